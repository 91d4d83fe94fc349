"""Is what is timed right? Some of its rows, against the PyTorch backend, at its own batch size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels.cases import Case, sketch
from kernels.runs import Plain, Replay, rows_of
from lazystate import StateCache
from lazystate.ops.triton.launch import Launch
from timing import DEVICE

SAMPLE = 16  # rows that are followed
# Outputs are rounded to eight bits, corrections to eleven; a wrong row is off by 1.
BOUND = 1e-2


def difference(outs: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference relative to the largest expected entry; NaN if anything is NaN."""
    one, other = torch.stack(outs).float(), torch.stack(expected).float()
    return float((one - other).abs().max() / other.abs().max())


def replay_error(run: Replay, launch: Launch | None = None) -> float:
    """Error of the first layer's outputs over the first cycle and a step: every row has folded.

    The rows that are followed are copied into a cache of the PyTorch backend, records and phases
    included, which takes the same steps. They keep their slots, on which the bits of stochastic
    rounding depend.
    """
    case = run.case
    rows = picked(case.batch)
    twin = StateCache(
        case.spec,
        case.batch,
        window=case.window,
        max_tokens=case.tokens,
        checkpoint=case.checkpoint,
        view=sketch(case, 1) if case.rank else case.view,
        device=DEVICE,
        backend="torch",
    )
    slots = run.rows[rows]
    held = run.cache.export(slots)
    twin.import_(slots, {name: held[name] for name in twin.export(slots)})
    step = rows_of(run.steps[0], rows)
    kept = None if run.kept is None else run.kept[rows]
    outs, expected = [], []
    for _ in range(case.period + 1):
        outs.append(run.step(launch)[rows])
        ticket = twin.begin(slots, case.tokens)
        expected.append(twin.step(ticket, 0, *step))
        twin.commit(ticket, kept)
    return difference(outs, expected)


def repeats(run: Replay, launch: Launch | None, times: int) -> bool:
    """Whether a cycle from the same records gives the same bits, outputs and states, every time."""
    held = run.cache.export(run.rows)
    results = []
    for _ in range(times):
        run.cache.import_(run.rows, held)
        outs = [run.step(launch) for _ in range(run.case.period)]
        results.append([*outs, *run.cache.materialize(run.rows)])
    return all(
        torch.equal(one, first)
        for found in results[1:]
        for one, first in zip(found, results[0], strict=True)
    )


def plain_error(run: Plain, tile: dict[str, Any]) -> float:
    """Error of one conventional step, outputs and the last state; the pool is changed by it."""
    case = run.case
    rows = picked(case.batch)
    twin = fresh(case, run.pools[0][run.source[rows]])
    slots = torch.arange(len(rows), device=DEVICE)
    out = run.step(tile)[rows]
    ticket = twin.begin(slots, case.tokens)
    expected = twin.step(ticket, 0, *rows_of(run.steps[0], rows))
    twin.commit(ticket)
    last = run.target[rows] if run.target.dim() == 1 else run.target[rows, -1]
    (state,) = twin.materialize(slots)
    return max(difference([out], [expected]), difference([run.pools[0][last]], [state]))


def fresh(case: Case, states: Tensor) -> StateCache:
    """A cache of the PyTorch backend that has loaded the states [n, HV, V, K] of a layer."""
    twin = StateCache(
        case.spec,
        len(states),
        window=max(case.window, case.tokens),
        max_tokens=case.tokens,
        checkpoint=case.checkpoint,
        device=DEVICE,
        backend="torch",
    )
    twin.load(torch.arange(len(states), device=DEVICE), [states])
    return twin


def picked(batch: int) -> Tensor:
    """Batch rows that are followed, spread over the batch."""
    return torch.linspace(0, batch - 1, min(SAMPLE, batch), device=DEVICE).long()
