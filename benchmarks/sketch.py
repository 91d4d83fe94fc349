"""What sketches do to outputs: measure, keep the numbers, write docs/sketch.md.

    python benchmarks/sketch.py            # measure, about a quarter of an hour on two cores
    python benchmarks/sketch.py --page     # tables and plot again, from the kept numbers
    python benchmarks/sketch.py --check    # only say whether the page is up to date

The shipped models and calibrations, teacher-forced on held-out books as in `lazystate evaluate kl`,
and retrieval as in `lazystate evaluate recall`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from lazystate.commands.decoding import Loaded, load
from lazystate.evaluation import kl, retrieval
from lazystate.formats import FORMATS
from lazystate.ops.states import States
from lazystate.sketch.allocation import budget_of, rank_actions, uniform
from lazystate.sketch.calibration_file import Calibration
from lazystate.sketch.files import open_calibration
from lazystate.sketch.view import DENSE, Sketch
from lazystate.spec import LayerSpec
from low_precision import head, line
from page import ROOT, write

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "sketch.json"
PAGE = ROOT / "docs" / "sketch.md"
MODELS = ("gdn", "kda", "mamba2")
PROMPT, TOKENS, STREAMS, CONTEXT, EXAMPLES = 512, 1024, 4, 256, 64
ABLATED = 4.0  # mean rank of the ablations
RANKS = (2.0, 4.0, 8.0, 16.0)
CASTS = ("int2", "int4", "nvfp4", "fp8")
RECALLED = ("fp32", *(f"sketch {rank:g}" for rank in RANKS), "int2 view", "int4 view")


@contextmanager
def low_rank(rank: int) -> Iterator[None]:
    """Checkpoints are replaced by their best approximation of a rank: a recurrence of that rank."""
    plain = States.write

    def write(self: States, slots: Tensor, state: Tensor, counts: Tensor | None = None) -> None:
        u, s, vt = torch.linalg.svd(state, full_matrices=False)
        plain(self, slots, (u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :], counts)

    with patch.object(States, "write", write):
        yield


def evenly(found: Calibration, omega: Tensor) -> Sketch:
    """Sketches of a basis with the same rank for all heads, at the ablations' budget."""
    actions = rank_actions(found.key_dim, found.origin.value_dim, found.largest_rank)
    heads = found.paired.shape[0] * found.heads
    choice = uniform(actions, heads, budget_of(actions, heads, ABLATED))
    ranks = torch.tensor([each.rank if each.view == "sketch" else DENSE for each in actions])
    return Sketch(omega, ranks[choice].view(-1, found.heads))


def configurations(found: Calibration) -> dict[str, kl.Config]:
    """Everything that is measured, by name."""
    fp32 = kl.States()

    def sketched(view: Sketch, window: int = 16, checkpoint: str = "fp32") -> kl.Config:
        return kl.Config(kl.States(checkpoint, "sketch"), window, sketch=view)

    named = {"fp32": kl.Config(fp32, 16)}
    named |= {f"sketch {rank:g}": sketched(found.sketch(rank)) for rank in RANKS}
    named |= {
        f"{map} map": sketched(found.sketch(ABLATED, map=map)) for map in ("exact", "offline")
    }
    named |= {
        f"{criterion} only": sketched(found.sketch(ABLATED, criterion=criterion))
        for criterion in ("error", "gradient")
    }
    named["uniform ranks"] = sketched(evenly(found, found.sketch(ABLATED).omega))
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(found.sketch(ABLATED).omega.shape, generator=generator)
    named["random basis"] = sketched(evenly(found, torch.linalg.qr(random).Q))
    named |= {f"{name} view": kl.Config(kl.States("fp32", name), 16) for name in CASTS}
    named["nvfp4 recurrence"] = kl.Config(kl.States("nvfp4"), 16)
    named["rank 8 recurrence"] = kl.Config(fp32, 16)
    named |= {
        f"sketch 8, window {window}": sketched(found.sketch(8), window) for window in (32, 64)
    }
    named["sketch 8, fp16 checkpoint"] = sketched(found.sketch(8), 16, "fp16")
    return named


