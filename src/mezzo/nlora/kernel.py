"""The three products of a layer, written so that backward keeps r numbers a token and no copy of anything larger.

    project     u = A x
    tap         h = (y - b)[I], and y itself
    add_        y + scale B N u, in place where that is safe
    linear      all of them with a frozen linear layer, for one adapter: the common case, in one pass of backward

Each is an autograd function; the first three have plain operations of the same meaning beside them, for compilers,
torch.func and odd strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable


def traced() -> bool:
    """Returns whether a compiler or a transform of torch.func looks on, which wants plain operations."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def project(x: Float[Tensor, "... in"], A: Float[Tensor, "r in"]) -> Float[Tensor, "... r"]:
    """Returns A x in A's dtype (autocast's, where it is on). Keeps x as it is for backward: no cast copy."""
    if x.dtype == A.dtype or _autocast(x) is not None or traced():
        return F.linear(x if _autocast(x) is not None else x.to(A.dtype), A)
    u: Tensor = _Project.apply(x, A)
    return u


def tap(
    y: Float[Tensor, "... out"], rows: Int[Tensor, " r"], bias: Float[Tensor, " out"] | None
) -> tuple[Float[Tensor, "... out"], Float[Tensor, "... r"]]:
    """Returns y and the landmark outputs (y - bias)[rows]. In backward both gradients meet in one pass."""
    if traced() or not y.requires_grad:
        h = y.index_select(-1, rows)
        return y, h if bias is None else h - bias.index_select(0, rows)
    tapped: tuple[Tensor, Tensor] = _Tap.apply(y, rows, bias)
    return tapped


def add_(
    y: Float[Tensor, "... out"],
    u: Float[Tensor, "... r"],
    N: Float[Tensor, "r r"],
    B: Float[Tensor, "out r"],
    scale: float,
) -> Float[Tensor, "... out"]:
    """Returns y + scale B N u in y's dtype, written into y where y is contiguous. Keeps u, N and B for backward."""
    kind = _autocast(y) or B.dtype
    if traced() or not y.is_contiguous():
        v = F.linear(u.to(kind), N.to(kind) * scale)
        return y + F.linear(v, B.to(kind)).to(y.dtype)
    with nullcontext() if _autocast(y) is None else torch.autocast(y.device.type, enabled=False):
        added: Tensor = _Add.apply(y, u, N, B, scale, kind)
    return added


