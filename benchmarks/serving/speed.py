"""Whole models of published shapes with random weights, served by vLLM, stock and with lazystate.

    PYTHONPATH=src:benchmarks:<site-packages with vLLM> python -m serving.speed Qwen3.5-4B \
        --version 0.33 --methods stock exact --out runs/speed

A row is the time of a decode step at a batch, as the engine's caller sees it, and what the GPU's
kernels take of one by purpose. Engines start side by side and are timed one after the other. Every
row is kept as soon as it is there, in OUT/speed.jsonl; `--resume` with such a file leaves out what
it has. OUT/<date>-speed.json has all rows, OUT/speed-logs.tgz the engines' logs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import select
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import version_of
from serving.calibration import synthetic
from serving.drive import ROOT, plugin, why
from serving.folders import shape
from serving.methods import BATCHES, CYCLE, METHODS, Load, Method
from serving.shapes import SHAPES

Row = dict[str, Any]
SHORTEST = 60  # seconds in which an engine that has started can time something


@dataclass(frozen=True)
class Job:
    """One engine: a model, a method, and the batches without a time, or without a breakdown."""

    model: str
    method: Method
    steps: tuple[int, ...]
    breakdowns: tuple[int, ...]

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.model}-{self.method.name}"


class Process:
    """A job's process: it starts, says that it is ready, and goes on when it is told to."""

    def __init__(self, job: Job, at: Path, environment: dict[str, str]) -> None:
        self.job, self.log = job, at / f"{job.name}.log"
        self._ready, theirs = os.pipe()
        command = [sys.executable, "-m", "serving.timed", f"{job.name}.spec", f"{job.name}.jsonl"]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, str(theirs)],
                cwd=at,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[theirs],
            )
        os.close(theirs)

    def started(self, seconds: float) -> bool:
        """Wait until the engine stands before its cache; False if it has ended, or is too slow."""
        found, _, _ = select.select([self._ready], [], [], max(seconds, 0))
        return bool(found and os.read(self._ready, 1))

    def go(self, seconds: float) -> str:
        """Let the engine be timed to its end or for so long; how it ended, in a word."""
        try:
            self._process.communicate(b"go\n", max(seconds, 0))
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
        code = self._process.returncode
        return f"failed with {code}" if code else "done"

    def end(self) -> None:
        """Kill what still runs."""
        self._process.kill()
        self._process.wait()
        os.close(self._ready)


def options() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=SHAPES)
    parser.add_argument("--version", choices=("0.26", "0.33"), required=True, help="vLLM's minor")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=["stock", "exact"])
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--context", type=int, default=Load.context)
    parser.add_argument("--cycles", type=int, default=Load.cycles, help=f"of {CYCLE} steps")
    parser.add_argument("--drafts", type=int, default=0, help="of n-gram lookup, a step")
    parser.add_argument("--accepted", type=float, default=1.0, help="mean tokens a step kept")
    parser.add_argument("--cache-gib", type=int, default=84, help="GiB of cache of an engine")
    parser.add_argument("--side", type=int, default=4, help="engines that start side by side")
    parser.add_argument("--limit", type=float, default=150, help="seconds of timing one engine")
    parser.add_argument("--minutes", type=float, default=9, help="time nothing after them")
    parser.add_argument("--resume", nargs="+", type=Path, default=[], help="speed.jsonl of before")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", default="unknown", help="revision measured")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def key(row: Row) -> tuple[Any, ...]:
    """What a row is of."""
    return tuple(row[x] for x in ("bench", "vllm", "model", "method", "tokens", "batch"))


def jobs(
    arguments: argparse.Namespace, load: Load, folders: dict[str, Path], known: Sequence[Row]
) -> tuple[list[Job], dict[str, str]]:
    """What is to be timed, and by name what is not, with the reasons."""
    todo, refused = [], {}
    have = {key(row) for row in known}
    for model in arguments.models:
        for method in (METHODS[name] for name in arguments.methods):
            config = json.loads((folders[model] / "config.json").read_text("utf8"))
            classes = tuple(config["architectures"])
            reasons = method.refused(arguments.version, classes, load.drafts)
            given = facts(arguments, load, model, method)
            left = (
                tuple(b for b in load.batches if key(given | {"bench": x, "batch": b}) not in have)
                for x in ("serving_step", "serving_breakdown")
            )
            job = Job(model, method, *left)
            if reasons:
                refused[job.name] = "; ".join(reasons)
            elif job.steps or job.breakdowns:
                todo.append(job)
    return todo, refused


def facts(arguments: argparse.Namespace, load: Load, model: str, method: Method) -> Row:
    """What all rows of a job say."""
    found = version_of(arguments.version)
    assert found is not None
    chosen = None if method.options is None else Options(**method.options)
    return {
        "model": model,
        "vllm": found.tested,
        "impl": method.impl,
        "method": method.name,
        "view": (chosen and chosen.view) or "full",
        "checkpoint": (chosen and chosen.checkpoint) or "fp32",
        "window": chosen and chosen.window,
        "phases": "mixed",
        "tokens": load.tokens,
        "longest": load.longest,
        "commit": arguments.commit,
    }


def calibration(folder: Path) -> Path:
    """Where a model's synthetic calibration lies: beside its folder, which vLLM reads."""
    return folder.with_name(f"{folder.name}-synthetic.safetensors")


