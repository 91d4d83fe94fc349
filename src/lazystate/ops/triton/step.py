"""The step kernel: outputs of T tokens, the append, and the fold of rows that are due (Eq. 8-14).

The state of the value heads that share a key head is one matrix of rows [K]. A program serves a
few tiles of BV of these rows, reads each once, and never forms a state; on a row that folds it
first replays the records into the checkpoint, and reads that.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.arguments import Inputs, Ring
from lazystate.ops.triton.decode import decode
from lazystate.ops.triton.fold import fold
from lazystate.ops.triton.formats import stored_at
from lazystate.ops.triton.sketch import view_at
from lazystate.ops.triton.verify import verify


@triton.jit
def step_kernel(
    meta,
    starts,
    order,
    inputs,
    strides,
    skip,
    out,
    states,
    ring,
    ring_slot,
    seed,
    batch,
    T: tl.constexpr,
    WHICH: tl.constexpr,
    storing: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """One model step of one layer; WHICH rows: 0 those that do not fold, 1 those that do, 2 all.

    meta: int64 [B, 8], starts: int32 [B] or None and order: int32 [1 + B], see `Rows`. skip: [HV]
    or None. out: [B, T, HV, V], or [tokens, HV, V] with starts. seed: of stochastic rounding and
    the layer's number above it. The rest: see `arguments`.
    """
    programs: tl.constexpr = shape.HV * tiling.PER_HEAD // tiling.TILES  # of one row
    first = 0
    end = batch * programs
    if WHICH == 0:
        first = tl.load(order) * programs
    if WHICH == 1:
        end = tl.load(order) * programs
    # rows that fold are few, and how many only the device knows: some programs take turns
    for index in range(first + tl.program_id(0), end, tl.num_programs(0)):
        _row(
            index,
            meta,
            starts,
            order,
            inputs,
            strides,
            skip,
            out,
            states,
            ring,
            ring_slot,
            seed,
            T,
            WHICH,
            storing,
            tiling,
            shape,
        )


@triton.jit
def _row(
    index,
    meta,
    starts,
    order,
    inputs,
    strides,
    skip,
    out,
    states,
    ring,
    ring_slot,
    seed,
    T: tl.constexpr,
    WHICH: tl.constexpr,
    storing: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """A few tiles of one row."""
    parts: tl.constexpr = shape.GROUP * tiling.PER_HEAD // tiling.TILES
    part = index % parts
    key_head = (index // parts) % shape.H
    row = tl.load(order + 1 + index // (parts * shape.H)).to(tl.int64)
    slot = tl.load(meta + row * 8)
    held = tl.load(meta + row * 8 + 1).to(tl.int32)
    length = tl.load(meta + row * 8 + 3).to(tl.int32)
    due = tl.load(meta + row * 8 + 4) != 0
    stored = tl.load(meta + row * 8 + 5) == 0
    start = tl.load(meta + row * 8 + 6).to(tl.int32)
    first = row  # rows of T tokens, or tokens
    if starts is None:
        out += row * T * shape.VALUES
    else:
        first = tl.load(starts + row).to(tl.int64)
        out += first * shape.VALUES
    if (slot < 0) | (length == 0):
        if starts is None:
            _clear(out, part, key_head, T, tiling, shape)
    else:
        checkpoint = stored_at(states.checkpoint, states.checkpoint_slot, slot)
        view = view_at(states, slot, storing)
        reads_view: tl.constexpr = storing.VIEW and WHICH == 0
        source = view if reads_view else checkpoint
        form: tl.constexpr = storing.view if reads_view else storing.checkpoint
        ring = Ring(
            ring.k + slot * ring_slot.k + key_head * shape.K,
            ring.v + slot * ring_slot.v,
            ring.u + slot * ring_slot.u,
            ring.log_decay + slot * ring_slot.log_decay,
            ring.beta + slot * ring_slot.beta,
        )
        used = held
        largest: tl.constexpr = 16 if WHICH == 2 else tiling.BV
        if WHICH != 0 and storing.PLAIN:  # a row that folds reads what it has folded
            if due:
                fold(
                    part,
                    key_head,
                    stored,
                    start,
                    held,
                    slot,
                    0,
                    seed,
                    checkpoint,
                    view,
                    ring,
                    largest,
                    storing,
                    tiling,
                    shape,
                )
                tl.debug_barrier()  # other lanes read what this one stored
            used = tl.where(due, 0, held)
            stored = stored | due
        inputs = Inputs(
            inputs.q + first * strides.row.q + key_head * strides.head.q,
            inputs.k + first * strides.row.k + key_head * strides.head.k,
            inputs.v + first * strides.row.v,
            inputs.log_decay + first * strides.row.log_decay,
            inputs.beta + first * strides.row.beta,
            inputs.A_log,
            inputs.dt_bias,
        )
        if T == 1:
            decode(
                part,
                key_head,
                stored,
                start,
                used,
                inputs,
                strides.head,
                skip,
                out,
                source,
                ring,
                form,
                tiling,
                shape,
            )
        else:
            verify(
                part,
                key_head,
                stored,
                start,
                length,
                T if starts is None else length,
                used,
                inputs,
                strides,
                skip,
                out,
                source,
                ring,
                T,
                form,
                tiling,
                shape,
            )

        if WHICH == 1 and not storing.PLAIN:  # rounding comes after the outputs
            tl.debug_barrier()
            count = tl.load(meta + row * 8 + 7)
            fold(
                part,
                key_head,
                stored,
                start,
                held,
                slot,
                count,
                seed,
                checkpoint,
                view,
                ring,
                largest,
                storing,
                tiling,
                shape,
            )


@triton.jit
def _clear(out, part, key_head, T: tl.constexpr, tiling: tl.constexpr, shape: tl.constexpr):
    """Zero outputs of a padded row."""
    for i in range(tiling.TILES):
        n = part * tiling.TILES + i
        channel = n % tiling.PER_HEAD * tiling.BV + tl.arange(0, tiling.BV)
        for s in range(T):
            at = (s * shape.HV + key_head * shape.GROUP + n // tiling.PER_HEAD) * shape.V + channel
            nothing = tl.zeros([tiling.BV], out.dtype.element_ty)
            tl.store(out + at, nothing, mask=channel < shape.V)
