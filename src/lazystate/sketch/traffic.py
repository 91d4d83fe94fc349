"""Bytes of state that a sketched head moves; pure functions.

`PaperBytes` follows SketchSSM's appendices D and E. `view_bytes` and `step_bytes` count this
package's layout, where the pivot map is stored in factors and nothing is stored for erases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lazystate.planner import Viewed
from lazystate.spec import LayerSpec

Map = Literal["pivot", "exact", "offline"]
MAPS = ("pivot", "exact", "offline")


@dataclass(frozen=True)
class PaperBytes:
    """One head with an FP32 state, and in BF16 its sketch, coefficient map and erase vectors.

    Attributes:
        key_dim: K. value_dim: V. window: W. erase: True for GDN and KDA.
    """

    key_dim: int
    value_dim: int
    window: int
    erase: bool

    @property
    def state(self) -> int:
        """D: bytes of the state."""
        return 4 * self.key_dim * self.value_dim

    @property
    def rank(self) -> int:
        """Bytes that one unit of rank adds to a step that does not fold."""
        return 2 * (self.value_dim + self.key_dim + self.erase * self.window)

    @property
    def dense(self) -> int:
        """Bytes of a BF16 copy of the state."""
        return 2 * self.key_dim * self.value_dim

    @property
    def largest_rank(self) -> int:
        """G*: the largest rank that reads no more than the copy."""
        return min(self.key_dim, self.dense // self.rank)

    def read(self, rank: float | None) -> float:
        """Bytes read a step, on average over a window; rank None for a dense head."""
        view = self.dense if rank is None else rank * self.rank
        return ((self.window - 1) * view + self.state) / self.window

    def reduction(self, ranks: Iterable[float | None]) -> float:
        """Traffic of conventional steps over that of heads with these ranks (Table 4, Eq. 47)."""
        moved = [self.read(rank) + self.state / self.window for rank in ranks]
        return len(moved) * 2 * self.state / sum(moved)


def view_bytes(
    key_dim: int,
    value_dim: int,
    rank: int,
    *,
    map: Map = "pivot",
    pivots: int = 4,
    element: int = 2,
) -> int:
    """Bytes of one head's sketch and coefficient map (docs/maths.md, Eq. 27).

    Args:
        key_dim: K. value_dim: V. rank: G, at least 1. pivots: P. element: bytes of a number.

    Returns:
        U, and of the pivot map e, F and B; of the exact map C; of the offline map nothing, as it is
        the same for all requests.
    """
    p = min(rank, pivots)
    factors = {"pivot": p * key_dim + rank * (1 + p), "exact": rank * key_dim, "offline": 0}
    return element * (rank * value_dim + factors[map])


def step_bytes(view: int, state: int, window: int) -> float:
    """State bytes a step, one token each: a fold reads and writes the state and writes the view.

    Args:
        view: bytes of the head's view. state: of its checkpoint. window: L, steps to a fold.
    """
    return ((window - 1) * view + 2 * state + view) / window


def largest_rank(key_dim: int, value_dim: int, dense: int, *, element: int = 2) -> int:
    """The largest rank whose pivot view needs no more than `dense` bytes, at most K; 0 for none."""
    fits = (
        rank
        for rank in range(key_dim, 0, -1)
        if view_bytes(key_dim, value_dim, rank, element=element) <= dense
    )
    return next(fits, 0)


def sketched(layer: LayerSpec, mean_rank: float) -> Viewed:
    """Sketches of a mean rank, stored as their own ranks are (docs/maths.md, Eq. 27).

    Between whole ranks the bytes are in proportion.

    Raises:
        ValueError: for a mean rank below 1 or above K.
    """
    if not 1 <= mean_rank <= layer.key_dim:
        raise ValueError(f"mean_rank must be 1 to {layer.key_dim}, got {mean_rank}")
    below = int(mean_rank)
    low, high = (view_bytes(layer.key_dim, layer.value_dim, rank) for rank in (below, below + 1))
    read = int(layer.heads * (low + (mean_rank - below) * (high - low)))
    return Viewed("sketch", read, read)
