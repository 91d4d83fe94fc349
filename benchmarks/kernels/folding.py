"""Drift of the GPU's kernels: every activation, checkpoint and fold, in one pass over the tokens.

    python benchmarks/drift.py --device cuda --warm 14

The experiment is that of benchmarks/drift.py. Layers of all kinds and activations stand in one
cache, whose window of 16 steps is one captured graph; what is compared is the checkpoint that each
fold left, with the FP64 recurrence on the same inputs, computed on the same device.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

import drift
from kernels.cases import Ceilings
from lazystate import StateCache
from lazystate.gates import Inputs
from lazystate.ops import Fold
from lazystate.ops.tables import slug
from timing import DEVICE

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32)
CHECKPOINTS = (torch.float32, torch.float16, torch.bfloat16)
Key = tuple[str, torch.dtype]
Unit = tuple[str, torch.dtype, torch.dtype]


def given(keys: Sequence[Key], tokens: int) -> dict[Key, Inputs]:
    """The inputs of each layer and activation, the same numbers before they are rounded."""
    found = {}
    for name, activation in keys:
        drawn = drift.inputs(name, 0, activation, tokens)
        moved = (None if x is None else x.to(DEVICE) for x in drawn)
        found[name, activation] = Inputs(*cast(Any, moved))
    return found


def truths(inputs: dict[Key, Inputs]) -> dict[Key, Tensor]:
    """FP64 states after every window, activations of a layer side by side as further heads."""
    found: dict[Key, Tensor] = {}
    for name in dict.fromkeys(name for name, _ in inputs):
        keys = [key for key in inputs if key[0] == name]
        parts = zip(*(inputs[key][:5] for key in keys), strict=True)
        wide = [None if x[0] is None else torch.cat([y.double() for y in x], 2) for x in parts]
        states = drift.truth(name, Inputs(*cast(Any, wide)))
        found |= zip(keys, states.split(drift.HEADS, 1), strict=True)
    return found


def checkpoints(
    inputs: dict[Key, Inputs], checkpoint: torch.dtype, fold: Fold
) -> dict[Key, Tensor]:
    """What each fold left: [windows - 1, HV, V, K] for every layer and activation."""
    specs = [drift.layer(name, activation) for name, activation in inputs]
    cache = StateCache(
        specs,
        1,
        window=drift.WINDOW,
        checkpoint=checkpoint,
        rounding="nearest",
        fold=fold,
        device=DEVICE,
        backend="triton",
    )
    slot = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    window = [
        [None if x is None else x[:, : drift.WINDOW].clone() for x in one[:5]]
        for one in inputs.values()
    ]

    def steps() -> None:
        for t in range(drift.WINDOW):
            ticket = cache.begin(slot)
            for number, parts in enumerate(window):
                own = [None if x is None else x[:, t : t + 1] for x in parts]
                cache.step(ticket, number, *cast(Any, own))
            cache.commit(ticket)

    replay = _captured(steps)
    cache.reset(slot)
    tokens = next(iter(inputs.values())).v.shape[1]
    found: list[list[Tensor]] = [[] for _ in window]
    for start in range(0, tokens, drift.WINDOW):
        for parts, one in zip(window, inputs.values(), strict=True):
            for x, every in zip(parts, one[:5], strict=True):
                if x is not None and every is not None:
                    x.copy_(every[:, start : start + drift.WINDOW])
        replay()
        if start:
            for states, pool in zip(found, cache._pools, strict=True):
                states.append(pool.checkpoint[0].clone())
    return {key: torch.stack(states) for key, states in zip(inputs, found, strict=True)}


def rows(
    names: Sequence[str] = drift.LAYERS,
    activations: Sequence[torch.dtype] = ACTIVATIONS,
    stored: Sequence[torch.dtype] = CHECKPOINTS,
    tokens: int = drift.TOKENS,
) -> Iterator[dict[str, Any]]:
    """A row for every layer, activation, checkpoint and fold; cached folds of layers with erase."""
    keys = [(name, activation) for name in names for activation in activations]
    inputs = given(keys, tokens)
    expected = truths(inputs)
    for checkpoint in stored:
        for fold in ("raw", "cached"):
            own = {k: x for k, x in inputs.items() if fold == "raw" or drift.layer(k[0]).erase}
            if not own:
                continue
            for (name, activation), states in checkpoints(own, checkpoint, fold).items():
                error = drift.relative(states, expected[name, activation][:-1])
                yield {
                    "bench": "drift",
                    "layer": name,
                    "activation": str(activation).removeprefix("torch."),
                    "checkpoint": str(checkpoint).removeprefix("torch."),
                    "fold": fold,
                    **drift.trend(error.cpu())._asdict(),
                }


def units() -> list[Unit]:
    """(layer, activation, checkpoint): what is compiled on its own."""
    return list(itertools.product(drift.LAYERS, ACTIVATIONS, CHECKPOINTS))


def compile_unit(unit: Unit) -> Iterator[dict[str, Any]]:
    """Run two windows of a unit; no rows."""
    name, activation, checkpoint = unit
    inputs = given([(name, activation)], 2 * drift.WINDOW)
    for fold in ("raw", "cached") if drift.layer(name).erase else ("raw",):
        checkpoints(inputs, checkpoint, fold)
    return iter(())


def main() -> None:
    """Measure, and write benchmarks/results/<gpu>/<date>-drift.json."""
    from kernels.jobs import warm
    from run import line, meta

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda"], required=True)
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument("--dry", metavar="I/N", help="only compile, the I-th of N parts")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", help="revision measured, if there is no git here")
    parser.add_argument("--out", type=Path, default=drift.ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if DEVICE != "cuda":
        raise SystemExit("--device cuda needs a CUDA device")
    if arguments.dry:
        part, parts = map(int, arguments.dry.split("/"))
        for unit in units()[part::parts]:
            compile_unit(unit)
        return
    if arguments.warm:
        print(f"compiled in {warm(Path(drift.__file__), sys.argv[1:], arguments.warm):.0f} s")
    about = {
        **meta(arguments, Ceilings(0.0, 0.0)),
        "method": " ".join((__doc__ or "").split()),
        "tokens": drift.TOKENS,
        "window": drift.WINDOW,
    }
    found = []
    for row in rows():
        found.append(row)
        print(line(row), flush=True)
    path = arguments.out / slug(torch.cuda.get_device_name()) / f"{arguments.date}-drift.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"meta": about, "rows": found}, indent=1) + "\n", "utf8")
    print(path)


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    """The call as a graph, after one call that compiles; without a GPU the call itself."""
    run()
    if DEVICE == "cpu":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay
