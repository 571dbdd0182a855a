"""The adapted layers: starts, forward, mixed batches. The base weight is read, never written.

`NLoraLayer` is the life of adapters on one layer, for a base seen as a matrix W (out x in). Its children in kinds.py
know how their kind stores W.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.utils.integrations import gather_params_ctx
from torch import Tensor, nn

from mezzo.core.errors import UserError
from mezzo.nlora.base import watched
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.factors import Factors
from mezzo.nlora.kernel import Product, add_, tap, traced
from mezzo.nlora.nystrom import middle_gain, row_norms, slices, start_of
from mezzo.nlora.quantised import backend_of, dequantised
from mezzo.nlora.sliced import SlicedLayer, after_load

LARGE_START = 0.15
"""Share of the weight above which a start that is not the base model is worth a warning."""


class NLoraLayer(nn.Module, SlicedLayer):
    """A layer y = W x + b with any number of NLoRA adapters on it.

    With C = W[:, J] and R = W[I, :], the landmark outputs h = (y - b)[I] = R x come from the base layer's own output:

        slora           y' = y + s B N A x
        nystrom         y' = y + s (B N A x - 2^k C W[I, J] h)
        nystrom_paper   y' = y + s B N A x            B, N, A start as W[:, :r], W[:r, :r], W[:r, :]
        train = middle  y' = y + s 2^c C N h          only N (r x r), I and J are kept

    Where the base's output is not W x + b up to rounding (dropout on the adapter's input, quantised kernels, another
    method's adapter inside), h is R x itself and R is held too.

    C and R are those of the base weight as it is now: where that is trained or loaded anew, they follow it.

    A Nyström layer's rank is at most its smaller side, where the product already reaches every change of W.

    Source: arXiv 2502.14482 for B, N, A, their slices and training N alone.
    Differs: the offset, so that step 0 is the base model; the paper starts at W + s B N A.
    """

    adapter_layer_names = ("nlora_A", "nlora_N", "nlora_B")
    other_param_names = ("nlora_rows", "nlora_columns", "nlora_shift", "nlora_gain", "nlora_C", "nlora_G", "nlora_R")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: NLoraConfig, r: int, scale: float, key: str):
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = self._sizes()
        self.nlora_A, self.nlora_N, self.nlora_B = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self._start_tables()
        self._start_unmerged()
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.quantization_backend = backend_of(self.get_base_layer())
        self.float_dtype = torch.float32
        """dtype of the plain layer that a merge puts in place of a quantised one."""
        self.register_load_state_dict_post_hook(after_load)
        self.update_layer(adapter_name, config, r, scale, key)

    def _sizes(self) -> tuple[int, int]:
        raise NotImplementedError

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        """Returns A x, r numbers a token (or place) in the last dimension."""
        raise NotImplementedError

    def _drop(self, name: str, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout[name], self.training) if self.dropout[name] else x

    def update_layer(self, name: str, config: NLoraConfig, r: int, scale: float, key: str) -> None:
        """Adds the adapter `name` (or starts it anew) with rank r and factor `scale`; `key` is the module's name."""
        if config.init != "slora":
            r = min(r, self.in_features, self.out_features)
        self.forget(name)
        self.r[name], self.scaling[name], self.dropout[name] = r, scale, config.lora_dropout
        self.gain[name] = self.shift[name] = 0
        weight: Any = getattr(self.get_base_layer(), "weight", None)
        with torch.no_grad(), gather_params_ctx([weight], modifier_rank=None):
            W, raw = self.original_weight(), None
            if config.init == "slora":
                self._start_random(name, r, W.dtype)
            else:
                raw = self._start_slices(name, config, W, key)
            if not config.init_weights:
                self._scatter(name, W)
            self._slice(name, W, raw)
        self._move_adapter_to_device_of_base_layer(name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def put(self, name: str, factors: Factors) -> None:
        """Sets an adapter made with init = slora to the given product; B, N and A may have any common rank."""
        self.r[name], self.scaling[name] = factors.rank, factors.scale
        B, N, A = (matrix.to(self.nlora_N[name].device) for matrix in (factors.B, factors.N, factors.A))
        self._keep(name, Factors(B, N, A))
        self.set_adapter(self.active_adapters)

    def forget(self, name: str) -> None:
        """Removes all that is kept for an adapter; which adapters are active stays as it is."""
        for table in (*self.adapter_layer_names, *self.other_param_names):
            if name in getattr(self, table):
                del getattr(self, table)[name]
        self._direct.discard(name)
        for known in (self.r, self.scaling, self.gain, self.shift, self.dropout, self._sliced):
            known.pop(name, None)

    def delete_adapter(self, adapter_name: str) -> None:
        """Removes the adapter and all that was kept for it."""
        super().delete_adapter(adapter_name)
        self.forget(adapter_name)

    def _start_random(self, name: str, r: int, dtype: torch.dtype) -> None:
        A, N = torch.empty(r, self.in_features), torch.empty(r, r)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5))
        nn.init.kaiming_uniform_(N, a=math.sqrt(5))
        self._keep(name, Factors(torch.zeros(self.out_features, r, dtype=dtype), N.to(dtype), A.to(dtype)))

    def _start_slices(self, name: str, config: NLoraConfig, W: Tensor, key: str) -> Factors:
        middle = config.train == "middle"
        try:
            start = start_of(W, self.r[name], self.scaling[name], offset=config.init == "nystrom", only_middle=middle)
        except ValueError as error:
            raise UserError(
                str(error), where=key, todo="Leave it out with exclude_modules, or use init = slora"
            ) from error
        if start.empty:
            warnings.warn(
                f"{key}: the weight is zero, and so is all that is taken of it: this layer will not learn. "
                "Leave it out with exclude_modules, or use init = slora",
                stacklevel=2,
            )
        if start.change > LARGE_START:
            warnings.warn(
                f"{key}: the paper's start changes this weight by {start.change:.0%} before the first step; "
                "init = nystrom starts at the base model",
                stacklevel=2,
            )
        if middle:
            self.nlora_N[name], self.gain[name] = nn.Parameter(start.middle), start.gain
            if config.init == "nystrom":
                self.nlora_gain[name] = torch.tensor([start.gain], dtype=torch.int32)
        else:
            self._keep(name, start.factors)
        if middle or config.init == "nystrom":
            self.nlora_rows[name], self.nlora_columns[name] = start.rows, start.columns
        if config.train == "all" and config.init == "nystrom":
            self.nlora_shift[name] = torch.tensor([start.shift], dtype=torch.int32)
        return start.raw

    def _scatter(self, name: str, W: Tensor) -> None:
        for table in (self.nlora_A, self.nlora_N, self.nlora_B):
            if name in table:
                nn.init.kaiming_uniform_(table[name], a=math.sqrt(5))
        if name not in self.nlora_A and not self.gain[name]:
            raw = slices(W, self.nlora_rows[name], self.nlora_columns[name], self.scaling[name])
            self.nlora_N[name].data *= 2.0 ** middle_gain(raw, float(row_norms(W).norm()))

    def _keep(self, name: str, start: Factors) -> None:
        for table, value in ((self.nlora_A, start.A), (self.nlora_N, start.N), (self.nlora_B, start.B)):
            table[name] = nn.Parameter(value.contiguous())

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Moves the adapter; unlike PEFT's, leaves its dtype, so that float32 files load exactly on a bfloat16 base."""
        target = self._get_base_layer_device_and_dtype(self.get_base_layer())[0] if device is None else device
        if target is None:
            return
        for table in (*self.adapter_layer_names, *self.other_param_names):
            held = getattr(self, table)
            if adapter_name in held and not held[adapter_name].is_meta:
                held[adapter_name] = held[adapter_name].to(target)

    def original_weight(self) -> Tensor:
        """Returns the base weight W (out x in) as it was before any merge; a view, or the dequantised weight."""
        base: Any = self.get_base_layer()
        kept = self._unmerged
        if self.quantization_backend is not None:
            return dequantised(base if kept is None else kept, self.quantization_backend)
        return self._matrix((base.weight if kept is None else kept).data)

    def factors(self, name: str) -> tuple[Factors, Factors | None]:
        """Returns the adapter's product in float32, every scaling folded in, and the offset to subtract, if any."""
        scale, raw = self.scaling[name], None
        if name in self.nlora_rows:
            W = self.original_weight()
            raw = slices(W, self.nlora_rows[name].to(W.device), self.nlora_columns[name].to(W.device), scale)
            raw = Factors(raw.B.float(), raw.N.float(), raw.A.float(), scale)
        if name not in self.nlora_A:
            assert raw is not None  # noqa: S101  # an adapter without A lives on landmarks
            return Factors(raw.B, self.nlora_N[name].detach().float() * 2.0 ** self.gain[name], raw.A, scale), None
        B, N, A = (table[name].detach().float() for table in (self.nlora_B, self.nlora_N, self.nlora_A))
        if raw is None:
            return Factors(B, N, A, scale), None
        return Factors(B, N, A, scale), Factors(raw.B, raw.N * 2.0 ** self.shift[name], raw.A, scale)

    def change(self, name: str) -> Tensor:
        """Returns the adapter's whole change of W, out x in, float32, on the weight's device."""
        product, offset = self.factors(name)
        return product.delta() if offset is None else product.delta() - offset.delta()

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Returns the adapter's whole change in the shape in which the base stores its weight, float32."""
        return self._stored(self.change(adapter))

    def forward(self, x: Tensor, *args: Any, adapter_names: Sequence[str] | None = None, **kwargs: Any) -> Tensor:
        """Returns y' (... x out) for x (... x in); see the class for the equations.

        Args:
            x: the layer's input.
            args, kwargs: handed on to the base layer.
            adapter_names: one adapter name a row of the batch ("__base__": none), in place of the active ones.

        Raises:
            ValueError: `adapter_names` with merged adapters, or of another length than the batch.
        """
        if self.disable_adapters and self.merged:
            self.unmerge()
        names = [name for name in self.active_adapters if name in self.nlora_N]
        if names and self.nlora_N[names[0]].is_meta and not x.is_meta:
            raise UserError(
                "the adapter's tensors are not in memory: they are offloaded, or were never loaded",
                where=f"adapter {names[0]!r}",
                todo="Offload the base before the adapter is attached, and keep the adapter on the device",
            )
        idle = self.disable_adapters or self.merged or not names
        if not idle and adapter_names is None and len(names) == 1 and not args and not kwargs:
            fused = self._fused(x, names[0])
            if fused is not None:
                return fused
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if adapter_names is not None:
            return self._mixed(x, y, adapter_names)
        return y if idle else self._adapted(x, self._own(y), names)

    def _fused(self, x: Tensor, name: str) -> Tensor | None:
        return None

    def _own(self, y: Tensor) -> Tensor:
        """Returns y, or a copy where what follows must not write into it."""
        if traced():
            return y
        kept = self.quantization_backend is not None or watched(self.base_layer)
        return y.clone() if kept or (y.requires_grad and y._is_view()) else y

    def _mixed(self, x: Tensor, y: Tensor, names: Sequence[str]) -> Tensor:
        if self.merged or self.disable_adapters:
            raise ValueError("adapter_names needs adapters that are enabled and not merged: call unmerge_adapter()")
        if len(names) != len(x):
            raise ValueError(f"{len(names)} adapter names for a batch of {len(x)}: give one name a row")
        result = y.clone()
        for name in sorted(set(names) & set(self.nlora_N.keys())):
            rows = torch.tensor([k for k, wanted in enumerate(names) if wanted == name], device=y.device)
            result[rows] = self._adapted(x[rows], y[rows], [name])
        return result

    def _adapted(self, x: Tensor, y: Tensor, names: Sequence[str]) -> Tensor:
        """Returns y with the adapters' products added; all landmark outputs are read before the first is added."""
        terms = []
        for name in names:
            dropped = self._drop(name, x)
            for product in self._products(name):
                if product.A is not None:
                    terms.append((self._project(dropped, product.A), product))
                elif product.rows is not None:
                    y, h = tap(y, product.rows, getattr(self.get_base_layer(), "bias", None))
                    terms.append((h, product))
        for u, product in terms:
            y = add_(y, u, product.N, product.B, product.scale)
        return y

    def _products(self, name: str) -> list[Product]:
        N, s = self.nlora_N[name], self.scaling[name]
        products = []
        if name in self.nlora_A:
            products.append(Product(s, N, self.nlora_B[name], self.nlora_A[name]))
            if name not in self.nlora_shift:
                return products
        C, G, R = self._now(name)
        direct = R is not None and (self._inexact(name) or (self.training and self.dropout[name] > 0))
        rest = (C, R if direct else None, None if direct else self.nlora_rows[name])
        if products:
            assert G is not None  # noqa: S101  # it is held wherever there is a shift
            return [*products, Product(-s * 2.0 ** self.shift[name], G, *rest)]
        return [Product(s * 2.0 ** self.gain[name], N, *rest)]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Returns True: the change is additive."""
        return True

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        done = super()._apply(fn, recurse)
        self._apply_to_kept(fn)
        return done

    def __repr__(self) -> str:
        return f"nlora.{super().__repr__()}"
