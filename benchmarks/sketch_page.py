"""Tables and plots of docs/sketch.md, from what benchmarks/sketch.py has measured.

    python benchmarks/sketch_page.py            # write the page's tables and plots
    python benchmarks/sketch_page.py --check    # only say whether they are up to date

A whole page is of one run: a GPU's where there is one, else a CPU's. What a run lacks, the page
says it lacks.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import statistics
from collections.abc import Callable
from typing import Any

from low_precision_tables import head, line
from page import ROOT, write
from sketch_rows import ABSENT, MODELS, Evidence, Row, cell, kept, record, span, verdict

PAGE = ROOT / "docs" / "sketch.md"
PLOTS = ROOT / "docs" / "plots"
RANKS = (2, 4, 8, 16)
SKETCHES = [f"sketch {rank}" for rank in RANKS]
CASTS = [f"{name} view" for name in ("int2", "int4", "nvfp4", "fp8")]
# SketchSSM's finding, its numbers (mean accuracy in percent on Nemotron Nano 9B v2), and the
# configurations of which the first should have more KL than the second here.
FINDINGS = (
    ("a calibrated basis beats a random one", "71.9, 63.7", "random basis", "sketch 4"),
    ("a map for the state at hand beats a fixed one", "71.9, 53.5", "offline map", "sketch 4"),
    ("allocated ranks beat equal ones", "71.9, 61.9", "uniform ranks", "sketch 4"),
    ("error and slope together beat the error", "71.9, 66.3", "error only", "sketch 4"),
    ("they beat the slope", "71.9, 55.7", "gradient only", "sketch 4"),
    ("a sketch beats a projected state, rank 8", "74.4, 62.1", "low-rank state 8", "sketch 8"),
    ("the same, rank 4", "71.9, 47.8", "low-rank state 4", "sketch 4"),
    ("rank 8 beats a 4-bit copy, with fewer bytes", "74.4, 71.1", "int4 view", "sketch 8"),
    ("rank 4 beats a 2-bit copy, with fewer bytes", "71.9, 46.1", "int2 view", "sketch 4"),
    ("a 4-bit copy beats a 4-bit recurrence", "71.1, 3.7", "nvfp4 recurrence", "nvfp4 view"),
    ("least squares beats the pivot map", "-", "sketch 4", "exact map"),
)
CHANGED = (
    "sketch 8",
    "sketch 8, window 32",
    "sketch 8, window 64",
    "sketch 8, fp16 checkpoint",
    "fp8 recurrence",
    "nvfp4 recurrence",
)
LASTING = ("fp32", "sketch 4", "sketch 8", "nvfp4 view", "sketch 8, fp16 checkpoint",
           "nvfp4 recurrence")  # fmt: skip
LAYERS = ("Nemotron-3-Super-120B", "Qwen3.8-Flash-Next", "GLM-5.3-Flash")
NOT_YET = "Not measured yet: `python benchmarks/sketch.py`.\n"


def costs_table(found: Evidence) -> str:
    """What sketches move and keep on published layers, by the planner; nothing is measured."""
    del found
    from lazystate import planner
    from lazystate.presets import preset
    from lazystate.sketch.traffic import sketched

    out = head("states", *LAYERS, "memory, of plain")
    listed = [("fp32", None), ("fp32", "nvfp4"), ("fp16", "nvfp4")]
    listed += [("fp32", rank) for rank in reversed(RANKS)] + [("fp16", 8)]
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
    """A head's view in bytes, beside the paper's layout and beside copies of few bits."""
    del found
    from lazystate.formats import FORMATS
    from lazystate.sketch.traffic import PaperBytes, view_bytes

    out = head(
        "a head's state",
        *(f"rank {rank}, SketchSSM's" for rank in RANKS),
        *(f"{name}, as rank" for name in ("INT2", "NVFP4", "FP8")),
    )
    shapes = {
        "Mamba-2, V = 64, K = 128": (64, 128, False),
        "delta rule, V = K = 128": (128, 128, True),
        "the shipped models', V = K = 64": (64, 64, True),
    }
    for name, (value_dim, key_dim, erase) in shapes.items():
        paper = PaperBytes(key_dim, value_dim, 16, erase)
        ours = {rank: view_bytes(key_dim, value_dim, rank) for rank in range(1, key_dim + 1)}
        cells = [f"{ours[rank]:,}, {rank * paper.rank:,}" for rank in RANKS]
        for form in ("int2", "nvfp4", "fp8"):
            copy = FORMATS[form].nbytes(value_dim, key_dim)
            cells.append(f"{copy:,}, {max(rank for rank in ours if ours[rank] <= copy)}")
        out += line(name, *cells)
    return out


def retained_table(found: Evidence) -> str:
    """What the shipped calibrations make of a budget: ranks, bytes, and what reads retain."""
    del found
    from lazystate.evaluation.sketch_plots import retained
    from lazystate.sketch.files import open_calibration
    from lazystate.sketch.view import DENSE, SketchView

    out = head("model", "mean rank", "bytes read", "kept", "ranks", "copies", "retained", "gap")
    sizes = set()
    for calibration in map(open_calibration, MODELS):
        assert calibration.missed is not None
        notes = calibration.origin.notes
        sizes.add(f"{notes['states']:,} states and {notes['scored tokens']:,} scored tokens")
        for rank in RANKS:
            allocated = calibration.allocate(rank)
            ranks, sketch = allocated.ranks, calibration.sketch(rank)
            rooms = [
                SketchView.allocate(omega, of_heads, 1, calibration.origin.value_dim)
                for omega, of_heads in zip(sketch.omega, ranks, strict=True)
            ]
            held = sum(tensor.nbytes for room in rooms for tensor in room.stored.values())
            shares = retained(calibration.missed).gather(2, ranks.unsqueeze(2)).squeeze(2)
            out += line(
                calibration.origin.model,
                rank,
                f"{allocated.allocation.bytes:,}",
                f"{held:,}",
                span(ranks[ranks != DENSE].tolist(), "d"),
                int((ranks == DENSE).sum()),
                f"{float(shares.where(ranks != DENSE, 1).mean()):.4f}",
                f"{allocated.allocation.gap:.1%}",
            )
    return out + f"\nEach from {' or '.join(sorted(sizes))} of every head.\n"


def ranks_table(found: Evidence) -> str:
    """KL of mean ranks and of rounded copies, by the bytes that most steps read."""
    if not found.models:
        return NOT_YET
    kl = (f"{model}, KL" for model in found.models)
    out = head("read by most steps", "bytes", "moved, of plain", *kl, "same top token")
    names = [name for name in ("fp32", *CASTS, *SKETCHES) if found.of(name)]
    for name in sorted(names, key=lambda each: -max(row["bytes"] for row in found.of(each))):
        top = statistics.mean(row["points"][-1]["top"] for row in found.of(name))
        moved = found.span(name, "share", ".3f")
        read = found.span(name, "bytes", ",.0f")
        out += line(name, read, moved, *found.cells(name), f"{top:.1%}")
    return out + found.made()


def bytes_table(found: Evidence) -> str:
    """Sketches against copies at equal bytes, and what a copy as good reads."""
    measured = {model: [name for name in CASTS if found.end(model, name)] for model in found.models}
    if not any(measured.values()):
        return NOT_YET
    out = head(
        "model",
        "sketch",
        "bytes",
        "best copy of no more bytes, its KL over the sketch's",
        "smallest copy as good, its bytes over the sketch's",
        "to take",
    )
    for model, casts in measured.items():
        for name in SKETCHES:
            if casts and found.end(model, name):
                out += line(model, name, *_at_equal_bytes(found, model, name, casts))
    return out


def _at_equal_bytes(found: Evidence, model: str, name: str, casts: list[str]) -> tuple[str, ...]:
    def read(config: str) -> float:
        row = found.row(model, config)
        assert row is not None
        return row["bytes"]

    over = {each: found.ratio(model, each, name) for each in casts}
    ratios = {each: ratio for each, ratio in over.items() if ratio is not None}
    no_larger = [each for each in casts if read(each) <= read(name)]
    as_good = [each for each in casts if ratios[each].value <= 1]
    rival, good, best = "-", "none", "sketch"
    if no_larger:
        nearest = min(no_larger, key=lambda each: ratios[each].value)
        rival = f"{nearest}: {ratios[nearest]}"
        best = "sketch" if ratios[nearest].low > 1 else "either"
        best = "copy" if ratios[nearest].high < 1 else best
    if as_good:
        smallest = min(as_good, key=read)
        good = f"{smallest}: {read(smallest) / read(name):.2f}x"
    return f"{read(name):,.0f}", rival, good, best


def findings_table(found: Evidence) -> str:
    """SketchSSM's ablations, as ratios of KL."""
    if not found.models:
        return NOT_YET
    out = head(
        "finding", "SketchSSM, accuracy", "KL of", "over that of", *found.models, "seen here"
    )
    for claim, accuracy, above, below in FINDINGS:
        ratios = [found.ratio(model, above, below) for model in found.models]
        cells = (ABSENT if ratio is None else str(ratio) for ratio in ratios)
        out += line(claim, accuracy, above, below, *cells, verdict(ratios))
    return out + found.made()


