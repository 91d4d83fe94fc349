"""Tables and plots of docs/sketch.md, from what benchmarks/sketch.py has measured.

    python benchmarks/sketch_page.py            # write the page's tables and plots
    python benchmarks/sketch_page.py --check    # only say whether the page is up to date

A whole page is of one run: a GPU's where there is one, else a CPU's. What a run lacks, the page
says it lacks.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

from low_precision import head, line, times
from page import ROOT, write

PAGE = ROOT / "docs" / "sketch.md"
RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("gdn", "kda", "mamba2")
SKETCHES = [f"sketch {rank}" for rank in (2, 4, 8, 16)]
CASTS = [f"{name} view" for name in ("int2", "int4", "nvfp4", "fp8")]
ABLATED = "sketch 4"
ABLATIONS = (
    ABLATED,
    "exact map",
    "offline map",
    "error only",
    "gradient only",
    "uniform ranks",
    "random basis",
    "low-rank state 4",
)
KEPT = (
    "sketch 8",
    "sketch 8, window 32",
    "sketch 8, window 64",
    "sketch 8, fp16 checkpoint",
    "fp8 recurrence",
    "nvfp4 recurrence",
)
LAYERS = ("Nemotron-3-Super-120B", "Qwen3.8-Flash-Next", "GLM-5.3-Flash")
NOT_YET = "Not measured yet: `python benchmarks/sketch.py`.\n"
ABSENT = "not measured"

Row = dict[str, Any]


class Evidence:
    """One run's rows by (model, part, configuration); none where nothing has been measured."""

    def __init__(self, record: dict[str, Any] | None) -> None:
        self.record = record or {}
        rows = self.record.get("runs", [])
        self.rows = {(row["model"], row["part"], row["config"]): row for row in rows}
        self.models = [model for model in MODELS if any(key[0] == model for key in self.rows)]

    def row(self, model: str, config: str, part: str = "main") -> Row | None:
        """One configuration of one model, if it was measured."""
        return self.rows.get((model, part, config))

    def of(self, config: str) -> list[Row]:
        """A configuration's rows of all models that have it."""
        found = (self.row(model, config) for model in self.models)
        return [row for row in found if row is not None]

    def kl(self, model: str, config: str) -> float | None:
        """KL at the last N, in nats; None where not measured or not finite."""
        row = self.row(model, config)
        return None if row is None else row["points"][-1]["kl"]

    def cells(self, config: str) -> list[str]:
        """KL at the last N with its standard error, a cell a model."""
        rows = (self.row(model, config) for model in self.models)
        return [ABSENT if row is None else cell(row["points"][-1]) for row in rows]

    def span(self, config: str, name: str, form: str) -> str:
        """A number of a configuration, the smallest and the largest of the models."""
        return span([row[name] for row in self.of(config)], form)

    def made(self) -> str:
        """What was run, where, and what is lacking."""
        about = self.record
        last = max(row["points"][-1]["n"] for row in self.rows.values() if row["part"] == "main")
        where = "a CPU, one thread" if about["device"] == "cpu" else about["device"]
        out = (
            f"{', '.join(self.models)}; N = {last:,}, {about['streams']} pages behind prompts of "
            f"{about['prompt']} tokens; torch {about['torch']}, transformers "
            f"{about['transformers']}, {where}, revision {about['commit']}."
        )
        if lacking := [model for model in MODELS if model not in self.models]:
            out += f" Not measured yet: {', '.join(lacking)}."
        return "\n" + out + "\n"


def cell(point: Row) -> str:
    """KL and its standard error."""
    if point["kl"] is None:
        return "not finite"
    error = point["standard_error"]
    return f"{point['kl']:.1e}" + ("" if error is None else f" ± {error:.0e}")


def span(numbers: list[float], form: str) -> str:
    """The smallest and the largest, or one where they read alike."""
    if not numbers:
        return ABSENT
    low, high = (format(pick(numbers), form) for pick in (min, max))
    return low if low == high else f"{low} to {high}"


