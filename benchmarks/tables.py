"""Write docs/measured.md's table of kernel times from benchmarks/results/<gpu>/*-kernels.json.

With `--check`, only say whether the page is up to date.
"""

from __future__ import annotations

import json
import sys

from page import ROOT, write


def table(record: dict) -> str:
    """Standard decoding, then verification, in Markdown."""
    meta = record["meta"]
    decode: dict[tuple[str, int], dict[str, dict]] = {}
    for row in record["rows"]:
        if row["bench"] == "decode":
            decode.setdefault((row["layer"], row["batch"]), {})[row["method"]] = row
    lines = [
        "| layer | B | conventional, us | of its floor | replay, us | of its floor | speed-up |\n",
        "|---|---|---|---|---|---|---|\n",
    ]
    for (layer, batch), rows in decode.items():
        plain, replay = rows["plain"], rows["replay"]
        lines.append(
            f"| {layer} | {batch} | {plain['us']:.1f} | {plain['us'] / plain['floor_us']:.2f} | "
            f"{replay['us']:.1f} | {replay['us'] / replay['floor_us']:.2f} | "
            f"{plain['us'] / replay['us']:.2f} |\n"
        )
    lines += ["\n| layer | B | T | kept | replay verify, us |\n", "|---|---|---|---|---|\n"]
    for row in record["rows"]:
        if row["bench"] == "verify":
            cells = row["layer"], row["batch"], row["tokens"], row["kept"], f"{row['us']:.1f}"
            lines.append(f"| {' | '.join(map(str, cells))} |\n")
    lines.append(
        f"\n{meta['gpu']}, torch {meta['torch']}, triton {meta['triton']}, revision "
        f"{meta['commit']}, {meta['date']}; in that run a plain read reached "
        f"{meta['read_gbs']:,.0f} GB/s and a copy {meta['copy_gbs']:,.0f} GB/s.\n"
    )
    return "".join(lines)


def main() -> None:
    """Write or check, from the newest result."""
    newest = max((ROOT / "benchmarks" / "results").glob("*/*-kernels.json"))
    record = json.loads(newest.read_text("utf8"))
    write(ROOT / "docs" / "measured.md", "kernels", table(record), check="--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