def _autocast(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _flat(x: Tensor, kind: torch.dtype) -> Tensor:
    return x.reshape(-1, x.shape[-1]).to(kind)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, A: Tensor) -> Tensor:
        ctx.save_for_backward(x, A)
        return F.linear(x.to(A.dtype), A)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, A = ctx.saved_tensors
        g_x = (g @ A).to(x.dtype) if ctx.needs_input_grad[0] else None
        g_A = _flat(g, A.dtype).T @ _flat(x, A.dtype) if ctx.needs_input_grad[1] else None
        return g_x, g_A


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, rows: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.mark_dirty(y)  # y goes on as itself, not as a view
        ctx.save_for_backward(rows)
        ctx.out = None if bias is None else bias.shape
        h = y.index_select(-1, rows)
        return y, h if bias is None else h - bias.index_select(0, rows).to(h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_y: Tensor, g_h: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        whole = g_y.index_add(-1, rows, g_h.to(g_y.dtype))
        g_bias = None
        if ctx.needs_input_grad[2]:
            g_bias = g_h.new_zeros(ctx.out).index_add_(0, rows, -_flat(g_h, g_h.dtype).sum(0))
        return whole, None, g_bias


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, u: Tensor, N: Tensor, B: Tensor, scale: float, kind: torch.dtype) -> Tensor:
        ctx.mark_dirty(y)
        ctx.save_for_backward(u, N, B)
        ctx.scale, ctx.kind = scale, kind
        flat = y.view(-1, y.shape[-1])
        v = _flat(u, kind) @ N.to(kind).T
        if y.dtype == kind:
            flat.addmm_(v, B.to(kind).T, alpha=scale)
        else:
            flat.add_(v @ B.to(kind).T, alpha=scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        u, N, B = ctx.saved_tensors
        kind, scale = ctx.kind, ctx.scale
        _, needs_u, needs_N, needs_B, _, _ = ctx.needs_input_grad
        g_u = g_N = g_B = None
        g_flat, u_flat, middle = _flat(g, kind), _flat(u, kind), N.to(kind)
        if needs_u or needs_N:
            g_v = (g_flat @ B.to(kind)).mul_(scale)
            g_u = (g_v @ middle).view(u.shape).to(u.dtype) if needs_u else None
            g_N = (g_v.T @ u_flat).to(N.dtype) if needs_N else None
        if needs_B:
            g_B = (g_flat.T @ (u_flat @ middle.T).mul_(scale)).to(B.dtype)
        return g, g_u, g_N, g_B, None, None


class Product(NamedTuple):
    """One term scale B N (A x), or with rows in place of A: scale B N h, h the landmark outputs."""

    scale: float
    N: Tensor
    B: Tensor
    A: Tensor | None = None
    rows: Tensor | None = None


def linear(
    x: Float[Tensor, "... in"],
    W: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None,
    products: Sequence[Product],
) -> Float[Tensor, "... out"]:
    """Returns W x + bias and the products added; W is frozen and all dtypes are one.

    Backward keeps x (by reference, where a product has an A) and r numbers a token for each product, and adds every
    part of x's gradient into the one that the base makes.
    """
    flat = [matrix for product in products for matrix in (product.N, product.B, product.A, product.rows)]
    y: Tensor = _Linear.apply(x, W, bias, [product.scale for product in products], *flat)
    return y


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor, bias: Tensor | None, scales: list[float], *flat: Any) -> Tensor:
        y = F.linear(x, W, bias)
        y_flat, terms = y.view(-1, y.shape[-1]), [flat[k : k + 4] for k in range(0, len(flat), 4)]
        inputs = []
        for _, _, A, rows in terms:
            if A is not None:
                inputs.append(x.reshape(-1, x.shape[-1]) @ A.T)
                continue
            h = y_flat.index_select(1, rows)
            inputs.append(h if bias is None else h.sub_(bias.index_select(0, rows)))
        for scale, u, (N, B, _, _) in zip(scales, inputs, terms, strict=True):
            y_flat.addmm_(u @ N.T, B.T, alpha=scale)
        needs_x = any(A is not None and A.requires_grad for _, _, A, _ in terms)
        ctx.save_for_backward(x if needs_x else None, W, *inputs, *flat)
        ctx.scales, ctx.shape = scales, x.shape
        # F.linear may give a view; autograd forbids writing into a view that a function returns (ReLU(inplace=True)).
        whole: Tensor = torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:
        x, W, *rest = ctx.saved_tensors
        count = len(ctx.scales)
        inputs, flat = rest[:count], rest[count:]
        needs_x, _, needs_bias, _, *needs = ctx.needs_input_grad
        g_flat = g.reshape(-1, g.shape[-1])
        g_x = g_flat @ W if needs_x else None
        g_bias = g_flat.sum(0) if needs_bias else None
        found: list[Tensor | None] = [None] * len(flat)
        for k, (scale, u) in enumerate(zip(ctx.scales, inputs, strict=True)):
            N, B, A, rows = flat[4 * k : 4 * k + 4]
            g_v = (g_flat @ B).mul_(scale)
            g_u = g_v @ N
            if needs[4 * k]:
                found[4 * k] = g_v.T @ u
            if needs[4 * k + 1]:
                found[4 * k + 1] = g_flat.T @ (u @ N.T).mul_(scale)
            if needs[4 * k + 2]:
                found[4 * k + 2] = g_u.T @ x.reshape(-1, x.shape[-1])
            if g_x is not None:
                g_x.addmm_(g_u, W.index_select(0, rows) if A is None else A)
        return None if g_x is None else g_x.view(ctx.shape), None, g_bias, None, *found
