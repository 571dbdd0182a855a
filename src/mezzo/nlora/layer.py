"""The adapted layers: forward, mixed batches, merge, unmerge. The base weight is read, never written but by `merge`.

`NLoraLayer` is the life of adapters on one layer, for a base seen as a matrix W (out x in). Its children know how their
kind stores W: `NLoraLinear` (linear layers, GPT-2's Conv1D, quantised ones), `NLoraConv`, `NLoraEmbedding`.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from peft.utils.integrations import gather_params_ctx
from peft.utils.quantization_utils import QuantizationBackend, resolve_quantization_backend
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from mezzo.core.errors import UserError
from mezzo.nlora.config import NLoraConfig
from mezzo.nlora.factors import Factors
from mezzo.nlora.kernel import add_, project, tap
from mezzo.nlora.nystrom import (
    balanced,
    largest_landmarks,
    leading_landmarks,
    middle_gain,
    product_norm,
    row_norms,
    slices,
)

LARGE_START = 0.15
"""Share of the weight above which a start that is not the base model is worth a warning."""

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class NLoraLayer(nn.Module, BaseTunerLayer):
    """A layer y = W x + b with any number of NLoRA adapters on it.

    With C = W[:, J] and R = W[I, :], the landmark outputs h = (y - b)[I] = R x come from the base layer's own output:

        slora           y' = y + s B N A x
        nystrom         y' = y + s (B N A x - 2^k C W[I, J] h)
        nystrom_paper   y' = y + s B N A x            B, N, A start as W[:, :r], W[:r, :r], W[:r, :]
        train = middle  y' = y + s 2^c C N h          only N (r x r), I and J are kept

    Where the base's output is not W x + b up to rounding (dropout on the adapter's input, quantised kernels, another
    method's adapter inside), h is R x itself and R is held too.

    A Nyström layer's rank is at most its smaller side, where the product already reaches every change of W.

    Source: arXiv 2502.14482 for B, N, A, their slices and training N alone.
    Differs: the offset, so that step 0 is the base model; the paper starts at W + s B N A.

    Raises:
        UserError: the layer cannot be adapted.
    """

    adapter_layer_names = ("nlora_A", "nlora_N", "nlora_B")
    other_param_names = ("nlora_rows", "nlora_columns", "nlora_shift", "nlora_C", "nlora_G", "nlora_R")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: NLoraConfig, r: int, scale: float, key: str):
        super().__init__()
        self.base_layer = base_layer
        self.in_features, self.out_features = self._sizes()
        self.nlora_A, self.nlora_N, self.nlora_B = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        self.nlora_rows, self.nlora_columns = BufferDict(persistent=True), BufferDict(persistent=True)
        self.nlora_shift = BufferDict(persistent=True)
        # Slices of W for the forward, in N's dtype; made again from W and the landmarks, so no file holds them.
        self.nlora_C, self.nlora_G = BufferDict(persistent=False), BufferDict(persistent=False)
        self.nlora_R = BufferDict(persistent=False)
        self.r: dict[str, int] = {}
        self.scaling: dict[str, float] = {}
        self.gain: dict[str, int] = {}
        self.shift: dict[str, int] = {}
        self.dropout: dict[str, float] = {}
        self.merged_adapters: list[str] = []
        self.merge_error = 0.0
        """Rounding made by the last merge, as a share of the merged change (Frobenius norms)."""
        self._unmerged: Any = None  # the base's weight (or the quantised base) while adapters are merged
        self._sliced: dict[str, tuple[Tensor, Tensor]] = {}  # the landmarks that C, G and R were made for
        self._disable_adapters = False
        self._active_adapter = adapter_name
        self.quantization_backend = _backend(self.get_base_layer())
        self.float_dtype = torch.float32
        """dtype of the plain layer that a merge puts in place of a quantised one."""
        self.register_load_state_dict_post_hook(_after_load)
        self.update_layer(adapter_name, config, r, scale, key)

    # ---- what a kind of layer knows -------------------------------------------------------------------------------

    def _sizes(self) -> tuple[int, int]:
        raise NotImplementedError

    def _matrix(self, stored: Tensor) -> Tensor:
        """Returns W (out x in) as a view of the weight as the base stores it."""
        raise NotImplementedError

    def _stored(self, W: Tensor) -> Tensor:
        """Returns a matrix W in the shape in which the base stores its weight."""
        raise NotImplementedError

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        """Returns A x, r numbers a token (or place) in the last dimension."""
        raise NotImplementedError

    def _drop(self, name: str, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout[name], self.training) if self.dropout[name] else x

    # ---- an adapter's start ---------------------------------------------------------------------------------------

    def update_layer(self, name: str, config: NLoraConfig, r: int, scale: float, key: str) -> None:
        """Adds the adapter `name` (or starts it anew) with rank r and factor `scale`; `key` is the module's name."""
        if config.init != "slora":
            r = min(r, self.in_features, self.out_features)
        self._forget(name)
        self.r[name], self.scaling[name], self.dropout[name] = r, scale, config.lora_dropout
        self.gain[name] = self.shift[name] = 0
        weight: Any = getattr(self.get_base_layer(), "weight", None)
        with torch.no_grad(), gather_params_ctx([weight], modifier_rank=None):
            W = self.original_weight()
            if config.init == "slora":
                self._start_random(name, r)
            else:
                self._start_slices(name, config, W, key)
            if not config.init_weights:
                self._scatter(name, W)
            self._cast(name, W.dtype)
            self._slice(name, W)
        self._move_adapter_to_device_of_base_layer(name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def put(self, name: str, factors: Factors) -> None:
        """Sets an adapter made with init = slora to the given product; B, N and A may have any common rank."""
        self.r[name], self.scaling[name] = factors.rank, factors.scale
        device = self.nlora_N[name].device
        self._keep(name, Factors(factors.B.to(device), factors.N.to(device), factors.A.to(device)))
        self.set_adapter(self.active_adapters)

    def _forget(self, name: str) -> None:
        for table in (*self.adapter_layer_names, *self.other_param_names):
            if name in getattr(self, table):
                del getattr(self, table)[name]
        for known in (self.r, self.scaling, self.gain, self.shift, self.dropout, self._sliced):
            known.pop(name, None)

    def delete_adapter(self, adapter_name: str) -> None:
        """Removes the adapter and all that was kept for it."""
        super().delete_adapter(adapter_name)
        self._forget(adapter_name)

    def _start_random(self, name: str, r: int) -> None:
        A, N = torch.empty(r, self.in_features), torch.empty(r, r)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5))
        nn.init.kaiming_uniform_(N, a=math.sqrt(5))
        self._keep(name, Factors(torch.zeros(self.out_features, r), N, A))

    def _start_slices(self, name: str, config: NLoraConfig, W: Tensor, key: str) -> None:
        r, scale = self.r[name], self.scaling[name]
        norms = torch.zeros(0) if W.is_meta else row_norms(W)
        norm = float(norms.norm())
        rows, columns = (index.to(W.device) for index in leading_landmarks(r))
        if config.init == "nystrom" and not W.is_meta:
            rows, columns = largest_landmarks(W, norms, r)
        raw = slices(W, rows, columns, scale)
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

    def _cast(self, name: str, dtype: torch.dtype) -> None:
        for table in (self.nlora_A, self.nlora_N, self.nlora_B):
            if name in table and dtype.is_floating_point:
                table[name] = nn.Parameter(table[name].data.to(dtype))

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Moves the adapter; unlike PEFT's, leaves its dtype, so that float32 files load exactly on a bfloat16 base."""
        target = self._get_base_layer_device_and_dtype(self.get_base_layer())[0] if device is None else device
        if target is None:
            return
        for table in (*self.adapter_layer_names, *self.other_param_names):
            held = getattr(self, table)
            if adapter_name in held and not held[adapter_name].is_meta:
                held[adapter_name] = held[adapter_name].to(target)

    # ---- slices of the base ---------------------------------------------------------------------------------------

    def original_weight(self) -> Tensor:
        """Returns the base weight W (out x in) as it was before any merge; a view, or the dequantised weight."""
        base: Any = self.get_base_layer()
        kept = self._unmerged
        if self.quantization_backend is not None:
            return dequantised(base if kept is None else kept, self.quantization_backend)
        return self._matrix((base.weight if kept is None else kept).data)

    def refresh_gain(self, name: str) -> None:
        """Computes an IntTune adapter's gain anew, from the base weight and the landmarks at hand."""
        W = self.original_weight()
        rows, columns = self.nlora_rows[name].to(W.device), self.nlora_columns[name].to(W.device)
        self.gain[name] = middle_gain(slices(W, rows, columns, self.scaling[name]), float(row_norms(W).norm()))

    def refresh_slices(self) -> None:
        """Makes C, G and R anew for every adapter whose landmarks are not those they were made for."""
        for name, rows in self.nlora_rows.items():
            columns, known = self.nlora_columns[name], self._sliced.get(name)
            if name in self.nlora_shift and not self.nlora_shift[name].is_meta:
                self.shift[name] = int(self.nlora_shift[name])
            if rows.is_meta or (known and torch.equal(known[0], rows.cpu()) and torch.equal(known[1], columns.cpu())):
                continue
            self._slice(name, self.original_weight())

    def _slice(self, name: str, W: Tensor) -> None:
        if name not in self.nlora_rows:
            return
        rows, columns = self.nlora_rows[name], self.nlora_columns[name]
        if name in self.nlora_shift:
            self.shift[name] = 0 if self.nlora_shift[name].is_meta else int(self.nlora_shift[name])
        raw, kind = slices(W, rows.to(W.device), columns.to(W.device)), self.nlora_N[name].dtype
        self.nlora_C[name] = raw.B.to(kind)
        if name in self.nlora_shift:
            self.nlora_G[name] = raw.N.to(kind)
        if self.dropout[name] or self._inexact():
            self.nlora_R[name] = raw.A.to(kind)
        if not W.is_meta and not rows.is_meta:
            self._sliced[name] = (rows.cpu().clone(), columns.cpu().clone())

    def _inexact(self) -> bool:
        """Returns whether the base's output is not W x + b up to rounding."""
        return self.quantization_backend is not None or isinstance(self.base_layer, BaseTunerLayer)

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

    # ---- forward --------------------------------------------------------------------------------------------------

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
        y: Tensor = self.base_layer(x, *args, **kwargs)
        if adapter_names is not None:
            return self._mixed(x, y, adapter_names)
        names = [name for name in self.active_adapters if name in self.nlora_N]
        if self.disable_adapters or self.merged or not names:
            return y
        return self._adapted(x, self._own(y), names)

    def _own(self, y: Tensor) -> Tensor:
        """Returns y, or a copy where what follows must not write into it."""
        if torch.compiler.is_compiling():
            return y
        watched = self.quantization_backend is not None or getattr(self.base_layer, "_forward_hooks", None)
        return y.clone() if watched or (y.requires_grad and y._is_view()) else y

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
        inputs: dict[str, tuple[Any, Any]] = {}
        for name in names:
            dropped = self._drop(name, x)
            u = self._project(dropped, self.nlora_A[name]) if name in self.nlora_A else None
            h = None
            if name in self.nlora_R and (self.training or self._inexact()):
                h = self._project(dropped, self.nlora_R[name])
            elif name in self.nlora_rows:
                y, h = tap(y, self.nlora_rows[name], getattr(self.get_base_layer(), "bias", None))
            inputs[name] = u, h
        for name, (u, h) in inputs.items():
            N, s = self.nlora_N[name], self.scaling[name]
            if u is None:
                y = add_(y, h, N, self.nlora_C[name], s * 2.0 ** self.gain[name])
                continue
            y = add_(y, u, N, self.nlora_B[name], s)
            if h is not None:
                y = add_(y, h, self.nlora_G[name], self.nlora_C[name], -s * 2.0 ** self.shift[name])
        return y

    # ---- merge ----------------------------------------------------------------------------------------------------

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Adds the adapters' change to the base weight. The weight as it was is kept, so `unmerge` is exact.

        A quantised base is replaced by a plain linear layer with the dequantised weight; `merge_error` tells the
        rounding made, as a share of the change.

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
        change = sum((self.change(name) for name in [*self.merged_adapters, *names]), torch.zeros(()))
        exact = original.float() + change
        if safe_merge and not bool(torch.isfinite(exact).all()):
            raise ValueError(f"NaNs detected in the merged weights. The adapters {names} seem to be broken")
        merged = exact.to(original.dtype if self.quantization_backend is None else self.float_dtype)
        size = float(change.norm())
        self.merge_error = float((merged.float() - exact).norm()) / size if size else 0.0
        self._swap_in(self._stored(merged).contiguous())
        self.merged_adapters.extend(names)

    def _swap_in(self, stored: Tensor) -> None:
        base: Any = self.get_base_layer()
        holder = self._holder()
        if self.quantization_backend is not None:
            bias = getattr(base, "bias", None)
            plain = nn.Linear(self.in_features, self.out_features, bias=bias is not None, device="meta")
            plain.weight = nn.Parameter(stored, requires_grad=False)
            if bias is not None:
                plain.bias = nn.Parameter(bias.detach().to(stored.dtype), requires_grad=False)
            self._unmerged = base if self._unmerged is None else self._unmerged
            holder.base_layer = plain
            return
        self._unmerged = base.weight if self._unmerged is None else self._unmerged
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
        self._unmerged = None
        self.merged_adapters.clear()

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Returns True: the change is additive."""
        return True

    def __repr__(self) -> str:
        return f"nlora.{super().__repr__()}"


class NLoraLinear(NLoraLayer):
    """NLoRA on a linear layer, on GPT-2's Conv1D (which stores W transposed), or on a quantised linear layer."""

    def _sizes(self) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        if isinstance(base, Conv1D):
            return base.nx, base.nf
        return base.in_features, base.out_features

    def _matrix(self, stored: Tensor) -> Tensor:
        return stored.T if isinstance(self.get_base_layer(), Conv1D) else stored

    def _stored(self, W: Tensor) -> Tensor:
        return W.T if isinstance(self.get_base_layer(), Conv1D) else W

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        return project(x, A)


