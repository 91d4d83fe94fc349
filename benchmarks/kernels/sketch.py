"""Sketched states: whole windows at mixed phases, folds that build a sketch beside plain folds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

from kernels.cases import LAYERS, Case, Ceilings, row
from kernels.checks import BOUND, replay_error
from kernels.measure import time_plain
from kernels.runs import Replay
from lazystate.ops.triton.launch import Launch, sketch_launch
from lazystate.spec import LayerSpec
from timing import graph_us

MEAN_RANK = 8
LARGE, VERIFY_BATCH, VERIFY_TOKENS = 512, 256, 4


def cases(layers: Sequence[str], batches: Sequence[int]) -> list[Case]:
    """What is measured, the most telling first."""
    made = []
    large = min(LARGE, max(batches))
    changes: tuple[dict[str, Any], ...] = (
        {"window": 32},
        {"window": 32, "checkpoint": "fp16"},
        {"window": 32, "tokens": VERIFY_TOKENS, "kept": VERIFY_TOKENS},
        {"window": 16},
        {"window": 64},
        {"window": 32, "map": "exact"},
        {"window": 32, "map": "offline"},
        {"window": 32, "rank": 16},
    )
    for change in changes:
        for name in layers:
            batch = min(VERIFY_BATCH, large) if "tokens" in change else large
            options: dict[str, Any] = {"view": "sketch", "rank": MEAN_RANK} | change
            made.append(Case(name, LAYERS[name], batch, **options))
    return made


def rows(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[dict[str, Any]]:
    """Decoding at mixed phases with the best of a few launches; steps of rows that all fold."""
    tried = launches(case.spec, case.batch)
    if dry:
        run = Replay(replace(case, batch=min(case.batch, 64)), 1)
        for launch in tried:
            for _ in range(2):
                run.step(launch)
        return
    run = Replay(case, case.copies(8))
    error = replay_error(run, tried[0])
    times = {each: graph_us(partial(run.cycle, each), 5) for each in tried}
    launch = min(times, key=times.__getitem__)
    error = max(error, replay_error(Replay(case, 1), launch))
    shared: dict[str, Any] = {"error": error, "rank": case.rank, "map": case.map}
    yield row(
        case,
        "sketch",
        "replay",
        times[launch] / (case.period * run.layers) if error <= BOUND else None,
        floor_us=case.floor_us("replay", ceilings),
        conventional_us=time_plain(plain_of(case))[0] if case.tokens == 1 else None,
        launch=asdict(launch),
        tried={str(asdict(x)): us / (case.period * run.layers) for x, us in times.items()},
        state_bytes=sum(case.moved("replay")),
        **shared,
    )
    if case.tokens > 1:
        return
    for bench, method, held in (
        ("sketch fold", "fold", case.window),
        ("sketch read", "read", case.window // 2),
    ):
        run.together(held)
        us = graph_us(partial(run.stand, launch), 5) / run.layers
        yield row(
            case,
            bench,
            "replay",
            us if error <= BOUND else None,
            floor_us=case.floor_us(method, ceilings),
            phases="synchronised",
            launch=asdict(launch),
            plain_fold_us=plain_fold(exact_of(case)) if method == "fold" else None,
            state_bytes=sum(case.moved(method)),
            **shared,
        )


def plain_of(case: Case) -> Case:
    """The conventional step of the same layer: FP32 states."""
    return Case(case.layer, case.spec, case.batch)


def exact_of(case: Case) -> Case:
    """Exact replay of the same window and checkpoint."""
    return replace(case, view=None, rank=0, map="pivot")


@lru_cache(maxsize=64)
def plain_fold(case: Case) -> float:
    """Microseconds of a step of rows that all fold, without a view."""
    run = Replay(case, case.copies(4))
    run.cycle()
    run.together(case.window)
    return graph_us(run.stand, 5) / run.layers


def launches(spec: LayerSpec, batch: int) -> list[Launch]:
    """Settings that are worth a trial: heads of a program, warps, warps of the folding launch."""
    start = sketch_launch(spec, batch)
    heads = [n for n in (1, 2, 4, 8) if spec.decay == "scalar" and spec.group % n == 0] or [1]
    tried = [
        replace(start, tiles=n, warps=warps, fold_warps=fold_warps)
        for n in heads
        for warps, fold_warps in ((1, 4), (2, 8))
    ]
    return [start, *(each for each in tried if each != start)]
