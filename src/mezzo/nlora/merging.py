"""Merging a layer's adapters into its base weight, and taking them out again bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.quantization_utils import QuantizationBackend
from torch import Tensor, nn

from mezzo.core.errors import UserError


class MergingLayer(BaseTunerLayer):
    """The part of an adapted layer that merges and unmerges.

    The layer itself tells the base weight (`original_weight`), each adapter's change of it (`change`) and how the base
    stores a matrix (`_stored`).
    """

    nlora_N: nn.ParameterDict  # noqa: N815  # the paper's capital
    quantization_backend: QuantizationBackend | None
    float_dtype: torch.dtype
    in_features: int
    out_features: int

    def _start_unmerged(self) -> None:
        self.merged_adapters: list[str] = []
        self.merge_error = 0.0
        """Rounding of the last merge, as a share of the change (Frobenius norms)."""
        # The base's weight (or the quantised base) while adapters are merged; in a list, so that it is no parameter.
        self._kept: list[Any] = []

    @property
    def _unmerged(self) -> Any:
        return self._kept[0] if self._kept else None

    def _apply_to_kept(self, fn: Any) -> None:
        """Moves or casts what is kept as the rest of the layer is."""
        if isinstance(self._unmerged, nn.Module):
            self._unmerged._apply(fn)
        elif self._kept:
            self._unmerged.data = fn(self._unmerged.data)

    def original_weight(self) -> Tensor:
        """Returns the base weight W (out x in) as it was before any merge."""
        raise NotImplementedError

    def change(self, name: str) -> Tensor:
        """Returns the adapter's whole change of W, out x in, float32."""
        raise NotImplementedError

    def _stored(self, W: Tensor) -> Tensor:
        """Returns a matrix W in the shape in which the base stores its weight."""
        raise NotImplementedError

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters' change to the base weight. The weight as it was is kept, so `unmerge` is exact.

        A quantised base is replaced by a plain linear layer with the dequantised weight; `merge_error` tells the
        rounding made, as a share of the change.

        Args:
            safe_merge: refuse to merge a change that is not finite.
            adapter_names: which adapters; None: the active ones.

        Raises:
            UserError: the base computes its weight anew at every call, so there is nothing to write into.
            ValueError: `safe_merge` and the merged weight is not finite.
        """
        if not (names := [name for name in check_adapters_to_merge(self, adapter_names) if name in self.nlora_N]):
            return
        self._check_mergeable()
        original = self.original_weight()
        change = sum((self.change(name) for name in [*self.merged_adapters, *names]), torch.zeros(()))
        exact = original.float() + change
        if safe_merge and not bool(torch.isfinite(exact).all()):
            raise ValueError(f"NaNs detected in the merged weights. The adapters {names} seem to be broken")
        merged = exact.to(original.dtype if self.quantization_backend is None else self.float_dtype)
        size = float(change.norm())
        self.merge_error = float((merged.float() - exact).norm()) / size if size else 0.0
        self._swap_in(self._stored(merged).contiguous())
        self.merged_adapters.extend(names)

    def _check_mergeable(self) -> None:
        base = self.get_base_layer()
        if self.quantization_backend is None and "weight" not in base._parameters:
            raise UserError(
                "the weight is computed at every call (parametrised or pruned), so no change can be merged into it",
                where=type(base).__name__,
                todo="Make it plain first: torch.nn.utils.parametrize.remove_parametrizations, or prune.remove",
            )

    def _swap_in(self, stored: Tensor) -> None:
        base: Any = self.get_base_layer()
        holder = self._holder()
        if self.quantization_backend is not None:
            bias = getattr(base, "bias", None)
            plain = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
            plain.weight = nn.Parameter(stored, requires_grad=False)
            if bias is not None:
                plain.bias = nn.Parameter(bias.detach().to(stored.dtype), requires_grad=False)
            self._kept = self._kept or [base]
            holder.base_layer = plain
            return
        self._kept = self._kept or [base.weight]
        base.weight = nn.Parameter(stored, requires_grad=self._unmerged.requires_grad)

    def _holder(self) -> Any:
        """Returns the innermost tuner layer, whose base_layer is the base itself."""
        holder: Any = self
        while isinstance(holder.base_layer, BaseTunerLayer):
            holder = holder.base_layer
        return holder

    def unmerge(self) -> None:
        """Puts the base weight back, bit for bit."""
        if self._unmerged is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        if self.quantization_backend is not None:
            self._holder().base_layer = self._unmerged
        else:
            self.get_base_layer().weight = self._unmerged
        self._kept = []
        self.merged_adapters.clear()
