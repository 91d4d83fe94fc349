"""Draw docs/plots/*.svg from benchmarks/results/<gpu>/*.json.

python benchmarks/plots.py           # those that have been measured
python benchmarks/plots.py --check   # only say whether those that exist are up to date
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterable
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from page import ROOT
from tables import Record, Row, newest

FOLDER = ROOT / "docs" / "plots"
COLOURS = {"M1": "#7fb3d5", "M2": "#1f618d", "G1": "#f0b27a", "G2": "#ca6f1e", "K1": "#2e8b57"}
PURPOSES = {
    "GEMM": "#7f8c8d",
    "linear attention": "#1f618d",
    "attention": "#ca6f1e",
    "rest": "#bfc9ca",
    "no kernel": "#f2f3f4",
}
STYLE: Any = {
    "svg.hashsalt": "lazystate",  # the same numbers give the same file
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def speedup() -> Figure | None:
    """Speed-up of replay over batch, and what the conventional kernel reaches of the bandwidth."""
    record = newest("decode")
    if record is None:
        return None
    figure, (gain, share) = plt.subplots(1, 2, figsize=(9, 3.4), width_ratios=(3, 2))
    published = newest("decode", "vllm") or {"rows": []}
    for layer, colour in COLOURS.items():
        plain, replay = (_line(record["rows"], layer, name) for name in ("plain", "replay"))
        if not plain:
            continue
        shared = sorted(plain.keys() & replay.keys())
        ratios = [plain[b]["us"] / replay[b]["us"] for b in shared]
        gain.plot(shared, ratios, "o-", color=colour, label=layer, markersize=3)
        theirs = _line(published["rows"], layer, "replay")
        both = sorted(plain.keys() & theirs.keys())
        gain.plot(both, [plain[b]["us"] / theirs[b]["us"] for b in both], ":", color=colour)
        batches = sorted(plain)
        reached = [100 * plain[b]["floor_us"] / plain[b]["us"] for b in batches]
        share.plot(batches, reached, "o-", color=colour, label=layer, markersize=3)
    gain.axhline(1, color="black", linewidth=0.8)
    dotted = "; dotted: vLLM's replay" if published["rows"] else ""
    _batch_axis(gain, f"replay, times as fast as conventional{dotted}")
    _batch_axis(share, "conventional, % of read-write bandwidth")
    share.set_ylim(0, 105)
    gain.legend(ncols=5, loc="lower right")
    return _titled(figure, record)


def window() -> Figure | None:
    """Time of a step over window lengths, with the floor."""
    record = newest("window")
    if record is None:
        return None
    batches = sorted({row["batch"] for row in record["rows"]})
    figure, axes = plt.subplots(1, len(batches), figsize=(4.5 * len(batches), 3.4), squeeze=False)
    for batch, axis in zip(batches, axes[0], strict=True):
        for layer, colour in COLOURS.items():
            rows = [r for r in record["rows"] if r["layer"] == layer and r["batch"] == batch]
            rows = sorted((r for r in rows if r["us"]), key=lambda r: r["window"])
            at = [r["window"] for r in rows]
            axis.plot(at, [r["us"] for r in rows], "o-", color=colour, label=layer, ms=3)
            axis.plot(at, [r["floor_us"] for r in rows], ":", color=colour)
        axis.set_xscale("log", base=2)
        lengths = sorted({row["window"] for row in record["rows"]})
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.set_xlabel("window L")
        axis.set_ylim(bottom=0)
        axis.set_title(f"us a step of a layer, batch {batch}; dotted: floor", fontsize=9)
    axes[0][0].legend(ncols=5)
    return _titled(figure, record)


def verify() -> Figure | None:
    """Time of a verify step over T: replay from all rejected to all accepted, and snapshots."""
    record = newest("verify")
    if record is None or not any(row["method"] == "snapshot" for row in record["rows"]):
        return None
    layers = [name for name in ("M2", "G2") if any(r["layer"] == name for r in record["rows"])]
    figure, axes = plt.subplots(1, len(layers), figsize=(4.5 * len(layers), 3.4), squeeze=False)
    for layer, axis in zip(layers, axes[0], strict=True):
        rows = [row for row in record["rows"] if row["layer"] == layer and row["us"]]
        series = {
            "snapshots": [r for r in rows if r["method"] == "snapshot"],
            "accepted": [r for r in rows if r["method"] == "replay" and r["kept"] == r["tokens"]],
            "rejected": [r for r in rows if r["method"] == "replay" and r["kept"] == 1],
        }
        points = {name: _points(found, "us") for name, found in series.items()}
        tokens = sorted(points["accepted"].keys() & points["rejected"].keys())
        low, high = ([points[name][t] for t in tokens] for name in ("rejected", "accepted"))
        axis.fill_between(tokens, low, high, color=COLOURS[layer], alpha=0.3)
        axis.plot(tokens, high, "o-", color=COLOURS[layer], label="all accepted", ms=3)
        axis.plot(tokens, low, "o--", color=COLOURS[layer], label="all rejected", ms=3)
        taken = sorted(points["snapshots"])
        axis.plot(taken, [points["snapshots"][t] for t in taken], "ks-", label="snapshots", ms=3)
        floor = _points(series["rejected"], "floor_us")
        axis.plot(sorted(floor), [floor[t] for t in sorted(floor)], "k:", label="floor, rejected")
        axis.set_yscale("log")
        axis.set_xlabel("T, tokens of a step")
        axis.set_title(f"{layer}, us a step of a layer, batch {rows[0]['batch']}", fontsize=9)
    axes[0][0].legend(loc="upper left")
    return _titled(figure, record)


def serving() -> Figure | None:
    """What a decode step of a whole model is spent on, each method at its largest batch."""
    record, steps = newest("serving_breakdown", None), newest("serving_step", None)
    if record is None or steps is None:
        return None
    walls = {_served(row): row["us"] for row in steps["rows"]}
    models = list(dict.fromkeys((row["model"], row["vllm"]) for row in record["rows"]))
    figure, axes = plt.subplots(1, len(models), figsize=(4.5 * len(models), 3.4), squeeze=False)
    for (model, version), axis in zip(models, axes[0], strict=True):
        largest: dict[str, Row] = {}
        for row in record["rows"]:
            if (row["model"], row["vllm"], row["tokens"]) == (model, version, 1):
                known = largest.setdefault(row["method"], row)
                largest[row["method"]] = max(known, row, key=lambda each: each["batch"])
        names = [f"{name}\nB = {row['batch']}" for name, row in largest.items()]
        below = [0.0] * len(names)
        for group, colour in PURPOSES.items():
            taken = [_taken(row, group, walls) / 1e3 for row in largest.values()]
            axis.bar(names, taken, 0.6, below, color=colour, label=group)
            below = [low + more for low, more in zip(below, taken, strict=True)]
        axis.set_title(f"{model}, vLLM {version}, ms a step", fontsize=9)
        axis.tick_params(axis="x", labelsize=7, rotation=20)
    axes[0][0].legend(fontsize=7)
    return _titled(figure, record)


def _served(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model", "vllm", "method", "tokens", "batch"))


def _taken(row: Row, group: str, walls: dict[tuple[Any, ...], float]) -> float:
    """Microseconds of a step that kernels of a group take, or in which none runs."""
    if group in row["groups"]:
        return row["groups"][group]
    return max(walls.get(_served(row), 0.0) - row["gpu_us"], 0.0)


PLOTS: dict[str, Callable[[], Figure | None]] = {
    "speedup": speedup,
    "window": window,
    "verify": verify,
    "serving": serving,
}
NUMBERS = {
    "speedup": (("decode", "lazystate"), ("decode", "vllm")),
    "window": (("window", "lazystate"),),
    "verify": (("verify", "lazystate"),),
    "serving": (("serving_breakdown", None), ("serving_step", None)),
}


def digest(name: str) -> str:
    """Of the records that a plot is drawn from."""
    records = [newest(*which) for which in NUMBERS[name]]
    return "numbers " + hashlib.sha256(json.dumps(records).encode()).hexdigest()[:16]


def svg(figure: Figure, description: str) -> str:
    """A figure as text."""
    file = io.StringIO()
    with matplotlib.rc_context(STYLE):
        metadata: Any = {"Date": None, "Description": description}
        figure.savefig(file, format="svg", metadata=metadata, bbox_inches="tight")
    plt.close(figure)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def main() -> None:
    """Draw or check."""
    for name, draw in PLOTS.items():
        with matplotlib.rc_context(STYLE):
            figure = draw()
        if figure is None:
            continue
        path, new = FOLDER / f"{name}.svg", svg(figure, digest(name))
        if "--check" not in sys.argv[1:]:
            FOLDER.mkdir(parents=True, exist_ok=True)
            path.write_text(new, "utf8")
        elif path.exists() and digest(name) not in path.read_text("utf8"):
            raise SystemExit(f"{path.name} is behind its numbers: run benchmarks/plots.py")


def _line(rows: Iterable[Row], layer: str, method: str) -> dict[int, Row]:
    return {r["batch"]: r for r in rows if (r["layer"], r["method"]) == (layer, method) and r["us"]}


def _points(rows: Iterable[Row], name: str) -> dict[int, float]:
    return {row["tokens"]: row[name] for row in rows}


def _batch_axis(axis: Axes, title: str) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks([2**n for n in range(10)], [str(2**n) for n in range(10)])
    axis.set_xlabel("batch")
    axis.set_title(title, fontsize=9)


def _titled(figure: Figure, record: Record) -> Figure:
    meta: dict[str, Any] = record["meta"]
    text = f"{meta['gpu']}, triton {meta['triton']}, revision {meta['commit']}, {meta['date']}"
    figure.text(0.995, 0.0, text, ha="right", va="top", fontsize=7, color="grey")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    main()
