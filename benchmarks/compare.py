"""Run `lazystate compare` and keep its numbers, with versions, in benchmarks/results/cpu/."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch
import transformers

RESULTS = Path(__file__).parent / "results" / "cpu" / "compare.json"


def main() -> None:
    """Run it with the options of the command line, e.g. `--repeats 9`."""
    command = [sys.executable, "-m", "lazystate", "compare", "--json", *sys.argv[1:]]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if not done.stdout:
        raise SystemExit(done.returncode)
    record = {
        "command": " ".join(["lazystate compare", *sys.argv[1:]]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "results": json.loads(done.stdout),
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", "utf8")
    raise SystemExit(done.returncode)


if __name__ == "__main__":
    main()
