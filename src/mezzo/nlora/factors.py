"""Low-rank factors with a middle matrix, and the algebra on them.

A change of a weight W (out x in) is held as `scale * B @ N @ A` with B: out x r, N: r x r, A: r x in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Factors:
    """The product `scale * B N A`, kept in factors.

    Source: arXiv 2502.14482, figure 2 (SLoRA's three matrices).
    """

    B: Float[Tensor, "out r"]
    N: Float[Tensor, "r r"]
    A: Float[Tensor, "r in"]
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """The number of columns of B."""
        return self.B.shape[1]

    def delta(self) -> Float[Tensor, "out in"]:
        """Returns the change of the weight, `scale * B N A`. Cost: O(out r (r + in)) time, O(out in) memory."""
        return self.scale * (self.B @ self.N @ self.A)

    def apply(self, x: Float[Tensor, "... in"]) -> Float[Tensor, "... out"]:
        """Returns what the change adds to the output for input x. Cost: O(r (in + r + out)) a token."""
        return self.scale * (x @ self.A.T @ self.N.T @ self.B.T)

    def minus(self, other: Factors) -> Factors:
        """Returns factors of the difference `self.delta() - other.delta()`, exactly, with the ranks added."""
        return combine([(1.0, self), (-1.0, other)])

    def fold(self) -> tuple[Float[Tensor, "out r"], Float[Tensor, "r in"]]:
        """Returns the plain LoRA pair (B N, A) with the same product, rank and scale. Cost: O(out r^2)."""
        return self.B @ self.N, self.A

    def truncate(self, rank: int) -> tuple[Factors, float]:
        """Returns the best factors of a smaller rank, and the relative error they make (Frobenius norm).

        An SVD of the small core between the QR factors of B and A^T.
        Cost: O((out + in) r^2 + r^3) time; the out x in product is never formed.
        """
        Q_b, R_b = torch.linalg.qr(self.B)
        Q_a, R_a = torch.linalg.qr(self.A.T)
        U, S, Vh = torch.linalg.svd(R_b @ self.N @ R_a.T)
        kept = Factors(Q_b @ U[:, :rank], torch.diag(S[:rank]), Vh[:rank] @ Q_a.T, self.scale)
        whole = float(S.norm())
        return kept, float(S[rank:].norm()) / whole if whole > 0 else 0.0


def combine(parts: Sequence[tuple[float, Factors]]) -> Factors:
    """Returns factors of the weighted sum of products, exactly: the ranks add up, the scale is 1.

    Parts that stand on the same B and A (as IntTune adapters of the same landmarks do) share their rank.

    Raises:
        ValueError: no parts.
    """
    if not parts:
        raise ValueError("a sum of products needs one or more")
    first = parts[0][1].B
    kept: list[Factors] = []
    for weight, part in parts:
        B, N, A = part.B.to(first), part.N.to(first) * (weight * part.scale), part.A.to(first)
        same = next((k for k, held in enumerate(kept) if torch.equal(held.B, B) and torch.equal(held.A, A)), None)
        if same is None:
            kept.append(Factors(B, N, A))
        else:
            kept[same] = Factors(B, kept[same].N + N, A)
    return Factors(
        B=torch.cat([part.B for part in kept], dim=1),
        N=torch.block_diag(*(part.N for part in kept)),
        A=torch.cat([part.A for part in kept], dim=0),
    )
