"""An adapter as a plain LoRA that stock PEFT loads, or merged into a model folder."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig
from safetensors.torch import save_file

from mezzo.core.errors import UserError
from mezzo.core.files import atomic, check_free, write_json
from mezzo.nlora.tuner import adapted_layers

Rank = Literal["exact", "same"]


def export_lora(model: Any, out: Path, *, rank: Rank = "exact", adapter: str = "default") -> dict[str, Any]:
    """Writes the adapter as a stock PEFT LoRA folder and returns what was done.

    With three trained matrices and an offset (init = nystrom) the product has rank 2r: "exact" writes 2r, "same" the
    best r. All others fold to rank r exactly. lora_alpha equals the written rank: scales are inside the matrices.

    Args:
        model: a `PeftModel` with the NLoRA adapter.
        out: folder to write; must not exist or be empty.
        rank: "exact", or "same" for rank r with the error reported.
        adapter: name of the adapter.

    Returns:
        {"rank": largest written rank, "modules": count, "relative_error": largest of all modules (0.0 where exact)}

    Raises:
        UserError: `out` is in use, or the adapter trains whole modules too (modules_to_save).
    """
    check_free(out)
    config = model.peft_config[adapter]
    if config.modules_to_save:
        raise UserError(
            "a plain LoRA cannot hold modules_to_save", where=", ".join(config.modules_to_save), todo="Use --to merged"
        )
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    worst = 0.0
    for key, layer in adapted_layers(model, adapter):
        product, offset = layer.factors(adapter)
        factors = product if offset is None else product.minus(offset)
        if rank == "same" and offset is not None:
            factors, error = factors.truncate(product.rank)
            worst = max(worst, error)
        B, A = factors.fold()
        name = key if key.startswith("base_model.model.") else f"base_model.model.{key}"
        tensors[f"{name}.lora_A.weight"] = A.contiguous().cpu()
        tensors[f"{name}.lora_B.weight"] = (B * factors.scale).contiguous().cpu()
        ranks[name.removeprefix("base_model.model.")] = factors.rank
    if not ranks:
        raise UserError("the model carries no NLoRA adapter of this name", where=adapter, todo="Name one it carries")
    largest = max(ranks.values())
    odd = {key: value for key, value in ranks.items() if value != largest}
    lora = LoraConfig(
        r=largest, lora_alpha=largest, target_modules=sorted(ranks),
        rank_pattern=odd, alpha_pattern=dict(odd), task_type=config.task_type, inference_mode=True,
        base_model_name_or_path=config.base_model_name_or_path,
    )  # fmt: skip
    with atomic(out) as temporary:
        temporary.mkdir()
        save_file(tensors, temporary / "adapter_model.safetensors", metadata={"format": "pt"})
        lora.save_pretrained(str(temporary))
    return {"rank": largest, "modules": len(ranks), "relative_error": worst}


def export_merged(model: Any, tokenizer: Any, out: Path, *, adapter: str = "default") -> dict[str, Any]:
    """Writes the base with the adapter merged in as an ordinary model folder (safetensors and tokenizer).

    The model at hand is left merged: load it again to go on.

    Raises:
        UserError: `out` is in use.
    """
    check_free(out)
    merged = model.merge_and_unload(safe_merge=True, adapter_names=[adapter])
    with atomic(out) as temporary:
        merged.save_pretrained(str(temporary))
        tokenizer.save_pretrained(str(temporary))
    return {"parameters": sum(parameter.numel() for parameter in merged.parameters())}


def stock_answers(
    lora: Path, base: Path, prompts: Sequence[Sequence[int]], *, max_new_tokens: int, batch_size: int = 25, dtype: str
) -> list[list[int]]:
    """Returns the greedy replies (token ids) of the exported LoRA in stock PEFT: a process that never imports mezzo.

    Raises:
        UserError: that process failed; its last line is given.
    """
    script = Path(__file__).with_name("stock.py")
    job = {
        "lora": str(lora), "base": str(base), "prompts": [list(prompt) for prompt in prompts],
        "max_new_tokens": max_new_tokens, "batch_size": batch_size, "dtype": dtype, "threads": torch.get_num_threads(),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", str(script)], input=json.dumps(job), capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"stock PEFT could not run the export ({last})", where=str(lora), todo="Report this as a bug")
    replies: list[list[int]] = json.loads(done.stdout.strip().splitlines()[-1])
    return replies


def save_adapter(model: Any, out: Path) -> None:
    """Writes the adapter folder (adapter_config.json, adapter_model.safetensors) atomically, sets in sorted order."""
    with atomic(out) as temporary:
        model.save_pretrained(str(temporary))
        path = temporary / "adapter_config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        for key, value in config.items():
            if key in ("target_modules", "exclude_modules") and isinstance(value, list):
                config[key] = sorted(value)
        write_json(path, config)
