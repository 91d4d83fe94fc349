"""Decode and verify kernels on one GPU: `make bench`; writes benchmarks/results/<gpu>/.

Times are medians of captured graphs over whole cycles between two folds, at mixed phases (rows
spread evenly over a cycle, as in serving), through enough layers for a cold L2; folds, cursor and
commit launches are included. Some rows of every batch that is timed were followed by the PyTorch
backend in the same run, over a cycle and a step. The floor counts state bytes alone: reads at read
bandwidth, what is read and written back at copy bandwidth, both measured in the same run.

    python benchmarks/run.py --warm 14 --minutes 8                  # everything
    python benchmarks/run.py --only decode --layers M2 --batches 1 256   # a look
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.cases import BATCHES, LAYERS, Ceilings
from kernels.jobs import Report, dry, jobs, run, warm
from lazystate.ops.tables import slug
from timing import ceilings

PARTS = ("decode", "verify", "fold", "peers", "window", "drift", "ncu", "low", "gates", "sketch")


def options() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--minutes", type=float, default=60.0, help="start no job after them")
    parser.add_argument("--warm", type=int, default=0, help="processes that compile first")
    parser.add_argument("--name", default="kernels", help="of the file: <date>-<name>.json")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", help="revision measured, if there is no git here")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--dry", metavar="I/N", help="only compile, the I-th of N parts")
    return parser


def meta(arguments: argparse.Namespace, measured: Ceilings) -> dict[str, Any]:
    """Where and how the numbers were taken."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": arguments.commit or output("git", "rev-parse", "--short", "HEAD"),
        "date": arguments.date,
        "read_gbs": measured.read,
        "copy_gbs": measured.copy,
        "method": " ".join((__doc__ or "").split("\n\n    python")[0].split()),
    }


def line(row: dict[str, Any]) -> str:
    """A row as it is printed."""
    what = f"{row['bench']:7} {row['layer']:15}"
    if row["bench"] in ("drift", "ncu"):
        rest = {name: value for name, value in row.items() if name not in ("bench", "layer")}
        return what + " ".join(f"{name} {value}" for name, value in rest.items())
    us = "WRONG" if row["us"] is None else f"{row['us']:.1f} us"
    ratio = f"{row['ratio']:.2f} of floor" if row["ratio"] else ""
    both = row["us"] and row["conventional_us"]
    gain = f"{row['conventional_us'] / row['us']:.2f}x" if both else ""
    case = (
        f"B {row['batch']:4} T {row['tokens']:2} kept {row['kept']:2} L {row['window'] or '-':>2}"
    )
    if row.get("gates", "prepared") != "prepared":
        what += f"{row['gates']} fused "
    if row["view"] == "sketch":
        what += f"{row['checkpoint']:6}{row['map']:8}rank {row['rank']:2} "
    if row["bench"] == "low":
        what += f"{row['checkpoint']:6}{row['view']:6}"
    return (
        f"{what}{row['impl']:10}{row['method']:9}{case} {us:>11} {ratio:14} {gain:6} "
        f"error {row['error']:.1e} {row.get('launch', '')}"
    )


def main() -> None:
    """Measure, print a line a row, write the JSON after every row."""
    begun = time.monotonic()
    arguments = options().parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/run.py needs a CUDA device: on a CPU, run `make demo`")
    todo = jobs(arguments.only, arguments.layers, arguments.batches)
    if arguments.dry:
        part, parts = map(int, arguments.dry.split("/"))
        dry(todo, part, parts)
        return
    if arguments.warm:
        seconds = warm(Path(__file__), sys.argv[1:], arguments.warm)
        print(f"compiled in {seconds:.0f} s", flush=True)
    measured = Ceilings(*ceilings())
    torch.cuda.empty_cache()
    print(f"read {measured.read:.0f} GB/s, copy {measured.copy:.0f} GB/s", flush=True)
    result = {"meta": meta(arguments, measured), "rows": []}
    folder = arguments.out / slug(torch.cuda.get_device_name())
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{arguments.date}-{arguments.name}.json"

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        print(line(row), flush=True)
        path.write_text(json.dumps(result, indent=1) + "\n", "utf8")

    report = run(todo, measured, begun + arguments.minutes * 60, keep)
    result["meta"] |= asdict(report)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf8")
    _end(path, report, result["rows"])


def _end(path: Path, report: Report, rows: list[dict[str, Any]]) -> None:
    print(f"{path}\nskipped: {report.skipped or 'nothing'}\nfailed: {report.failed or 'nothing'}")
    wrong = sum("us" in row and row["us"] is None for row in rows)
    if wrong or report.failed:
        raise SystemExit(f"{wrong} kernels gave wrong outputs, {len(report.failed)} jobs failed")


def output(*command: str) -> str:
    """What a command prints, "unknown" where it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
