"""What calibration keeps of all states and queries, and the basis that follows (Eq. 23-25).

The paper averages z z^T over z = E0^(1/2) q~, which needs E0 first. It is linear in q~ q~^T, so one
pass keeps two K x K sums a head, however long the text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lazystate.ops.torch.decay import segment_sums
from lazystate.ops.torch.step import per_head
from lazystate.sketch.prefix import completed, orthonormal


def effective_queries(
    q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor | None, *, erase: bool
) -> Tensor:
    """Queries that read the state before the window: q~_t = M_1^T ... M_t^T q_t (Eq. 23).

    Args:
        q, k: [B, T, H, K], the window's tokens. log_decay: [B, T, HV] or [B, T, HV, K].
        beta: [B, T, HV], or None for 1; read with erase only.

    Returns:
        [B, T, HV, K].
    """
    group = log_decay.shape[2] // q.shape[2]
    queries, keys = (per_head(x, group, 2).transpose(1, 2) for x in (q, k))  # [B, HV, T, K]
    if log_decay.dim() == 3:
        log_decay = log_decay.unsqueeze(-1)
    start = log_decay.cumsum(1).exp().transpose(1, 2)  # [B, HV, T, 1 or K]
    queries_now = queries * start
    if not erase:
        return queries_now.transpose(1, 2)
    between = segment_sums(log_decay).exp().permute(0, 3, 1, 2, 4)  # [B, HV, T (j), T (s), .]
    decayed = keys.unsqueeze(3) * between
    seen = (decayed * queries.unsqueeze(2)).sum(-1).triu()
    erased = (decayed * keys.unsqueeze(2)).sum(-1).triu(1)
    if beta is None:
        beta = torch.ones_like(log_decay[..., 0])
    strength = beta.transpose(1, 2).unsqueeze(2)  # [B, HV, 1, T]
    right = (keys * start).mT * strength
    factors = torch.linalg.solve_triangular(
        erased * strength, right, upper=True, left=False, unitriangular=True
    )
    return (queries_now.mT - factors @ seen).permute(0, 3, 1, 2)


@dataclass
class Statistics:
    """Sums over calibration text for the heads of one layer.

    Attributes:
        states: FP64 [HV, K, K], sum of S^T S over window-boundary states S [V, K].
        queries: FP64 [HV, K, K], sum of q~ q~^T over effective queries.
        windows, tokens: int64 [], how many of each.
    """

    states: Tensor
    queries: Tensor
    windows: Tensor
    tokens: Tensor

    @classmethod
    def empty(
        cls, heads: int, key_dim: int, device: torch.device | str | None = None
    ) -> Statistics:
        """Nothing seen yet."""
        sums = torch.zeros(2, heads, key_dim, key_dim, dtype=torch.float64, device=device)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        return cls(sums[0], sums[1], counts[0], counts[1])

    def add(self, state: Tensor, queries: Tensor) -> None:
        """One window of some requests.

        Args:
            state: [B, HV, V, K], before the window. queries: [B, T, HV, K], its effective ones.

        Raises:
            ValueError: for shapes that do not fit, or numbers that are not finite: one such window
                would spoil all of the calibration.
        """
        heads, key_dim = self.states.shape[:2]
        fits = state.dim() == queries.dim() == 4 and len(state) == len(queries)
        if not fits or (state.shape[1], state.shape[3]) != (heads, key_dim):
            raise ValueError(
                f"state must be [B, {heads}, V, {key_dim}] and queries [B, T, {heads}, {key_dim}], "
                f"got {list(state.shape)} and {list(queries.shape)}"
            )
        state = state.double().transpose(0, 1).flatten(1, 2)  # [HV, B V, K]
        flat = queries.double().flatten(0, 1).transpose(0, 1)  # [HV, B T, K]
        new = state.mT @ state, flat.mT @ flat
        if not all(bool(x.isfinite().all()) for x in new):
            raise ValueError("states and queries must be finite")
        self.states += new[0]
        self.queries += new[1]
        self.windows += len(queries)
        self.tokens += flat.shape[1]

    def merge(self, other: Statistics) -> None:
        """Add what another process has seen.

        Raises:
            ValueError: for another number of heads or channels.
        """
        if self.states.shape != other.states.shape:
            raise ValueError(
                f"statistics of {list(other.states.shape)} do not merge into "
                f"{list(self.states.shape)}"
            )
        for name, tensor in self.tensors().items():
            tensor += other.tensors()[name].to(tensor.device)

    def tensors(self) -> dict[str, Tensor]:
        """The four sums by name: to save, or to add up over processes in place."""
        return {
            "states": self.states,
            "queries": self.queries,
            "windows": self.windows,
            "tokens": self.tokens,
        }

    def grouped(self, groups: int) -> Statistics:
        """Statistics for one basis for all value heads of a group, each head counting alike.

        Raises:
            ValueError: if groups does not divide the heads.
        """
        heads = len(self.states)
        if groups < 1 or heads % groups:
            raise ValueError(f"groups must divide the {heads} heads, got {groups}")
        sums = torch.stack([self.states, self.queries]).unflatten(1, (groups, -1)).mean(2)
        return Statistics(sums[0], sums[1], self.windows, self.tokens)

    @property
    def metric(self) -> Tensor:
        """E0 [HV, K, K], the mean of S^T S.

        Raises:
            ValueError: if nothing was added.
        """
        if self.windows == 0:
            raise ValueError("no windows were added: there is nothing to calibrate from")
        return self.states / self.windows

    def basis(self, rank: int, *, ridge: float = 0.0) -> Basis:
        """The basis of Eq. 24, leading columns first.

        Args:
            rank: G, columns to keep. ridge: added to E0 in shares of its mean eigenvalue. The
                paper has none; the calibration that its authors publish has 0.1.

        Raises:
            ValueError: for a rank outside 1..K, a negative ridge, or if nothing was added.
        """
        key_dim = self.states.shape[-1]
        if not 1 <= rank <= key_dim or ridge < 0:
            raise ValueError(
                f"rank must be 1 to {key_dim} and ridge not negative, got {rank} and {ridge}"
            )
        metric = self.metric
        mean = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        unit = torch.eye(key_dim, dtype=metric.dtype, device=metric.device)
        values, vectors = torch.linalg.eigh(metric + ridge * mean * unit)
        support = values > key_dim * torch.finfo(values.dtype).eps * values[..., -1:]
        root = values.where(support, 0).sqrt().unsqueeze(-2)
        inverse = torch.where(support.unsqueeze(-2), 1 / root, 0)
        # In E0's eigenvectors E0^(1/2) is a diagonal.
        inner = (vectors.mT @ (self.queries / self.tokens) @ vectors) * root * root.mT
        energy, principal = torch.linalg.eigh(inner)
        energy, principal = energy.flip(-1).clamp_min(0), principal.flip(-1)
        known = energy > key_dim * torch.finfo(values.dtype).eps * energy[..., :1]
        columns = vectors @ (inverse.mT * principal) * known.unsqueeze(-2)
        omega = orthonormal(columns[..., :rank])
        if bool((omega.abs().amax(-2) == 0).any()):
            omega = completed(omega)[..., :rank]
        return Basis(_signed(omega), energy)


@dataclass(frozen=True)
class Basis:
    """Omega and what it keeps.

    Attributes:
        omega: FP64 [HV, K, G], orthonormal; a smaller rank is a prefix.
        energy: FP64 [HV, K], descending: the mean energy of state-weighted queries in each
            direction; a basis of G columns loses the sum of those behind G.
    """

    omega: Tensor
    energy: Tensor


def _signed(columns: Tensor) -> Tensor:
    """Columns whose largest entry is positive: the same whatever solver found them."""
    largest = columns.gather(-2, columns.abs().argmax(-2, keepdim=True))
    return columns * torch.where(largest < 0, -1.0, 1.0)
