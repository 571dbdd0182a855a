"""NLoRA as a PEFT method. The only file that knows PEFT's internals; its one side effect: NLORA in PEFT's tables."""

from __future__ import annotations

import difflib
from typing import Any

import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS
from peft.utils.other import get_pattern_key
from torch import nn

from mezzo.core.errors import UserError
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.layer import NLoraLinear

PEFT_TYPE = "NLORA"


class NLoraModel(BaseTuner):
    """A model whose matched linear layers are `NLoraLinear`. Made by `peft.get_peft_model(model, NLoraConfig(...))`."""

    prefix = "nlora_"
    tuner_layer_cls = NLoraLinear
    target_module_mapping = {kind: list(names) for kind, names in DEFAULT_TARGETS.items()}  # noqa: RUF012  # as PEFT declares it

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Checks the targets before any layer is replaced."""
        check_targets(peft_config, model)

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        r, scale = rank_and_scale(peft_config, current_key)
        if isinstance(target, NLoraLinear):
            target.update_layer(adapter_name, peft_config, r, scale, current_key)
            return
        if not isinstance(target, nn.Linear):
            raise UserError(
                f"a {type(target).__name__} cannot be adapted",
                where=current_key,
                todo="Name torch.nn.Linear modules in target_modules",
            )
        layer = NLoraLinear(target, adapter_name, peft_config, r, scale, current_key)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, torch.Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, torch.Tensor]:
        """Selects the adapter's tensors; an IntTune middle is saved as the effective one, gain folded in (exact)."""
        chosen = super()._get_adapter_state_dict(model, config, adapter_name, state_dict, unwanted_adapter_names)
        for key, layer in _layers(model, adapter_name):
            name = f"{key}.nlora_N.{adapter_name}"
            if layer.gain[adapter_name] and name in chosen:
                chosen[name] = chosen[name] * 2.0 ** layer.gain[adapter_name]
        return chosen

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Names the tensors for the model, and divides an IntTune middle by its gain again (exact)."""
        named = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        for key, layer in _layers(model, adapter_name):
            rows, columns = (f"{key}.{table}.{adapter_name}" for table in ("nlora_rows", "nlora_columns"))
            if config.train == "middle" and config.init == "nystrom" and rows in named:
                layer.nlora_rows[adapter_name], layer.nlora_columns[adapter_name] = named[rows], named[columns]
                layer.refresh_gain(adapter_name)
                name = f"{key}.nlora_N.{adapter_name}"
                named[name] = named[name] * 2.0 ** -layer.gain[adapter_name]
        return named


def rank_and_scale(config: NLoraConfig, key: str) -> tuple[int, float]:
    """Returns the rank and the factor s of the module named `key`, patterns applied."""
    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), key), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), key), config.lora_alpha)
    return config.rank_and_scale(rank, float(rank if alpha is None else alpha))


def check_targets(config: NLoraConfig, model: nn.Module) -> None:
    """Checks that every name in `target_modules` matches a module.

    Raises:
        UserError: a name matches nothing; the nearest names are given.
    """
    if not isinstance(config.target_modules, (set, list, tuple)):
        return
    keys = [key for key, _ in model.named_modules() if key]
    linear = sorted({key.rpartition(".")[2] for key, module in model.named_modules() if isinstance(module, nn.Linear)})
    for target in sorted(config.target_modules):
        if not any(key == target or key.endswith(f".{target}") for key in keys):
            near = difflib.get_close_matches(target, linear, n=3, cutoff=0.4) or linear[:8]
            raise UserError(
                f"{target!r} matches no module", where="target_modules", todo=f"Nearest names here: {', '.join(near)}"
            )


def adapted_layers(model: nn.Module, adapter_name: str = "default") -> list[tuple[str, NLoraLinear]]:
    """Returns (module name, layer) of every layer that carries the adapter, in the model's order."""
    return _layers(model, adapter_name)


def _layers(model: nn.Module, adapter_name: str) -> list[tuple[str, NLoraLinear]]:
    return [(k, m) for k, m in model.named_modules() if isinstance(m, NLoraLinear) and adapter_name in m.nlora_N]


def register() -> None:
    """Enters NLORA in PEFT's tables. Doing it again changes nothing."""
    PEFT_TYPE_TO_CONFIG_MAPPING[PEFT_TYPE] = NLoraConfig  # type: ignore[index]
    PEFT_TYPE_TO_TUNER_MAPPING[PEFT_TYPE] = NLoraModel  # type: ignore[index]
    PEFT_TYPE_TO_PREFIX_MAPPING[PEFT_TYPE] = NLoraModel.prefix  # type: ignore[index]
