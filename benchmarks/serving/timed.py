"""One engine's decode steps, timed: `python -m serving.timed SPEC.json OUT.jsonl READY`.

speed.py starts it. READY is the number of a pipe: a byte in it says that the model is loaded and
compiled. The cache is taken, and anything timed, only after a line on standard input, so that
several engines can start side by side and be timed one by one.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from serving.engine import ENVIRONMENT, Engine
from serving.kernels import grouped, largest
from serving.methods import CYCLE, Load

STUCK = 64  # steps without a new request's first token, after which no more are taken to fit


class Timed:
    """Requests that decode without end: more and more of them, or fewer."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.lengths: dict[str, int] = {}  # tokens that each request has by now
        self.prompts: dict[str, int] = {}

    def grow(self, batch: int, load: Load) -> bool:
        """Add requests up to a batch, step until all decode; False, without them, if that fails."""
        before, preempted = len(self.lengths), self.engine.preemptions
        for row in range(before, batch):
            pick = random.Random(row)
            phrase = [pick.randrange(3, 30_000) for _ in range(64)]  # n-grams find their drafts
            prompt = (phrase * (load.prompt // 64 + 1))[: load.prompt]
            self.engine.add(f"{row}", prompt, load.longest - load.prompt)
            self.prompts[f"{row}"] = self.lengths[f"{row}"] = load.prompt
        idle = 0
        while idle < STUCK and self.engine.preemptions == preempted:
            first = self.decoding()
            if first == batch:
                return True
            self.step()
            idle = 0 if self.decoding() > first else idle + 1
        self.keep(list(self.lengths)[:before])
        if before:
            self.run(STUCK)  # what was preempted comes back
        return False

    def decoding(self) -> int:
        """Requests that have a token of their own."""
        return sum(self.lengths[name] > self.prompts[name] for name in self.lengths)

    def shrink(self, batch: int) -> None:
        """End all but a batch of requests, evenly spaced, so that their phases stay mixed."""
        names = list(self.lengths)
        self.keep([names[row * len(names) // batch] for row in range(batch)])

    def keep(self, names: Sequence[str]) -> None:
        """End all other requests."""
        ended = set(self.lengths) - set(names)
        self.engine.abort(sorted(ended))
        for name in ended:
            del self.lengths[name], self.prompts[name]

    def step(self) -> int:
        """One step; its new tokens."""
        new = 0
        for name, count in self.engine.step():
            if name in self.lengths:
                self.lengths[name] += count
                new += count
        return new

    def run(self, steps: int) -> tuple[float, int]:
        """Seconds and tokens of some steps."""
        begun = time.perf_counter()
        tokens = sum(self.step() for _ in range(steps))
        return time.perf_counter() - begun, tokens


def step_row(timed: Timed, load: Load) -> dict[str, Any]:
    """Cycles of decode steps against the clock."""
    timed.run(load.settle)
    context = statistics.mean(timed.lengths.values())
    cycles = [timed.run(CYCLE) for _ in range(load.cycles)]
    each = [1e6 * seconds / CYCLE for seconds, _ in cycles]
    seconds, tokens = (sum(values) for values in zip(*cycles, strict=True))
    batch = len(timed.lengths)
    return {
        "bench": "serving_step",
        "batch": batch,
        "kept": tokens / (CYCLE * load.cycles * batch),
        "context": round(context + tokens / batch / 2),
        "us": statistics.median(each),
        "us_least": min(each),
        "us_most": max(each),
        "tokens_per_s": tokens / seconds,
    }


def breakdown_row(timed: Timed) -> dict[str, Any]:
    """A cycle of decode steps under the profiler: microseconds of a step by kernels."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        timed.run(CYCLE)
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us = event.time_range.elapsed_us() / CYCLE
            times[event.name] = times.get(event.name, 0.0) + us
    return {
        "bench": "serving_breakdown",
        "batch": len(timed.lengths),
        "gpu_us": sum(times.values()),
        "groups": grouped(times),
        "kernels": largest(times),
    }


def stand_before_the_cache(ready: int) -> None:
    """Let the engine wait for its turn where it would allocate the cache."""
    from vllm.v1.executor import Executor

    stock = Executor.initialize_from_config

    def in_turn(self: Any, *given: Any, **named: Any) -> Any:
        os.write(ready, b"r")
        sys.stdin.readline()
        return stock(self, *given, **named)

    Executor.initialize_from_config = in_turn


def rows(
    timed: Timed, load: Load, steps: Sequence[int], breakdowns: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Steps of growing batches, as far as they fit, then breakdowns of shrinking ones.

    In this order, as a profiler may slow down what comes after it.
    """
    engine = timed.engine
    for batch in sorted({*steps, *breakdowns}):
        preempted = engine.preemptions
        if not timed.grow(batch, load):
            print(f"batch {batch} does not fit", flush=True)
            break
        if batch not in steps:
            continue
        row = step_row(timed, load)
        if engine.preemptions > preempted:
            print(f"batch {batch} outgrew the cache", flush=True)
            break
        yield row
    for batch in sorted(breakdowns, reverse=True):
        if batch <= len(timed.lengths):
            timed.shrink(batch)
            timed.run(load.settle)
            yield breakdown_row(timed)


def main() -> None:
    """Start the engine, write a line for every row as soon as there is one."""
    spec, out = json.loads(Path(sys.argv[1]).read_text("utf8")), Path(sys.argv[2])
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    load = Load(**{**spec["load"], "batches": tuple(spec["load"]["batches"])})
    stand_before_the_cache(int(sys.argv[3]))
    engine = Engine(Path(spec["folder"]), spec["settings"], spec["options"])
    fits = engine.fits()
    print(f"started in {engine.start_s:.0f} s; {fits:.0f} requests fit", flush=True)
    for row in rows(Timed(engine), load, spec["steps"], spec["breakdowns"]):
        with out.open("a", encoding="utf8") as file:
            file.write(json.dumps(spec["row"] | row | {"fits": fits}) + "\n")
        print(f"{row['bench']}, batch {row['batch']}: done", flush=True)


if __name__ == "__main__":
    main()
