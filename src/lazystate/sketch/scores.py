"""What a smaller rank costs a head: paired scores and residuals of all ranks at once (Eq. 25)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazystate.sketch.prefix import orthonormal


def prefix_products(
    state: Tensor, omega: Tensor, queries: Tensor, gradients: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """What the best reads of rank 0 to G miss, and what the loss makes of it.

    Args:
        state: [B, HV, V, K], before the window. omega: [HV, K, G].
        queries: [B, T, HV, K], effective. gradients: [B, T, HV, V], of the loss by the state's
            part of each output; None if not known.

    Returns:
        (|delta(G)|^2, g^T delta(G)), FP64 [B, T, HV, G + 1] each, the second None without
        gradients. Ranks beyond what the state holds miss nothing.
    """
    state, omega = state.double(), omega.double()
    out = torch.einsum("bhvk,bthk->bhtv", state, queries.double())
    ortho = orthonormal(state @ omega)  # [B, HV, V, G]
    inside = out @ ortho  # [B, HV, T, G]
    outside = out - inside @ ortho.mT
    missed = _behind(inside.square(), outside.square().sum(-1, keepdim=True))
    if gradients is None:
        return missed.transpose(1, 2), None
    slope = gradients.double().transpose(1, 2)
    paired = _behind(inside * (slope @ ortho), (slope * outside).sum(-1, keepdim=True))
    return missed.transpose(1, 2), paired.transpose(1, 2)


def _behind(terms: Tensor, rest: Tensor) -> Tensor:
    """The rest plus the terms behind each rank: [..., G] and [..., 1] -> [..., G + 1].

    Eq. 48 of SketchSSM takes the terms up to a rank from the whole, which cancels.
    """
    return torch.cat([rest, terms.flip(-1)], -1).cumsum(-1).flip(-1)


@dataclass
class Scores:
    """Sums over calibration text for the heads of one layer, for ranks 0 to G.

    Attributes:
        paired: FP64 [HV, G + 1], sum of (g^T delta(G))^2. missed: FP64 [HV, G + 1], of
            |delta(G)|^2. slopes: FP64 [HV], of |g|^2. tokens: int64 [], how many.
    """

    paired: Tensor
    missed: Tensor
    slopes: Tensor
    tokens: Tensor

    @classmethod
    def empty(cls, heads: int, rank: int, device: torch.device | str | None = None) -> Scores:
        """Nothing seen yet."""
        sums = torch.zeros(2, heads, rank + 1, dtype=torch.float64, device=device)
        slopes = torch.zeros(heads, dtype=torch.float64, device=device)
        return cls(sums[0], sums[1], slopes, torch.zeros((), dtype=torch.int64, device=device))

    def add(self, state: Tensor, omega: Tensor, queries: Tensor, gradients: Tensor) -> None:
        """One window of some requests; arguments as of `prefix_products`.

        Raises:
            ValueError: for numbers that are not finite.
        """
        missed, paired = prefix_products(state, omega, queries, gradients)
        assert paired is not None
        if not bool(missed.isfinite().all() and paired.isfinite().all()):
            raise ValueError("states, queries and gradients must be finite")
        self.paired += paired.square().sum((0, 1))
        self.missed += missed.sum((0, 1))
        self.slopes += gradients.double().square().sum((0, 1, 3))
        self.tokens += missed.shape[0] * missed.shape[1]

    def merge(self, other: Scores) -> None:
        """Add what another process has seen.

        Raises:
            ValueError: for another number of heads or ranks.
        """
        if self.paired.shape != other.paired.shape:
            raise ValueError(
                f"scores of {list(other.paired.shape)} do not merge into {list(self.paired.shape)}"
            )
        for name, tensor in self.tensors().items():
            tensor += other.tensors()[name].to(tensor.device)

    def tensors(self) -> dict[str, Tensor]:
        """The four sums by name: to save, or to add up over processes in place."""
        return {
            "paired": self.paired,
            "missed": self.missed,
            "slopes": self.slopes,
            "tokens": self.tokens,
        }
