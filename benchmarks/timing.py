"""Timing on a GPU: captured graphs, cold L2, medians, and what plain reads and copies reach."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

# Enough distinct state that no replay finds any of it in L2 (60 MB on an H200).
COLD_BYTES = 400e6


def graph_us(run: Callable[[], None], repeats: int = 7) -> float:
    """Median microseconds of one call, captured in a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_us(graph.replay, repeats)


def median_us(run: Callable[[], None], repeats: int = 7) -> float:
    """Median microseconds of one call, by events, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def copies_for_cold_l2(state_bytes: int) -> int:
    """Layers of that much state that a graph must go through."""
    return min(max(2, int(COLD_BYTES / state_bytes) + 1), 64)


@triton.jit
def _read_kernel(source, out, size, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0) * BLOCK
    for at in range(tl.program_id(0) * BLOCK, size, step):
        total += tl.load(source + at + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), total)


def ceilings() -> tuple[float, float]:
    """(GB/s of a plain read, GB/s of a copy counting bytes read and written) over 2 GiB."""
    source = torch.randn(1 << 29, device="cuda")
    best = 0.0
    for block, programs, warps in ((1024, 2112, 4), (2048, 2112, 8), (2048, 1056, 4)):
        out = torch.empty(block * programs, device="cuda")

        launch = partial(_read_kernel[(programs,)], source, out, source.numel(), block)
        us = graph_us(partial(launch, num_warps=warps))
        best = max(best, source.nbytes / us / 1e3)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / median_us(lambda: target.copy_(source)) / 1e3
    return best, copied
