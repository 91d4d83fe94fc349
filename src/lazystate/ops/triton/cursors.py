"""Cursor kernels: one launch before a model step and one after it, shared by all layers.

Nothing is read back to the host, so one captured graph serves every mix of folding and other rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazystate.ops.backend import Census
from lazystate.ops.pool import Cursors


@dataclass(frozen=True)
class Rows:
    """One model step on the device.

    Attributes:
        meta: int64 [B, 8], a row's slot (-1 if padded), committed records h, tokens seen, length,
            1 if it folds, 1 if its checkpoint is zero and is not read, ring position of the next
            record (so that the kernels need no remainder), and checkpoints written before.
        order: int32 [1 + B], how many rows fold, then all batch rows, those that fold first, as
            they take longest.
        tokens: T.
        starts: int32 [B], first token of each row where the inputs of all rows lie behind one
            another, [1, tokens, ...]; None where they are [B, T, ...].
    """

    meta: Tensor
    order: Tensor
    tokens: int
    starts: Tensor | None = None


@triton.jit
def begin_kernel(
    slots,
    lengths,
    origin,
    filled,
    limit,
    empty,
    writes,
    meta,
    order,
    batch,
    records,
    T: tl.constexpr,
    RAGGED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look up every row's cursors and decide which rows fold (h + length > limit)."""
    row = tl.arange(0, BLOCK)
    inside = row < batch
    slot = tl.load(slots + row, mask=inside, other=-1)
    if RAGGED:
        length = tl.load(lengths + row, mask=inside, other=0)
    else:
        length = tl.full([BLOCK], T, tl.int64)
    active = (slot >= 0) & (length > 0)
    held = tl.load(filled + slot, mask=active, other=0)
    seen = held + tl.load(origin + slot, mask=active, other=0)
    due = active & (held + length > tl.load(limit + slot, mask=active, other=0))
    zero = tl.load(empty + slot, mask=active, other=0)
    at = meta + row * 8
    tl.store(at, tl.where(active, slot, -1), mask=inside)
    tl.store(at + 1, held, mask=inside)
    tl.store(at + 2, seen, mask=inside)
    tl.store(at + 3, length, mask=inside)
    tl.store(at + 4, due.to(tl.int64), mask=inside)
    tl.store(at + 5, zero.to(tl.int64), mask=inside)
    tl.store(at + 6, seen % records, mask=inside)
    tl.store(at + 7, tl.load(writes + slot, mask=active, other=0), mask=inside)
    ahead = tl.cumsum(due.to(tl.int32), 0)
    place = tl.where(due, ahead - 1, tl.sum(due.to(tl.int32), 0) + row - ahead)
    tl.store(order + 1 + place, row, mask=inside)
    tl.store(order, tl.sum(due.to(tl.int32), 0))


@triton.jit
def commit_kernel(
    meta,
    kept,
    origin,
    filled,
    limit,
    empty,
    writes,
    batch,
    window,
    ALL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Advance the cursors by the kept tokens; folded records leave the ring."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = meta + row * 8
    slot = tl.load(at, mask=row < batch, other=-1)
    active = slot >= 0
    held = tl.load(at + 1, mask=active, other=0)
    seen = tl.load(at + 2, mask=active, other=0)
    due = active & (tl.load(at + 4, mask=active, other=0) != 0)
    if ALL:
        count = tl.load(at + 3, mask=active, other=0)
    else:
        count = tl.load(kept + row, mask=active, other=0)
    tl.store(filled + slot, tl.where(due, count, held + count), mask=active)
    tl.store(origin + slot, seen, mask=due)
    tl.store(limit + slot, tl.full([BLOCK], window, tl.int64), mask=due)
    tl.store(empty + slot, tl.zeros([BLOCK], tl.int8), mask=due)
    tl.store(writes + slot, 1 + tl.load(at + 7, mask=due, other=0), mask=due)


def room(batch: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Uninitialised `Rows.meta` and `Rows.order` of a batch."""
    meta = torch.empty(batch, 8, dtype=torch.int64, device=device)
    return meta, torch.empty(batch + 1, dtype=torch.int32, device=device)


def begin(
    cursors: Cursors,
    slots: Tensor,
    lengths: Tensor | None,
    tokens: int,
    window: int,
    records: int,
    into: tuple[Tensor, Tensor] | None = None,
) -> Rows:
    """See `Backend.begin`. into: `room` for at least the batch, where addresses must not change."""
    batch = slots.numel()
    meta, order = room(batch, slots.device) if into is None else into
    meta, order = meta[:batch], order[: batch + 1]
    begin_kernel[(1,)](
        slots,
        slots if lengths is None else lengths,
        *_pointers(cursors),
        meta,
        order,
        batch,
        records,
        T=tokens,
        RAGGED=lengths is not None,
        BLOCK=triton.next_power_of_2(batch),
        num_warps=4,
    )
    return Rows(meta, order, tokens)


def commit(cursors: Cursors, rows: Rows, kept: Tensor | None, window: int) -> None:
    """See `Backend.commit`."""
    batch = rows.meta.shape[0]
    commit_kernel[(triton.cdiv(batch, 128),)](
        rows.meta,
        rows.meta if kept is None else kept,
        *_pointers(cursors),
        batch,
        window,
        ALL=kept is None,
        BLOCK=128,
        num_warps=4,
    )


def census(rows: Rows) -> Census:
    """See `Backend.census`."""
    meta = rows.meta.cpu()
    _, held, _, length, due, empty, *_ = meta[meta[:, 0] >= 0].unbind(1)
    return Census(
        views=int(((due == 0) & (empty == 0)).sum()),
        checkpoints=int(((due != 0) & (empty == 0)).sum()),
        held=int(held.sum()),
        folded=int(held[due != 0].sum()),
        folding=int(due.sum()),
        new=int(length.sum()),
    )


def _pointers(cursors: Cursors) -> tuple[Tensor, ...]:
    empty = cursors.empty.view(torch.int8)
    return cursors.origin, cursors.filled, cursors.limit, empty, cursors.writes
