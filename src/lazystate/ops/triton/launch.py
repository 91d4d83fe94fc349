"""Launch settings and launches of the step kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lazystate.gates import Prologue
from lazystate.ops.pool import LowRank, Pool
from lazystate.ops.tables import tuned
from lazystate.ops.triton.arguments import (
    Tiling,
    inputs_of,
    pool_shape,
    ring_of,
    seed_of,
    states_of,
    storing_of,
)
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.step import step_kernel
from lazystate.spec import LayerSpec

# Programs that take turns with the folding rows' work: more than a large GPU holds at once.
FOLD_PROGRAMS = 2048


@dataclass(frozen=True)
class Launch:
    """How the step kernel is launched.

    Attributes:
        block_v: value channels of a tile, a power of two.
        tiles: tiles of one program: a divisor or a multiple of those of a head, dividing those of
            the heads that share a key head; with a decay per channel within one head.
        stages: tiles in flight from memory, the one that is multiplied included.
        warps: warps of one program.
        fold_block_v: value channels of a tile in a launch of its own for the rows that fold; 0 for
            one launch for all rows: one launch less, but more registers for the many.
        fold_tiles: tiles of a program of that launch.
        fold_warps: warps of a program of that launch.
    """

    block_v: int
    tiles: int
    stages: int
    warps: int
    fold_block_v: int = 0
    fold_tiles: int = 1
    fold_warps: int = 1

    def tiling(self, value_dim: int) -> Tiling:
        """What the kernel is compiled for."""
        return Tiling(
            BV=self.block_v,
            TILES=self.tiles,
            PER_HEAD=triton.cdiv(value_dim, self.block_v),
            STAGES=self.stages,
        )


def default_launch(spec: LayerSpec, batch: int, tokens: int) -> Launch:
    """A setting that is valid for any shape: small programs until they fill a large GPU."""
    widest = triton.next_power_of_2(spec.value_dim)
    channel = spec.decay == "channel"
    if batch * spec.heads < 8192:
        return Launch(min(16, widest), 1, 1, 1)
    block_v = min(widest, 16 if channel or spec.value_dim % 32 else 32)
    tiles = triton.cdiv(spec.value_dim, block_v)  # all of a head
    fold_block_v = min(widest, 32 if channel else 16)
    fold_tiles = triton.cdiv(spec.value_dim, fold_block_v)
    warps = 1 if tokens == 1 or block_v < 32 else 2
    return Launch(block_v, tiles, min(2, tiles), warps, fold_block_v, fold_tiles)


def sketch_launch(spec: LayerSpec, batch: int) -> Launch:
    """The same for steps that read sketches: a tile is a head, whose coefficients it needs."""
    block_v = max(16, triton.next_power_of_2(spec.value_dim))
    heads = 1
    if spec.decay == "scalar" and batch * spec.heads >= 8192:
        heads = next(n for n in (4, 2, 1) if spec.group % n == 0)
    warps = 1 if block_v <= 64 else 2
    return Launch(block_v, heads, 1, warps, block_v, 1, 4 if block_v <= 64 else 8)


def launch_of(pool: Pool, batch: int, tokens: int) -> Launch:
    """What is tuned for a step on the pool's GPU, or the default."""
    sketched, device = isinstance(pool.view, LowRank), pool.checkpoint.device
    default = default_launch(pool.spec, batch, tokens)
    if sketched:
        default = sketch_launch(pool.spec, batch)
    method = "sketch" if sketched else "replay"
    return tuned(default, method, pool.spec, batch, tokens, pool.window, device)


def _folding(launch: Launch, pool: Pool) -> Launch:
    """The launch of its own for rows that fold; a state's largest number takes all of a head."""
    block_v = launch.fold_block_v or min(16, triton.next_power_of_2(pool.spec.value_dim))
    tiles = launch.fold_tiles if launch.fold_block_v else 1
    if storing_of(pool).TOTAL:
        tiles = max(tiles, triton.cdiv(pool.spec.value_dim, block_v))
    return Launch(block_v, tiles, launch.stages, launch.fold_warps)


def step(
    pool: Pool,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    prologue: Prologue | None = None,
    launch: Launch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One step of one layer, see `Backend.step`; skip: [HV] or None.

    With `rows.starts` inputs and outputs of all rows lie behind one another, [1, tokens, ...].

    Args:
        out: where the outputs go, dense; None for a new tensor.

    Returns:
        [B, T, HV, V], activation dtype; zeros on padded rows and behind a row's length. With
        `rows.starts` [1, tokens, HV, V], and only tokens of rows are written.
    """
    spec = pool.spec
    if skip is not None and skip.dim() != 1:
        raise ValueError(f"skip must be [HV] for the Triton backend, got {list(skip.shape)}")
    batch, tokens = rows.meta.shape[0], rows.tokens
    launch = launch or launch_of(pool, batch, tokens)
    if out is None:
        out = torch.empty(*v.shape, dtype=v.dtype, device=v.device)
    inputs, strides = inputs_of(q, k, v, log_decay, beta, prologue)
    if rows.starts is not None:
        strides = strides._replace(row=strides.token)
    ring, ring_slot = ring_of(pool)
    storing, states = storing_of(pool), states_of(pool)
    fused = launch.fold_block_v == 0 and storing.PLAIN
    for which, setting in ((2, launch),) if fused else ((1, _folding(launch, pool)), (0, launch)):
        tiling = setting.tiling(spec.value_dim)
        grid = batch * spec.heads * triton.cdiv(spec.value_dim, setting.block_v) // setting.tiles
        step_kernel[(min(grid, FOLD_PROGRAMS) if which == 1 else grid,)](
            rows.meta,
            rows.starts,
            rows.order,
            inputs,
            strides,
            skip,
            out,
            states,
            ring,
            ring_slot,
            seed_of(pool),
            batch,
            T=tokens,
            WHICH=which,
            storing=storing,
            tiling=tiling,
            shape=pool_shape(pool, which == 0, prologue),
            num_warps=setting.warps,
            num_stages=1,
        )
    return out