def changed_table(found: Evidence) -> str:
    """Windows, a narrower checkpoint, and what rounding the recurrence itself does."""
    if not found.models:
        return NOT_YET
    out = head("configuration", "moved, of plain", *(f"{model}, KL" for model in found.models))
    for name in CHANGED:
        out += line(name, found.span(name, "share", ".3f"), *found.cells(name))
    return out


def length_table(found: Evidence) -> str:
    """KL over the text: the longest run of each configuration."""
    if not found.models:
        return NOT_YET
    rows = _longest(found)
    at = sorted({point["n"] for row in rows for point in row["points"]})
    out = head("model", "configuration", *(f"N = {n:,}" for n in at))
    for row in rows:
        by = {point["n"]: cell({**point, "standard_error": None}) for point in row["points"]}
        out += line(row["model"], row["config"], *(by.get(n, "") for n in at))
    return out


def _longest(found: Evidence) -> list[Row]:
    rows = (
        found.row(model, name, "long") or found.row(model, name)
        for model in found.models
        for name in LASTING
    )
    return [row for row in rows if row is not None]


def tasks_table(found: Evidence) -> str:
    """Facts recalled, passages copied, and when the model stopped."""
    rows = found.having("recall")
    if not rows:
        return NOT_YET
    whole = {row["model"]: _recalled(row) for row in rows if row["config"] == "fp32"}
    names = [*rows[0]["recall"], "all four", "of fp32's", "copied"]
    out = head("model", "configuration", *names, "tokens until the stop", "not stopped")
    most = _most_tokens()
    for row in rows:
        model, tokens, mean = row["model"], row["tokens"], _recalled(row)
        of_exact = mean / whole[model] if whole.get(model) else math.nan
        shares = (*row["recall"].values(), mean, of_exact, row["copied"])
        late = sum(n >= most for n in tokens) / len(tokens)
        cells = (f"{share:.2f}" for share in shares)
        out += line(model, row["config"], *cells, f"{statistics.mean(tokens):.1f}", f"{late:.2f}")
    about = found.record
    return out + (
        f"\nShares of {about['examples']} examples, so that each has a standard error of up to "
        f"{0.5 / math.sqrt(about['examples']):.2f} (but all configurations get the same ones); "
        f"contexts of {about['context']} tokens; the run of the tables above.\n"
    )


