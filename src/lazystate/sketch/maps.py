"""The sketch of a state and the three maps from a vector to its coefficients (docs/maths.md, 7).

Everything here is batched over leading dimensions. A head of a smaller rank than the others is
padded with zero columns of Omega: they give zero columns of U and zero rows of every map.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazystate.sketch.prefix import orthonormal

PIVOTS = 4
RIDGE = 0.003


def padded(omega: Tensor, ranks: Tensor) -> Tensor:
    """Omega with zeros behind each head's rank.

    Args:
        omega: [..., K, G], leading columns first. ranks: int [...], 0 to G.

    Raises:
        ValueError: for a rank outside 0..G.
    """
    largest = omega.shape[-1]
    if ranks.numel() and (int(ranks.min()) < 0 or int(ranks.max()) > largest):
        raise ValueError(
            f"ranks must be 0 to {largest}, the columns of the basis, "
            f"got {int(ranks.min())} to {int(ranks.max())}"
        )
    columns = torch.arange(largest, device=omega.device)
    return omega * (columns < ranks.to(omega.device).unsqueeze(-1)).unsqueeze(-2)


def sketch(state: Tensor, omega: Tensor) -> Tensor:
    """U = S Omega: what the state [..., V, K] returns for the basis [..., K, G] (Eq. 17)."""
    return state @ omega


@dataclass(frozen=True)
class PivotMap:
    """The coefficient map C = Diag(e) Omega^T + F B^T, in factors (Eq. 22).

    Attributes:
        keep: e [..., G], in [0, 1). mix: F [..., G, p]. keys: B [..., K, p].
    """

    keep: Tensor
    mix: Tensor
    keys: Tensor

    def coefficients(self, projected: Tensor, vectors: Tensor) -> Tensor:
        """C x from Omega^T x [..., G, n] and x [..., K, n] -> [..., G, n]."""
        return self.keep.unsqueeze(-1) * projected + self.mix @ (self.keys.mT @ vectors)

    def dense(self, omega: Tensor) -> Tensor:
        """C itself, [..., G, K]."""
        return self.keep.unsqueeze(-1) * omega.mT + self.mix @ self.keys.mT


def pivot_map(
    state: Tensor, omega: Tensor, *, pivots: int = PIVOTS, ridge: float = RIDGE
) -> PivotMap:
    """The coefficient map from P pivots and a diagonal (SketchSSM A.2.2; Eq. 19-22).

    SketchSSM states it in a rotated frame and with one p x p solve for every vector. Here the state
    stays as it is, and the solve is part of the factors.

    Args:
        state: [..., V, K]. omega: [..., K, G], orthonormal columns or zeros.
        pivots: P. ridge: lambda, relative to the state's mean energy per key channel.

    Raises:
        ValueError: for fewer than one pivot, or a ridge that is not positive.
    """
    if pivots < 1 or ridge <= 0:
        raise ValueError(
            f"pivots must be at least 1 and ridge positive, got {pivots} and {ridge}: "
            "the pivots' own diagonal is zero, so nothing but the ridge keeps it invertible"
        )
    u = sketch(state, omega)
    unit = _unit(state)
    ortho = orthonormal(u[..., :pivots])
    keys = state.mT @ ortho / unit  # K x p
    low = u.mT @ ortho / unit  # L, G x p
    rest = (u.square().sum(-2) / unit.square().squeeze(-1) - low.square().sum(-1)).clamp_min(0)
    diagonal = (rest + ridge).unsqueeze(-1)
    keep = rest.unsqueeze(-1) / diagonal
    gram = torch.eye(low.shape[-1], dtype=low.dtype, device=low.device) + low.mT @ (low / diagonal)
    mix = torch.linalg.solve(gram, low / diagonal, left=False)
    return PivotMap(keep.squeeze(-1), mix, keys - omega @ (keep * low))


def exact_map(state: Tensor, omega: Tensor, *, ridge: float = 0.0) -> Tensor:
    """The least-squares map: U C x is the closest to S x that the sketch can say (Eq. 18).

    Args:
        state: [..., V, K]. omega: [..., K, G], orthonormal columns or zeros.
        ridge: 0 for the minimum-norm solution, or lambda as in `pivot_map`.

    Returns:
        C [..., G, K].
    """
    u = sketch(state, omega)
    if ridge == 0:
        return torch.linalg.pinv(u) @ state
    u, scaled = u / _unit(state), state / _unit(state)
    gram = u.mT @ u + ridge * torch.eye(u.shape[-1], dtype=u.dtype, device=u.device)
    return torch.linalg.solve(gram, u.mT @ scaled)


def offline_map(metric: Tensor, omega: Tensor) -> Tensor:
    """The map that would be best were every state's S^T S the calibrated mean (SketchSSM Eq. 10).

    Args:
        metric: E0 [..., K, K]. omega: [..., K, G].

    Returns:
        C [..., G, K], the same for every request.
    """
    right = omega.mT @ metric
    return torch.linalg.pinv(right @ omega, hermitian=True) @ right


def _unit(state: Tensor) -> Tensor:
    """sqrt(mu) [..., 1, 1], mu = |S|_F^2 / K; 1 for a zero state."""
    energy = state.square().sum((-2, -1), keepdim=True) / state.shape[-1]
    return energy.where(energy > 0, 1).sqrt()
