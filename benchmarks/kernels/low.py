"""Low-precision states: steps that only read them, and whole windows with folds that round."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from kernels.cases import LAYERS, Case, Ceilings, row
from kernels.checks import BOUND, replay_error
from kernels.runs import Replay
from kernels.tuning import valid
from lazystate.ops.triton.launch import Launch, default_launch
from timing import graph_us

# (checkpoint, view); None: steps read the checkpoint. FP32 is what the others are compared to.
STORED = (
    ("fp32", None),
    ("fp16", None),
    ("fp8", None),
    ("nvfp4", None),
    ("fp16", "nvfp4"),
    ("fp16", "fp8"),
    ("fp32", "nvfp4"),
)
# (block_v, tiles, stages, warps) of the rows that do not fold; those that are valid are tried.
TRIES = ((16, 4, 2, 1), (32, 2, 2, 1), (32, 4, 2, 1), (32, 4, 2, 2), (64, 2, 2, 2), (16, 8, 2, 1))


def cases(layer: str, batch: int) -> list[Case]:
    """One case for each way of storing the states."""
    return [Case(layer, LAYERS[layer], batch, checkpoint=c, view=v) for c, v in STORED]


def rows(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[dict[str, Any]]:
    """A step without folds of rows with half a window, and decoding at mixed phases."""
    run = Replay(case, 1 if dry else case.copies())
    if dry:
        for launch in launches(case):
            for _ in range(2):
                run.step(launch)
        return
    error = replay_error(run)
    run.together(case.window // 2)
    times = {x: graph_us(partial(run.stand, x), 5) / run.layers for x in launches(case)}
    launch = min(times, key=times.__getitem__)
    checked = Replay(case, run.layers)
    error = max(error, replay_error(checked, launch))
    us = graph_us(partial(checked.cycle, launch)) / (case.period * checked.layers)
    for bench, method, found in (("read", "read", times[launch]), ("low", "replay", us)):
        yield row(
            case,
            bench,
            "replay",
            found if error <= BOUND else None,
            floor_us=case.floor_us(method, ceilings),
            error=error,
            phases="mixed" if bench == "low" else "synchronised",
            launch=asdict(launch),
            state_bytes=sum(case.moved(method)),
        )


def launches(case: Case) -> list[Launch]:
    """Settings that are worth a trial."""
    start = default_launch(case.spec, case.batch, 1)
    if not start.fold_block_v:
        return [start]
    tried = [
        Launch(*x, start.fold_block_v, start.fold_tiles, start.fold_warps)
        for x in TRIES
        if valid(case.spec, {"block_v": x[0], "tiles": x[1], "stages": x[2]})
    ]
    return [start, *(each for each in tried if each != start)]
