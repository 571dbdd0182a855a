"""NLoRA as a PEFT method. The only file that knows PEFT's internals; its one side effect: NLORA in PEFT's tables."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftConfig, get_peft_model_state_dict, set_peft_model_state_dict
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULT_TARGETS
from peft.utils.other import AuxiliaryTrainingWrapper, get_pattern_key
from torch import nn

from mezzo.core.errors import UserError
from mezzo.nlora.config import MethodName, NLoraConfig
from mezzo.nlora.factors import Factors, combine
from mezzo.nlora.folder import adapter_tensors
from mezzo.nlora.kinds import CONVOLUTIONS, layer_for
from mezzo.nlora.layer import NLoraLayer

MAMBA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
"""Model types whose out_proj and conv1d are read by fused kernels, past the module."""

ALIKE = "Load it under a name of its own with model.load_adapter"

BASE = "__base__"
"""The name in `adapter_names` that means no adapter."""


class NLoraModel(BaseTuner):
    """A model whose matched layers are `NLoraLayer`s. Made by `peft.get_peft_model(model, NLoraConfig(...))`."""

    prefix = "nlora_"
    tuner_layer_cls = NLoraLayer
    target_module_mapping = {kind: list(names) for kind, names in DEFAULT_TARGETS.items()}  # noqa: RUF012  # as PEFT declares it

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Adds the adapter's layers to the model; where one is refused, those before it are taken back.

        Raises:
            UserError: the adapter cannot have this name, or a layer cannot be adapted.
        """
        held = {key for key, _ in adapted_layers(model, adapter_name)}
        try:
            check_name(adapter_name)
            super().inject_adapter(model, adapter_name, *args, **kwargs)
        except UserError:
            self.peft_config.pop(adapter_name, None)
            for key, layer in [(k, m) for k, m in model.named_modules() if isinstance(m, NLoraLayer) and k not in held]:
                layer.forget(adapter_name)
                if not layer.nlora_N:
                    parent, _, name = key.rpartition(".")
                    setattr(model.get_submodule(parent), name, layer.base_layer)
            raise

    def _prepare_model(self, peft_config: Any, model: nn.Module) -> None:
        """Checks the targets before any layer is replaced."""
        check_targets(peft_config, model)
        fused = fused_experts(model)
        if fused and peft_config.target_modules == "all-linear":
            shown = ", ".join(fused[:3]) + (", ..." if len(fused) > 3 else "")
            warnings.warn(f"{len(fused)} tensors of fused experts are not adapted: {shown}", stacklevel=2)

    def _check_target_module_compatiblity(self, peft_config: Any, model: nn.Module, target_name: str) -> None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind in MAMBA and target_name in ("out_proj", "conv1d"):
            raise UserError(
                f"{kind} reads this weight past the module, so an adapter on it does nothing",
                where=target_name,
                todo="Leave it out of target_modules",
            )

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
        if isinstance(target, NLoraLayer):
            target.update_layer(adapter_name, peft_config, r, scale, current_key)
            return
        kind = layer_for(target, current_key)
        layer = kind(target, adapter_name, peft_config, r, scale, current_key)
        layer.float_dtype = getattr(self.model, "dtype", layer.float_dtype)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    # ---- files ----------------------------------------------------------------------------------------------------

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
        for key, layer in adapted_layers(model, adapter_name):
            name = f"{key}.nlora_N.{adapter_name}"
            chosen.pop(f"{key}.nlora_gain.{adapter_name}", None)
            if layer.gain[adapter_name] and name in chosen:
                chosen[name] = chosen[name] * 2.0 ** layer.gain[adapter_name]
        return chosen

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Names the tensors for the model, and divides an IntTune middle by its gain again (exact).

        Raises:
            UserError: tensors that the adapter's settings do not name: one of the two was changed.
        """
        named = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        known = model.state_dict().keys()
        unknown = sorted(key for key in named if cls.prefix in key and key not in known)
        if unknown:
            raise UserError(
                f"the file holds {unknown[0]}" + (f" and {len(unknown) - 1} more tensors" if unknown[1:] else "")
                + f", for which the settings (init = {config.init}, train = {config.train}) make no place",
                where=f"adapter {adapter_name!r}",
                todo="Load it with the adapter_config.json it was saved with, on the model it was trained on",
            )  # fmt: skip
        for key, layer in adapted_layers(model, adapter_name):
            rows, columns = (f"{key}.{table}.{adapter_name}" for table in ("nlora_rows", "nlora_columns"))
            if config.train == "middle" and config.init == "nystrom" and rows in named:
                layer.nlora_rows[adapter_name], layer.nlora_columns[adapter_name] = named[rows], named[columns]
                layer.refresh_gain(adapter_name)
                named[f"{key}.nlora_gain.{adapter_name}"] = layer.nlora_gain[adapter_name]
                name = f"{key}.nlora_N.{adapter_name}"
                named[name] = named[name] * 2.0 ** -layer.gain[adapter_name]
        return named

    # ---- mixed batches --------------------------------------------------------------------------------------------

    @contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """Hands `adapter_names` (one name a row) to every adapted layer while the context lasts."""
        names = kwargs.pop("adapter_names", None)
        if names is None:
            yield
            return
        self._check_adapter_names(names)
        beams = kwargs.get("num_beams") or 1
        repeated = [name for name in names for _ in range(beams)]
        encoder: Any = self.model.get_encoder() if beams > 1 and hasattr(self.model, "get_encoder") else None
        apart = isinstance(encoder, nn.Module) and encoder is not self.model  # an encoder sees each row once
        once = {id(module) for module in encoder.modules()} if apart else set()
        hooks = []
        for module in self.modules():
            if isinstance(module, (NLoraLayer, AuxiliaryTrainingWrapper)):
                hook = partial(_name_rows, names=names if id(module) in once else repeated)
                hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def _check_adapter_names(self, names: Any) -> None:
        if self.training:
            raise ValueError("Cannot pass `adapter_names` when the model is in training mode.")
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise TypeError(f"Got adapter names of type {type(names)}, expected a list of str.")
        known = {name for module in self.modules() if isinstance(module, NLoraLayer) for name in module.nlora_N}
        unknown = sorted(set(names) - known - {BASE})
        if unknown:
            raise ValueError(f"Trying to infer with non-existing adapter(s): {', '.join(unknown)}")

    # ---- sums of adapters -----------------------------------------------------------------------------------------

    def add_weighted_adapter(
        self,
        adapters: Sequence[str],
        weights: Sequence[float],
        adapter_name: str,
        combination_type: Literal["cat", "svd"] = "cat",
        svd_rank: int | None = None,
    ) -> float:
        """Adds the adapter `adapter_name` whose change is the weighted sum of others', and returns the error made.

        "cat" is exact: the ranks add up (adapters that share landmarks share what they have in common). "svd" keeps the
        best `svd_rank` (None: the largest r of the adapters). The new adapter is a frozen one with init = slora.

        Returns:
            The largest relative error of a module's change (Frobenius norm); 0.0 for "cat".

        Raises:
            UserError: an unknown adapter or combination, or a name in use.
        """
        unknown = sorted(set(adapters) - set(self.peft_config))
        if unknown or not adapters:
            raise UserError(f"no adapter {', '.join(unknown) or 'is named'}", where="adapters", todo="Name loaded ones")
        if len(weights) != len(adapters):
            raise UserError(f"{len(weights)} for {len(adapters)} adapters", where="weights", todo="Give one each")
        if combination_type not in ("cat", "svd"):
            raise UserError(f"unknown {combination_type!r}", where="combination_type", todo="Use cat or svd")
        if adapter_name in self.peft_config:
            raise UserError(f"{adapter_name!r} is in use", where="adapter_name", todo="Choose another name")
        configs: dict[str, Any] = self.peft_config
        if any(configs[name].modules_to_save for name in adapters):
            raise UserError("whole modules cannot be summed", where="modules_to_save", todo="Leave such adapters out")
        totals: dict[str, float] = {}
        for name, weight in zip(adapters, weights, strict=True):
            totals[name] = totals.get(name, 0.0) + weight
        sums, worst = self._sums(totals, combination_type, svd_rank)
        ranks = {key: factors.rank for key, factors in sums.items()}
        largest = max(ranks.values())
        odd = {f"^{re.escape(key)}": rank for key, rank in ranks.items() if rank != largest}
        configs[adapter_name] = replace(
            configs[adapters[0]], r=largest, lora_alpha=float(largest), init="slora", train="all",
            use_rslora=False, target_modules=set(ranks), exclude_modules=None, layers_to_transform=None,
            layers_pattern=None, rank_pattern=odd, alpha_pattern=dict(odd), inference_mode=True,
        )  # fmt: skip
        self.inject_adapter(self.model, adapter_name)
        for key, factors in sums.items():
            self.model.get_submodule(key).put(adapter_name, factors)
        self.set_requires_grad(adapter_name, False)
        return worst

    def _sums(self, weights: dict[str, float], kind: str, svd_rank: int | None) -> tuple[dict[str, Factors], float]:
        found: dict[str, Factors] = {}
        worst = 0.0
        for key, layer in self.model.named_modules():
            held = [name for name in weights if isinstance(layer, NLoraLayer) and name in layer.nlora_N]
            if not held:
                continue
            parts: list[tuple[float, Factors]] = []
            for name in held:
                product, offset = layer.factors(name)
                parts.append((weights[name], product))
                parts += [(-weights[name], offset)] if offset is not None else []
            total = combine(parts)
            if kind == "svd" and total.rank > (rank := svd_rank or max(layer.r[name] for name in held)):
                total, error = total.truncate(rank)
                worst = max(worst, error)
            found[key] = total
        return found, worst

    # ---- merge ----------------------------------------------------------------------------------------------------

    def _unload_and_optionally_merge(self, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        layers = [module for module in self.model.modules() if isinstance(module, NLoraLayer)]
        model: Any = super()._unload_and_optionally_merge(merge, *args, **kwargs)
        quantised = [layer.merge_error for layer in layers if layer.quantization_backend is not None]
        if merge and quantised:
            warnings.warn(
                f"merged onto the dequantised base: rounding of at most {max(quantised):.2%} of a layer's change",
                stacklevel=2,
            )
        return model


def _name_rows(_: nn.Module, args: Any, kwargs: dict[str, Any], names: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"adapter_names": list(names)}


def rank_and_scale(config: NLoraConfig, key: str) -> tuple[int, float]:
    """Returns the rank and the factor s of the module named `key`, patterns applied."""
    rank = config.rank_pattern.get(get_pattern_key(list(config.rank_pattern), key), config.r)
    alpha = config.alpha_pattern.get(get_pattern_key(list(config.alpha_pattern), key), config.lora_alpha)
    return config.rank_and_scale(rank, float(rank if alpha is None else alpha))


def check_name(name: str) -> None:
    """Checks that an adapter can have this name.

    Raises:
        UserError: it is empty, has a dot, or is a word that PyTorch or PEFT use themselves.
    """
    why = ""
    if not name or "." in name:
        why = "is empty or has a dot"
    elif name in NLoraModel.prefix:
        why = f"is a part of {NLoraModel.prefix!r}, by which PEFT finds the adapters' tensors"
    elif name == BASE or hasattr(nn.ParameterDict(), name):
        why = "is used by the library itself"
    if why:
        raise UserError(f"{name!r} {why}", where="adapter_name", todo="Choose a plain word, as 'orders'")


def check_targets(config: NLoraConfig, model: nn.Module) -> None:
    """Checks that every name in `target_modules` matches a module.

    Raises:
        UserError: a name or the pattern matches nothing; the nearest names are given.
    """
    named = config.target_modules
    if isinstance(named, str) and named != "all-linear":
        if any(re.fullmatch(named, key) for key, _ in model.named_modules()):
            return
        raise UserError(
            f"the pattern {named!r} matches no module",
            where="target_modules",
            todo="Text is one regular expression for whole names, as '.*q_proj'; give plain names in a list",
        )
    if not isinstance(named, (set, list, tuple)):
        return
    keys = [key for key, _ in model.named_modules() if key]
    linear = sorted({key.rpartition(".")[2] for key, module in model.named_modules() if isinstance(module, nn.Linear)})
    for target in sorted(named):
        if not any(key == target or key.endswith(f".{target}") for key in keys):
            near = difflib.get_close_matches(target, linear, n=3, cutoff=0.4) or linear[:8]
            raise UserError(
                f"{target!r} matches no module", where="target_modules", todo=f"Nearest names here: {', '.join(near)}"
            )


def fused_experts(model: nn.Module) -> list[str]:
    """Returns the names of tensors that hold the weights of several experts at once: no module, so no adapter."""
    return [
        f"{key}.{name}"
        for key, module in model.named_modules()
        if "expert" in key and not isinstance(module, (*CONVOLUTIONS, nn.ParameterDict, nn.ParameterList))
        for name, value in module.named_parameters(recurse=False)
        if value.ndim == 3
    ]


def adapted_layers(model: nn.Module, adapter_name: str = "default") -> list[tuple[str, NLoraLayer]]:
    """Returns (module name, layer) of every layer that carries the adapter, in the model's order."""
    return [(k, m) for k, m in model.named_modules() if isinstance(m, NLoraLayer) and adapter_name in m.nlora_N]


