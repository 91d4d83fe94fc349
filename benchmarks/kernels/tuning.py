"""The search for launch settings: which there are, how fast each is, and whether it is right."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import triton

from kernels.cases import LAYERS, Case
from kernels.checks import BOUND, plain_error, repeats, replay_error
from kernels.runs import Plain, Replay
from lazystate import LayerSpec
from lazystate.ops.triton.launch import Launch, default_launch
from timing import graph_us

CHOICES: dict[str, tuple[Any, ...]] = {
    "block_v": (8, 16, 32, 64),
    "tiles": (1, 2, 4, 8),
    "warps": (1, 2, 4),
}
TILES = {"block_v": (4, 8, 16, 32), "warps": (1, 2, 4)}
REPEATS = 10
Setting = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """One entry of the table to be found.

    Attributes:
        method: replay, plain or snapshot. settings: the candidates.
    """

    method: str
    case: Case
    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        return f"{self.method} {self.case.layer} B {self.case.batch} T {self.case.tokens}"


def valid(spec: LayerSpec, setting: Setting) -> bool:
    """Whether a tile is not wider than V, and a program's tiles divide those that share a key."""
    block_v = setting["block_v"]
    if block_v > triton.next_power_of_2(spec.value_dim):
        return False
    tiles = triton.cdiv(spec.value_dim, block_v) * (spec.group if spec.decay == "scalar" else 1)
    return tiles % setting.get("tiles", 1) == 0


def combinations(choices: dict[str, tuple[Any, ...]], start: Setting) -> Iterator[Setting]:
    """Every choice of values for the fields that `start` has, over `start`."""
    names = [name for name in choices if name in start]
    for values in itertools.product(*(choices[name] for name in names)):
        yield start | dict(zip(names, values, strict=True))


def trials(
    methods: Sequence[str],
    layers: Sequence[str],
    batches: Sequence[int],
    tokens: Sequence[int],
    choices: dict[str, tuple[Any, ...]],
) -> list[Trial]:
    """The entries to be found, large batches first, standard decoding before verification."""
    found = []
    for count, batch, name in itertools.product(tokens, sorted(batches, reverse=True), layers):
        case = Case(name, LAYERS[name], batch, count, count)
        for method in methods:
            if (method == "plain" and count > 1) or (method == "snapshot" and count == 1):
                continue
            start = asdict(default_launch(case.spec, batch)) if method == "replay" else {}
            wanted = {**CHOICES, **choices} if start else TILES
            every = combinations(wanted, start or dict.fromkeys(TILES))
            settings = tuple(each for each in every if valid(case.spec, each))
            found.append(Trial(method, case, settings))
    return found


def search(trial: Trial) -> tuple[Setting, float] | None:
    """The fastest setting that passes, with its microseconds, or None where none does."""
    timed = time_replay(trial) if trial.method == "replay" else time_plain(trial)
    check = replay_passes if trial.method == "replay" else plain_passes
    order = sorted(timed, key=lambda pair: pair[1])
    for setting, us in order:
        reason = check(trial, setting)
        if not reason:
            second = f", next {order[1][1]:.1f}" if len(order) > 1 else ""
            print(f"{trial}: {us:.1f} us {setting}{second}, of {len(order)}", flush=True)
            return setting, us
        print(f"{trial}: refused {setting} at {us:.1f} us: {reason}", flush=True)
    return None


def time_replay(trial: Trial) -> list[tuple[Setting, float]]:
    """Microseconds of one step of one layer with every setting that runs."""
    case = trial.case
    run = Replay(case, case.copies(24))
    steps = case.period if case.batch < 4 * case.period else 2  # the phases are even anyway
    run.cycle()

    def us(setting: Setting) -> float:
        graph = partial(run.cycle, Launch(**setting), steps)
        return graph_us(graph, repeats=5) / (steps * run.layers)

    return _timed(trial, us)


def time_plain(trial: Trial) -> list[tuple[Setting, float]]:
    """The same of the conventional kernel."""
    snapshots = trial.method == "snapshot"
    run = Plain(trial.case, trial.case.copies(4 if snapshots else 64), snapshots=snapshots)
    return _timed(trial, lambda tile: graph_us(partial(run.step, tile), 5) / len(run.pools))


def replay_passes(trial: Trial, setting: Setting) -> str:
    """Why a setting must not be used, or nothing."""
    run = Replay(replace(trial.case, batch=min(trial.case.batch, 32)), 1)
    error = replay_error(run, Launch(**setting))
    if not error <= BOUND:
        return f"error {error:.1e}"
    return "" if repeats(run, Launch(**setting), REPEATS) else "other bits in a repeat"


def plain_passes(trial: Trial, setting: Setting) -> str:
    """The same for the conventional kernel."""
    case = replace(trial.case, batch=min(trial.case.batch, 32))
    snapshots = trial.method == "snapshot"
    error = plain_error(Plain(case, 1, snapshots=snapshots), setting)
    if not error <= BOUND:
        return f"error {error:.1e}"
    run, results = Plain(case, 1, snapshots=snapshots), []
    first = run.pools[0].clone()
    for _ in range(REPEATS):
        run.pools[0].copy_(first)
        results.append((run.step(setting), run.pools[0].clone()))
    same = all(
        torch.equal(a, b) for found in results for a, b in zip(found, results[0], strict=True)
    )
    return "" if same else "other bits in a repeat"


def compile_part(todo: Sequence[Trial], part: int, parts: int) -> None:
    """Run every `parts`-th setting once on a small pool, so that it is compiled."""
    work = {}
    for trial in todo:
        for setting in trial.settings:
            key = trial.method, trial.case.layer, trial.case.tokens, str(setting)
            work[key] = trial, setting
    runs: dict[str, Replay] = {}
    plains: dict[str, Plain] = {}
    for trial, setting in list(work.values())[part::parts]:
        case = replace(trial.case, batch=16)
        name = f"{trial.method} {case.layer} {case.tokens}"
        try:
            if trial.method == "replay":
                runs[name] = runs.get(name) or Replay(case, 1)
                runs[name].step(Launch(**setting))
            else:
                snapshots = trial.method == "snapshot"
                plains[name] = plains.get(name) or Plain(case, 1, snapshots=snapshots)
                plains[name].step(setting)
        except Exception as error:
            print(f"{trial}: {setting} does not run: {error}"[:300], file=sys.stderr)


def _timed(trial: Trial, us: Callable[[Setting], float]) -> list[tuple[Setting, float]]:
    found = []
    for setting in trial.settings:
        try:
            found.append((setting, us(setting)))
        except Exception as error:  # too many registers or too much shared memory, say
            print(f"{trial}: {setting} does not run: {error}"[:300], flush=True)
    return found
