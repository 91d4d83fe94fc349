"""What a backend does to pools and cursors: the functions a model step is made of."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from torch import Tensor

from lazystate.gates import Prologue
from lazystate.ops.pool import Cursors, Pool


class Census(NamedTuple):
    """What one layer's step touches, counted on the host.

    Attributes:
        views: rows whose view is read. checkpoints: folding rows whose checkpoint is read.
        held: committed records read. folded: those of them that are folded.
        folding: rows that fold. new: records appended.
    """

    views: int
    checkpoints: int
    held: int
    folded: int
    folding: int
    new: int


class Backend(Protocol):
    """The interface of `lazystate.ops.torch` and `lazystate.ops.triton`.

    `rows` is the backend's own description of a model step, made by `begin` and shared by all
    layers; B are batch rows, padded ones included.
    """

    def begin(
        self,
        cursors: Cursors,
        slots: Tensor,
        lengths: Tensor | None,
        tokens: int,
        window: int,
        records: int,
    ) -> Any:
        """Decide a model step: where each row appends and which rows fold (h + length > limit).

        slots: int64 [B], negative on padded rows. lengths: int64 [B], or None for `tokens` each.
        records: R, ring positions a slot has.
        """

    def step(
        self,
        pool: Pool,
        rows: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None,
        skip: Tensor | None,
        prologue: Prologue | None,
    ) -> Tensor:
        """Outputs [B, T, HV, V], activation dtype, of T new tokens, whose records are appended;
        rows that are due are folded (Eq. 8-14). Arguments as in `StateCache.step`.
        """
        ...

    def settle(self, pool: Pool, rows: Any) -> None:
        """Fold the rows that are due as `step` does (Eq. 8, 14); nothing is read or appended."""
        ...

    def convolve(
        self, pool: Pool, rows: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
    ) -> Tensor:
        """The short convolution [B, T, C] of new inputs, which join its ring (Eq. 15)."""
        ...

    def commit(self, cursors: Cursors, rows: Any, kept: Tensor | None, window: int) -> None:
        """Advance the cursors by `kept` int64 [B], or by every token if None."""

    def census(self, rows: Any) -> Census:
        """Count what a step of these rows touches; reads cursors back to the host."""
        ...
