"""What states of few bits do to outputs: measure, keep the numbers, write docs/low_precision.md.

    python benchmarks/low_precision.py --measure decay      # the bare recurrence, on a CPU
    python benchmarks/low_precision.py --measure states windows long seeds --device cuda
    python benchmarks/low_precision.py            # tables and plots again, from the kept numbers
    python benchmarks/low_precision.py --check    # only say whether the page is up to date

Everything is measured by `lazystate evaluate`; this script runs its commands side by side, keeps
what each prints in --parts, so that a run that was cut short goes on, and makes tables and plots of
it. Without --device, the models' parts take hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from page import ROOT, write

FOLDER = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "low_precision.md"
EVIDENCE = ROOT / "src" / "lazystate" / "recommendation.json"
MODELS = ("gdn", "kda", "mamba2")
SEEDS = (0, 1, 2, 3)

WINDOWS = ("--window 1 --window 4 --window 16 --window 32 --window 64 --tokens 256 --state fp32 "
           "--state fp8 --state nvfp4 --state fp32,fp8 --state fp32,nvfp4")  # fmt: skip
LONG = ("--tokens 7680 --state fp8 --state fp8:nearest --state nvfp4 --state nvfp4:nearest "
        "--state fp32,nvfp4 --state fp16,nvfp4")  # fmt: skip
BFLOAT16 = "--dtype bfloat16 --state fp32 --state fp16 --state fp16,fp8 --state fp16,nvfp4"
SEEDED = "--tokens 1024 --state fp16 --state fp8 --state nvfp4 --state fp8,nvfp4"
PARTS = {
    "decay": ["decay"],
    "long": [f"kl {model} {LONG}" for model in MODELS],
    "states": [f"kl {model} --tokens 3584" for model in MODELS],
    "windows": [f"kl {model} {WINDOWS}" for model in MODELS],
    "bfloat16": [f"kl {model} {BFLOAT16}" for model in MODELS],
    "seeds": [f"kl {model} --seed {seed} {SEEDED}" for model in MODELS for seed in SEEDS],
}


def run(command: str, kept: Path) -> dict:
    """Rows and versions of `lazystate evaluate COMMAND --json`, from a file if it has run."""
    if not kept.exists():
        line = [sys.executable, "-m", "lazystate", "evaluate", *command.split(), "--json"]
        done = subprocess.run(line, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command}: {done.stderr}")
        rows = [_short(row) for row in json.loads(done.stdout)]
        found = {"command": f"lazystate evaluate {command}", **_machine(command), "rows": rows}
        kept.write_text(json.dumps(found), "utf8")
        print(f"done: {command}", flush=True)
    return json.loads(kept.read_text("utf8"))


def _machine(command: str) -> dict:
    import torch
    import transformers

    cuda = "--device cuda" in command
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu, 1 thread",
    }


def _short(row: dict) -> dict:
    """Numbers to four digits: more is noise, and the file is read by people."""

    def short(value):
        if isinstance(value, list):
            return [short(each) for each in value]
        return float(f"{value:.4g}") if isinstance(value, float) else value

    return {name: short(value) for name, value in row.items()}


def measure(options: argparse.Namespace) -> None:
    """Run all commands of some parts, and put their rows into the record of the device."""
    options.parts.mkdir(parents=True, exist_ok=True)
    on = " --streams 16 --device cuda --backend torch" if options.device == "cuda" else ""
    with ThreadPoolExecutor(options.processes) as pool:
        jobs = {
            part: [
                pool.submit(
                    run,
                    command + (on if command != "decay" else ""),
                    options.parts / f"{part}-{number}.json",
                )
                for number, command in enumerate(PARTS[part])
            ]
            for part in PARTS
            if part in options.measure
        }
        found = {part: [each.result() for each in of] for part, of in jobs.items()}
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.check_output(head, cwd=ROOT, text=True).strip()
    for part, each in found.items():
        device = each[0]["device"]
        slug = device.lower().removeprefix("nvidia ").replace(",", " ").split()[0]
        path = FOLDER / slug / "low_precision.json"
        record = json.loads(path.read_text("utf8")) if path.exists() else {}
        record[part] = {
            "commands": [one["command"] for one in each],
            **{name: each[0][name] for name in ("torch", "transformers", "device")},
            "commit": commit,
            "rows": [row for one in each for row in one["rows"]],
        }
        path.write_text(json.dumps(record, indent=1) + "\n", "utf8")


def kept() -> dict:
    """The parts, each from where it was measured last: a GPU's in place of a CPU's."""
    record = {}
    for folder in ("cpu", "h200"):
        path = FOLDER / folder / "low_precision.json"
        record |= json.loads(path.read_text("utf8")) if path.exists() else {}
    return record


class Points:
    """KL by (model, state, window, N)."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = {(r["model"], r["state"], r["window"], r["n"]): r for r in rows}
        self.at = sorted({row["n"] for row in rows})
        self.models = sorted({row["model"] for row in rows})
        self.states = list(dict.fromkeys((row["state"], row["window"]) for row in rows))

    def kl(self, model: str, state: str, n: int, window: int | None = 16) -> float:
        """Mean KL in nats."""
        return self.rows[model, state, window, n]["kl"]


