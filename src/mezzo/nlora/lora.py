"""A plain LoRA folder of PEFT, read and checked: what is no product of two matrices a linear layer is refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mezzo.core.errors import UserError
from mezzo.core.fetch import first_line
from mezzo.nlora.factors import Factors

PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base weight as it is."""

MOVED_STARTS = ("pissa", "olora", "corda", "lora_ga")
"""Values (or their beginnings) that take the starting product out of the base weight."""

UNDERSTOOD = {
    "peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision", "task_type", "inference_mode",
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "lora_dropout", "fan_in_fan_out", "init_lora_weights", "eva_config",
    "corda_config", "lora_ga_config", "velora_config", "runtime_config", "megatron_core", "qalora_group_size",
    "ensure_weight_tying",
}  # fmt: skip
"""Settings of a LoRA that are read here, or that say nothing of its product. Any other that is set is refused."""


@dataclass(frozen=True)
class Lora:
    """A LoRA folder whose settings, tensor names and shapes were checked. Tensors are read when asked for."""

    folder: Path
    config: dict[str, Any]
    shapes: dict[str, tuple[int, int]]
    ranks: dict[str, int]
    scales: dict[str, float]

    def product(self, module: str) -> Factors:
        """Returns the module's product in float64.

        Raises:
            UserError: a number in it is not finite.
        """
        file = self.folder / SAFETENSORS_WEIGHTS_NAME
        A, B = (tensor_in(file, f"base_model.model.{module}.lora_{side}.weight") for side in "AB")
        one = torch.eye(self.ranks[module], dtype=torch.float64)
        return Factors(B.double(), one, A.double(), self.scales[module])


def read_lora(folder: Path) -> Lora:
    """Returns a LoRA folder after checks of everything but the numbers.

    Raises:
        UserError: a damaged file, another method, a variant that is no plain product, unknown or unfit tensors.
    """
    config = _settings(folder)
    file = folder / SAFETENSORS_WEIGHTS_NAME
    if not file.is_file():
        raise UserError(
            "is missing", where=str(file), todo="Save the adapter as safetensors (PEFT: save_pretrained does so)"
        )
    sides: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes_in(file).items():
        module, dot, side = name.removeprefix("base_model.model.").rpartition(".lora_")
        if not dot or side not in ("A.weight", "B.weight") or not name.startswith("base_model.model."):
            raise UserError(_unknown(name), where=f"{file}, {name}", todo="Only lora_A and lora_B of linear layers fit")
        sides.setdefault(module, {})[side[0]] = shape
    if not sides:
        raise UserError("holds no tensors", where=str(file), todo="Copy the adapter again")
    shapes, ranks, scales = {}, {}, {}
    for module, pair in sides.items():
        ranks[module], scales[module] = _rank_and_scale(config, module, folder)
        shapes[module] = _checked_shape(module, pair, ranks[module], file)
    return Lora(folder, config, shapes, ranks, scales)


def _settings(folder: Path) -> dict[str, Any]:
    file = folder / "adapter_config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"is no adapter's ({first_line(error)})", where=str(file), todo="Copy it again") from error
    if kind != "LORA":
        todo = "It needs no conversion" if kind == "NLORA" else "Only LoRA adapters can be converted"
        raise UserError(f"is of the method {kind}", where=str(file), todo=todo)
    for name, value in config.items():
        if name not in UNDERSTOOD and value and not (name == "bias" and value == "none"):
            raise UserError(
                f"{name} is set, and such an adapter is no plain product of two matrices",
                where=str(file),
                todo="Merge it into its base with PEFT, then convert the merged model with --base and --r",
            )
    start = config.get("init_lora_weights", True)
    if start not in PLAIN_STARTS and not moved(start):
        raise UserError(
            f"init_lora_weights = {start!r} changes the base in a way that cannot be undone here",
            where=str(file),
            todo="Merge it into its base with PEFT, then convert the merged model with --base and --r",
        )
    return dict(config)


def moved(start: Any) -> bool:
    """Returns whether a value of init_lora_weights takes the starting product out of the base weight."""
    return isinstance(start, str) and start.lower().startswith(MOVED_STARTS)


def _unknown(name: str) -> str:
    kinds = {"lora_embedding_": "is of an embedding", "lora_magnitude_vector": "is of DoRA", "lora_B.bias": "is a bias"}
    return next((text for part, text in kinds.items() if part in name), "is no tensor of a linear layer's LoRA")


def _rank_and_scale(config: dict[str, Any], module: str, folder: Path) -> tuple[int, float]:
    file = folder / "adapter_config.json"
    try:
        ranks, alphas = config.get("rank_pattern") or {}, config.get("alpha_pattern") or {}
        rank = ranks.get(get_pattern_key(list(ranks), module), config.get("r", 8))
        alpha = alphas.get(get_pattern_key(list(alphas), module), config.get("lora_alpha", 8))
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
            raise ValueError(f"{rank!r} is no rank")
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        if not math.isfinite(scale):
            raise ValueError(f"{alpha!r} is no alpha")
    except (ValueError, TypeError, AttributeError, re.error) as error:
        raise UserError(
            f"rank or alpha of {module} cannot be read ({first_line(error)})", where=str(file), todo="Mend the settings"
        ) from error
    return rank, scale


def _checked_shape(module: str, pair: dict[str, tuple[int, ...]], rank: int, file: Path) -> tuple[int, int]:
    where = f"{file}, {module}"
    for side in "AB":
        if side not in pair:
            raise UserError(f"lora_{side} is missing", where=where, todo="Copy the adapter again")
        if len(pair[side]) != 2:
            raise UserError(
                f"lora_{side} has {len(pair[side])} dimensions, as of a convolution", where=where,
                todo="Only linear layers can be converted",
            )  # fmt: skip
    if pair["A"][0] != rank or pair["B"][1] != rank:
        raise UserError(
            f"lora_A {list(pair['A'])} and lora_B {list(pair['B'])} do not fit rank {rank}", where=where,
            todo="Use the adapter_config.json that was saved with these weights",
        )  # fmt: skip
    return pair["B"][0], pair["A"][1]


def shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Returns tensor name -> shape, read from a safetensors file's header.

    Raises:
        UserError: a damaged file.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"is damaged ({first_line(error)})", where=str(file), todo="Copy it again") from error


def tensor_in(file: Path, name: str) -> Tensor:
    """Returns one tensor as it is in the file; no other is read.

    Raises:
        UserError: it holds no real numbers, or one that is not finite.
    """
    with safe_open(file, framework="pt") as opened:
        found: Tensor = opened.get_tensor(name)
    where = f"{file}, {name}"
    if not found.is_floating_point() or found.element_size() < 2:
        raise UserError(f"is of type {found.dtype}", where=where, todo="Quantised weights cannot be converted")
    if not bool(torch.isfinite(found).all()):
        raise UserError("holds a number that is not finite", where=where, todo="Use an earlier checkpoint")
    return found
