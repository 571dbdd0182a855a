"""Fine-tuning through TRL's SFTTrainer: every step is logged, checkpoints make it resumable, Ctrl-C loses nothing."""

from __future__ import annotations

import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import set_peft_model_state_dict
from peft.utils import SAFETENSORS_WEIGHTS_NAME, load_peft_weights
from safetensors import SafetensorError, safe_open
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from mezzo.core.errors import UserError
from mezzo.core.runs import Run
from mezzo.nlora.processes import NLoraMoves
from mezzo.nlora.recipe import Recipe
from mezzo.nlora.tokens import Encoded

Step = Callable[[int, int, dict[str, float]], None]
"""Called after each step with (step, steps in all, {loss, learning_rate, tokens_per_second})."""

WHOLE = "trainer_state.json"
"""The file a checkpoint ends with: a folder without it was cut off."""


def fit(
    model: Any,
    tokenizer: Any,
    encoded: Sequence[Encoded],
    recipe: Recipe,
    run: Run,
    *,
    resume: bool = False,
    on_step: Step = lambda step, total, values: None,
) -> bool:
    """Trains the model's active adapter and returns whether all steps were done (False: interrupted, state saved).

    Args:
        model: a `PeftModel`; trained in place.
        tokenizer: its tokenizer; must have a pad token.
        encoded: rows as token ids.
        recipe: steps, batch, rate, seed.
        run: metrics go to its metrics.jsonl, checkpoints to its `checkpoints` folder.
        resume: go on from the last whole checkpoint, if there is one.
        on_step: called after each step.

    Raises:
        UserError: the loss is no longer a number.
    """
    folder = run.path / "checkpoints"
    last = last_checkpoint(folder) if resume else None
    run.rewind(int(last.name.rpartition("-")[2]) if last else 0)
    if last and _all_steps_done(last):
        set_peft_model_state_dict(model, load_peft_weights(str(last), device=model.device.type))
        return True
    data = Dataset.from_dict({"input_ids": [e.input_ids for e in encoded], "labels": [e.labels for e in encoded]})
    reporter = _Reporter(run, on_step)
    trainer = SFTTrainer(
        model=model,
        args=_arguments(recipe, folder, model),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[reporter, NLoraMoves()],
    )
    _quiet(trainer)
    with _Interrupt(reporter):
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    return not reporter.interrupted


def last_checkpoint(folder: Path) -> Path | None:
    """Returns the newest whole checkpoint; one that was cut off in the middle is removed."""
    whole = []
    for path in folder.glob("checkpoint-*") if folder.is_dir() else ():
        try:
            json.loads((path / WHOLE).read_text(encoding="utf-8"))
            with safe_open(path / SAFETENSORS_WEIGHTS_NAME, framework="pt"):  # its header must fit its length
                pass
            whole.append((int(path.name.rpartition("-")[2]), path))
        except (OSError, ValueError, SafetensorError):
            shutil.rmtree(path, ignore_errors=True)
    return max(whole)[1] if whole else None


def _all_steps_done(checkpoint: Path) -> bool:
    state = json.loads((checkpoint / WHOLE).read_text(encoding="utf-8"))
    return int(state["global_step"]) >= int(state["max_steps"])


def _arguments(recipe: Recipe, folder: Path, model: Any) -> SFTConfig:
    on_cpu = model.device.type == "cpu"
    return SFTConfig(
        output_dir=str(folder),
        per_device_train_batch_size=recipe.batch_size,
        gradient_accumulation_steps=recipe.accumulate,
        learning_rate=recipe.rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,
        weight_decay=0.0,
        max_grad_norm=1.0,
        num_train_epochs=recipe.epochs,
        max_steps=recipe.steps or -1,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="steps",
        save_steps=recipe.save_steps,
        save_total_limit=2,
        gradient_checkpointing=recipe.gradient_checkpointing,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        seed=recipe.seed,
        data_seed=recipe.seed,
        use_cpu=on_cpu,
        bf16=False,
        dataloader_pin_memory=False,
        report_to=[],
        disable_tqdm=True,
    )


def _quiet(trainer: SFTTrainer) -> None:
    from transformers.trainer_callback import PrinterCallback

    trainer.remove_callback(PrinterCallback)


class _Reporter(TrainerCallback):
    """Writes each step to the run, stops on an interrupt, and fails on a loss that is no number."""

    def __init__(self, run: Run, on_step: Step) -> None:
        self.run, self.on_step = run, on_step
        self.interrupted = self.wanted_stop = False
        self.tokens, self.started, self.first = 0, time.perf_counter(), 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.started, self.first = time.perf_counter(), state.global_step

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Logs one step's loss (nats/token), rate and speed."""
        logs: dict[str, Any] = kwargs["logs"]
        if "loss" not in logs:
            return
        seconds = time.perf_counter() - self.started
        done = state.global_step - self.first
        values = {
            "loss": float(logs["loss"]),
            "learning_rate": float(logs["learning_rate"]),
            "grad_norm": float(logs.get("grad_norm", 0.0)),
            "seconds": seconds,
            "steps_per_second": done / seconds if seconds else 0.0,
        }
        if "num_tokens" in logs:
            values["tokens"] = float(logs["num_tokens"])
            values["tokens_per_second"] = values["tokens"] / seconds if self.first == 0 and seconds else 0.0
        self.run.log(step=state.global_step, **values)
        self.on_step(state.global_step, state.max_steps, values)
        if values["loss"] != values["loss"]:
            raise UserError(
                f"the loss is no number at step {state.global_step}",
                where="train",
                todo="Use a smaller --learning-rate",
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.wanted_stop and state.global_step < state.max_steps:
            self.interrupted = True
            control.should_save = control.should_training_stop = True


class _Interrupt:
    """Within it, a first Ctrl-C asks for a stop at the end of the step; a second one stops at once."""

    def __init__(self, reporter: _Reporter) -> None:
        self.reporter = reporter

    def __enter__(self) -> None:
        self.main = threading.current_thread() is threading.main_thread()
        if self.main:
            self.old = signal.signal(signal.SIGINT, self._ask)

    def __exit__(self, *_: object) -> None:
        if self.main:
            signal.signal(signal.SIGINT, self.old)

    def _ask(self, *_: object) -> None:
        if self.reporter.wanted_stop:
            raise KeyboardInterrupt
        self.reporter.wanted_stop = True