def head(*cells: str) -> str:
    """A table's first two lines."""
    return f"| {' | '.join(cells)} |\n|{'---|' * len(cells)}\n"


def line(*cells: object) -> str:
    """One line of a table."""
    return f"| {' | '.join(map(str, cells))} |\n"


def times(ratio: float) -> str:
    """A factor, to two digits."""
    return f"{ratio:.2g}x" if ratio < 100 else f"{ratio:,.0f}x"


def states_table(record: dict) -> str:
    """KL of every state at the last N, with standard errors, and the share of equal tokens."""
    points = Points(record["states"]["rows"])
    last = points.at[-1]
    out = head(
        "checkpoint", "view", "rounding", *(f"{m}, KL" for m in points.models), "same top token"
    )
    for state, window in points.states:
        rows = [points.rows[model, state, window, last] for model in points.models]
        formats, _, nearest = state.partition(":")
        checkpoint, _, view = formats.partition(",")
        names = ("conventional, again", "", "") if state == "again" else (
            checkpoint, view or "-", "nearest" if nearest else
            "-" if checkpoint == "fp32" else "stochastic")  # fmt: skip
        top = statistics.mean(row["top"] for row in rows)
        cells = (f"{row['kl']:.1e} ± {row['standard_error']:.0e}" for row in rows)
        out += line(*names, *cells, f"{top:.1%}")
    return out + "\n" + _made(record["states"])


