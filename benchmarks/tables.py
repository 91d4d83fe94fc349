"""Write the tables of docs/measured.md from benchmarks/results/<gpu>/*.json.

With `--check`, only say whether the page is up to date. A table is made from the newest file that
has rows of its kind, so that parts can be measured again on their own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from page import ROOT, write

RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]
Record = dict[str, Any]
NOTHING = "Not measured yet.\n"


def newest(bench: str, impl: str | None = "lazystate", folder: Path = RESULTS) -> Record | None:
    """The newest file's record with its rows of one kind, of prepared inputs, or None.

    impl: whose; None for everybody's.
    """
    for path in sorted(folder.glob("*/*.json"), key=lambda p: p.name, reverse=True):
        record = json.loads(path.read_text("utf8"))
        rows = [
            row
            for row in record.get("rows", ())
            if row.get("bench") == bench
            and (impl is None or row.get("impl", impl) == impl)
            and row.get("gates", "prepared") == "prepared"
        ]
        if rows:
            return {"meta": record["meta"], "rows": rows}
    return None


def markdown(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A table in Markdown."""
    every = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in every)


def source(meta: Record) -> str:
    """Where numbers are from, in one line."""
    speeds = ""
    if meta.get("read_gbs"):
        speeds = (
            f"; in that run a plain read reached {meta['read_gbs']:,.0f} GB/s and a copy "
            f"{meta['copy_gbs']:,.0f} GB/s"
        )
    return (
        f"\n{meta['gpu']}, torch {meta['torch']}, triton {meta['triton']}, revision "
        f"{meta['commit']}, {meta['date']}{speeds}.\n"
    )


def us(row: Row | None) -> str:
    """A time, or that the kernel was wrong."""
    if row is None:
        return "-"
    return "wrong" if row["us"] is None else f"{row['us']:.1f}"


def of_floor(row: Row | None) -> str:
    """A time as a multiple of its floor."""
    return f"{row['us'] / row['floor_us']:.2f}" if row and row["us"] and row["floor_us"] else "-"


def gain(slow: Row | None, fast: Row | None) -> str:
    """How many times faster."""
    return f"{slow['us'] / fast['us']:.2f}" if slow and fast and slow["us"] and fast["us"] else "-"


def decode() -> str:
    """Standard decoding over batch sizes."""
    record = newest("decode")
    if record is None:
        return NOTHING
    cases: dict[tuple[str, int], dict[str, Row]] = {}
    for row in record["rows"]:
        cases.setdefault((row["layer"], row["batch"]), {})[row["method"]] = row
    lines = []
    for (layer, batch), rows in sorted(cases.items(), key=_by_layer):
        plain, replay = rows.get("plain"), rows.get("replay")
        numbers = us(plain), of_floor(plain), us(replay), of_floor(replay), gain(plain, replay)
        lines.append((layer, batch, *numbers))
    head = ("layer", "B", "conventional, us", "of its floor", "replay, us", "of its floor")
    return markdown((*head, "speed-up"), lines) + source(record["meta"])


def verify() -> str:
    """Verification of T tokens, all accepted and all rejected."""
    record = newest("verify")
    if record is None:
        return NOTHING
    cases: dict[tuple[str, int], dict[str, Row]] = {}
    for row in record["rows"]:
        name = "snapshot" if row["method"] == "snapshot" else f"replay {row['kept']}"
        cases.setdefault((row["layer"], row["tokens"]), {})[name] = row
    lines = []
    for (layer, tokens), rows in sorted(cases.items(), key=_by_layer):
        snapshot = rows.get("snapshot")
        accepted, rejected = rows.get(f"replay {tokens}"), rows.get("replay 1")
        numbers: list[str] = [us(snapshot)]
        for row in (accepted, rejected):
            numbers += [us(row), of_floor(row), gain(snapshot, row)]
        lines.append((layer, tokens, *numbers))
    head = ["layer", "T", "snapshots, us"]
    for name in ("all accepted", "all rejected"):
        head += [f"{name}, us", "of its floor", "speed-up"]
    batch = record["rows"][0]["batch"]
    return markdown(head, lines) + f"\nB = {batch}. " + source(record["meta"]).lstrip("\n")


