"""Fine-tune with NLoRA in one or several processes, on TRL's SFTTrainer and accelerate.

    accelerate launch --config_file recipes/ddp.yaml   recipes/sft.py --data rows.jsonl --out runs/ddp
    accelerate launch --config_file recipes/fsdp2.yaml recipes/sft.py --data rows.jsonl --out runs/fsdp2 --bf16
    python recipes/sft.py --data rows.jsonl --out runs/one
    python recipes/sft.py --data rows.jsonl --out runs/one --resume

A step takes `processes x batch-size x accumulate` rows. A run goes on with another number of processes as long as that
product is the same: the rows of each step, and so the curve, are then those of the unbroken run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from mezzo.core import models
from mezzo.core.errors import UserError
from mezzo.core.records import read
from mezzo.nlora import NLoraConfig
from mezzo.nlora.folder import finish_folder
from mezzo.nlora.processes import NLoraMoves, SameRows, resumable
from mezzo.nlora.recipe import Recipe
from mezzo.nlora.tokens import encode_all


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=models.DEFAULT, help="built-in name, folder, GGUF file or hub id")
    parser.add_argument("--data", required=True, help="rows: JSONL, CSV or Parquet, or a dataset id")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and the adapter")
    parser.add_argument("--init", default="nystrom", help="nystrom, nystrom_paper or slora")
    parser.add_argument("--train", default="all", help="all, or middle (IntTune)")
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, help="default: by mode")
    parser.add_argument("--steps", type=int, help="optimiser steps; over --epochs")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=4, help="rows a process and forward pass")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--save-steps", type=int, default=50)
    parser.add_argument("--dtype", default="auto", help="of the weights: auto, float32, bfloat16, float16")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--compile", action="store_true", help="torch.compile")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the last whole checkpoint in --out")
    return parser.parse_args()


def main() -> int:
    args = parsed()
    recipe = Recipe(
        model=args.model, data=args.data, init=args.init, train=args.train, r=args.r, learning_rate=args.learning_rate,
        steps=args.steps, epochs=args.epochs, batch_size=args.batch_size, accumulate=args.accumulate,
        max_length=args.max_length, save_steps=args.save_steps, seed=args.seed, dtype=args.dtype,
    )  # fmt: skip
    files = models.find(args.model)
    tokenizer = models.tokenizer(files)
    encoded, _ = encode_all(tokenizer, read(args.data), max_length=args.max_length, too_long="error")
    settings = SFTConfig(
        output_dir=str(args.out),
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulate,
        learning_rate=recipe.rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        weight_decay=0.0,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.steps or -1,
        logging_steps=1,
        save_steps=recipe.save_steps,
        save_total_limit=2,
        gradient_checkpointing=args.gradient_checkpointing,
        torch_compile=args.compile,
        bf16=args.bf16,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=recipe.seed,
        use_cpu=not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
        report_to=[],
        ddp_find_unused_parameters=False,
    )
    same_rows = SameRows(settings)
    last = resumable(args.out, same_rows, resume=args.resume)
    # After the settings: under ZeRO-3 they tell transformers to share the weights out as they are read.
    dtype = models.choose_dtype(args.dtype, models.choose_device("auto"))
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype, local_files_only=True)
    torch.manual_seed(recipe.seed)  # the same start in every process
    model = get_peft_model(model, NLoraConfig(**recipe.adapter(task_type="CAUSAL_LM", base_sha256=files.sha256)))
    trainer = SFTTrainer(
        model=model,
        args=settings,
        train_dataset=Dataset.from_dict(
            {"input_ids": [e.input_ids for e in encoded], "labels": [e.labels for e in encoded]}
        ),
        processing_class=tokenizer,
        callbacks=[same_rows, NLoraMoves()],
    )
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    trainer.save_model(str(args.out / "adapter"))
    trainer.save_state()
    if trainer.is_world_process_zero():
        finish_folder(args.out / "adapter")
        print(f"The adapter is in {args.out / 'adapter'}. Look at it: mezzo nlora inspect {args.out / 'adapter'}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