def read_bytes(config: kl.Config, specs: list[LayerSpec]) -> int:
    """Bytes of state that a step which does not fold reads for one request, all layers."""
    if isinstance(config.sketch, Sketch):
        return sum(config.sketch.planned(i, spec).read for i, spec in enumerate(specs))
    form = FORMATS[config.states.view or config.states.checkpoint]
    return sum(spec.heads * form.nbytes(spec.value_dim, spec.key_dim) for spec in specs)


def measure_model(name: str) -> list[dict[str, Any]]:
    """A row for every configuration of one model."""
    torch.set_num_threads(1)
    loaded = load(name)
    given = kl.streams(loaded.tokenizer, STREAMS, PROMPT + TOKENS)
    reference = kl.Reference.of(loaded.model, given, PROMPT)
    tasks = {
        task: retrieval.examples(loaded.tokenizer, task, EXAMPLES, CONTEXT)
        for task in retrieval.TASKS
    }
    rows = []
    for label, config in configurations(open_calibration(name)).items():
        start = time.time()
        with low_rank(8 if label == "rank 8 recurrence" else 1 << 20):
            rows += _points(loaded, label, config, reference)
            if label in RECALLED:
                rows[-1]["recall"] = {
                    task: sum(found) / len(found)
                    for task, drawn in tasks.items()
                    for found in [retrieval.accuracy(loaded.model, drawn, config)]
                }
        print(f"{name}: {label}, {time.time() - start:.0f} s", file=sys.stderr, flush=True)
    return rows


def _points(
    loaded: Loaded, label: str, config: kl.Config, reference: kl.Reference
) -> list[dict[str, Any]]:
    bytes_read = read_bytes(config, loaded.specs)
    return [
        {
            "model": loaded.name,
            "config": label,
            "window": config.window,
            "n": point.n,
            "bytes": bytes_read,
            "kl": float(f"{point.kl:.4g}"),
            "standard_error": float(f"{point.standard_error:.3g}"),
            "top": float(f"{point.top:.4g}"),
        }
        for point in reference.measure(loaded.model, config)
    ]


def measure() -> None:
    """All models, two at once."""
    import transformers

    def run(model: str) -> list[dict[str, Any]]:
        command = [sys.executable, __file__, "--model", model]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return json.loads(done.stdout)

    start = time.time()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    with ThreadPoolExecutor(2) as pool:
        rows = [row for found in pool.map(run, MODELS) for row in found]
    record = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
        "device": "cpu, 1 thread, 2 processes",
        "prompt": PROMPT,
        "streams": STREAMS,
        "context": CONTEXT,
        "examples": EXAMPLES,
        "seconds": round(time.time() - start),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", "utf8")


