"""Cursors by position: how long a sequence is says what of a step was kept.

A page says at which position its checkpoint is, and all records lie at their positions, those of
rejected drafts behind what the next step says is the sequence. So nothing is committed, and a page
that is copied, or read again at an earlier position behind its checkpoint, is right as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lazystate.ops.triton.cursors import Rows

BASE, ORIGIN = 0, 1  # in a page's cursor
CURSOR = 2


@dataclass(frozen=True)
class Spans:
    """What a model step computes of the sequences of some rows.

    Attributes:
        blocks: int32 [B], page of each row, any stride; page 0 is nobody's.
        starts, stops: int32 [B], where each row's tokens begin and end in the step's inputs.
        lengths: int32 [B], of the sequences at the end of the step, drafts included.
    """

    blocks: Tensor
    starts: Tensor
    stops: Tensor
    lengths: Tensor


@triton.jit(do_not_specialize=["batch"])
def place_kernel(
    blocks,
    starts,
    stops,
    lengths,
    cursors,
    meta,
    order,
    firsts,
    block_stride,
    cursor_stride,
    batch,
    window,
    records,
    PREFILL: tl.constexpr,
    VIEWED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Find out what every row's page holds of its sequence, and which rows fold.

    cursors: [pages, 2], position of the checkpoint and position from which records and inputs are
    counted. PREFILL: rows whose states are computed from the checkpoint on by something else, so
    that all records are due before and none are held behind. VIEWED: steps read a view, which a
    checkpoint that holds all of the sequence does not have yet: it is stored by folding no record.
    """
    row = tl.arange(0, BLOCK)
    inside = row < batch
    first = tl.load(starts + row, mask=inside, other=0)
    length = tl.load(stops + row, mask=inside, other=0) - first
    end = tl.load(lengths + row, mask=inside, other=0)
    block = tl.load(blocks + row * block_stride, mask=inside, other=0).to(tl.int64)
    active = (block > 0) & (length > 0)
    position = end - length
    at = cursors + block * cursor_stride
    known = active & (position > 0)  # a sequence that begins finds what another has left
    base = tl.load(at, mask=known, other=0)
    origin = tl.load(at + 1, mask=known, other=0)
    held = position - base
    if PREFILL:
        due = known & (held > 0)
        tl.store(at, end, mask=active)
        tl.store(at + 1, end, mask=active)
    else:
        due = known & (held + length > window)
        if VIEWED:
            due = due | (known & (held == 0))
        tl.store(at, tl.where(due, position, base), mask=active)
        tl.store(at + 1, origin, mask=active)
    to = meta + row * 8
    seen = position - origin
    tl.store(to, tl.where(active, block, -1), mask=inside)
    tl.store(to + 1, held.to(tl.int64), mask=inside)
    tl.store(to + 2, seen.to(tl.int64), mask=inside)
    tl.store(to + 3, length.to(tl.int64), mask=inside)
    tl.store(to + 4, due.to(tl.int64), mask=inside)
    tl.store(to + 5, (base == 0).to(tl.int64), mask=inside)
    tl.store(to + 6, (seen % records).to(tl.int64), mask=inside)
    tl.store(to + 7, position.to(tl.int64), mask=inside)
    tl.store(firsts + row, first, mask=inside)
    ahead = tl.cumsum(due.to(tl.int32), 0)
    place = tl.where(due, ahead - 1, tl.sum(due.to(tl.int32), 0) + row - ahead)
    tl.store(order + 1 + place, row, mask=inside)
    tl.store(order, tl.sum(due.to(tl.int32), 0))


def room(batch: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised `Rows.meta`, `Rows.order` and `Rows.starts` of a batch."""
    meta = torch.empty(batch, 8, dtype=torch.int64, device=device)
    order, starts = (torch.empty(batch + n, dtype=torch.int32, device=device) for n in (1, 0))
    return meta, order, starts


def place(
    cursors: Tensor,
    spans: Spans,
    tokens: int,
    window: int,
    records: int,
    into: tuple[Tensor, Tensor, Tensor],
    *,
    prefill: bool = False,
    viewed: bool = False,
) -> Rows:
    """Decide a step, once for all layers whose pages are numbered alike, and move the cursors on.

    The number of a rounding is the position that it is at.

    Args:
        cursors: int32 [pages, CURSOR], dense behind the page.
        tokens: T, most tokens of a row. window: L. records: R >= L + T.
        into: `room` for at least the batch.
        prefill, viewed: see `place_kernel`; rows of a prefill that are due are settled before it.
    """
    batch = spans.blocks.numel()
    meta, order, starts = into[0][:batch], into[1][: batch + 1], into[2][:batch]
    place_kernel[(1,)](
        spans.blocks,
        spans.starts,
        spans.stops,
        spans.lengths,
        cursors,
        meta,
        order,
        starts,
        spans.blocks.stride(0),
        cursors.stride(0),
        batch,
        window,
        records,
        PREFILL=prefill,
        VIEWED=viewed,
        BLOCK=triton.next_power_of_2(into[0].shape[0]),  # one kernel for every batch
        num_warps=4,
    )
    return Rows(meta, order, tokens, starts)
