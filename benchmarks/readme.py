"""Write the README's table of `lazystate compare` from the numbers that benchmarks/compare.py kept.

With `--check`, only say whether the README is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "compare.json"
BEGIN, END = "<!-- compare: begin -->\n", "<!-- compare: end -->\n"
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


def filled(readme: str, record: dict) -> str:
    """The README with the table between its markers replaced."""
    before, rest = readme.split(BEGIN)
    return before + BEGIN + table(record) + END + rest.split(END)[1]


def main() -> None:
    """Write or check."""
    readme = README.read_text("utf8")
    new = filled(readme, json.loads(RESULTS.read_text("utf8")))
    if "--check" not in sys.argv[1:]:
        README.write_text(new, "utf8")
    elif new != readme:
        raise SystemExit("README.md is behind its numbers: run python benchmarks/readme.py")


if __name__ == "__main__":
    main()
