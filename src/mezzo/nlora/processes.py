"""What training in several processes needs beside an engine: every N moves, and a resumed run sees the same rows."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from peft.utils.integrations import gather_params_ctx
from torch import Tensor
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mezzo.core.errors import UserError
from mezzo.core.files import write_json

NAME = "rows_a_step.json"
LOOK_AFTER = 3
"""Steps after which every N must have moved: slora's N has no gradient at the first, and a warm-up may start at 0."""


class SameRows(TrainerCallback):
    """Writes how many rows a step takes, and in how many processes, into every checkpoint."""

    def __init__(self, args: TrainingArguments) -> None:
        processes = args.world_size
        self.now = {
            "processes": processes,
            "batch_size": args.per_device_train_batch_size,
            "accumulate": args.gradient_accumulation_steps,
            "rows": processes * args.per_device_train_batch_size * args.gradient_accumulation_steps,
            "engine": _engine(args),
        }

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Adds the file to the checkpoint just written."""
        if state.is_world_process_zero:
            write_json(Path(str(args.output_dir)) / f"checkpoint-{state.global_step}" / NAME, self.now)

    def check(self, checkpoint: Path) -> None:
        """Checks that a run can go on from a checkpoint with the settings at hand.

        Raises:
            UserError: a step would take another number of rows, or the state is another engine's or in other shares.
        """
        try:
            then = json.loads((checkpoint / NAME).read_text(encoding="utf-8"))
            rows, engine, processes = then["rows"], then["engine"], then["processes"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                "nothing says how many rows a step of this run took",
                where=str(checkpoint / NAME),
                todo="Start a new run in another --out",
            ) from error
        if rows != self.now["rows"]:
            raise UserError(
                f"a step of this run took {rows} rows ({processes} processes), and would now take "
                f"{self.now['rows']} ({self.now['processes']} processes)",
                where=str(checkpoint),
                todo=f"Choose --batch-size and --accumulate so that processes x batch x accumulate is {rows}",
            )
        if engine != self.now["engine"]:
            raise UserError(
                f"this run's optimiser state was written by {engine}, not by {self.now['engine']}",
                where=str(checkpoint),
                todo=f"Go on with the launcher file of {engine}, or start a new run from the saved adapter",
            )
        if engine == "deepspeed" and processes != self.now["processes"]:
            raise UserError(
                f"DeepSpeed wrote this run's optimiser state in {processes} shares, one a process, and would now read "
                f"{self.now['processes']}",
                where=str(checkpoint),
                todo=f"Go on with --num_processes {processes}, or start a new run from the saved adapter",
            )


def resumable(folder: Path, rows: SameRows, *, resume: bool) -> Path | None:
    """Returns the checkpoint to go on from, or None for a new run.

    Raises:
        UserError: a new run in a folder that holds one, or a checkpoint that does not fit.
    """
    whole = [path for path in folder.glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    if not resume:
        if whole:
            todo = "Choose another --out, or go on with --resume"
            raise UserError("this folder holds a run", where=str(folder), todo=todo)
        return None
    if not whole:
        return None
    last = max(whole, key=lambda path: int(path.name.rpartition("-")[2]))
    rows.check(last)
    return last


class NLoraMoves(TrainerCallback):
    """Warns after three steps with the name of every trained N that is still what it was.

    A layer whose input takes no gradient (checkpointing without `enable_input_require_grads`) or whose step is below
    the rounding of a low-precision dtype would stay untrained without a word.
    """

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.look_at = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Keeps a copy of every trained N (r x r numbers a module)."""
        self.look_at = state.global_step + LOOK_AFTER
        self.before = _middles(kw["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kw: Any) -> None:
        """Looks once, after the third step."""
        if state.global_step != self.look_at or not self.before:
            return
        now = _middles(kw["model"])
        still = [key for key, value in now.items() if key in self.before and torch.equal(value, self.before[key])]
        self.before = {}
        if still and state.is_world_process_zero:
            warnings.warn(
                f"{len(still)} of {len(now)} matrices N have not moved in {LOOK_AFTER} steps: {', '.join(still)}. "
                "With gradient checkpointing, call model.enable_input_require_grads(); otherwise look at the rate and "
                "the dtype",
                stacklevel=2,
            )


def _engine(args: TrainingArguments) -> str:
    # accelerate's launcher speaks through the environment; `args.deepspeed` is only the trainer's own flag.
    for engine in ("deepspeed", "fsdp"):
        if getattr(args, engine, None) or os.environ.get(f"ACCELERATE_USE_{engine.upper()}", "").lower() == "true":
            return engine
    return "ddp"


def _middles(model: Any) -> dict[str, Tensor]:
    """Returns a copy of every trained N, whole, on the CPU. Every process must call this: shares are gathered."""
    found = {key: value for key, value in model.named_parameters() if ".nlora_N." in key and value.requires_grad}
    with gather_params_ctx(list(found.values()), modifier_rank=None):  # ZeRO-3's shares
        return {key: _whole(value) for key, value in found.items()}


def _whole(value: Tensor) -> Tensor:
    gather = getattr(value, "full_tensor", None)  # FSDP2's shares
    kept: Tensor = value.detach() if gather is None else gather().detach()
    return kept.clone().cpu()
