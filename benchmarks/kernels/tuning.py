"""The search for launch settings: which there are, how fast each is, and whether it is right."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from kernels.cases import LAYERS, Case
from kernels.checks import BOUND, plain_error, repeats, replay_error
from kernels.runs import Plain, Replay
from lazystate import LayerSpec
from lazystate.ops.triton.launch import Launch, default_launch
from timing import graph_us

Setting = dict[str, Any]
Group = dict[str, tuple[Any, ...]]
# Fields of a launch setting and their values. All combinations of a group are tried, then those of
# the next group from the best so far. Fields that a setting does not have are left out.
FEW: tuple[Group, ...] = (  # rows: one launch, as many programs as there can be
    {
        "block_v": (16, 32),
        "tiles": (1,),
        "stages": (1,),
        "warps": (1, 2),
        "fold_block_v": (0,),
        "fold_tiles": (1,),
        "fold_warps": (1,),
    },
    {"fold_block_v": (0, 16)},
)
MANY: tuple[Group, ...] = (
    {"block_v": (16, 32), "tiles": (2, 4, 5, 8), "stages": (2,), "warps": (1,)},
    {"fold_block_v": (16, 32), "fold_tiles": (1, 4, 5, 8), "fold_warps": (1,)},
)
DRAFTS: tuple[Group, ...] = (
    {"block_v": (32,), "tiles": (2, 4, 8), "stages": (2,), "warps": (1, 2)},
    {"fold_block_v": (16,), "fold_tiles": (1, 4, 8), "fold_warps": (1,)},
)
TILES: Group = {"block_v": (4, 8, 16, 32), "warps": (1, 2, 4)}
REPEATS = 10


@dataclass(frozen=True)
class Trial:
    """One entry of the table to be found.

    Attributes:
        method: replay, plain or snapshot. groups: values of fields, see `groups_of`.
    """

    method: str
    case: Case
    groups: tuple[Group, ...]

    def __str__(self) -> str:
        return f"{self.method} {self.case.layer} B {self.case.batch} T {self.case.tokens}"


def groups_of(case: Case, method: str) -> tuple[Group, ...]:
    """The values that are worth a trial for a case."""
    if method != "replay":
        return (TILES,)
    if case.batch * case.spec.heads < 8192:
        return FEW
    return MANY if case.tokens == 1 else DRAFTS


def valid(spec: LayerSpec, setting: Setting) -> bool:
    """Whether tiles are not wider than V, and a program's tiles are of whole heads or of one."""
    if setting.get("stages", 1) > setting.get("tiles", 1):
        return False
    sizes = [(setting["block_v"], setting.get("tiles", 1))]
    if setting.get("fold_block_v", 0):
        sizes.append((setting["fold_block_v"], setting["fold_tiles"]))
    elif setting.get("fold_tiles", 1) * setting.get("fold_warps", 1) > 1:
        return False
    return all(_whole(spec, *size) for size in sizes)


def _whole(spec: LayerSpec, block_v: int, tiles: int) -> bool:
    a_head = -(-spec.value_dim // block_v)
    all_tiles = a_head * (spec.group if spec.decay == "scalar" else 1)
    fits = block_v < 2 * spec.value_dim and all_tiles % tiles == 0
    return fits and (a_head % tiles == 0 or tiles % a_head == 0)


def first(trial: Trial) -> Setting:
    """The setting that the search starts from."""
    case = trial.case
    if trial.method == "replay":
        return asdict(default_launch(case.spec, case.batch, case.tokens))
    return {"block_v": 8, "warps": 1}


def candidates(trial: Trial, group: Group, start: Setting) -> list[Setting]:
    """Every valid combination of a group's values, over `start`."""
    names = [name for name in group if name in start]
    every = itertools.product(*(group[name] for name in names))
    found = [start | dict(zip(names, values, strict=True)) for values in every]
    return [each for each in found if valid(trial.case.spec, each)]


def trials(
    methods: Sequence[str],
    layers: Sequence[str],
    batches: Sequence[int],
    tokens: Sequence[int],
    chosen: Group,
) -> list[Trial]:
    """The entries to be found, large batches first, standard decoding before verification.

    chosen: values in place of those of `groups_of`.
    """
    found = []
    for count, batch, name in itertools.product(tokens, sorted(batches, reverse=True), layers):
        case = Case(name, LAYERS[name], batch, count, count)
        for method in methods:
            if (method == "plain" and count > 1) or (method == "snapshot" and count == 1):
                continue
            groups = tuple(
                {**group, **{n: chosen[n] for n in group if n in chosen}}
                for group in groups_of(case, method)
            )
            found.append(Trial(method, case, groups))
    return found


def search(trial: Trial) -> tuple[Setting, float] | None:
    """The fastest setting that passes, with its microseconds, or None where none does."""
    timing = time_replay if trial.method == "replay" else time_plain
    check = replay_passes if trial.method == "replay" else plain_passes
    best, timed = first(trial), dict[str, tuple[Setting, float]]()
    for group in trial.groups:
        new = [each for each in candidates(trial, group, best) if str(each) not in timed]
        timed |= {str(setting): (setting, us) for setting, us in timing(trial, new)}
        best = min(timed.values(), key=lambda pair: pair[1], default=(best, 0.0))[0]
    order = sorted(timed.values(), key=lambda pair: pair[1])
    for setting, us in order:
        reason = check(trial, setting)
        if not reason:
            second = f", next {order[1][1]:.1f}" if len(order) > 1 else ""
            print(f"{trial}: {us:.1f} us {setting}{second}, of {len(order)}", flush=True)
            return setting, us
        print(f"{trial}: refused {setting} at {us:.1f} us: {reason}", flush=True)
    return None


def time_replay(trial: Trial, settings: Sequence[Setting]) -> list[tuple[Setting, float]]:
    """Microseconds of one step of one layer with every setting that runs."""
    case = trial.case
    run = Replay(case, case.copies(24))
    steps = case.period if case.batch < 4 * case.period else 2  # the phases are even anyway
    run.cycle()

    def us(setting: Setting) -> float:
        graph = partial(run.cycle, Launch(**setting), steps)
        return graph_us(graph, repeats=5) / (steps * run.layers)

    return _timed(trial, settings, us)


def time_plain(trial: Trial, settings: Sequence[Setting]) -> list[tuple[Setting, float]]:
    """The same of the conventional kernel."""
    snapshots = trial.method == "snapshot"
    run = Plain(trial.case, trial.case.copies(4 if snapshots else 64), snapshots=snapshots)
    return _timed(
        trial, settings, lambda tile: graph_us(partial(run.step, tile), 5) / len(run.pools)
    )


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
        start = first(trial)
        for setting in (each for group in trial.groups for each in candidates(trial, group, start)):
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


def _timed(
    trial: Trial, settings: Sequence[Setting], us: Callable[[Setting], float]
) -> list[tuple[Setting, float]]:
    found = []
    for setting in settings:
        try:
            found.append((setting, us(setting)))
        except Exception as error:  # too many registers or too much shared memory, say
            print(f"{trial}: {setting} does not run: {error}"[:300], flush=True)
    return found