def specification(arguments: argparse.Namespace, load: Load, job: Job, folder: Path) -> Row:
    """What timed.py reads."""
    settings = load.settings(job.method, arguments.cache_gib << 30)
    if "vision_config" in json.loads((folder / "config.json").read_text("utf8")):
        settings["language_model_only"] = True
    return {
        "folder": str(folder),
        "settings": settings,
        "options": job.method.given(str(calibration(folder))),
        "load": load.as_json(),
        "steps": job.steps,
        "breakdowns": job.breakdowns,
        "row": facts(arguments, load, job.model, job.method),
    }


def side_by_side(processes: Sequence[Process], end: float, limit: float) -> dict[str, str]:
    """Start all, time one after the other; how each ended."""
    ended = {}
    try:
        ready = [each for each in processes if each.started(end - SHORTEST - time.monotonic())]
        for each in processes:
            left = end - time.monotonic()
            if each not in ready:
                ended[each.job.name] = "did not start"
            elif left < SHORTEST:
                ended[each.job.name] = "no time left"
            else:
                ended[each.job.name] = each.go(min(limit, left))
            each.end()
            word = ended[each.job.name]
            print(f"{each.job.name}: {word}", flush=True)
            if word != "done":
                print(f"    {why(each.log)}", flush=True)
    finally:
        for each in processes:
            if each.job.name not in ended:
                each.end()
    return ended


def joined(rows: Sequence[Row]) -> list[Row]:
    """The last row of each kind; steps have the stock engine's of the same beside them."""
    last = {key(row): row for row in rows}
    return [_beside(row, last.get(key(row | {"method": "stock"}), {})) for row in last.values()]


def _beside(row: Row, stock: Row) -> Row:
    if row["bench"] != "serving_step":
        return row
    return row | {f"conventional_{name}": stock.get(name) for name in ("us", "tokens_per_s")}


def lines(path: Path) -> list[Row]:
    """Rows of a file, none if there is no file."""
    text = path.read_text("utf8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def table(rows: Sequence[Row]) -> str:
    """Times for a reader of a terminal."""
    shown = []
    for row in rows:
        if row["bench"] == "serving_step":
            base = row["conventional_tokens_per_s"]
            gain = f"{row['tokens_per_s'] / base:.2f}x" if base else "-"
            shown.append(
                f"{row['vllm']:8}{row['model']:20}{row['method']:16}T {row['tokens']} B "
                f"{row['batch']:4} {row['us']:9.0f} us {gain:>6} {row['tokens_per_s']:9.0f} "
                f"tokens/s, kept {row['kept']:.2f}, context {row['context']}, "
                f"fits {row['fits']:.0f}"
            )
    return "\n".join(shown)


def main() -> None:
    """Time what is not known yet; write rows after every group of engines."""
    arguments = options().parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    load = Load(
        tuple(sorted(arguments.batches)),
        arguments.context,
        arguments.cycles,
        drafts=arguments.drafts,
        accepted=arguments.accepted,
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows = [row for path in arguments.resume for row in lines(path)]
    ended: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        folders = {x: shape(x, arguments.version, at / x) for x in arguments.models}
        for model, folder in folders.items():
            synthetic(model, SHAPES[model], calibration(folder))
        todo, refused = jobs(arguments, load, folders, rows)
        own = str(plugin(at / "plugin"))
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *sys.path[1:]]
        for first in range(0, len(todo), arguments.side):
            processes = []
            for job in todo[first : first + arguments.side]:
                spec = specification(arguments, load, job, folders[job.model])
                (at / f"{job.name}.spec").write_text(json.dumps(spec), "utf8")
                mine = [own] if job.method.impl == "lazystate" else []
                path = os.pathsep.join([*mine, *paths])
                processes.append(Process(job, at, os.environ | {"PYTHONPATH": path}))
            ended |= side_by_side(processes, end, arguments.limit)
            for process in processes:
                rows += lines(at / f"{process.job.name}.jsonl")
            write(arguments, load, rows, ended, refused)
        with tarfile.open(arguments.out / "speed-logs.tgz", "w:gz") as archive:
            for file in sorted(at.iterdir()):
                if file.suffix in (".log", ".spec"):
                    archive.add(file, file.name)
    write(arguments, load, rows, ended, refused)
    print(table(joined(rows)), flush=True)


def write(
    arguments: argparse.Namespace,
    load: Load,
    rows: Sequence[Row],
    ended: dict[str, str],
    refused: dict[str, str],
) -> None:
    """The lines to resume from, and the file of all rows."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (arguments.out / "speed.jsonl").write_text(text, "utf8")
    meta = {
        "gpu": _queried("name"),
        "driver": _queried("driver_version"),
        **{name: _version(name) for name in ("torch", "triton")},
        "commit": arguments.commit,
        "date": arguments.date,
        "method": " ".join((__doc__ or "").split("\n\n    PYTHONPATH")[0].split()),
        "load": asdict(load),
        "failed": [f"{name}: {how}" for name, how in ended.items() if how != "done"],
        "refused": [f"{name}: {reason}" for name, reason in refused.items()],
    }
    path = arguments.out / f"{arguments.date}-speed.json"
    path.write_text(json.dumps({"meta": meta, "rows": joined(rows)}, indent=1) + "\n", "utf8")


def _queried(what: str) -> str:
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip().split("\n")[0] or "unknown"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    main()