def windows() -> str:
    """Replay over window lengths."""
    record = newest("window")
    if record is None:
        return NOTHING
    cases: dict[tuple[str, int], dict[int, Row]] = {}
    for row in record["rows"]:
        cases.setdefault((row["layer"], row["batch"]), {})[row["window"]] = row
    lengths = sorted({row["window"] for row in record["rows"]})
    lines = []
    for (layer, batch), rows in sorted(cases.items(), key=_by_layer):
        cells = [f"{us(rows.get(n))} ({of_floor(rows.get(n))})" for n in lengths]
        lines.append((layer, batch, *cells))
    return markdown(["layer", "B", *(f"L = {n}" for n in lengths)], lines) + source(record["meta"])


def folds() -> str:
    """A step that folds everything and one that folds nothing."""
    fold, read = newest("fold"), newest("read")
    if fold is None or read is None:
        return NOTHING
    others = {(row["layer"], row["batch"]): row for row in read["rows"]}
    lines = []
    for row in fold["rows"]:
        other = others.get((row["layer"], row["batch"]))
        numbers = us(other), of_floor(other), us(row), of_floor(row)
        lines.append((row["layer"], row["batch"], *numbers))
    head = ("layer", "B", "no row folds, us", "of its floor", "all fold, us", "of its floor")
    return markdown(head, lines) + source(fold["meta"])


def peers() -> str:
    """The published kernels in the same run."""
    decode, verify = newest("decode", "vllm"), newest("verify", "vllm")
    if decode is None:
        return NOTHING
    ours = {}
    for bench in ("decode", "verify"):
        record = newest(bench)
        for row in record["rows"] if record else ():
            if row["kept"] == row["tokens"]:
                ours[row["layer"], row["batch"], row["tokens"], row["method"]] = row
    lines = []
    for row in [*decode["rows"], *(verify["rows"] if verify else ())]:
        case = row["layer"], row["batch"], row["tokens"]
        same, replay = ours.get((*case, row["method"])), ours.get((*case, "replay"))
        numbers = us(row), of_floor(row), us(same), us(replay), gain(row, replay)
        lines.append((*case, f"{row['method']}, {row['launch']}", *numbers))
    head = ("layer", "B", "T", "vLLM's kernel, setting", "us", "of its floor", "the same, ours")
    return markdown((*head, "our replay", "times faster"), lines) + source(decode["meta"])


def traffic() -> str:
    """Bytes by the GPU's counters and by the planner."""
    record = newest("ncu")
    if record is None:
        return NOTHING
    names = {"plain": "conventional", "read": "replay, no fold", "fold": "replay, all fold"}
    lines = [
        (
            row["layer"],
            row["batch"],
            names[row["step"]],
            *(
                f"{row[name] / 1e6:,.0f}"
                for name in ("read", "planned_read", "written", "planned_written")
            ),
            f"{row['ratio']:.3f}",
        )
        for row in record["rows"]
    ]
    head = ("layer", "B", "step", "MB read", "planned", "MB written", "planned", "measured/planned")
    return markdown(head, lines) + source(record["meta"])


def drift() -> str:
    """State errors of the GPU's kernels against FP64."""
    record = newest("drift")
    if record is None:
        return NOTHING
    cases: dict[tuple[str, str, str], dict[str, Row]] = {}
    for row in record["rows"]:
        key = row["layer"], row["fold"], row["activation"]
        cases.setdefault(key, {})[row["checkpoint"]] = row
    stored = ("float32", "float16", "bfloat16")
    lines = []
    for (layer, fold, activation), rows in cases.items():
        cells = []
        for name in stored:
            row = rows.get(name)
            cells += ["-", "-"] if row is None else [f"{row['worst']:.1e}", f"{row['growth']:+.1%}"]
        first = rows.get("float32")
        lines.append((layer, activation, fold, *cells, f"{first['t']:+.1f}" if first else "-"))
    head = ["layer", "activation", "fold"]
    for name in ("FP32", "FP16", "BF16"):
        head += [f"{name} checkpoint: largest", "growth"]
    return markdown([*head, "t at FP32"], lines) + source(record["meta"])


TABLES: dict[str, Callable[[], str]] = {
    "kernels": decode,
    "verify": verify,
    "windows": windows,
    "folds": folds,
    "peers": peers,
    "traffic": traffic,
    "drift-gpu": drift,
}


def _by_layer(item: tuple[tuple[str, int], Any]) -> tuple[int, int]:
    (layer, number), _ = item
    return ("M1", "M2", "G1", "G2", "K1").index(layer), number


def main() -> None:
    """Write or check."""
    for name, table in TABLES.items():
        page = ROOT / "docs" / "measured.md"
        write(page, name, table(), check="--check" in sys.argv[1:])


if __name__ == "__main__":
    main()
