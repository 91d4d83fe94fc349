"""Write the README's table of `lazystate compare` from the numbers that benchmarks/compare.py kept.

With `--check`, only say whether the README is up to date.
"""

from __future__ import annotations

import json
import sys

from page import ROOT, write

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


def main() -> None:
    """Write or check."""
    record = json.loads(RESULTS.read_text("utf8"))
    write(ROOT / "README.md", "compare", table(record), check="--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
