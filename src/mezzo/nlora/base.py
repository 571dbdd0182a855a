"""The base layer below an adapter: whether its weight changed, and whether anyone watches its calls."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as every

FORWARD, BACKWARD = ("forward_hooks", "forward_pre_hooks"), ("backward_hooks", "backward_pre_hooks")


def plain_weight(base: Any) -> Tensor | None:
    """Returns the layer's weight where it is there as numbers and whole, or None (meta, sharded, quantised)."""
    weight: Any = getattr(base, "weight", None)
    if type(weight) not in (nn.Parameter, Tensor) or weight.is_meta or hasattr(weight, "ds_id") or not weight.numel():
        return None
    whole: Tensor = weight
    return whole


def stamp(base: nn.Module) -> object | None:
    """Returns a value that is another one once the layer's weight has changed; None where that cannot be told.

    Assigning a weight, loading one, moving it and writing into it are seen; what writes past autograd (`weight.data`,
    fused optimisers) is not.
    """
    weight = plain_weight(base)
    if weight is None:
        return None
    if "weight" not in base._parameters:  # computed at every access (parametrisations, pruning)
        return object()
    return id(weight), weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _hooked(base: nn.Module, kinds: tuple[str, ...]) -> bool:
    return any(getattr(base, f"_{kind}") or getattr(every, f"_global_{kind}") for kind in kinds)


def changed(base: nn.Module) -> bool:
    """Returns whether the layer's output may be another than its class gives: hooks, or a forward put in its place."""
    return "forward" in vars(base) or _hooked(base, FORWARD)


def watched(base: nn.Module) -> bool:
    """Returns whether someone sees or changes the layer's call, so that the call has to be made."""
    return changed(base) or _hooked(base, BACKWARD)