def findings_table(record: dict) -> str:
    """The paper's findings, and the same ratios here."""
    points = Points(record["states"]["rows"])
    first, last = points.at[0], points.at[-1]
    windows = Points(record["windows"]["rows"])
    end = windows.at[-1]

    def row(name: str, paper: str, ratio) -> str:
        return line(name, *(times(ratio(model)) for model in points.models), paper)

    def growth(state: str):
        return lambda m: points.kl(m, state, last) / points.kl(m, state, first)

    def over(one: str, other: str):
        return lambda m: points.kl(m, one, last) / points.kl(m, other, last)

    def shorter(state: str):
        return lambda m: windows.kl(m, state, end, 1) / windows.kl(m, state, end, 64)

    def scatter(state: str):
        def ratio(model: str) -> float:
            seen = [windows.kl(model, state, end, window) for window in (4, 16, 32, 64)]
            return max(seen) / min(seen)

        return ratio

    out = head("ratio of KL", *points.models, "ReplaySSM, its four models")
    for state in ("fp8", "nvfp4"):
        out += row(f"shared {state}: N = {last} over N = {first}", "grows", growth(state))
    for state in ("fp32,fp8", "fp32,nvfp4"):
        name = state.split(",")[1]
        out += row(
            f"{name} view of fp32: N = {last} over N = {first}", "grows little", growth(state)
        )
    gap = "13x to 36x, at 32K or 128K"
    out += row(
        f"shared nvfp4 over nvfp4 view of fp32, N = {last}", gap, over("nvfp4", "fp32,nvfp4")
    )
    out += row(f"shared fp8 over fp8 view of fp32, N = {last}", "-", over("fp8", "fp32,fp8"))
    for name in ("fp16", "fp8"):
        out += row(
            f"nvfp4 view of {name} over nvfp4 view of fp32, N = {last}",
            "within 1.25x" if name == "fp16" else "-",
            over(f"{name},nvfp4", "fp32,nvfp4"),
        )
    for state, paper in (("fp8", "12x at 1K"), ("nvfp4", "23x at 1K")):
        out += row(f"shared {state}: window 1 over window 64, N = {end}", paper, shorter(state))
    for state in ("fp32,fp8", "fp32,nvfp4"):
        name = state.split(",")[1]
        out += row(f"{name} view of fp32: largest over least, windows 4 to 64", "1.1x to 1.2x",
                   scatter(state))  # fmt: skip
    return out


def choices_table(record: dict) -> str:
    """What each state moves on two published layers, and what it costs here."""
    from lazystate import planner
    from lazystate.presets import preset

    points = Points(record["states"]["rows"])
    last = points.at[-1]
    layers = {name: preset(name).layer for name in ("Nemotron-3-Super-120B", "Qwen3.5-122B-A10B")}
    out = head("state", *(f"{name}, of plain" for name in layers), f"KL at N = {last}")
    listed = []
    for state, window in points.states:
        if window is None or ":" in state:
            continue
        checkpoint, _, view = state.partition(",")
        parts = []
        for layer in layers.values():
            options = {"window": window, "checkpoint": checkpoint, "view": view or None}
            moved = planner.traffic(layer, "replay", **options).total
            parts.append(moved / planner.traffic(layer, "plain").total)
        seen = [points.kl(model, state, last) for model in points.models]
        listed.append((parts, state, seen))
    for parts, state, seen in sorted(listed, reverse=True):
        cells = (f"{part:.3f}" for part in parts)
        out += line(f"`{state}`", *cells, f"{min(seen):.0e} to {max(seen):.0e}")
    return out


def rounding_table(record: dict) -> str:
    """KL of shared checkpoints rounded to nearest, over those rounded stochastically."""
    parts = [("states", ("fp16", "fp8", "nvfp4")), ("long", ("fp8", "nvfp4"))]
    found: dict[tuple[str, str], dict[int, float]] = {}
    for part, states in parts:
        if part in record:
            points = Points(record[part]["rows"])
            for model in points.models:
                for state in states:
                    for n in points.at:
                        ratio = points.kl(model, f"{state}:nearest", n) / points.kl(model, state, n)
                        found.setdefault((model, state), {})[n] = ratio
    at = sorted({n for row in found.values() for n in row})
    out = head("model", "checkpoint", *(f"N = {n}" for n in at))
    for (model, state), row in found.items():
        out += line(model, state, *(times(row[n]) if n in row else "" for n in at))
    return out


def long_table(record: dict) -> str:
    """KL over long texts."""
    if "long" not in record:
        return "Not measured yet: `python benchmarks/low_precision.py --long`.\n"
    points = Points(record["long"]["rows"])
    out = head("model", "state", *(f"N = {n}" for n in points.at))
    for model in points.models:
        for state, window in points.states:
            cells = (points.rows[model, state, window, n] for n in points.at)
            out += line(
                model, state, *(f"{c['kl']:.1e} ± {c['standard_error']:.0e}" for c in cells)
            )
    return out + "\n" + _made(record["long"])


