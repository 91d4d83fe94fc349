"""The rows of one model step: where each stands and which fold, decided once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from lazystate.ops.backend import Census
from lazystate.ops.pool import Cursors


@dataclass(frozen=True)
class Rows:
    """The active rows A of a model step over T tokens; R = window + max_tokens ring positions.

    Attributes:
        batch: B. index: int64 [A], their batch rows, or None where all batch rows are active.
        slots: int64 [A]. all_slots: whether these are all slots of the pool, in order.
        lengths: int64 [A], tokens of each row; None where all rows have T.
        seen: int64 [A], tokens committed before this step.
        filled: int64 [A], committed records h.
        folding: int64, indices into A of the rows that fold in this step.
        empty: bool [A], rows whose checkpoint is zero and is not read.
        any_empty: bool(empty.any()).
        writes: int64 [A], checkpoints written before.
        tokens: T, the longest row of the step.
        newer: int64 [A, window + 1], flat ring positions: of nothing, then of committed records,
            newest first, and of nothing where there is none. So the log-decays there sum to those
            after each record.
        recent: int64 [A, window], the same without the first.
        fresh: int64 [A * T], flat ring positions of the step's own records.
    """

    batch: int
    index: Tensor | None
    slots: Tensor
    all_slots: bool
    lengths: Tensor | None
    seen: Tensor
    filled: Tensor
    folding: Tensor
    empty: Tensor
    any_empty: bool
    writes: Tensor
    tokens: int
    newer: Tensor
    recent: Tensor
    fresh: Tensor
    _conv: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def conv_positions(self, past: int, inputs: int) -> tuple[Tensor, Tensor]:
        """Flat positions in a convolution ring: `past` committed inputs and T new ones of each row.

        Args:
            past: kernel size - 1. inputs: positions a slot has in that ring.

        Returns:
            (all of them [A, past + T], the new ones [A * T]).
        """
        if (past, inputs) not in self._conv:
            offsets = torch.arange(-past, self.tokens, device=self.slots.device)
            position = (self.seen.unsqueeze(1) + offsets) % inputs
            every = self.slots.unsqueeze(1) * inputs + position
            self._conv[past, inputs] = every, every[:, past:].flatten()
        return self._conv[past, inputs]


def standing(cursors: Cursors, slots: Tensor, window: int, records: int) -> Rows:
    """Rows that hold no new token: every slot as it stands, to be folded or read."""
    return begin(cursors, slots, None, 0, window, records)


def begin(
    cursors: Cursors, slots: Tensor, lengths: Tensor | None, tokens: int, window: int, records: int
) -> Rows:
    """Decide a model step: drop padded rows, find ring positions, mark rows that must fold.

    A row folds when its committed records and its new ones would pass its limit (design rule
    h + T > L), so that after any commit at most `window` records are committed.

    Args:
        slots: int64 [B], negative on padded rows. lengths: int64 [B] or None for `tokens` each.
        records: R, ring positions a slot has.
    """
    active = slots >= 0 if lengths is None else (slots >= 0) & (lengths > 0)
    index = None if bool(active.all()) else active.nonzero().squeeze(1)
    if index is not None:
        slots = slots[index]
        lengths = None if lengths is None else lengths[index]
    origin, filled, limit, empty, writes = (
        cursor.index_select(0, slots)
        for cursor in (cursors.origin, cursors.filled, cursors.limit, cursors.empty, cursors.writes)
    )
    new = tokens if lengths is None else lengths
    base = (slots * records).unsqueeze(1)
    seen = origin + filled
    offsets = torch.arange(max(window, tokens), device=slots.device)
    recent = base + (seen.unsqueeze(1) - 1 - offsets[:window]) % records
    nothing = cursors.origin.numel() * records
    recent = recent.masked_fill_(offsets[:window] >= filled.unsqueeze(1), nothing)
    fresh = base + (seen.unsqueeze(1) + offsets[:tokens]) % records
    return Rows(
        batch=active.numel(),
        index=index,
        slots=slots,
        all_slots=torch.equal(slots, torch.arange(cursors.origin.numel(), device=slots.device)),
        lengths=lengths,
        seen=seen,
        filled=filled,
        folding=(filled + new > limit).nonzero().squeeze(1),
        empty=empty,
        any_empty=bool(empty.any()),
        writes=writes,
        tokens=tokens,
        newer=F.pad(recent, (1, 0), value=nothing),
        recent=recent,
        fresh=fresh.flatten(),
    )


def commit(cursors: Cursors, rows: Rows, kept: Tensor | None, window: int) -> None:
    """See `Backend.commit`; on rows that folded, the origin moves past the folded records."""
    if kept is None:
        kept = torch.full_like(rows.slots, rows.tokens) if rows.lengths is None else rows.lengths
    elif rows.index is not None:
        kept = kept[rows.index]
    filled = rows.filled + kept
    if rows.folding.numel():
        folded = rows.slots[rows.folding]
        cursors.origin[folded] += rows.filled[rows.folding]
        cursors.limit[folded] = window
        cursors.empty[folded] = False
        cursors.writes[folded] += 1
        filled[rows.folding] = kept[rows.folding]
    cursors.filled[rows.slots] = filled


def census(rows: Rows) -> Census:
    """See `Backend.census`."""
    due = torch.zeros_like(rows.empty)
    due[rows.folding] = True
    new = rows.slots.numel() * rows.tokens if rows.lengths is None else int(rows.lengths.sum())
    return Census(
        views=int((~rows.empty & ~due).sum()),
        checkpoints=int((~rows.empty & due).sum()),
        held=int(rows.filled.sum()),
        folded=int(rows.filled[due].sum()),
        folding=int(due.sum()),
        new=new,
    )


def gather_rows(rows: Rows, tensor: Tensor) -> Tensor:
    """The active rows of [B, T, ...], with zeros behind a row's length (which may hold NaN)."""
    return _trim(rows, tensor if rows.index is None else tensor[rows.index])


def scatter_rows(rows: Rows, out: Tensor) -> Tensor:
    """[B, T, ...] from the active rows: zeros on padded rows and behind a row's length."""
    out = _trim(rows, out)
    if rows.index is None:
        return out
    return out.new_zeros(rows.batch, *out.shape[1:]).index_copy_(0, rows.index, out)


def _trim(rows: Rows, tensor: Tensor) -> Tensor:
    if rows.lengths is None:
        return tensor
    behind = torch.arange(tensor.shape[1], device=tensor.device) >= rows.lengths.unsqueeze(1)
    return tensor.masked_fill(behind.view(*behind.shape, *[1] * (tensor.dim() - 2)), 0)
