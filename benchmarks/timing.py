"""Timing on a GPU: captured graphs, medians, and what plain reads and copies reach.

Without a GPU everything runs once and is timed by the clock of the host, to try the code.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def graph_us(run: Callable[[], object], repeats: int = 7) -> float:
    """Median microseconds of one call, captured in a CUDA graph."""
    if DEVICE == "cpu":
        begun = time.perf_counter()
        run()
        return (time.perf_counter() - begun) * 1e6
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return median_us(graph.replay, repeats)


def median_us(run: Callable[[], object], repeats: int = 7) -> float:
    """Median microseconds of one call, by events, after one that is not counted."""
    run()
    events = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e3 for start, end in events)


@triton.jit
def _read_kernel(source, out, BLOCK: tl.constexpr, COUNT: tl.constexpr):
    at = tl.program_id(0) * (BLOCK * COUNT) + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(COUNT):
        total += tl.load(source + at + i * BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(total))


@triton.jit
def _scale_kernel(source, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(source + at, tl.load(source + at) * 1.0001)


def ceilings() -> tuple[float, float]:
    """(GB/s of the best plain read, GB/s of the best copy counting both ways) over 4 GiB."""
    source = torch.ones(1 << 30, device=DEVICE)
    size, read = source.numel(), [graph_us(lambda: source.sum())]
    for block, count, warps in ((4096, 1, 8), (8192, 2, 8), (1024, 16, 4), (2048, 8, 4)):
        out = torch.empty(size // (block * count), device=DEVICE)
        launch = partial(_read_kernel[(out.numel(),)], source, out, block, count)
        read.append(graph_us(partial(launch, num_warps=warps)))
    scale = partial(_scale_kernel[(size // 1024,)], source, 1024, num_warps=4)
    target = torch.empty_like(source)
    copied = [graph_us(scale), median_us(lambda: target.copy_(source))]
    return source.nbytes / min(read) / 1e3, 2 * source.nbytes / min(copied) / 1e3