class NLoraConv(NLoraLayer):
    """NLoRA on a convolution of 1 to 3 dimensions: W is out x (in · kernel), h are the output channels I."""

    def _sizes(self) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        return base.in_channels * math.prod(base.kernel_size), base.out_channels

    def _matrix(self, stored: Tensor) -> Tensor:
        return stored.flatten(1)

    def _stored(self, W: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        return W.view(len(W), base.in_channels, *base.kernel_size)

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        kernel = self._stored(A)
        base: Any = self.get_base_layer()
        return base._conv_forward(x.to(A.dtype), kernel, None).movedim(1, -1)

    def _adapted(self, x: Tensor, y: Tensor, names: Sequence[str]) -> Tensor:
        last = y.movedim(1, -1).clone(memory_format=torch.contiguous_format)
        return super()._adapted(x, last, names).movedim(-1, 1)


class NLoraEmbedding(NLoraLayer):
    """NLoRA on an embedding: W is (embedding size) x (vocabulary), x the one-hot token, so A x is a column of A.

    An embedding that scales its output (Gemma) scales the adapter's product too. Dropout does not apply to tokens.
    """

    def _sizes(self) -> tuple[int, int]:
        base: Any = self.get_base_layer()
        return base.num_embeddings, base.embedding_dim

    def _matrix(self, stored: Tensor) -> Tensor:
        return stored.T

    def _stored(self, W: Tensor) -> Tensor:
        return W.T

    def _drop(self, name: str, x: Tensor) -> Tensor:
        return x

    def _project(self, x: Tensor, A: Tensor) -> Tensor:
        base: Any = self.get_base_layer()
        u = F.embedding(x, A.T, padding_idx=base.padding_idx, scale_grad_by_freq=base.scale_grad_by_freq)
        scale = self._get_embed_scale()
        return u if scale is None else u * scale.to(u)


def layer_for(target: nn.Module, key: str) -> type[NLoraLayer]:
    """Returns the class that adapts this module.

    Raises:
        UserError: none does; the message says why and what to do.
    """
    base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
    if isinstance(base, CONVOLUTIONS):
        if base.groups == 1:
            return NLoraConv
        why = f"a convolution with {base.groups} groups has no one weight matrix to take rows and columns of"
        raise UserError(why, where=key, todo="Leave it out with exclude_modules")
    if isinstance(base, nn.Embedding):
        if base.max_norm is None:
            return NLoraEmbedding
        raise UserError("an embedding with max_norm rewrites its own weight", where=key, todo="Leave it out")
    if isinstance(base, nn.modules.linear.NonDynamicallyQuantizableLinear):
        why = (
            "the output projection inside torch.nn.MultiheadAttention is never called, so an adapter on it does nothing"
        )
        raise UserError(why, where=key, todo="Leave it out with exclude_modules")
    if isinstance(base, (nn.Linear, Conv1D)) or _backend(base) is not None:
        return NLoraLinear
    raise UserError(
        f"a {type(base).__name__} cannot be adapted",
        where=key,
        todo="Name linear layers, Conv1D, convolutions or embeddings in target_modules",
    )


def _backend(base: nn.Module) -> QuantizationBackend | None:
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
    plain.absmax, plain.dtype = state.absmax.T.reshape(-1).float(), torch.float32
    weight: Tensor = dequantize_4bit(data, plain)
    return weight


def _after_load(layer: NLoraLayer, _: Any) -> None:
    """Runs when a state dict was loaded into the layer: its slices of W follow the landmarks that came in."""
    layer.refresh_slices()
