"""Rows of results: every time with the error of the very thing that was timed.

Every function yields rows and takes `dry`: then kernels are only compiled and run once on one
layer, so that a process of its own can fill the compiler's cache before the timed run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache, partial
from typing import Any

from kernels.cases import WINDOW, Case, Ceilings, row
from kernels.checks import BOUND, plain_error, replay_error
from kernels.runs import Plain, Replay
from lazystate.ops import tables
from lazystate.ops.triton.launch import default_launch
from timing import DEVICE, graph_us

TILES = tuple({"block_v": height, "warps": 1} for height in (4, 8, 16))  # where none is tuned
Row = dict[str, Any]


def time_replay(case: Case) -> tuple[float | None, float]:
    """(us of one step of one layer with its share of the cursor launches, error)."""
    run = Replay(case, case.copies())
    error = replay_error(run)
    if not error <= BOUND:
        return None, error
    return graph_us(run.cycle) / (case.period * run.layers), error


@lru_cache(maxsize=64)
def time_plain(case: Case, snapshots: bool = False) -> tuple[float | None, float, Row]:
    """(us of one step of one layer, error, tile) of the conventional kernel at its best tile."""
    run = Plain(case, case.copies(4 if snapshots else 64), snapshots=snapshots)
    best: tuple[float | None, float, Row] = None, 0.0, {}
    for tile in tiles(case, snapshots):
        error = plain_error(run, tile)
        if not error <= BOUND:
            return None, error, tile
        us = graph_us(partial(run.step, tile)) / len(run.pools)
        if best[0] is None or us < best[0]:
            best = us, error, tile
    return best


def tiles(case: Case, snapshots: bool) -> tuple[Row, ...]:
    """The tuned tile of the conventional kernel, or those that are tried."""
    method = "snapshot" if snapshots else "plain"
    tuned = tables.setting(method, case.spec, case.batch, case.tokens, device=DEVICE)
    return TILES if tuned is None else (tuned,)


def launch_of(case: Case) -> Row:
    """The launch setting that a case is timed with."""
    given = default_launch(case.spec, case.batch, case.tokens)
    tuned = tables.setting("replay", case.spec, case.batch, case.tokens, case.window, DEVICE)
    return asdict(given) | (tuned or {})


def decode(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """Standard decoding of one layer, conventional and replay."""
    if dry:
        _compile_plain(case)
        _compile_replay(case)
        return
    plain, error, tile = time_plain(case)
    floor = case.floor_us("plain", ceilings)
    yield row(
        case,
        "decode",
        "plain",
        plain,
        floor_us=floor,
        error=error,
        conventional_us=plain,
        launch=tile,
        state_bytes=sum(case.moved("plain")),
    )
    yield _replay_row(case, "decode", ceilings, plain)


def window(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """Standard decoding with replay of any window."""
    if dry:
        _compile_replay(case)
        return
    plain = time_plain(replace(case, window=WINDOW))[0]
    yield _replay_row(case, "window", ceilings, plain)


def verify(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """A step of T tokens: a snapshot a token, and replay all accepted and all rejected."""
    everything = replace(case, kept=case.tokens)
    if dry:
        _compile_plain(everything, snapshots=True)
        _compile_replay(everything)
        return
    conventional, error, tile = time_plain(everything, snapshots=True)
    yield row(
        everything,
        "verify",
        "snapshot",
        conventional,
        floor_us=everything.floor_us("snapshot", ceilings),
        error=error,
        conventional_us=conventional,
        launch=tile,
        state_bytes=sum(everything.moved("snapshot")),
    )
    for kept in sorted({case.tokens, 1}, reverse=True):
        yield _replay_row(replace(case, kept=kept), "verify", ceilings, conventional)


def fold(case: Case, ceilings: Ceilings, dry: bool = False) -> Iterator[Row]:
    """One step of rows that all fold, and one of rows that all hold half a window and do not."""
    if dry:
        _compile_replay(case)
        return
    run = Replay(case, case.copies())
    error = replay_error(run)
    for bench, method, held in (("fold", "fold", case.window), ("read", "read", case.window // 2)):
        run.together(held)
        us = graph_us(run.stand) / run.layers if error <= BOUND else None
        yield row(
            case,
            bench,
            "replay",
            us,
            floor_us=case.floor_us(method, ceilings),
            error=error,
            phases="synchronised",
            launch=launch_of(case),
            state_bytes=sum(case.moved(method)),
        )


def _replay_row(case: Case, bench: str, ceilings: Ceilings, conventional: float | None) -> Row:
    us, error = time_replay(case)
    return row(
        case,
        bench,
        "replay",
        us,
        floor_us=case.floor_us("replay", ceilings),
        error=error,
        conventional_us=conventional,
        launch=launch_of(case),
        state_bytes=sum(case.moved("replay")),
    )


def _compile_replay(case: Case) -> None:
    run = Replay(case, 1)
    for _ in range(min(case.period, 2)):
        run.step()


def _compile_plain(case: Case, snapshots: bool = False) -> None:
    few = case.batch if case.batch % 16 else 16  # a batch is compiled for by its divisors
    run = Plain(replace(case, batch=few), 1, snapshots=snapshots)
    for tile in tiles(case, snapshots):
        run.step(tile)
