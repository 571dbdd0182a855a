"""The settings of one fine-tuning job: defaults, a YAML file over them, flags over that."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from mezzo.core.errors import UserError
from mezzo.core.fields import check_fields
from mezzo.core.runs import CONFIG, Run

PLAIN = r"[\w.\-\s]+(,[\w.\-\s]*)*"
"""Module names with commas between: no regular expression."""

ALSO = {
    "lr": "learning_rate", "rank": "r", "lora_r": "r", "alpha": "lora_alpha", "max_steps": "steps",
    "num_train_epochs": "epochs", "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulate",
    "max_seq_length": "max_length", "model_name_or_path": "model", "dataset": "data", "lora_target": "target_modules",
}  # fmt: skip
"""What other programs call a key -> its name here."""

TooLong = Literal["error", "drop", "truncate"]


@dataclass(frozen=True)
class Recipe:
    """Settings of `mezzo nlora train`; every field is a key of `--config recipe.yaml` and most are flags.

    Raises:
        UserError: a value of the wrong type or outside its range; the field is named.
    """

    model: str = field(default="smollm2-135m", metadata={"help": "Built-in name, folder, GGUF file or hub id."})
    data: str | None = field(default=None, metadata={"help": "Rows to learn. None: the built-in practice task."})
    shape: str | None = field(default=None, metadata={"help": "Shape of the rows; None: found by their columns."})
    eval_data: str | None = field(default=None, metadata={"help": "Held-out rows. None: held out of the data."})
    eval_rows: int = field(default=100, metadata={"help": "Held-out rows to score before and after; 0: no scores."})
    max_new_tokens: int = field(default=80, metadata={"help": "Longest answer when scoring, in tokens."})
    init: Literal["nystrom", "nystrom_paper", "slora"] = field(
        default="nystrom", metadata={"help": "nystrom, nystrom_paper or slora."}
    )
    train: Literal["all", "middle"] = field(
        default="all", metadata={"help": "all, or middle (IntTune: only the r x r matrices)."}
    )
    r: int = field(default=16, metadata={"help": "Rank."})
    lora_alpha: float | None = field(default=None, metadata={"help": "Scale is lora_alpha / r; None: r."})
    target_modules: str | list[str] = field(default="all-linear", metadata={"help": "Names, or all-linear."})
    learning_rate: float | None = field(default=None, metadata={"help": "None: the default of the mode."})
    steps: int | None = field(default=None, metadata={"help": "Optimiser steps. None: `epochs` decides."})
    epochs: float = field(default=1.0, metadata={"help": "Passes over the rows, where `steps` is not given."})
    practice: int = field(default=416, metadata={"help": "Rows of the practice task, where `data` is not given."})
    batch_size: int = field(default=8, metadata={"help": "Rows a step and device."})
    accumulate: int = field(default=1, metadata={"help": "Steps whose gradients are summed before the optimiser's."})
    max_length: int = field(default=1024, metadata={"help": "Longest row in tokens."})
    too_long: TooLong = field(default="error", metadata={"help": "Longer rows: error, drop or truncate."})
    save_steps: int = field(default=50, metadata={"help": "Steps between checkpoints."})
    gradient_checkpointing: bool = field(default=False, metadata={"help": "Less memory, about a third slower."})
    dtype: str = field(default="auto", metadata={"help": "auto, float32, bfloat16 or float16."})
    device: str = field(default="auto", metadata={"help": "auto, cpu, cuda or mps."})
    seed: int = field(default=0, metadata={"help": "Seed of the data order and of random starts."})

    def __post_init__(self) -> None:
        """Checks every field."""
        check_fields(self)
        for name, low in (("eval_rows", 0), ("max_new_tokens", 1), ("r", 1), ("practice", 1), ("batch_size", 1),
                          ("accumulate", 1), ("max_length", 2), ("save_steps", 1)):  # fmt: skip
            if getattr(self, name) < low:
                raise UserError(f"{getattr(self, name)} is too small", where=name, todo=f"Give {low} or more")
        for name in ("learning_rate", "epochs", "steps"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UserError(f"{value} is not above 0", where=name, todo="Give a number above 0")

    @property
    def rate(self) -> float:
        """The learning rate: as given, or the default of the mode."""
        if self.learning_rate is not None:
            return self.learning_rate
        return {"all": 1e-3, "middle": 2e-2}[self.train] if self.init != "nystrom_paper" else 2e-4

    def adapter(self, **more: Any) -> dict[str, Any]:
        """Returns the fields that make an `NLoraConfig`."""
        names = ("init", "train", "r", "lora_alpha", "target_modules")
        return {name: getattr(self, name) for name in names} | more


def recipe_of(run: Run) -> Recipe:
    """Returns the recipe that a run was begun with.

    Raises:
        UserError: its config.json was changed or damaged.
    """
    try:
        return Recipe(**run.config)
    except (TypeError, UserError) as error:
        raise UserError(
            f"is no recipe ({error})", where=str(run.path / CONFIG), todo="Restore the file, or start a new run"
        ) from error


def load_recipe(path: Path | None, **flags: Any) -> Recipe:
    """Returns the recipe of a YAML file (or the defaults) with the given flags over it; None flags are left out.

    Raises:
        UserError: no such file, no YAML mapping, an unknown key (the nearest is named), a value that does not fit.
    """
    values: dict[str, Any] = _read_yaml(path) if path else {}
    known = [item.name for item in dataclasses.fields(Recipe)]
    for key in values:
        if key not in known:
            near = [ALSO[key]] if key in ALSO else difflib.get_close_matches(str(key).replace("-", "_"), known, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Known keys: {', '.join(known)}"
            raise UserError(f"unknown key {key!r}", where=str(path), todo=hint.rstrip("?"))
    for key in ("learning_rate", "lora_alpha", "epochs"):
        if isinstance(values.get(key), str):  # YAML 1.1 reads 1e-3 as text
            with suppress(ValueError):
                values[key] = float(values[key])
    if isinstance(named := values.get("target_modules"), str) and named != "all-linear" and re.fullmatch(PLAIN, named):
        values["target_modules"] = [name.strip() for name in named.split(",") if name.strip()]
    if isinstance(values.get("target_modules"), list):
        values["target_modules"] = [str(name) for name in values["target_modules"]]
    given = {key: value for key, value in flags.items() if value is not None}
    try:
        return Recipe(**(values | given))
    except UserError as error:
        of_file = path is not None and error.where in values and error.where not in given
        raise (UserError(error.what, where=f"{path}: {error.where}", todo=error.todo) if of_file else error) from None


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot be read ({error})", where=str(path), todo="Name a YAML file") from error
    except yaml.YAMLError as error:
        raise UserError(f"is no YAML ({error})", where=str(path), todo="Write `key: value` lines") from error
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise UserError("holds no mapping", where=str(path), todo="Write `key: value` lines")
    return value
