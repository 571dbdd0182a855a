"""A weight's own rows and columns as factors: landmarks, slices and their scale. No SVD, no factorisation.

Every scale is a power of two, so scaling a slice, undoing it and folding it are exact in floating point.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo.nlora.factors import Factors

TAU = 0.1
"""Size of the starting product in Mezzo's form, as a share of the weight: norm(s B N A) / norm(W)."""


LARGEST = 2.0**40
"""Largest entry size (and 1 / smallest) of a weight that rows and columns of it can start an adapter of."""

SAMPLED_ROWS = 512
"""Rows that a norm is measured on, at most, where only its size matters."""


@dataclass(frozen=True)
class Start:
    """Where an adapter of W begins: its landmarks, its factors, and the middle of one that trains N alone."""

    rows: Int[Tensor, " r"]
    columns: Int[Tensor, " r"]
    factors: Factors
    raw: Factors
    """C, W[I, J] and R as they are."""
    middle: Float[Tensor, "r r"]
    shift: int = 0
    """k, with B N A = 2^k C W[I, J] R."""
    gain: int = 0
    """c of the trained middle, see `middle_gain`."""
    change: float = 0.0
    """norm(s B N A) / norm(W) where nothing is subtracted."""
    empty: bool = False
    """Whether the weight is zero, as far as its norm tells."""


def start_of(W: Float[Tensor, "out in"], r: int, scale: float, *, offset: bool, only_middle: bool = False) -> Start:
    """Returns the start of Mezzo's form (offset: landmarks of the largest norm, scaled slices) or of the paper's.

    With `only_middle`, for an adapter that trains N alone, the factors are the raw slices. Of a weight that holds no
    numbers (meta) it has the shapes alone.

    Raises:
        ValueError: entries that are not finite, or so large or small that their products leave float32's range.
    """
    rows, columns = (index.to(W.device) for index in leading_landmarks(r))
    norms = torch.zeros(1) if W.is_meta else row_norms(W)
    if offset and not W.is_meta:
        rows, columns = largest_landmarks(W, norms, r)
    raw, norm = slices(W, rows, columns, scale), float(norms.norm())
    entry = norm / math.sqrt(W.numel())
    if norm != 0 and not 1 / LARGEST < entry < LARGEST:
        raise ValueError(
            f"the weight's entries are of size {entry:.3g}: rows and columns of it cannot start an adapter"
        )
    if W.is_meta:
        return Start(rows, columns, raw, raw, torch.zeros_like(raw.N))
    if not offset:
        change = scale * product_norm(raw.B, raw.N, raw.A) / norm if norm else 0.0
        return Start(rows, columns, raw, raw, raw.N, change=change, empty=not norm)
    if only_middle:
        return Start(rows, columns, raw, raw, torch.zeros_like(raw.N), gain=middle_gain(raw, norm), empty=not norm)
    factors, shift = balanced(raw, norm)
    return Start(rows, columns, factors, raw, raw.N, shift, empty=not norm)


def leading_landmarks(r: int) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
    """Returns rows 0..r-1 and columns 0..r-1. Source: arXiv 2502.14482, figure 3 (the paper's landmarks)."""
    return torch.arange(r, dtype=torch.int32), torch.arange(r, dtype=torch.int32)


