"""Folds without a step: rings emptied into their checkpoints, before something else reads them."""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.pool import LowRank, Pool
from lazystate.ops.triton.arguments import (
    Ring,
    pool_shape,
    ring_of,
    seed_of,
    states_of,
    storing_of,
)
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.fold import fold
from lazystate.ops.triton.formats import stored_at
from lazystate.ops.triton.launch import Launch, sketch_launch
from lazystate.ops.triton.sketch import view_at


@triton.jit
def settle_kernel(
    meta,
    states,
    ring,
    ring_slot,
    seed,
    storing: tl.constexpr,
    tiling: tl.constexpr,
    shape: tl.constexpr,
):
    """One head of one row; arguments as of `step_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(meta + row * 8)
    held = tl.load(meta + row * 8 + 1).to(tl.int32)
    if (slot >= 0) & (tl.load(meta + row * 8 + 4) != 0) & (held > 0):
        key_head = head // shape.GROUP
        checkpoint = stored_at(states.checkpoint, states.checkpoint_slot, slot)
        view = view_at(states, slot, storing)
        records = Ring(
            ring.k + slot * ring_slot.k + key_head * shape.K,
            ring.v + slot * ring_slot.v,
            ring.u + slot * ring_slot.u,
            ring.log_decay + slot * ring_slot.log_decay,
            ring.beta + slot * ring_slot.beta,
        )
        fold(
            head % shape.GROUP,
            key_head,
            tl.load(meta + row * 8 + 5) == 0,
            tl.load(meta + row * 8 + 6).to(tl.int32),
            held,
            slot,
            tl.load(meta + row * 8 + 7),
            seed,
            checkpoint,
            view,
            records,
            tiling.BV,
            storing,
            tiling,
            shape,
        )


def settle(pool: Pool, rows: Rows) -> None:
    """Fold the committed records of every row that is due and has any; nothing is read out."""
    spec = pool.spec
    block_v = min(16, triton.next_power_of_2(spec.value_dim))
    launch = Launch(block_v, triton.cdiv(spec.value_dim, block_v), 1, 1)
    if isinstance(pool.view, LowRank):  # built of a head's whole state
        whole = sketch_launch(spec, rows.meta.shape[0])
        launch = Launch(whole.fold_block_v, 1, 1, whole.fold_warps)
    ring, ring_slot = ring_of(pool)
    settle_kernel[(rows.meta.shape[0], spec.heads)](
        rows.meta,
        states_of(pool),
        ring,
        ring_slot,
        seed_of(pool),
        storing=storing_of(pool),
        tiling=launch.tiling(spec.value_dim),
        shape=pool_shape(pool, False, None),
        num_warps=launch.warps,
        num_stages=1,
    )
