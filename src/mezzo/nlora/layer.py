"""The adapted linear layer: forward, merge, unmerge. The base weight is read, never written (but for `merge`)."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from mezzo.core.errors import UserError
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.factors import Factors
from mezzo.nlora.nystrom import balanced, largest_landmarks, leading_landmarks, middle_gain, product_norm, slices

LARGE_START = 0.15
"""Share of the weight above which a start that is not the base model is worth a warning."""


class NLoraLinear(nn.Module, BaseTunerLayer):
    """A linear layer y = W x + b with any number of NLoRA adapters on it.

    With C = W[:, J] and R = W[I, :], the landmark outputs h = (y - b)[I] = R x come from the base layer's own output:

        slora           y' = y + s B N A x
        nystrom         y' = y + s (B N A x - 2^k C W[I, J] h)
        nystrom_paper   y' = y + s B N A x            B, N, A start as W[:, :r], W[:r, :r], W[:r, :]
        train = middle  y' = y + s 2^c C N h          only N (r x r), I and J are kept

    Source: arXiv 2502.14482 for B, N, A, their slices and training N alone.
    Differs: the offset, so that step 0 is the base model; the paper starts at W + s B N A.

    Raises:
        UserError: the rank is above the layer's smaller side.
    """

    adapter_layer_names = ("nlora_A", "nlora_N", "nlora_B")
    other_param_names = ("nlora_rows", "nlora_columns", "nlora_shift")

    def __init__(self, base_layer: nn.Linear, adapter_name: str, config: NLoraConfig, r: int, scale: float, key: str):
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        self.nlora_A, self.nlora_N, self.nlora_B = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self.nlora_rows, self.nlora_columns = BufferDict(persistent=True), BufferDict(persistent=True)
        self.nlora_shift = BufferDict(persistent=True)
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.gain: dict[str, int] = {}
        self.dropout: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self._base_data: Tensor | None = None  # the base weight while adapters are merged into it
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, r, scale, key)

    def update_layer(self, name: str, config: NLoraConfig, r: int, scale: float, key: str) -> None:
        """Adds the adapter `name` (or starts it anew) with rank r and factor `scale`; `key` is the module's name."""
        smaller = min(self.in_features, self.out_features)
        if r > smaller:
            raise UserError(
                f"rank {r} is above the smaller side of this {self.out_features} x {self.in_features} layer",
                where=key,
                todo=f"Use r <= {smaller}, or give this module its own rank in rank_pattern",
            )
        self.r[name], self.scaling[name], self.dropout[name] = r, scale, config.lora_dropout
        self.gain[name] = 0
        for table in (*self.adapter_layer_names, *self.other_param_names):
            if name in getattr(self, table):
                del getattr(self, table)[name]
        with torch.no_grad():
            if config.init == "slora":
                self._start_random(name, r)
            else:
                self._start_slices(name, config, r, scale, key)
        self._cast(name, self.original_weight().dtype)
        self._move_adapter_to_device_of_base_layer(name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _start_random(self, name: str, r: int) -> None:
        A, N = torch.empty(r, self.in_features), torch.empty(r, r)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5))
        nn.init.kaiming_uniform_(N, a=math.sqrt(5))
        self._keep(name, Factors(torch.zeros(self.out_features, r), N, A))

    def _start_slices(self, name: str, config: NLoraConfig, r: int, scale: float, key: str) -> None:
        W = self.original_weight()
        rows, columns = (index.to(W.device) for index in leading_landmarks(r))
        if config.init == "nystrom" and not W.is_meta:
            rows, columns = largest_landmarks(W, r)
        raw = slices(W, rows, columns, scale)
        norm = 0.0 if W.is_meta else float(W.float().norm())
        if config.init == "nystrom_paper":
            change = 0.0 if norm == 0 else scale * product_norm(raw.B, raw.N, raw.A) / norm
            if change > LARGE_START:
                warnings.warn(
                    f"{key}: the paper's start changes this weight by {change:.0%} before the first step; "
                    "init = nystrom starts at the base model",
                    stacklevel=2,
                )
        start, shift = (raw, 0) if config.init == "nystrom_paper" or W.is_meta else balanced(raw, norm)
        if config.train == "middle":
            middle = raw.N if config.init == "nystrom_paper" else torch.zeros_like(raw.N)
            if config.init == "nystrom" and not W.is_meta:
                self.gain[name] = middle_gain(raw, norm)
            self.nlora_N[name] = nn.Parameter(middle)
        else:
            self._keep(name, start)
        if config.train == "middle" or config.init == "nystrom":
            self.nlora_rows[name], self.nlora_columns[name] = rows, columns
        if config.train == "all" and config.init == "nystrom":
            self.nlora_shift[name] = torch.tensor([shift], dtype=torch.int32)

    def _keep(self, name: str, start: Factors) -> None:
        for table, value in ((self.nlora_A, start.A), (self.nlora_N, start.N), (self.nlora_B, start.B)):
            table[name] = nn.Parameter(value.contiguous())

    def _cast(self, name: str, dtype: torch.dtype) -> None:
        for table in (self.nlora_A, self.nlora_N, self.nlora_B):
            if name in table and dtype.is_floating_point:
                table[name] = nn.Parameter(table[name].data.to(dtype))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Moves the adapter; unlike PEFT's, leaves its dtype, so that float32 files load exactly on a bfloat16 base."""
        target = self.base_layer.weight.device if device is None else device
        for table in (*self.adapter_layer_names, *self.other_param_names):
            held = getattr(self, table)
            if adapter_name in held and not held[adapter_name].is_meta:
                held[adapter_name] = held[adapter_name].to(target)

    def original_weight(self) -> Tensor:
        """Returns the base weight W (out x in) as it was before any merge; not a copy."""
        return self.base_layer.weight.data if self._base_data is None else self._base_data

    def refresh_gain(self, name: str) -> None:
        """Computes an IntTune adapter's gain anew, from the base weight and the landmarks at hand."""
        W = self.original_weight()
        rows, columns = self.nlora_rows[name].to(W.device), self.nlora_columns[name].to(W.device)
        self.gain[name] = middle_gain(slices(W, rows, columns, self.scaling[name]), float(W.float().norm()))

    def factors(self, name: str) -> tuple[Factors, Factors | None]:
        """Returns the adapter's product in float32, every scaling folded in, and the offset to subtract, if any."""
        W, scale = self.original_weight(), self.scaling[name]
        raw = None
        if name in self.nlora_rows:
            raw = slices(W, self.nlora_rows[name], self.nlora_columns[name], scale)
            raw = Factors(raw.B.float(), raw.N.float(), raw.A.float(), scale)
        if name not in self.nlora_A:
            assert raw is not None  # noqa: S101  # an adapter without A lives on landmarks
            return Factors(raw.B, self.nlora_N[name].detach().float() * 2.0 ** self.gain[name], raw.A, scale), None
        B, N, A = (table[name].detach().float() for table in (self.nlora_B, self.nlora_N, self.nlora_A))
        if raw is None:
            return Factors(B, N, A, scale), None
        return Factors(B, N, A, scale), Factors(raw.B, raw.N * 2.0 ** int(self.nlora_shift[name]), raw.A, scale)

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Returns the adapter's whole change of the weight, out x in, float32, on the weight's device."""
        product, offset = self.factors(adapter)
        return product.delta() if offset is None else product.delta() - offset.delta()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns y' (... x out) for x (... x in); see the class for the equations."""
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return y
        result = y
        for name in self.active_adapters:
            if name in self.nlora_N:
                result = result + self._added(name, x, y).to(y.dtype)
        return result

    def _added(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        N, scale = self.nlora_N[name], self.scaling[name]
        dropping = self.training and self.dropout[name] > 0
        if dropping:
            x = F.dropout(x, self.dropout[name])
        W = self.original_weight()
        h = None
        if name in self.nlora_rows:
            rows, columns = self.nlora_rows[name], self.nlora_columns[name]
            h = F.linear(x, W.index_select(0, rows)) if dropping else self._landmark_outputs(y, rows)
            C = W.index_select(1, columns)
        if name not in self.nlora_A:
            assert h is not None  # noqa: S101  # an adapter without A lives on landmarks
            return F.linear(F.linear(h.to(N.dtype), N * (scale * 2.0 ** self.gain[name])).to(C.dtype), C)
        inner = F.linear(x.to(N.dtype), self.nlora_A[name])
        added = F.linear(F.linear(inner, N), self.nlora_B[name])
        if h is not None:
            G = C.index_select(0, rows).to(N.dtype) * torch.exp2(self.nlora_shift[name].to(N.dtype))
            added = added - F.linear(F.linear(h.to(N.dtype), G), C.to(N.dtype))
        return added * scale

    def _landmark_outputs(self, y: Tensor, rows: Tensor) -> Tensor:
        h = y.index_select(-1, rows)
        bias = self.base_layer.bias
        return h if bias is None else h - bias.index_select(0, rows)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters' change to the base weight. The weight as it was is kept, so `unmerge` is exact.

        Args:
            safe_merge: refuse to merge a change that is not finite.
            adapter_names: which adapters; None: the active ones.

        Raises:
            ValueError: `safe_merge` and the merged weight is not finite.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.nlora_N]
        if not names:
            return
        original = self.original_weight()
        merged = original.float()
        for name in [*self.merged_adapters, *names]:
            merged = merged + self.get_delta_weight(name)
        if safe_merge and not bool(torch.isfinite(merged).all()):
            raise ValueError(f"NaNs detected in the merged weights. The adapters {names} seem to be broken")
        self._base_data = original
        self.base_layer.weight.data = merged.to(original.dtype)
        self.merged_adapters.extend(names)

    def unmerge(self) -> None:
        """Puts the base weight back, bit for bit."""
        if self._base_data is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        self.base_layer.weight.data = self._base_data
        self._base_data = None
        self.merged_adapters.clear()

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Returns True: the change is additive."""
        return True

    def __repr__(self) -> str:
        return f"nlora.{super().__repr__()}"