def largest_landmarks(
    W: Float[Tensor, "out in"], norms: Float[Tensor, " out"], r: int
) -> tuple[Int[Tensor, " r"], Int[Tensor, " r"]]:
    """Returns the r rows and r columns of the largest Euclidean norm, each in rising order; `norms` are of the rows.

    A column is measured on at most SAMPLED_ROWS rows, evenly spaced: reading down the columns is the dear part.
    """
    rows = norms.topk(r).indices.sort().values
    step = -(-W.shape[0] // SAMPLED_ROWS)
    columns = column_norms(W[::step]).topk(r).indices.sort().values
    return rows.int(), columns.int()


def row_norms(W: Float[Tensor, "out in"]) -> Float[Tensor, " out"]:
    """Returns the Euclidean norm of each row, float32."""
    if W.stride(1) > W.stride(0):
        return column_norms(W.T)
    norms: Tensor = torch.linalg.vector_norm(W.float() if W.dtype == torch.float64 else W, dim=1, dtype=torch.float32)
    return norms


def column_norms(W: Float[Tensor, "out in"], block: int = 256) -> Float[Tensor, " in"]:
    """Returns the Euclidean norm of each column, float32, read in blocks of rows. Memory: O(block in)."""
    if W.stride(0) < W.stride(1):
        return row_norms(W.T)
    total = torch.zeros(W.shape[1], device=W.device)
    for part in W.split(block):
        total += part.float().square().sum(0)
    return total.sqrt()


def slices(
    W: Float[Tensor, "out in"], rows: Int[Tensor, " r"], columns: Int[Tensor, " r"], scale: float = 1.0
) -> Factors:
    """Returns B = W[:, J], N = W[I, J], A = W[I, :] as copies in W's dtype. Cost: O(r (out + in)) time and memory.

    Source: arXiv 2502.14482, figure 3; TracyGuo2001/NLoRA, layer.py, nlora_init (leading rows and columns).
    """
    A = W.index_select(0, rows.long())
    return Factors(B=W.index_select(1, columns.long()), N=A.index_select(1, columns.long()), A=A, scale=scale)


def balanced(raw: Factors, weight_norm: float) -> tuple[Factors, int]:
    """Returns the slices scaled for training, and k with B N A = 2^k C W[I, J] R for the raw slices C, R.

    A and N get the entry size of the usual random start (Kaiming-uniform, a = sqrt 5: variance 1 / (3 fan_in)), B the
    size that makes norm(s B N A) about TAU norm(W). Each scale is a power of two, so the result is exact.
    Differs: the paper takes the raw slices, whose product grows with the cube of the weight's size.
    """
    r, fan_in = raw.A.shape
    a = exponent(1 / math.sqrt(3 * fan_in), size(raw.A))
    n = exponent(1 / math.sqrt(3 * r), size(raw.N))
    A, N = raw.A * 2.0**a, raw.N * 2.0**n
    b = exponent(TAU * weight_norm, raw.scale * sampled_norm(raw.B, N, A))
    return Factors(raw.B * 2.0**b, N, A, raw.scale), a + n + b


def middle_gain(raw: Factors, weight_norm: float) -> int:
    """Returns c, so that a middle of unit-sized entries times 2^c moves the weight by about its own norm.

    The trained middle is kept divided by 2^c, so that one learning rate serves layers of any size; the file holds the
    product.
    """
    return exponent(weight_norm, raw.scale * float(raw.B.float().norm()) * float(raw.A.float().norm()))


def size(x: Float[Tensor, ...]) -> float:
    """Returns the root mean square of the entries."""
    return float(x.float().norm()) / math.sqrt(x.numel())


def product_norm(B: Float[Tensor, "out r"], N: Float[Tensor, "r r"], A: Float[Tensor, "r in"]) -> float:
    """Returns the Frobenius norm of B N A without forming it, from the r x r Gram matrices. Cost: O(r^2 (out + in))."""
    B, N, A = B.float(), N.double(), A.float()
    square = torch.trace((N.T @ (B.T @ B).double() @ N) @ (A @ A.T).double())
    return math.sqrt(max(float(square), 0.0))


def sampled_norm(B: Float[Tensor, "out r"], N: Float[Tensor, "r r"], A: Float[Tensor, "r in"]) -> float:
    """Returns `product_norm` measured on at most SAMPLED_ROWS rows of B and columns of A, evenly spaced."""
    rows, columns = (-(-count // SAMPLED_ROWS) for count in (B.shape[0], A.shape[1]))
    few, short = B[::rows], A[:, ::columns]
    share = few.shape[0] * short.shape[1] / (B.shape[0] * A.shape[1])
    return product_norm(few, N, short) / math.sqrt(share)


def exponent(wanted: float, found: float) -> int:
    """Returns the e with 2^e nearest to wanted / found in ratio; 0 where either is zero or not finite."""
    if not (0 < wanted < math.inf and 0 < found < math.inf):
        return 0
    return max(-60, min(60, round(math.log2(wanted / found))))
