"""Write the README's tables from recorded numbers.

One is of `lazystate compare` (benchmarks/compare.py), one, where the README has a place for it, of
the kernels' speed-up (benchmarks/run.py).

With `--check`, only say whether the README is up to date.
"""

from __future__ import annotations

import json
import sys

from page import ROOT, write
from tables import gain, markdown, newest, source

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "compare.json"
HEAD = """\
| model | method | drafts | same tokens | max logit difference | state bytes a token | \
planner | of plain | tokens/s | tokens a step |
|---|---|---|---|---|---|---|---|---|---|
"""


def table(record: dict) -> str:
    """The table in Markdown."""
    lines = [HEAD]
    plain: dict[str, float] = {}
    for row in record["results"]:
        moved = row["state_bytes_per_token"]
        plain.setdefault(row["model"], moved)
        cells = [
            row["model"],
            row["method"],
            row["draft"],
            "yes" if row["identical"] else "**no**",
            f"{row['max_logit_diff']:.0e}" if row["max_logit_diff"] else "0",
            f"{moved:,.0f}",
            f"{row['predicted_state_bytes_per_token']:,.0f}",
            f"{moved / plain[row['model']]:.2f}",
            f"{row['tokens_per_s']:.0f}",
            f"{row['acceptance']:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |\n")
    lines.append(
        f"\n`{record['command']}` on a CPU, float32, torch {record['torch']}, transformers "
        f"{record['transformers']}.\n"
    )
    return "".join(lines)


def speed() -> str:
    """How many times faster than the conventional kernel replay is, layers over batch sizes."""
    record = newest("decode")
    if record is None:
        return "Not measured yet.\n"
    rows = {(r["layer"], r["batch"], r["method"]): r for r in record["rows"]}
    batches = sorted({batch for _, batch, _ in rows})
    lines = [
        [
            layer,
            *(gain(rows.get((layer, b, "plain")), rows.get((layer, b, "replay"))) for b in batches),
        ]
        for layer in dict.fromkeys(row["layer"] for row in record["rows"])
    ]
    return markdown(["layer", *(f"B = {b}" for b in batches)], lines) + source(record["meta"])


def main() -> None:
    """Write or check."""
    check, path = "--check" in sys.argv[1:], ROOT / "README.md"
    write(path, "compare", table(json.loads(RESULTS.read_text("utf8"))), check=check)
    if "<!-- speed: begin -->" in path.read_text("utf8"):
        write(path, "speed", speed(), check=check)


if __name__ == "__main__":
    main()
