"""What served tokens say: where they leave the stock engine's, and whether that was a near tie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]
Row = dict[str, Any]
SAME_PROMPTS = ("together", "eights", "arrivals")


def rows(records: Sequence[Record]) -> list[Row]:
    """A row for every run of every engine.

    Runs of the same prompts are compared with the stock engine's run of them all at once, at the
    same dtype; other runs with the stock engine's of the same case. Stock rows against stock rows
    say what batch sizes and schedules alone change.
    """
    found = []
    for record in records:
        for traffic, run in record["runs"].items():
            base = _reference(records, record, traffic)
            found.append(
                {
                    "bench": "serving",
                    "model": record["model"],
                    "impl": record["engine"],
                    "vllm": record["vllm"],
                    "case": record["case"]["name"],
                    "dtype": record["case"]["dtype"],
                    "traffic": traffic,
                    "requests": len(run["tokens"]),
                    "finished": sum(bool(tokens) for tokens in run["tokens"]),
                    **compare(base, run),
                    "nonfinite": sum(
                        not math.isfinite(value) for one in run["logprobs"] for value in one
                    ),
                    **{
                        name: run[name]
                        for name in (
                            "steps",
                            "seconds",
                            "tokens_a_step",
                            "preemptions",
                            "cached",
                            "blocks_kept",
                        )
                    },
                }
            )
    return found


def _reference(records: Sequence[Record], record: Record, traffic: str) -> Record | None:
    """The stock run that a run is compared with, None if it is that run or is missing."""
    stock = [one for one in records if (one["model"], one["engine"]) == (record["model"], "stock")]
    dtype = record["case"]["dtype"]
    if traffic in SAME_PROMPTS:
        first = ("bf16",) if dtype == "bfloat16" else ("exact", "eager")
        for name in first:
            for one in stock:
                run = one["runs"].get("together")
                if one["case"]["name"] == name and one["case"]["dtype"] == dtype and run:
                    return None if run is record["runs"].get(traffic) else run
        return None
    for one in stock:
        if one is not record and one["case"]["name"] == record["case"]["name"]:
            return one["runs"].get(traffic)
    return None


def compare(base: Record | None, run: Record) -> Row:
    """Where rows of tokens part, and how far logits were apart until then.

    Returns:
        same: rows that are equal to the end. first: the earliest token that differs, with mean, of
        those that part. drift: the largest difference of the chosen tokens' log-probability while
        texts are equal. margin: the largest lead of the stock engine's token over its second where
        texts part: a near tie has a lead within a few drifts. None where there is nothing to say.
    """
    if base is None:
        return dict.fromkeys(("same", "first", "mean", "drift", "margin"))
    parted, drifts, margins = [], [0.0], []
    pairs = zip(base["tokens"], run["tokens"], strict=True)
    for row, (old, new) in enumerate(pairs):
        at = _parting(old, new)
        if at is not None:
            parted.append(at)
            if base["margins"][row][at : at + 1]:
                margins.append(base["margins"][row][at])
        both = zip(base["logprobs"][row][:at], run["logprobs"][row][:at], strict=False)
        drifts += [abs(a - b) for a, b in both]
    said = any(base["logprobs"]) and any(run["logprobs"])
    return {
        "same": len(run["tokens"]) - len(parted),
        "first": min(parted, default=None),
        "mean": sum(parted) / len(parted) if parted else None,
        "drift": max(drifts) if said else None,
        "margin": max(margins, default=None),
    }


def _parting(old: Sequence[int], new: Sequence[int]) -> int | None:
    for at, (one, other) in enumerate(zip(old, new, strict=False)):
        if one != other:
            return at
    return None if len(old) == len(new) else min(len(old), len(new))


def table(found: Sequence[Row]) -> str:
    """The rows for a reader of a terminal."""
    head = (
        f"{'model':7}{'engine':10}{'case':13}{'dtype':9}{'traffic':9}{'same':>12}{'first':>6}"
        f"{'drift':>9}{'margin':>9}{'T/step':>7}{'steps':>7}{'pre':>5}{'cached':>7}{'kept':>5}{'s':>7}"
    )
    return "\n".join([head, *(_line(row) for row in found)])


def _line(row: Row) -> str:
    same = "-" if row["same"] is None else f"{row['same']}/{row['requests']}"
    first, drift, margin = (
        "-" if row[name] is None else f"{row[name]:.{digits}}"
        for name, digits in (("first", "0f"), ("drift", "1e"), ("margin", "1e"))
    )
    bad = f"  {row['nonfinite']} NOT FINITE" if row["nonfinite"] else ""
    lost = row["requests"] - row["finished"]
    return (
        f"{row['model']:7}{row['impl']:10}{row['case']:13}{row['dtype']:9}{row['traffic']:9}"
        f"{same:>12}{first:>6}{drift:>9}{margin:>9}{row['tokens_a_step']:>7.2f}{row['steps']:>7}"
        f"{row['preemptions']:>5}{row['cached']:>7}{row['blocks_kept']:>5}{row['seconds']:>7.1f}"
        f"{bad}{f'  {lost} UNFINISHED' if lost else ''}"
    )
