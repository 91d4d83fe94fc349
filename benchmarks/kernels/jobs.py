"""The run as a list of small jobs, most wanted first, within a time budget and over processes."""

from __future__ import annotations

import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernels import low, measure, sketch
from kernels.cases import LAYERS, PROLOGUES, VERIFY, WINDOWS, Case, Ceilings

Row = dict[str, Any]
Rows = Callable[[Case, Ceilings, bool], Iterator[Row]]
WANTED = (512, 256, 128, 32, 1, 8, 64, 16, 4, 2)  # batches, so that a run cut short has the first


@dataclass(frozen=True)
class Job:
    """A few seconds of work.

    Attributes:
        part: what it belongs to. rows: measures the case, or with dry=True only compiles for it.
        key: see `compiles`; None for what follows from the case.
    """

    part: str
    case: Case
    rows: Rows
    key: Hashable = None

    def __str__(self) -> str:
        case = self.case
        return f"{self.part} {case.layer} B {case.batch} T {case.tokens} L {case.window}"

    @property
    def compiles(self) -> Hashable:
        """Equal for jobs that need the same compiled kernels, which batches often share."""
        case = self.case
        if self.key is not None:
            return self.part, self.key
        settings = [measure.launch_of(case), *measure.tiles(case, snapshots=case.tokens > 1)]
        if self.part == "low":
            settings.append({"checkpoint": case.checkpoint, "view": case.view})
        if self.part == "sketch":
            settings.append({"checkpoint": case.checkpoint, "map": case.map, "rank": case.rank})
        if case.prologue:
            settings.append({"prologue": case.prologue})
        special = case.batch == 1, case.batch % 16 == 0
        if self.part == "peers":  # which choose by batch
            settings.append({"batch": case.batch})
        return self.part, case.layer, case.tokens, case.window, str(settings), special


@dataclass
class Report:
    """What a run left out.

    Attributes:
        skipped: jobs for which there was no time. failed: jobs that raised, and what.
    """

    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def jobs(parts: Sequence[str], layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    """The jobs of some parts, in the order of the parts."""
    made = {
        "decode": _decode,
        "verify": _verify,
        "fold": _fold,
        "window": _window,
        "peers": _peers,
        "drift": _drift,
        "ncu": _ncu,
        "gates": _gates,
        "low": _low,
        "sketch": _sketch,
    }
    return [job for part in parts for job in made[part](layers, batches)]


def run(
    todo: Sequence[Job], ceilings: Ceilings, deadline: float, keep: Callable[[Row], None]
) -> Report:
    """Run the jobs and `keep` every row; none is begun after the deadline (time.monotonic)."""
    report = Report()
    for job in todo:
        if time.monotonic() > deadline:
            report.skipped.append(str(job))
            continue
        try:
            for found in job.rows(job.case, ceilings, False):
                keep(found)
        except Exception as error:  # the others can still be measured
            traceback.print_exc()
            report.failed.append(f"{job}: {type(error).__name__}: {error}"[:400])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return report


def dry(todo: Sequence[Job], part: int, parts: int) -> None:
    """Compile what every `parts`-th job needs, from number `part` on."""
    different = list({job.compiles: job for job in todo}.values())
    for job in different[part::parts]:
        try:
            for _ in job.rows(job.case, Ceilings(1.0, 1.0), True):
                pass
        except Exception as error:  # the timed run reports it again, in its place
            print(f"compiling for {job}: {error}"[:400], file=sys.stderr)


def warm(script: Path, arguments: Sequence[str], processes: int) -> float:
    """Run the script's --dry shards side by side; seconds that it took."""
    begun = time.monotonic()
    started = [
        subprocess.Popen([sys.executable, script, *arguments, "--dry", f"{i}/{processes}"])
        for i in range(processes)
    ]
    for process in started:
        process.wait()
    return time.monotonic() - begun


def _decode(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    order = sorted(batches, key=lambda b: WANTED.index(b) if b in WANTED else len(WANTED))
    cases = [Case(name, LAYERS[name], batch) for batch in order for name in layers]
    return [Job("decode", case, measure.decode) for case in cases]


def _gates(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    return [
        Job("gates", Case(name, LAYERS[name], batch, tokens, prologue=kind), rows)
        for tokens, rows in ((1, measure.decode), (4, measure.verify))
        for batch in ([512, 32, 1] if tokens == 1 else [256])
        if batch in batches
        for name in layers
        for kind in PROLOGUES[name]
    ]


def _verify(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    order = sorted(VERIFY, key=lambda tokens: tokens not in (4, 8))
    batch = min(256, max(batches))
    return [
        Job("verify", Case(name, LAYERS[name], batch, tokens), measure.verify)
        for tokens in order
        for name in layers
        if name in ("M2", "G2") or tokens == 4
    ]


def _fold(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    cases = [Case(name, LAYERS[name], batch) for batch in _large(batches) for name in layers]
    return [Job("fold", case, measure.fold) for case in cases]


def _low(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    chosen = [name for name in ("M2", "G2", "M1", "G1", "K1") if name in layers]
    wanted = [batch for batch in (512, 32) if batch in batches] or [max(batches)]
    return [
        Job("low", case, low.rows)
        for batch in wanted
        for name in chosen
        for case in low.cases(name, batch)
    ]


def _sketch(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    return [Job("sketch", case, sketch.rows) for case in sketch.cases(layers, batches)]


def _window(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    return [
        Job("window", Case(name, LAYERS[name], batch, window=window), measure.window)
        for batch in _large(batches)
        for window in WINDOWS
        for name in layers
    ]


def _peers(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    import peers

    return [Job("peers", case, peers.rows) for case in peers.cases(layers, batches)]


def _drift(layers: Sequence[str], _: Sequence[int]) -> list[Job]:
    from kernels import folding

    def rows(_: Case, __: Ceilings, dry: bool) -> Iterator[Row]:
        return iter(()) if dry else folding.rows()

    def compiles(unit: folding.Unit) -> Rows:
        return lambda _, __, dry: folding.compile_unit(unit) if dry else iter(())

    case = Case(layers[0], LAYERS[layers[0]], 1)
    ahead = [Job("drift", case, compiles(unit), unit) for unit in folding.units()]
    return [Job("drift", case, rows, "all"), *ahead]


def _ncu(layers: Sequence[str], batches: Sequence[int]) -> list[Job]:
    import ncu

    chosen = [name for name in ("M2", "G2", "K1") if name in layers] or layers

    def rows(case: Case, _: Ceilings, dry: bool) -> Iterator[Row]:
        return iter(()) if dry else ncu.rows(chosen, case.batch)

    return [Job("ncu", Case(chosen[0], LAYERS[chosen[0]], max(batches)), rows, "all")]


def _large(batches: Sequence[int]) -> list[int]:
    return [batch for batch in (256, 512) if batch in batches] or [max(batches)]