def ranks_table(found: Evidence) -> str:
    """KL of mean ranks and of rounded copies, by the bytes that most steps read."""
    if not found.rows:
        return NOT_YET
    out = head(
        "read by most steps",
        "bytes",
        "moved, of plain",
        *(f"{model}, KL" for model in found.models),
        "same top token",
    )
    names = [name for name in ("fp32", *CASTS, *SKETCHES) if found.of(name)]
    for name in sorted(names, key=lambda each: -max(row["bytes"] for row in found.of(each))):
        top = statistics.mean(row["points"][-1]["top"] for row in found.of(name))
        moved = found.span(name, "share", ".3f")
        out += line(name, found.span(name, "bytes", ",.0f"), moved, *found.cells(name), f"{top:.1%}")
    return out + found.made()


def picture(found: Evidence) -> str:
    """The plot, where there is one."""
    return "![KL against the bytes read](images/sketch.png)\n" if found.rows else NOT_YET


def ablations_table(found: Evidence) -> str:
    """One choice changed at a time, as a factor of KL."""
    if not any(found.of(name) for name in ABLATIONS):
        return NOT_YET
    out = head("configuration", *(f"{model}, KL" for model in found.models), "times the default's")
    for name in ABLATIONS:
        ratios = []
        for model in found.models:
            one, default = found.kl(model, name), found.kl(model, ABLATED)
            if one is not None and default:
                ratios.append(one / default)
        low_high = dict.fromkeys(times(pick(ratios)) for pick in (min, max)) if ratios else [ABSENT]
        out += line(name, *found.cells(name), " to ".join(low_high))
    return out + found.made()


def kept_table(found: Evidence) -> str:
    """Windows, a narrower checkpoint, and what rounding the recurrence itself does."""
    if not any(found.of(name) for name in KEPT):
        return NOT_YET
    out = head("configuration", "moved, of plain", *(f"{model}, KL" for model in found.models))
    for name in KEPT:
        out += line(name, found.span(name, "share", ".3f"), *found.cells(name))
    return out + found.made()


def length_table(found: Evidence) -> str:
    """KL over the text: the longest run of each configuration."""
    if not found.rows:
        return NOT_YET
    named = ("fp32", ABLATED, "sketch 8", "nvfp4 view", "sketch 8, fp16 checkpoint",
             "nvfp4 recurrence")  # fmt: skip
    rows = []
    for model in found.models:
        for name in named:
            row = found.row(model, name, "long") or found.row(model, name)
            if row is not None:
                rows.append(row)
    at = sorted({point["n"] for row in rows for point in row["points"]})
    out = head("model", "configuration", *(f"N = {n:,}" for n in at))
    for row in rows:
        by = {point["n"]: cell(point) for point in row["points"]}
        out += line(row["model"], row["config"], *(by.get(n, "") for n in at))
    return out


def tasks_table(found: Evidence) -> str:
    """Facts recalled, passages copied, and when the model stopped."""
    rows = [row for row in found.rows.values() if "recall" in row]
    if not rows:
        return NOT_YET
    tasks = list(rows[0]["recall"])
    out = head("model", "configuration", *tasks, "copied", "tokens until the stop")
    for row in sorted(rows, key=lambda each: MODELS.index(each["model"])):
        shares = [*row["recall"].values(), row["copied"]]
        cells = (f"{share:.2f}" for share in shares)
        out += line(row["model"], row["config"], *cells, f"{statistics.mean(row['tokens']):.1f}")
    examples = found.record["examples"]
    return out + (
        f"\nShares of {examples} examples of a task, in contexts of {found.record['context']} "
        f"tokens, so each has a standard error of up to {0.5 / math.sqrt(examples):.2f}; the "
        f"run is the one above.\n"
    )


def prediction_table(found: Evidence) -> str:
    """Rank correlations of the error seen at folds with what follows."""
    rows = [row for row in found.rows.values() if "predicted" in row]
    if not rows:
        return NOT_YET
    columns = {
        "heads": "error, between heads",
        "windows": "error, within a head",
        "outputs": "KL of the next window",
        "recent": "the same, four folds",
    }
    out = head("model", "configuration", *columns.values())
    for row in rows:
        numbers = (row["predicted"][name] for name in columns)
        cells = ("-" if number is None else f"{number:.2f}" for number in numbers)
        out += line(row["model"], row["config"], *cells)
    return out


