"""Find the fastest launch settings of a GPU; writes src/lazystate/ops/tuned/<gpu>.json.

    python benchmarks/tune.py --warm 14 --minutes 8
    python benchmarks/tune.py --layers M2 --batches 256 --tokens 1 4 --set block_v=16,32 warps=1

Every combination of the values of a setting's fields is compiled and timed as benchmarks/run.py
times, only shorter. The fastest is kept if it agrees with the PyTorch backend over a fold cycle and
gives the same bits in every repeat; otherwise it is refused, by name, and the next one is tried.
Entries of a table that are not measured again stay.

    python benchmarks/tune.py --rows benchmarks/results/h200/2026-12-01-kernels.json

takes over what a run of benchmarks/run.py has timed and checked, at the settings it used, without
a GPU: the conventional kernel's times above all, which `auto` compares with.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.cases import BATCHES, LAYERS, Case
from kernels.jobs import warm
from kernels.tuning import Setting, Trial, compile_part, search, trials
from lazystate.ops.tables import shape_of, slug
from lazystate.ops.triton.launch import Launch
from page import ROOT
from run import output

TUNED = ROOT / "src" / "lazystate" / "ops" / "tuned"


def entry(trial: Trial, setting: Setting, us: float) -> dict[str, Any]:
    """A row of the table, see lazystate/ops/tables.py."""
    case = trial.case
    return {
        "method": trial.method,
        "shape": shape_of(case.spec),
        "batch": case.batch,
        "tokens": case.tokens,
        "window": case.window,
        "setting": setting,
        "us": round(us, 2),
    }


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of the rows of a run that are our kernels' steps with every token kept."""
    methods = "replay", "plain", "snapshot"
    found = []
    for row in rows:
        ours = row["bench"] in ("decode", "verify") and row["impl"] == "lazystate"
        ours = ours and row.get("gates", "prepared") == "prepared"
        if ours and row["method"] in methods and row["kept"] == row["tokens"] and row["us"]:
            case = Case(row["layer"], LAYERS[row["layer"]], row["batch"], row["tokens"])
            found.append(entry(Trial(row["method"], case, ()), row["launch"], row["us"]))
    return found


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries, the new ones in place of old ones of the same case, in a fixed order."""

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        shape = tuple(str(value) for value in one["shape"].values())
        return one["method"], shape, one["tokens"], one["window"], one["batch"]

    found = {key(one): one for one in [*old, *new]}
    return [found[each] for each in sorted(found)]


def options() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    methods = ["replay", "plain", "snapshot"]
    parser.add_argument("--methods", nargs="+", choices=methods, default=methods)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE,...")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no entry after them")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", help="revision measured, if there is no git here")
    parser.add_argument("--out", type=Path, default=TUNED, help="folder of the table")
    parser.add_argument("--rows", nargs="+", type=Path, help="results to take over, nothing else")
    parser.add_argument("--dry", metavar="I/N", help="only compile, the I-th of N parts")
    return parser


def main() -> None:
    """Compile, time, check, and write the table after every entry."""
    begun, arguments = time.monotonic(), options().parse_args()
    if arguments.rows:
        take(arguments.rows, arguments.out)
        return
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/tune.py needs a CUDA device")
    choices = parsed(arguments.set)
    todo = trials(arguments.methods, arguments.layers, arguments.batches, arguments.tokens, choices)
    if arguments.dry:
        part, parts = map(int, arguments.dry.split("/"))
        compile_part(todo, part, parts)
        return
    if arguments.warm:
        seconds = warm(Path(__file__), sys.argv[1:], arguments.warm)
        print(f"compiled in {seconds:.0f} s", flush=True)
    gpu = torch.cuda.get_device_name()
    head = {
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": arguments.date,
        "commit": arguments.commit or output("git", "rev-parse", "--short", "HEAD"),
    }
    path = arguments.out / f"{slug(gpu)}.json"
    shipped = TUNED / path.name
    old = json.loads(shipped.read_text("utf8"))["entries"] if shipped.exists() else []
    new: list[dict[str, Any]] = []
    for trial in todo:
        if time.monotonic() - begun > arguments.minutes * 60:
            print(f"no time for {trial}", flush=True)
            continue
        found = search(trial)
        torch.cuda.empty_cache()
        if found is not None:
            new.append(entry(trial, *found))
            write(path, head, merged(old, new))
    print(path)


def take(paths: Sequence[Path], out: Path) -> None:
    """Add results' entries that a table does not have to it."""
    for each in paths:
        record = json.loads(each.read_text("utf8"))
        path = out / f"{slug(record['meta']['gpu'])}.json"
        table = json.loads(path.read_text("utf8"))
        entries = merged(measured(record["rows"]), table.pop("entries"))
        write(path, table, entries)
        print(f"{path}: {len(entries)} entries")


def write(path: Path, head: dict[str, Any], entries: Sequence[dict[str, Any]]) -> None:
    """Write a table, an entry a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(f"  {json.dumps(one)}" for one in entries)
    path.write_text(
        json.dumps(head, indent=1)[:-2] + f',\n "entries": [\n{lines}\n ]\n}}\n', "utf8"
    )


def parsed(given: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """FIELD=VALUE,... as values of the fields of a launch setting.

    Raises:
        SystemExit: for a field that a setting does not have.
    """
    names, found = {field.name for field in fields(Launch)}, {}
    for each in given:
        name, _, values = each.partition("=")
        if name not in names:
            raise SystemExit(f"--set: no field {name!r}, there are {', '.join(sorted(names))}")
        found[name] = tuple(json.loads(value.lower()) for value in values.split(","))
    return found


if __name__ == "__main__":
    main()