def text_table(found: Evidence) -> str:
    """Recall and KL by the text of the calibration, from benchmarks/sketch_text.py."""
    del found
    about = record("sketch_text")
    if about is None:
        return "Not measured yet: `python benchmarks/sketch_text.py`.\n"
    rows = sorted(about["rows"], key=lambda row: MODELS.index(row["model"]))
    whole = {row["model"]: _recalled(row) for row in rows if row["config"] == "fp32"}
    names = [*rows[0]["recall"], "all four", "of fp32's"]
    out = head("model", "configuration", "calibrated on", *names, "KL")
    for row in rows:
        mean, exact = _recalled(row), whole[row["model"]]
        shares = (*row["recall"].values(), mean, mean / exact if exact else math.nan)
        cells = (f"{share:.2f}" for share in shares)
        out += line(row["model"], row["config"], row["text"], *cells, cell(row))
    lacking = [model for model in MODELS if model not in whole]
    where = "a CPU, one thread" if about["device"] == "cpu" else about["device"]
    return out + (
        f"\n{about['examples']} examples of a task, contexts of {about['context']} tokens; KL at "
        f"N = {about['tokens']}, {about['streams']} pages; torch {about['torch']}, {where}."
        + (f" Not measured yet: {', '.join(lacking)}." if lacking else "")
        + "\n"
    )


