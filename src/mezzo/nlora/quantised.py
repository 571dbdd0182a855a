"""Quantised base layers: what reads their weight, and the weight as float numbers."""

from __future__ import annotations

import copy
from typing import Any

from peft.utils.quantization_utils import QuantizationBackend, resolve_quantization_backend
from torch import Tensor, nn

from mezzo.core.errors import UserError


def backend_of(base: nn.Module) -> QuantizationBackend | None:
    """Returns what reads a quantised layer's weight, chosen by the layer's class, or None for an ordinary layer.

    Raises:
        UserError: the layer is quantised in a way whose weight cannot be read.
    """
    backend = resolve_quantization_backend(base, get_apply_tensor_subclass=copy.copy)
    if backend is not None and not backend.supports_merge:
        raise UserError(
            f"the weight of a {backend.backend_name} layer cannot be read, so it has no rows and columns to start from",
            where=type(base).__name__,
            todo="Load the base unquantised, or in bitsandbytes 4 or 8 bit or torchao int8",
        )
    return backend


def dequantised(base: Any, backend: QuantizationBackend) -> Tensor:
    """Returns the weight (out x in) of a quantised linear layer as float numbers.

    On some CPUs bitsandbytes repacks a 4-bit weight at its first call in eval mode and rounds its scales to bfloat16,
    after which its own dequantisation gives other numbers: such a weight is unpacked here.
    """
    state: Any = getattr(base.weight, "quant_state", None)
    if not getattr(state, "packing_format_for_cpu", False):
        return backend.get_base_weight(base)
    from bitsandbytes.functional import _convert_weight_packed_for_cpu_inverse, dequantize_4bit

    plain: Any = copy.copy(state)
    plain.original_nested = False  # the repacked scales are plain numbers, one column a block of outputs
    data, plain = _convert_weight_packed_for_cpu_inverse(base.weight.data, plain)
    plain.absmax = state.absmax.T.reshape(-1).float()
    plain.dtype = plain.absmax.dtype
    weight: Tensor = dequantize_4bit(data, plain)
    return weight
