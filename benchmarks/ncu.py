"""Bytes that the kernels move, by the GPU's own counters, against the planner's (`ncu`).

    python benchmarks/ncu.py            # on a machine with ncu: M2, G2, K1, replay and plain

The program profiles itself: for each layer one conventional step, one step of rows that hold half a
window and do not fold, and one of rows that all fold, from a cold L2. A row has the bytes that DRAM
saw and those of state and records in the planner's model; inputs and outputs are not in it, and
what is still in L2 at the end (60 MB at most) was not written yet, so the batch is large.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kernels.cases import LAYERS, Case, Ceilings
from kernels.measure import tiles
from kernels.runs import Plain, Replay
from lazystate.ops.tables import slug
from lazystate.planner import Record
from page import ROOT

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
STEPS = ("plain", "read", "fold")
MARK = "spin_kernel"  # what `torch.cuda._sleep` launches
UNITS = {"byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}


def profiled(layers: Sequence[str], batch: int) -> None:
    """The program that is profiled: each step once after it was compiled, and a mark behind it."""
    for layer, step in itertools.product(layers, STEPS):
        case = Case(layer, LAYERS[layer], batch)
        run: Callable[[], object]
        if step == "plain":
            run = partial(Plain(case, 1).step, tiles(case, False)[0])
        else:
            replay = Replay(case, 1)
            replay.cycle()
            replay.together(case.window if step == "fold" else case.window // 2)
            run = replay.stand
        run()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        run()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def counted(text: str) -> list[tuple[int, int, list[str]]]:
    """(bytes read, bytes written, kernels) up to each mark in the CSV that `ncu` prints.

    Raises:
        ValueError: if there is no table, with what was printed in its place.
    """
    start = text.find('"ID"')
    if start < 0:
        raise ValueError(f"ncu printed no table of metrics: {text[-300:]!r}")
    found, kernels, launch = [], [], ""
    totals = dict.fromkeys(METRICS, 0.0)
    for row in csv.DictReader(text[start:].splitlines()):
        if MARK in row["Kernel Name"]:
            if row["ID"] != launch:
                read, written = (round(totals[name]) for name in METRICS)
                found.append((read, written, list(dict.fromkeys(kernels))))
                kernels, totals = [], dict.fromkeys(METRICS, 0.0)
            launch = row["ID"]
        elif row["Metric Name"] in totals:
            value = float(row["Metric Value"].replace(",", ""))
            totals[row["Metric Name"]] += value * UNITS[row["Metric Unit"]]
            kernels.append(row["Kernel Name"].split("(")[0])
    return found


def predicted(case: Case, step: str) -> tuple[int, int]:
    """(bytes read, bytes written) of state and records by the planner's layout."""
    record, state, batch = Record.of(case.spec), case.state_bytes, case.batch
    if step == "plain":
        return state, state
    held = case.window if step == "fold" else case.window // 2
    used = record.read + (record.raw if step == "fold" else 0)
    written = (state if step == "fold" else 0) + batch * record.total
    return state + batch * held * used, written


def rows(layers: Sequence[str], batch: int) -> Iterator[dict[str, Any]]:
    """Profile every layer and step; a row each."""
    command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--metrics", ",".join(METRICS), sys.executable, __file__]
    command += ["--profiled", "--layers", *layers, "--batch", str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = counted(done.stdout + done.stderr)
    steps = list(itertools.product(layers, STEPS))
    if len(found) != len(steps):
        raise ValueError(f"{len(steps)} steps, {len(found)} counted: {done.stderr[-300:]!r}")
    for (layer, step), (read, written, kernels) in zip(steps, found, strict=True):
        expected = predicted(Case(layer, LAYERS[layer], batch), step)
        yield {
            "bench": "ncu",
            "layer": layer,
            "batch": batch,
            "step": step,
            "kernels": kernels,
            "read": read,
            "written": written,
            "planned_read": expected[0],
            "planned_written": expected[1],
            "ratio": (read + written) / sum(expected),
        }


def main() -> None:
    """Profile, print, write benchmarks/results/<gpu>/<date>-ncu.json."""
    from run import line, meta

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=["M2", "G2", "K1"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", help="revision measured, if there is no git here")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    arguments = parser.parse_args()
    if arguments.profiled:
        profiled(arguments.layers, arguments.batch)
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/ncu.py needs a CUDA device")
    about = {**meta(arguments, Ceilings(0.0, 0.0)), "method": " ".join((__doc__ or "").split())}
    folder = arguments.out / slug(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    path, found = folder / f"{arguments.date}-ncu.json", []
    for row in rows(arguments.layers, arguments.batch):
        found.append(row)
        print(line(row), flush=True)
        path.write_text(json.dumps({"meta": about, "rows": found}, indent=1) + "\n", "utf8")
    print(path)


if __name__ == "__main__":
    main()
