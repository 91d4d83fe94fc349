"""What states of few bits do to outputs: measure, keep the numbers, write docs/low_precision.md.

    python benchmarks/low_precision.py --measure decay      # the bare recurrence, on a CPU
    python benchmarks/low_precision.py --measure states windows long seeds --device cuda
    python benchmarks/low_precision.py            # tables and plots again, from the kept numbers
    python benchmarks/low_precision.py --check    # only say whether the page is up to date

Everything is measured by `lazystate evaluate`; this script runs its commands side by side, keeps
what each prints in --parts, so that a run that was cut short goes on, and makes tables and plots of
it. Without --device, the models' parts take hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from low_precision_plots import plots
from low_precision_tables import TABLES, evidence
from page import ROOT, write

FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "low_precision.md"
EVIDENCE = ROOT / "src" / "lazystate" / "recommendation.json"
MODELS = ("gdn", "kda", "mamba2")
SEEDS = (0, 1, 2, 3)

WINDOWS = ("--window 1 --window 4 --window 16 --window 32 --window 64 --tokens 256 --state fp32 "
           "--state fp8 --state nvfp4 --state fp32,fp8 --state fp32,nvfp4")  # fmt: skip
LONG = ("--tokens 7680 --state fp8 --state fp8:nearest --state nvfp4 --state nvfp4:nearest "
        "--state fp32,nvfp4 --state fp16,nvfp4")  # fmt: skip
BFLOAT16 = "--dtype bfloat16 --state fp32 --state fp16 --state fp16,fp8 --state fp16,nvfp4"
# every token folds: as many roundings as 16 times the text has at the usual window
CROSSING = ("--window 1 --tokens 1024 --state fp8 --state fp8:nearest --state nvfp4 "
            "--state nvfp4:nearest")  # fmt: skip
SEEDED = "--tokens 1024 --state fp16 --state fp8 --state nvfp4 --state fp8,nvfp4"
PARTS = {
    "decay": ["decay"],
    "long": [f"kl {model} {LONG}" for model in MODELS],
    "states": [f"kl {model} --tokens 3584" for model in MODELS],
    "windows": [f"kl {model} {WINDOWS}" for model in MODELS],
    "crossing": [f"kl {model} {CROSSING}" for model in MODELS],
    "bfloat16": [f"kl {model} {BFLOAT16}" for model in MODELS],
    "seeds": [f"kl {model} --seed {seed} {SEEDED}" for model in MODELS for seed in SEEDS],
}


def run(command: str, kept: Path) -> dict:
    """Rows and versions of `lazystate evaluate COMMAND --json`, from a file if it has run."""
    if not kept.exists():
        line = [sys.executable, "-m", "lazystate", "evaluate", *command.split(), "--json"]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        rows = [_short(row) for row in json.loads(done.stdout)]
        found = {"command": f"lazystate evaluate {command}", **_machine(command), "rows": rows}
        kept.write_text(json.dumps(found), "utf8")
        print(f"done: {command}", flush=True)
    return json.loads(kept.read_text("utf8"))


def _machine(command: str) -> dict:
    import torch
    import transformers

    cuda = "--device cuda" in command
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu, 1 thread",
    }


def _short(row: dict) -> dict:
    """Numbers to four digits: more is noise, and the file is read by people."""

    def short(value):
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return {name: short(value) for name, value in row.items()}


def measure(options: argparse.Namespace) -> None:
    """Run all commands of some parts, and put their rows into the record of the device."""
    options.parts.mkdir(parents=True, exist_ok=True)
    on = " --streams 16 --device cuda --backend torch" if options.device == "cuda" else ""
    with ThreadPoolExecutor(options.processes) as pool:
        jobs = {
            part: [
                pool.submit(
                    run,
                    command + (on if command != "decay" else ""),
                    options.parts / f"{part}-{number}.json",
                )
                for number, command in enumerate(PARTS[part])
            ]
            for part in PARTS
            if part in options.measure
        }
        found = {part: [each.result() for each in of] for part, of in jobs.items()}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.check_output(head, cwd=ROOT, text=True).strip()
    for part, each in found.items():
        device = each[0]["device"]
        slug = device.lower().removeprefix("nvidia ").replace(",", " ").split()[0]
        path = FOLDER / slug / "low_precision.json"
        record = json.loads(path.read_text("utf8")) if path.exists() else {}
        record[part] = {
            "commands": [one["command"] for one in each],
            **{name: each[0][name] for name in ("torch", "transformers", "device")},
            "commit": commit,
            "rows": [row for one in each for row in one["rows"]],
        }
        path.write_text(json.dumps(record, indent=1) + "\n", "utf8")


def kept() -> dict:
    """The parts, each from where it was measured last: a GPU's in place of a CPU's."""
    record = {}
    for folder in ("cpu", "h200"):
        path = FOLDER / folder / "low_precision.json"
        record |= json.loads(path.read_text("utf8")) if path.exists() else {}
    return record


def main() -> None:
    """Measure, write, or check."""
    parser = argparse.ArgumentParser(description="What states of few bits do to outputs.")
    parser.add_argument("--measure", nargs="+", choices=PARTS, metavar="PART", help="run anew")
    parser.add_argument("--check", action="store_true", help="only compare the page")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", type=Path, default=ROOT / "data" / "low_precision")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--commit", help="revision, where there is no git")
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    record = kept()
    for name, table in TABLES.items():
        write(Path(PAGE), name, table(record), check=options.check)
    made = evidence(record)
    if options.check and EVIDENCE.read_text("utf8") != made:
        raise SystemExit(f"{EVIDENCE.name} is behind its numbers and must be written again")
    if not options.check:
        EVIDENCE.write_text(made, "utf8")
        plots(record)


if __name__ == "__main__":
    main()