FIXED = ("r", "lora_alpha", "init", "train", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "modules_to_save")
"""Fields that an adapter's layers are built by: another adapter takes their place only where these agree."""


def hotswap(model: Any, path: str, adapter_name: str = "default") -> None:
    """Puts the weights of the adapter folder `path` in place of a loaded adapter's, without building layers anew.

    What `peft.utils.hotswap` does for LoRA; adapters may differ in landmarks.

    Raises:
        UserError: the folder's adapter is built in another way, adapts other modules or another base, or is damaged;
            the model stays as it is.
    """
    if adapter_name not in model.peft_config:
        raise UserError(f"no adapter {adapter_name!r} is loaded", where="adapter_name", todo=ALIKE)
    config, held = PeftConfig.from_pretrained(path), model.peft_config[adapter_name]
    bases = {base for base in (held.base_sha256, getattr(config, "base_sha256", None)) if base}
    if len(bases) > 1:
        raise UserError("is of another base than the loaded adapter", where=path, todo="Load it on its own base")
    for name in FIXED:
        wanted, found = getattr(held, name), getattr(config, name, None)
        if wanted != found:
            raise UserError(f"is {found!r}, the loaded adapter's is {wanted!r}", where=f"{path}: {name}", todo=ALIKE)
    tensors = adapter_tensors(Path(path))
    expected = get_peft_model_state_dict(model, adapter_name=adapter_name)
    if set(tensors) != set(expected):
        other = min(set(tensors) ^ set(expected))
        raise UserError(f"{other} is in one of the two adapters alone", where=path, todo=ALIKE)
    sizes = {key: layer.original_weight().shape for key, layer in adapted_layers(model, adapter_name)}
    for key, tensor in tensors.items():
        if tensor.shape != expected[key].shape:
            shapes = f"{tuple(tensor.shape)}, not {tuple(expected[key].shape)}"
            raise UserError(f"{key} has the shape {shapes}", where=path, todo=ALIKE)
        module, _, table = key.rpartition(".")
        if table in ("nlora_rows", "nlora_columns") and int(tensor.max()) >= sizes[module][table == "nlora_columns"]:
            raise UserError(f"{key} names what the weight does not have", where=path, todo="Copy the adapter again")
    set_peft_model_state_dict(model, tensors, adapter_name=adapter_name)


def register() -> None:
    """Enters NLORA in PEFT's tables. Doing it again changes nothing."""
    PEFT_TYPE_TO_CONFIG_MAPPING[MethodName.NLORA] = NLoraConfig  # type: ignore[index]
    PEFT_TYPE_TO_TUNER_MAPPING[MethodName.NLORA] = NLoraModel  # type: ignore[index]
    PEFT_TYPE_TO_PREFIX_MAPPING[MethodName.NLORA] = NLoraModel.prefix  # type: ignore[index]