def costs_table(found: Evidence) -> str:
    """What sketches move and keep on published layers, by the planner; nothing is measured."""
    del found
    from lazystate import planner
    from lazystate.presets import preset
    from lazystate.sketch.traffic import sketched

    out = head("states", *LAYERS, "memory, of plain")
    listed = [("fp32", None), ("fp16", "nvfp4"), *(("fp32", rank) for rank in (16, 8, 4, 2)),
              ("fp16", 8)]  # fmt: skip
    for checkpoint, view in listed:
        cells, memory = [], []
        for layer in (preset(name).layer for name in LAYERS):
            read = sketched(layer, view) if isinstance(view, int) else view
            stored = {"checkpoint": checkpoint, "view": read}
            plain = planner.traffic(layer, "plain").total
            best = planner.best_window(layer, **stored)
            at_16, at_best = (
                planner.traffic(layer, "replay", window=window, **stored).total / plain
                for window in (16, best)
            )
            cells.append(f"{at_16:.3f}, {at_best:.3f} (L = {best})")
            room = planner.slot_bytes(layer, "replay", window=16, **stored)
            memory.append(room / planner.slot_bytes(layer, "plain"))
        name = f"{checkpoint}, sketch {view}" if isinstance(view, int) else checkpoint
        name += f", {view} view" if isinstance(view, str) else ""
        out += line(name, *cells, span(memory, ".2f"))
    return out


def layout_table(found: Evidence) -> str:
    """A head's view and its state traffic at window 16, beside the paper's layout."""
    del found
    from lazystate.sketch.traffic import PaperBytes, step_bytes, view_bytes

    shapes = {"Mamba-2, V = 64, K = 128": (64, False), "delta rule, V = K = 128": (128, True)}
    names = [f"{shape}: {what}" for shape in shapes for what in ("view", "traffic")]
    out = head("rank", *names)
    for rank in (2, 4, 8, 16):
        cells = []
        for value_dim, erase in shapes.values():
            paper = PaperBytes(128, value_dim, 16, erase)
            ours, plain = view_bytes(128, value_dim, rank), 2 * paper.state
            moved = step_bytes(ours, paper.state, 16)
            cells.append(f"{ours:,} B for {rank * paper.rank:,} B")
            cells.append(f"{plain / moved:.1f}x for {paper.reduction([rank]):.1f}x")
        out += line(rank, *cells)
    return out


TABLES = {
    "costs": costs_table,
    "layout": layout_table,
    "ranks": ranks_table,
    "picture": picture,
    "ablations": ablations_table,
    "kept": kept_table,
    "length": length_table,
    "tasks": tasks_table,
    "prediction": prediction_table,
}


def kept() -> dict[str, Any] | None:
    """The run that the page is of."""
    paths = {path.parent.name: path for path in sorted(RESULTS.glob("*/sketch.json"))}
    gpus = [path for name, path in paths.items() if name != "cpu"]
    path = gpus[0] if gpus else paths.get("cpu")
    return None if path is None else json.loads(path.read_text("utf8"))


def plot(found: Evidence) -> None:
    """KL against the bytes that most steps read: sketches and rounded copies."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found.models), 3.6), layout="constrained")
    panels = figure.subplots(1, len(found.models), squeeze=False, sharey=True)[0]
    lines = {
        "sketch, mean rank 2 to 16": (SKETCHES, "o-", "#1f618d"),
        "copy, INT2 to FP8": (CASTS, "s--", "#ca6f1e"),
    }
    for axes, model in zip(panels, found.models, strict=True):
        axes.set(title=model, xscale="log", yscale="log", xlabel="state bytes read by most steps")
        axes.grid(alpha=0.3)
        for label, (names, style, colour) in lines.items():
            rows = [row for name in names if (row := found.row(model, name)) is not None]
            ends = [row["points"][-1] for row in rows]
            axes.errorbar(
                [row["bytes"] for row in rows],
                [math.nan if end["kl"] is None else end["kl"] for end in ends],
                yerr=[end["standard_error"] or 0 for end in ends],
                fmt=style,
                color=colour,
                label=label,
                capsize=2,
            )
    panels[0].set_ylabel("KL from FP32 states, nats")
    panels[0].legend(frameon=False, fontsize=8)
    path = Path(PAGE).parent / "images" / "sketch.png"
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description="Tables and plots of docs/sketch.md.")
    parser.add_argument("--check", action="store_true", help="only compare the page")
    options = parser.parse_args()
    found = Evidence(kept())
    for name, table in TABLES.items():
        write(PAGE, name, table(found), check=options.check)
    if found.rows and not options.check:
        plot(found)


if __name__ == "__main__":
    main()
