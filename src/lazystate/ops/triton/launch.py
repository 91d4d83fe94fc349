"""Launch settings and launches of the step kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from lazystate.ops.pool import Pool
from lazystate.ops.triton.cursors import Rows
from lazystate.ops.triton.device import shape_of
from lazystate.ops.triton.step import step_kernel
from lazystate.spec import LayerSpec


@dataclass(frozen=True)
class Launch:
    """How the step kernel is launched.

    Attributes:
        block_v: value channels of a tile, a power of two.
        heads: value heads of one program, dividing the group that shares a key head.
        warps: warps of one program.
        split: two launches, for rows that do not fold and rows that do, instead of one for all:
            fewer registers for the many, one more launch.
    """

    block_v: int
    heads: int
    warps: int
    split: bool


def default_launch(spec: LayerSpec, batch: int) -> Launch:
    """A setting that is valid for any shape: few programs of much work, but enough for the GPU."""
    block_v = min(triton.next_power_of_2(spec.value_dim), 32 if batch >= 16 else 16)
    heads = next(n for n in (4, 3, 2, 1) if spec.group % n == 0) if batch >= 64 else 1
    return Launch(block_v=block_v, heads=heads, warps=1, split=batch >= 64)


def step(
    pool: Pool,
    rows: Rows,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None,
    skip: Tensor | None,
    launch: Launch | None = None,
) -> Tensor:
    """One step of one layer, see `Backend.step`; skip: [HV] or None.

    Returns:
        [B, T, HV, V], activation dtype; zeros on padded rows and behind a row's length.
    """
    spec, ring = pool.spec, pool.ring
    if skip is not None and skip.dim() != 1:
        raise ValueError(f"skip must be [HV] for the Triton backend, got {list(skip.shape)}")
    batch, tokens = q.shape[:2]
    launch = launch or default_launch(spec, batch)
    out = torch.empty(batch, tokens, spec.heads, spec.value_dim, dtype=v.dtype, device=v.device)
    absent = ring.k
    ring_v, ring_u, ring_b = (x if x is not None else absent for x in (ring.v, ring.u, ring.beta))
    strength = log_decay if beta is None else beta
    inputs = (q, k, v, log_decay, strength)
    rings = (ring.k, ring_v, ring_u, ring.log_decay, ring_b)
    records = ring.k.shape[1]
    programs = spec.heads // launch.heads * triton.cdiv(spec.value_dim, launch.block_v)
    for which in (0, 1) if launch.split else (2,):
        step_kernel[(batch * programs,)](
            rows.meta,
            rows.folds,
            *inputs,
            log_decay if skip is None else skip,
            out,
            pool.checkpoint,
            *rings,
            *(stride for x in inputs for stride in x.stride()[:3]),
            pool.checkpoint.stride(0),
            *(x.stride(0) for x in rings),
            T=tokens,
            TP=triton.next_power_of_2(tokens),
            HEADS=launch.heads,
            BV=launch.block_v,
            LP=triton.next_power_of_2(pool.window),
            R=records,
            **shape_of(spec),
            HAS_SKIP=skip is not None,
            RAW=ring.v is not None,
            WHICH=which,
            num_warps=launch.warps,
        )
    return out