def decay_table(record: dict) -> str:
    """Measured deviation over the law's, for every decay."""
    rows = record["decay"]["rows"]
    alphas = sorted({row["alpha"] for row in rows})
    out = head("checkpoint", "rounding", "L", *(f"alpha = {a}" for a in alphas))
    by = {(r["state"], r["rounding"], r["window"], r["alpha"]): r for r in rows}
    for state, rounding, window in dict.fromkeys(key[:3] for key in by):
        found = [by[state, rounding, window, alpha] for alpha in alphas]
        cells = (f"{r['rms']:.1e} ({r['rms'] / r['law']:.2f})" for r in found)
        out += line(state, rounding, window, *cells)
    return out + "\n" + _made(record["decay"])


def _made(part: dict) -> str:
    commands = "; ".join(f"`{command}`" for command in part["commands"])
    return (
        f"{commands}; torch {part['torch']}, transformers {part['transformers']}, "
        f"{part['device']}.\n"
    )


def evidence(record: dict) -> str:
    """What `lazystate.recommendation` goes by: the last N of each kind of layer, as JSON."""
    points = Points(record["states"]["rows"])
    windows = Points(record["windows"]["rows"])
    last, end = points.at[-1], windows.at[-1]
    activations = Points(record["bfloat16"]["rows"])
    views = ("fp8", "nvfp4")
    states = ("fp32", *(f"{form}{how}" for form in ("fp16", "fp8", "nvfp4")
              for how in ("", ":nearest", *(f",{view}" for view in views))))  # fmt: skip
    states += tuple(f"fp32,{view}" for view in views)

    def pair(row: dict) -> list[float]:
        return [row["kl"], row["standard_error"]]

    layers = {
        model: {
            "states": {
                state: pair(points.rows[model, state, 16, last])
                for state in states
                if (state, 16) in points.states
            },
            "bfloat16": pair(activations.rows[model, "fp32", 16, activations.at[-1]]),
            "windows": {
                view: {
                    str(window): windows.kl(model, f"fp32,{view}", end, window)
                    for state, window in windows.states
                    if state == f"fp32,{view}"
                }
                for view in views
            },
        }
        for model in points.models
    }
    commits = {name: record[name]["commit"] for name in ("states", "windows", "bfloat16")}
    made = {"tokens": last, "window": 16, "commits": commits, "layers": layers}
    return json.dumps(made, indent=1) + "\n"


TABLES = {
    "states": states_table,
    "findings": findings_table,
    "choices": choices_table,
    "rounding": rounding_table,
    "long": long_table,
    "decay": decay_table,
}


def plots(record: dict) -> None:
    """The three pictures of the page."""
    import matplotlib

    matplotlib.use("Agg")
    _plot_kl(record)
    _plot_windows(record)
    _plot_decay(record)


def _save(figure, name: str) -> None:
    path = PAGE.parent / "images" / f"{name}.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=90, metadata={"Software": None})
    assert path.stat().st_size < 150_000, path


STYLES = {
    "fp32": ("0.6", "-", "FP32 (floor)"),
    "fp16": ("tab:green", "-", "shared FP16"),
    "fp8": ("tab:blue", "-", "shared FP8"),
    "fp8:nearest": ("tab:blue", ":", "shared FP8, nearest"),
    "nvfp4": ("tab:red", "-", "shared NVFP4"),
    "nvfp4:nearest": ("tab:red", ":", "shared NVFP4, nearest"),
    "fp32,fp8": ("tab:blue", "--", "FP8 view of FP32"),
    "fp32,nvfp4": ("tab:red", "--", "NVFP4 view of FP32"),
    "fp16,nvfp4": ("tab:orange", "--", "NVFP4 view of FP16"),
}


