"""What an NLoRA adapter is: typed, validated fields under PEFT's names."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Literal

from peft import PeftConfig

from mezzo.core.errors import UserError
from mezzo.core.fields import check_fields

Init = Literal["nystrom", "nystrom_paper", "slora"]
Train = Literal["all", "middle"]
Bias = Literal["none", "all", "nlora_only", "lora_only"]


class MethodName(str, Enum):  # noqa: UP042  # PEFT reads "NLORA" off str(), as "MethodName.NLORA"
    """The name under which PEFT's tables know the method; an enum, as PEFT's own are."""

    NLORA = "NLORA"


@dataclass
class NLoraConfig(PeftConfig):
    """Settings of one NLoRA adapter, for `peft.get_peft_model`. Fields shared with `LoraConfig` mean the same.

    Raises:
        UserError: a field holds a value that it cannot hold.
    """

    r: int = field(default=16, metadata={"help": "Rank: N is r x r. 16 serves models of a few hundred million."})
    lora_alpha: float | None = field(
        default=None, metadata={"help": "The product is scaled by lora_alpha / r. None: r, as in the paper (scale 1)."}
    )
    target_modules: set[str] | list[str] | str | None = field(
        default="all-linear",
        metadata={
            "help": "Module names, a regular expression, or 'all-linear' (all but the output head; as the paper)."
        },
    )
    init: Init = field(
        default="nystrom",
        metadata={
            "help": "nystrom: rows and columns of W, with an offset so that step 0 is the base model. nystrom_paper: "
            "the paper's raw slices without offset. slora: random A and N, B = 0."
        },
    )
    train: Train = field(
        default="all", metadata={"help": "all: A, N and B. middle: N alone (IntTune), r x r numbers a module."}
    )
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout on the adapter's input; the paper uses none."})
    use_rslora: bool = field(default=False, metadata={"help": "Scale by lora_alpha / sqrt(r) instead."})
    exclude_modules: set[str] | list[str] | str | None = field(
        default=None, metadata={"help": "Names or an expression to leave out."}
    )
    layers_to_transform: list[int] | int | None = field(default=None, metadata={"help": "Only these layer numbers."})
    layers_pattern: list[str] | str | None = field(
        default=None, metadata={"help": "Name of the list that holds layers."}
    )
    rank_pattern: dict[str, int] = field(default_factory=dict, metadata={"help": "Module name or expression -> rank."})
    alpha_pattern: dict[str, float] = field(
        default_factory=dict, metadata={"help": "Module name or expression -> alpha."}
    )
    modules_to_save: list[str] | None = field(default=None, metadata={"help": "Modules trained and saved whole."})
    bias: Bias = field(
        default="none",
        metadata={"help": "Biases of the base to train too: none, all, or those of the adapted layers (nlora_only)."},
    )
    init_weights: bool = field(
        default=True,
        metadata={"help": "False: random numbers in place of the start that `init` names. For tests only."},
    )
    target_parameters: list[str] | None = field(
        default=None, metadata={"help": "Not supported: tensors that are no module's weight, as fused experts."}
    )
    base_sha256: str | None = field(
        default=None, metadata={"help": "Content hash of the base model's weights; checked when an adapter is loaded."}
    )

    def __post_init__(self) -> None:
        """Checks every field."""
        super().__post_init__()
        self.peft_type = MethodName.NLORA
        for name in ("layers_to_transform", "layers_pattern", "modules_to_save", "target_parameters"):
            if isinstance(getattr(self, name), (tuple, set, range)):
                setattr(self, name, list(getattr(self, name)))
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), tuple):
                setattr(self, name, list(getattr(self, name)))
        check_fields(self, OWN)
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), list):
                setattr(self, name, set(getattr(self, name)))
        self._check_values()
        self._check_patterns()

    def _check_values(self) -> None:
        if self.init == "slora" and self.train == "middle":
            raise UserError(
                "slora starts with B = 0, so training N alone changes nothing",
                where="train = middle",
                todo="Use init = nystrom with train = middle (IntTune), or init = slora with train = all",
            )
        if self.target_parameters:
            raise UserError(
                f"tensors cannot be adapted, only modules: {', '.join(self.target_parameters)}",
                where="target_parameters",
                todo="Leave it out; adapt the model's linear layers (the attention of a mixture-of-experts model)",
            )
        for name, rank in {"r": self.r, **_each("rank_pattern", self.rank_pattern)}.items():
            if rank < 1:
                raise UserError(f"{rank} is no rank", where=name, todo="Give a whole number of 1 or more")
        if self.lora_alpha is None:
            self.lora_alpha = float(self.r)
        for name, alpha in {"lora_alpha": self.lora_alpha, **_each("alpha_pattern", self.alpha_pattern)}.items():
            if not 0 < alpha < math.inf:
                raise UserError(f"{alpha!r} is no scale", where=name, todo="Give a number above 0")
        if not 0 <= self.lora_dropout < 1:
            raise UserError(f"{self.lora_dropout!r} is no share", where="lora_dropout", todo="Give a number in [0, 1)")
        if self.target_modules is not None and not self.target_modules:
            raise UserError("no module is named", where="target_modules", todo="Name modules, or leave 'all-linear'")

    def _check_patterns(self) -> None:
        texts = [(name, getattr(self, name)) for name in ("target_modules", "exclude_modules")]
        texts += [(name, key) for name in ("rank_pattern", "alpha_pattern") for key in getattr(self, name)]
        for name, text in texts:
            if isinstance(text, str):
                try:
                    re.compile(text)
                except re.error as error:
                    raise UserError(
                        f"{text!r} is no regular expression ({error})", where=name, todo="Name modules in a list"
                    ) from error

    def rank_and_scale(self, rank: int, alpha: float) -> tuple[int, float]:
        """Returns a module's rank and the factor s of its product, alpha / r or alpha / sqrt(r)."""
        return rank, alpha / (math.sqrt(rank) if self.use_rslora else rank)


OWN = tuple(item.name for item in fields(NLoraConfig) if item.name not in {f.name for f in fields(PeftConfig)})
"""The fields that PeftConfig does not have itself."""


def _each(field_name: str, pattern: dict[str, Any]) -> dict[str, Any]:
    return {f"{field_name}[{key!r}]": value for key, value in pattern.items()}