class Rows:
    """Rows at the last N by (model, configuration)."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.last = max(row["n"] for row in record["rows"])
        self.first = min(row["n"] for row in record["rows"])
        self.by = {(r["model"], r["config"]): r for r in record["rows"] if r["n"] == self.last}
        self.early = {(r["model"], r["config"]): r for r in record["rows"] if r["n"] == self.first}

    def cells(self, config: str) -> list[str]:
        """KL with its standard error, a cell a model."""
        found = (self.by[model, config] for model in MODELS)
        return [f"{row['kl']:.1e} ± {row['standard_error']:.0e}" for row in found]

    def bytes(self, config: str) -> str:
        """kB read a step; models differ by what their heads got."""
        found = sorted({self.by[model, config]["bytes"] for model in MODELS})
        return f"{found[-1] / 1000:.1f}"


def ranks_table(record: dict[str, Any]) -> str:
    """KL of mean ranks and of copies, by the bytes they read."""
    rows = Rows(record)
    names = ["fp32", *(f"{name} view" for name in CASTS), *(f"sketch {rank:g}" for rank in RANKS)]
    names.sort(key=lambda name: -rows.by[MODELS[0], name]["bytes"])
    out = head("read by most steps", "kB", *(f"{m}, KL" for m in MODELS), "same top token")
    for name in names:
        top = sum(rows.by[model, name]["top"] for model in MODELS) / len(MODELS)
        out += line(name, rows.bytes(name), *rows.cells(name), f"{top:.1%}")
    return out + "\n" + _made(record, rows.last)


def ablations_table(record: dict[str, Any]) -> str:
    """One choice changed at a time."""
    rows, full = Rows(record), f"sketch {ABLATED:g}"
    out = head("configuration", "kB", *(f"{m}, KL" for m in MODELS), "times the default's")
    names = [full, "exact map", "offline map", "error only", "gradient only", "uniform ranks",
             "random basis", "rank 8 recurrence", "nvfp4 recurrence"]  # fmt: skip
    for name in names:
        ratios = [rows.by[m, name]["kl"] / rows.by[m, full]["kl"] for m in MODELS]
        out += line(name, rows.bytes(name), *rows.cells(name), _span(ratios))
    return out


def windows_table(record: dict[str, Any]) -> str:
    """Windows and a narrower checkpoint at mean rank 8."""
    rows = Rows(record)
    out = head("configuration", *(f"{m}, KL" for m in MODELS), "of N = 16")
    for name in ("sketch 8", "sketch 8, window 32", "sketch 8, window 64",
                 "sketch 8, fp16 checkpoint"):  # fmt: skip
        growth = [rows.by[m, name]["kl"] / rows.early[m, name]["kl"] for m in MODELS]
        out += line(name, *rows.cells(name), _span(growth))
    return out


def recall_table(record: dict[str, Any]) -> str:
    """Answers found, tasks side by side."""
    tasks = list(retrieval.TASKS)
    out = head("read by most steps", *(f"{model}: {', '.join(tasks)}" for model in MODELS))
    rows = Rows(record)
    for name in RECALLED:
        found = (rows.by[model, name]["recall"] for model in MODELS)
        out += line(name, *(", ".join(f"{each[task]:.2f}" for task in tasks) for each in found))
    return out


def _span(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{low:.2g}" if f"{low:.2g}" == f"{high:.2g}" else f"{low:.2g} to {high:.2g}"


def _made(record: dict[str, Any], last: int) -> str:
    return (
        f"N = {last}, {record['streams']} pages of two held-out books behind prompts of "
        f"{record['prompt']} tokens; torch {record['torch']}, transformers "
        f"{record['transformers']}, {record['device']}.\n"
    )


TABLES = {
    "ranks": ranks_table,
    "ablations": ablations_table,
    "windows": windows_table,
    "recall": recall_table,
}


def plot(record: dict[str, Any]) -> None:
    """KL against bytes: sketches and copies."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = Rows(record)
    figure, axes = pyplot.subplots(1, len(MODELS), figsize=(11, 3.8), sharey=True)
    lines = {
        "sketch, mean rank 2 to 16": ([f"sketch {rank:g}" for rank in RANKS], "o-", "#1f618d"),
        "copy, INT2 to FP8": ([f"{name} view" for name in CASTS], "s--", "#ca6f1e"),
    }
    for axis, model in zip(axes, MODELS, strict=True):
        axis.set(title=model, xscale="log", yscale="log", xlabel="kB read a step")
        axis.grid(alpha=0.3)
        for label, (names, style, colour) in lines.items():
            found = [rows.by[model, name] for name in names]
            axis.errorbar(
                [row["bytes"] / 1000 for row in found],
                [row["kl"] for row in found],
                yerr=[row["standard_error"] for row in found],
                fmt=style,
                color=colour,
                label=label,
                capsize=2,
            )
    axes[0].set_ylabel("KL from FP32 states, nats")
    axes[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    path = PAGE.parent / "images" / "sketch.png"
    figure.savefig(path, dpi=90, metadata={"Software": None})


def main() -> None:
    """Measure and write, or check."""
    options = sys.argv[1:]
    if "--model" in options:
        print(json.dumps(measure_model(options[1])))
        return
    if not options:
        measure()
    record = json.loads(RESULTS.read_text("utf8"))
    for name, table in TABLES.items():
        write(Path(PAGE), name, table(record), check="--check" in options)
    if "--check" not in options:
        plot(record)


if __name__ == "__main__":
    main()