def _panels(models: list[str], label: str):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(models), figsize=(11, 4.2), sharey=True)
    for axis, model in zip(axes, models, strict=True):
        axis.set(title=model, xscale="log", yscale="log", xlabel=label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("KL from FP32 states, nats")
    return figure, axes


def _legend(figure, axis) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.12, 1, 1))


def _plot_kl(record: dict) -> None:
    """KL against N: long runs where there are any."""
    points = Points(record["states"]["rows"])
    longer = Points(record["long"]["rows"]) if "long" in record else None
    figure, axes = _panels(points.models, "N, tokens decoded")
    for axis, model in zip(axes, points.models, strict=True):
        for state, (colour, style, label) in STYLES.items():
            long = longer and model in longer.models and (state, 16) in longer.states
            source = longer if longer and long else points
            rows = [source.rows[model, state, 16, n] for n in source.at]
            axis.errorbar(
                source.at,
                [row["kl"] for row in rows],
                yerr=[row["standard_error"] for row in rows],
                color=colour,
                linestyle=style,
                label=label,
                capsize=2,
            )
    _legend(figure, axes[0])
    _save(figure, "kl")


def _plot_windows(record: dict) -> None:
    """KL against the window."""
    points = Points(record["windows"]["rows"])
    figure, axes = _panels(points.models, f"window L (at N = {points.at[-1]})")
    for axis, model in zip(axes, points.models, strict=True):
        for state in ("fp32", "fp8", "nvfp4", "fp32,fp8", "fp32,nvfp4"):
            colour, style, label = STYLES[state]
            lengths = [w for s, w in points.states if s == state]
            rows = [points.rows[model, state, length, points.at[-1]] for length in lengths]
            axis.errorbar(
                lengths,
                [row["kl"] for row in rows],
                yerr=[row["standard_error"] for row in rows],
                color=colour,
                linestyle=style,
                label=label,
                capsize=2,
            )
        axis.set_xscale("log", base=2)
    _legend(figure, axes[0])
    _save(figure, "windows")


def _plot_decay(record: dict) -> None:
    """Deviation against the decay: measured points on the law's lines."""
    from matplotlib import pyplot

    rows = record["decay"]["rows"]
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4.2), sharey=True)
    colours = {"fp16": "tab:green", "fp8": "tab:blue", "nvfp4": "tab:red"}
    for axis, rounding in zip(axes, ("stochastic", "nearest"), strict=True):
        axis.set(title=f"rounded {rounding}", xscale="log", yscale="log", xlabel="1 / (1 - alpha)")
        axis.grid(alpha=0.3)
        for state, colour in colours.items():
            for window, marker in ((1, "o"), (16, "s")):
                found = [
                    r
                    for r in rows
                    if (r["state"], r["rounding"], r["window"]) == (state, rounding, window)
                ]
                x = [1 / (1 - r["alpha"]) for r in found]
                axis.plot(x, [r["law"] for r in found], color=colour, linewidth=0.8)
                label = f"{state}, L = {window}"
                axis.plot(x, [r["rms"] for r in found], marker, color=colour, label=label)
    axes[0].set_ylabel("rms deviation (state: 1)")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=6, fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    _save(figure, "decay")


def main() -> None:
    """Measure, write, or check."""
    parser = argparse.ArgumentParser(description="What states of few bits do to outputs.")
    parser.add_argument("--measure", nargs="+", choices=PARTS, metavar="PART", help="run anew")
    parser.add_argument("--check", action="store_true", help="only compare the page")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", type=Path, default=ROOT / "data" / "low_precision")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--commit", help="revision, where there is no git")
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    record = kept()
    for name, table in TABLES.items():
        write(Path(PAGE), name, table(record), check=options.check)
    made = evidence(record)
    if options.check and EVIDENCE.read_text("utf8") != made:
        raise SystemExit(f"{EVIDENCE.name} is behind its numbers and must be written again")
    if not options.check:
        EVIDENCE.write_text(made, "utf8")
        plots(record)


if __name__ == "__main__":
    main()