def _recalled(row: Row) -> float:
    return statistics.mean(row["recall"].values())


def _most_tokens() -> int:
    """After so many tokens a copy that does not end is ended, see `copying.copy`."""
    from lazystate.evaluation.copying import BEGUN, LENGTH, PATIENCE

    return PATIENCE * (LENGTH - BEGUN + 1)


def prediction_table(found: Evidence) -> str:
    """Rank correlations of the error seen at folds with what follows."""
    rows = found.having("predicted")
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


TABLES: dict[str, Callable[[Evidence], str]] = {
    "costs": costs_table,
    "layout": layout_table,
    "retained": retained_table,
    "ranks": ranks_table,
    "bytes": bytes_table,
    "findings": findings_table,
    "changed": changed_table,
    "length": length_table,
    "tasks": tasks_table,
    "text": text_table,
    "prediction": prediction_table,
}


def draw(found: Evidence) -> Any:
    """Above: KL against the bytes that most steps read. Below: KL against N."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, NullFormatter

    count = len(found.models)
    figure = Figure(figsize=(3.4 * count + 2, 6.4), layout="constrained")
    above, below = figure.subplots(2, count, squeeze=False, sharex="row", sharey="row")
    for axes in (*above, *below):
        axes.set(xscale="log", yscale="log")
    for axes, model in zip(above, found.models, strict=True):
        axes.set(title=model, xlabel="state bytes read by most steps")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([10_000, 20_000, 50_000, 100_000])
        _curve(axes, found, model, SKETCHES, "o-", "sketch, mean rank 2 to 16")
        _curve(axes, found, model, CASTS, "s--", "copy, INT2 to FP8")
    for axes, model in zip(below, found.models, strict=True):
        axes.set(xlabel="N, tokens decoded")
        for row in _longest(found):
            if row["model"] == model and row["config"] != "fp32":
                points = [point for point in row["points"] if point["kl"] is not None]
                at = [point["n"] for point in points]
                colour = f"C{LASTING.index(row['config'])}"
                kl = [point["kl"] for point in points]
                axes.plot(at, kl, ".-", color=colour, label=row["config"])
    for row in (above, below):
        row[0].set_ylabel("KL from FP32 states, nats")
        named = {}  # a panel may lack what has not been measured yet
        for axes in row:
            named |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        row[-1].legend(
            named.values(), named, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5)
        )
    return figure


def _curve(
    axes: Any, found: Evidence, model: str, names: list[str], style: str, label: str
) -> None:
    ends = {name: end for name in names if (end := found.end(model, name))}
    rows = [row for name in ends if (row := found.row(model, name))]
    axes.errorbar(
        [row["bytes"] for row in rows],
        [end["kl"] for end in ends.values()],
        yerr=[end["standard_error"] or 0 for end in ends.values()],
        fmt=style,
        label=label,
        capsize=2,
        markersize=4,
    )


def plot(found: Evidence, *, check: bool) -> None:
    """Draw docs/plots/sketch.svg, or say whether it is of these numbers.

    Raises:
        SystemExit: with `check`, if it is not.
    """
    digest = "numbers " + hashlib.sha256(json.dumps(found.record).encode()).hexdigest()[:16]
    path = PLOTS / "sketch.svg"
    if check:
        if not path.exists() or digest not in path.read_text("utf8"):
            raise SystemExit(f"{path.name} is behind its numbers: run benchmarks/sketch_page.py")
        return
    import matplotlib

    from plots import STYLE, svg

    with matplotlib.rc_context(STYLE):
        path.write_text(svg(draw(found), digest), "utf8")


def write_all(*, check: bool) -> None:
    """Write all tables and the plot, or with `check` only compare.

    Raises:
        SystemExit: with `check`, if something is not what the numbers make.
    """
    found = kept()
    for name, table in TABLES.items():
        write(PAGE, name, table(found), check=check)
    plot(found, check=check)


def main() -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description="Tables and plots of docs/sketch.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    write_all(check=parser.parse_args().check)


if __name__ == "__main__":
    main()
