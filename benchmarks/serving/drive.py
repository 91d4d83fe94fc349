"""Serve the shipped models with vLLM, stock and with lazystate, and compare their tokens.

    PYTHONPATH=src:benchmarks:<site-packages with vLLM> python -m serving.drive mamba2 gdn \
        --version 0.33 --engines stock lazystate --out runs/serving

One engine a process, several side by side. Every process has a time limit; what it had written by
then counts. OUT/<date>-serving.json has the rows, OUT/serving.tgz raw tokens and logs.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.cases import Case, cases
from serving.folders import CONVERT, shipped
from serving.judge import rows, table

ROOT = Path(__file__).parents[2]
CACHE_BYTES = 2 << 30
ENGINES = ("stock", "lazystate")


@dataclass(frozen=True)
class Job:
    """One process: a model, an engine, a case."""

    model: str
    engine: str
    case: Case

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.model}-{self.engine}-{self.case.name}"


def options() -> argparse.ArgumentParser:
    """What can be chosen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("models", nargs="+", choices=CONVERT)
    parser.add_argument("--version", choices=("0.26", "0.33"), required=True, help="vLLM's minor")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument(
        "--cases", nargs="+", help="of serving/cases.py, or views, ngram, prefix; default: all"
    )
    parser.add_argument("--lazystate", default="{}", help="its options, as JSON")
    parser.add_argument("--jobs", type=int, default=8, help="engines side by side")
    parser.add_argument("--limit", type=float, default=280, help="seconds of one process")
    parser.add_argument(
        "--minutes", type=float, default=9, help="start nothing that may outlast it"
    )
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    parser.add_argument("--commit", default="unknown", help="revision measured")
    parser.add_argument("--out", type=Path, required=True)
    return parser


def plugin(into: Path) -> Path:
    """A folder for PYTHONPATH that tells vLLM of lazystate's entry point, without an installation.

    Raises:
        SystemExit: if this revision has no plugin.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    points = project.get("entry-points", {}).get("vllm.general_plugins")
    if not points:
        raise SystemExit("this revision has no vLLM plugin: --engines stock")
    folder = into / f"lazystate-{project['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = {target}" for name, target in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *lines, ""]))
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: lazystate\nVersion: {project['version']}\n"
    )
    return into


def specification(
    job: Job, version: str, folder: Path, lazystate: dict[str, Any]
) -> dict[str, Any]:
    """What run_case.py reads."""
    settings = job.case.settings(job.model) | {"kv_cache_memory_bytes": CACHE_BYTES}
    if job.model != "kda":  # whose state is FP32 whatever is said
        settings["mamba_ssm_cache_dtype"] = "float32"
    if job.case.caching and version == "0.26":  # which would keep states inside of blocks as well
        settings["mamba_cache_mode"] = "align"
    if (job.model, version) == ("gdn", "0.26"):  # inside a model with a vision tower
        settings["language_model_only"] = True
    return {
        "model": job.model,
        "engine": job.engine,
        "folder": str(folder),
        "case": job.case.as_json(),
        "settings": settings,
        "options": lazystate | (job.case.options or {}) if job.engine == "lazystate" else None,
    }


def run(job: Job, spec: dict[str, Any], at: Path, end: float, limit: float, path: str) -> str:
    """Run one process to its end or limit; how it ended, in a word."""
    seconds = min(limit, end - time.monotonic())
    if seconds < 45:
        return "not started"
    (at / f"{job.name}.spec").write_text(json.dumps(spec), "utf8")
    command = [sys.executable, "-m", "serving.run_case", f"{job.name}.spec", f"{job.name}.json"]
    environment = os.environ | {"PYTHONPATH": path}
    with (at / f"{job.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=at, env=environment, stdout=log, stderr=log, timeout=seconds
            )
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s"
    return "done" if not done.returncode else f"failed with {done.returncode}"


def asked(case: Case, names: Sequence[str] | None) -> bool:
    """Whether a case is among those named; "views" names all that begin with "views-"."""
    return not names or not {case.name, case.name.split("-")[0]}.isdisjoint(names)


def possible(engine: str, case: Case, version: str) -> bool:
    """Whether an engine takes a case: lazystate has views of its own, and refuses drafts together
    with prefix caching in vLLM's first runner, which is 0.26's.
    """
    if engine == "stock":
        return case.options is None
    return not (version == "0.26" and case.drafts and case.caching)


def why(log: Path, lines: int = 3) -> str:
    """The last errors of a log."""
    text = log.read_text("utf8", "replace").splitlines() if log.exists() else []
    errors = [line.strip()[-300:] for line in text if "Error" in line or "assert" in line.lower()]
    return "\n    ".join((errors or text)[-lines:])


def main() -> None:
    """Start all engines, then compare and write."""
    arguments = options().parse_args()
    begun = time.monotonic()
    end = begun + 60 * arguments.minutes
    jobs = [
        Job(model, engine, case)
        for model in arguments.models
        for case in cases(model)
        for engine in arguments.engines
        if asked(case, arguments.cases) and possible(engine, case, arguments.version)
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        folders = {m: shipped(m, arguments.version, at / m) for m in arguments.models}
        own = [str(plugin(at / "plugin"))] if "lazystate" in arguments.engines else []
        paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), *sys.path[1:]]
        ended: dict[str, str] = {}

        def work(job: Job) -> None:
            given = json.loads(arguments.lazystate)
            spec = specification(job, arguments.version, folders[job.model], given)
            path = os.pathsep.join([*(own if job.engine == "lazystate" else []), *paths])
            ended[job.name] = run(job, spec, at, end, arguments.limit, path)
            print(f"{time.monotonic() - begun:5.0f} s  {job.name}: {ended[job.name]}", flush=True)
            if ended[job.name] != "done":
                print(f"    {why(at / f'{job.name}.log')}", flush=True)

        with ThreadPoolExecutor(arguments.jobs) as pool:
            list(pool.map(work, jobs))
        files = [at / f"{job.name}.json" for job in jobs]
        records = [json.loads(file.read_text("utf8")) for file in files if file.exists()]
        found = rows(records)
        print(table(found), flush=True)
        write(arguments, records, found, ended)
        with tarfile.open(arguments.out / "serving.tgz", "w:gz") as archive:
            for file in sorted(at.iterdir()):
                if file.suffix in (".json", ".log", ".spec"):
                    archive.add(file, file.name)


def write(
    arguments: argparse.Namespace,
    records: list[dict[str, Any]],
    found: list[dict[str, Any]],
    ended: dict[str, str],
) -> None:
    """The file of rows."""
    first = records[0] if records else {}
    meta = {
        **{name: first.get(name) for name in ("gpu", "torch", "vllm")},
        "commit": arguments.commit,
        "date": arguments.date,
        "method": " ".join((__doc__ or "").split("\n\n    PYTHONPATH")[0].split()),
        "failed": [f"{name}: {how}" for name, how in ended.items() if how != "done"],
    }
    path = arguments.out / f"{arguments.date}-serving.json"
    path.write_text(json.dumps({"meta": meta, "rows": found}, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
