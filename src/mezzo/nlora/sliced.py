"""What an adapted layer holds of its base weight: C, G and R, made anew where weight or landmarks are others."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from mezzo.nlora.base import changed, plain_weight, stamp
from mezzo.nlora.factors import Factors
from mezzo.nlora.kernel import traced
from mezzo.nlora.merging import MergingLayer
from mezzo.nlora.nystrom import middle_gain, row_norms, slices


class SlicedLayer(MergingLayer):
    """The part of an adapted layer that keeps slices of the base weight beside the adapter's own tensors."""

    base_layer: Any
    exact: tuple[type[nn.Module], ...] = ()
    """Classes of base layers whose output is W x + b up to rounding."""

    def _start_tables(self) -> None:
        self.nlora_rows, self.nlora_columns = BufferDict(persistent=True), BufferDict(persistent=True)
        self.nlora_shift, self.nlora_gain = BufferDict(persistent=True), BufferDict(persistent=True)
        # Slices of W for the forward, in N's dtype; made again from W and the landmarks, so no file holds them.
        self.nlora_C, self.nlora_G, self.nlora_R = (BufferDict(persistent=False) for _ in "CGR")
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.gain: dict[str, int] = {}
        self.shift: dict[str, int] = {}
        self.dropout: dict[str, float] = {}
        self._direct: set[str] = set()  # adapters that take R x itself, as a bias would drown it
        # The landmarks that C, G and R were made for, and the stamp of the weight.
        self._sliced: dict[str, tuple[Tensor, Tensor, object]] = {}

    def _matrix(self, stored: Tensor) -> Tensor:
        """Returns W (out x in) as a view of the weight as the base stores it."""
        raise NotImplementedError

    def refresh_gain(self, name: str) -> None:
        """Computes an IntTune adapter's gain anew, from the base weight and the landmarks at hand."""
        W = self.original_weight()
        rows, columns = self.nlora_rows[name].to(W.device), self.nlora_columns[name].to(W.device)
        self.gain[name] = middle_gain(slices(W, rows, columns, self.scaling[name]), float(row_norms(W).norm()))
        self.nlora_gain[name] = torch.tensor([self.gain[name]], dtype=torch.int32, device=W.device)

    def refresh_slices(self) -> None:
        """Makes C, G and R anew for every adapter whose landmarks or weight are not those they were made for."""
        for name, rows in self.nlora_rows.items():
            columns, known = self.nlora_columns[name], self._sliced.get(name)
            self._read_exponents(name)
            same = known and torch.equal(known[0], rows.cpu()) and torch.equal(known[1], columns.cpu())
            if not rows.is_meta and (not same or self._outdated(name)):
                self._slice(name, self.original_weight())

    def _read_exponents(self, name: str) -> None:
        for held, known in ((self.nlora_shift, self.shift), (self.nlora_gain, self.gain)):
            if name in held and not held[name].is_meta:
                known[name] = int(held[name])

    def _outdated(self, name: str) -> bool:
        now = None if self.quantization_backend or self._unmerged is not None else stamp(self.get_base_layer())
        return now is not None and name in self._sliced and now != self._sliced[name][2]

    def _slice(self, name: str, W: Tensor, raw: Factors | None = None) -> None:
        if name not in self.nlora_rows:
            return
        rows, columns = self.nlora_rows[name], self.nlora_columns[name]
        self._read_exponents(name)
        self._hold(name, raw or slices(W, rows.to(W.device), columns.to(W.device)))
        if not W.is_meta and not rows.is_meta:
            self._sliced[name] = (rows.cpu().clone(), columns.cpu().clone(), stamp(self.get_base_layer()))

    def _hold(self, name: str, raw: Factors) -> None:
        kind = self.nlora_N[name].dtype
        self.nlora_C[name] = raw.B.to(kind)
        if name in self.nlora_shift:
            self.nlora_G[name] = raw.N.to(kind)
        if self._drowned(name, raw.A):
            self._direct.add(name)
        if self.dropout[name] or self._inexact(name):
            self.nlora_R[name] = raw.A.to(kind)

    def _now(self, name: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns C, G and R of the base weight as it is now; with gradients to it where it is trained."""
        weight = None if self.quantization_backend else plain_weight(self.get_base_layer())
        if weight is not None and (weight.requires_grad or traced()):
            raw = slices(self._matrix(weight), self.nlora_rows[name], self.nlora_columns[name])
            kind = self.nlora_N[name].dtype
            if not traced():  # an optimiser may write past the stamp
                self._sliced[name] = (*self._sliced[name][:2], None)
            return raw.B.to(kind), raw.N.to(kind), raw.A.to(kind)
        if not traced() and (self._outdated(name) or (name not in self.nlora_R and self._inexact(name))):
            with torch.no_grad():
                self._hold(name, slices(self.original_weight(), self.nlora_rows[name], self.nlora_columns[name]))
            known = self._sliced[name]
            self._sliced[name] = (known[0], known[1], stamp(self.get_base_layer()))
        G, R = (held[name] if name in held else None for held in (self.nlora_G, self.nlora_R))  # noqa: SIM401  # no get
        return self.nlora_C[name], G, R

    def _inexact(self, name: str) -> bool:
        """Returns whether the base's output at the landmarks is not R x + b up to rounding."""
        base = self.base_layer
        other = isinstance(base, BaseTunerLayer) or type(base) not in self.exact or changed(base)
        return self.quantization_backend is not None or other or (name in self._direct and self._in_half())

    def _in_half(self) -> bool:
        weight: Any = self.get_base_layer().weight
        half: bool = weight.dtype in (torch.bfloat16, torch.float16) or torch.is_autocast_enabled(weight.device.type)
        return half

    def _drowned(self, name: str, R: Tensor) -> bool:
        """Returns whether a bias is so large that in half precision R x is lost in the rounding of R x + b."""
        base: Any = self.get_base_layer()
        bias = getattr(base, "bias", None)
        if R.is_meta or bias is None or bias.is_meta:
            return False
        return bool((bias.detach()[self.nlora_rows[name].long()].float().abs() > 2 * R.float().norm(dim=1)).any())


def after_load(layer: SlicedLayer, _: Any) -> None:
    """Runs when a state dict was loaded into the layer: its slices of W follow the landmarks that came in."""
    layer.refresh_slices()
