"""The tables of docs/low_precision.md, and the record that lazystate.recommendation goes by."""

from __future__ import annotations

import json
import statistics


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


def findings(record: dict) -> str:
    """The paper's findings one by one, each judged by its numbers here."""
    points = Points(record["states"]["rows"])
    windows = Points(record["windows"]["rows"])
    models, first, last, end = points.models, points.at[0], points.at[-1], windows.at[-1]

    def grown(state: str) -> list[float]:
        return [points.kl(m, state, last) / points.kl(m, state, first) for m in models]

    def over(one: str, other: str) -> list[float]:
        return [points.kl(m, one, last) / points.kl(m, other, last) for m in models]

    def narrowed(state: str, widest: int, narrowest: int) -> list[float]:
        return [
            windows.kl(m, state, end, narrowest) / windows.kl(m, state, end, widest) for m in models
        ]

    shared, read = grown("nvfp4"), grown("fp32,nvfp4")
    gap, carried = over("nvfp4", "fp32,nvfp4"), over("fp16,nvfp4", "fp32,nvfp4")
    rounded = narrowed("nvfp4", 64, 1)
    viewed = narrowed("fp32,nvfp4", 64, 4)
    ratios = rounding_ratios(record)
    lowest = min(min(row.values()) for row in ratios.values())
    highest = max(max(row.values()) for row in ratios.values())
    rising = sum(row[max(row)] > row[min(row)] for row in ratios.values())
    return (
        f"- *The error of a shared checkpoint grows with the text, a view's hardly.* "
        f"{_judged(models, [a > 2 * b for a, b in zip(shared, read, strict=True)])}: from N = "
        f"{first} to {last} the KL of a shared NVFP4 checkpoint grows {_listed(models, shared)}, "
        f"that of an NVFP4 view of FP32 {_listed(models, read)}.\n"
        f"- *Separate copies err 13 to 36 times less than a shared one.* "
        f"{_judged(models, [ratio >= 13 for ratio in gap])}: shared NVFP4 over an NVFP4 view of "
        f"FP32 is {_listed(models, gap)} at N = {last}, where the paper has 32K or 128K tokens.\n"
        f"- *An FP16 checkpoint with stochastic rounding carries the recurrence as FP32 does.* "
        f"{_judged(models, [ratio < 1.25 for ratio in carried])}: an NVFP4 view of FP16 over one "
        f"of FP32 is {_listed(models, carried)}.\n"
        f"- *Nearest rounding is better at first, stochastic in the end.* "
        + (
            f"The crossing is not visible at this size: nearest over stochastic is {lowest:.2f} to "
            f"{highest:.2f} over all models, formats and lengths, always below 1"
            if highest < 1
            else f"A crossing is seen: nearest over stochastic is {lowest:.2f} to {highest:.2f}"
        )
        + f"; from the first to the last N it rises in {rising} of {len(ratios)} cases, toward a "
        "crossing.\n"
        f"- *A shared checkpoint is sensitive to the window, a view is not.* The first "
        f"{_judged(models, [ratio > 2 for ratio in rounded]).lower()}: window 1 over window 64 is "
        f"{_listed(models, rounded)} for shared NVFP4 at N = {end} (23x in the paper at 1K). The "
        f"second {_judged(models, [ratio < 1.25 for ratio in viewed]).lower()}: for an NVFP4 view "
        f"of FP32, window 4 over window 64 is {_listed(models, viewed)} (1.1x to 1.2x there).\n"
    )


def _judged(models: list[str], holds: list[bool]) -> str:
    """Whether a finding holds, and for which models if not for all."""
    which = [model for model, each in zip(models, holds, strict=True) if each]
    if len(which) == len(models):
        return "Holds"
    return f"Holds for {' and '.join(which)} alone" if which else "Does not hold"


def _listed(models: list[str], ratios: list[float]) -> str:
    return ", ".join(f"{times(r)} ({m})" for m, r in zip(models, ratios, strict=True))


def activations_table(record: dict) -> str:
    """KL of models with bfloat16 activations, by state."""
    points = Points(record["bfloat16"]["rows"])
    last = points.at[-1]
    out = head("state", *(f"{m}, KL" for m in points.models))
    for state, _ in points.states:
        rows = [points.rows[model, state, 16, last] for model in points.models]
        out += line(f"`{state}`", *(f"{r['kl']:.1e} ± {r['standard_error']:.0e}" for r in rows))
    return out + "\n" + _made(record["bfloat16"])


def recommended_table(record: dict) -> str:
    """What `lazystate.recommend` says for three published layers."""
    from lazystate.presets import preset
    from lazystate.recommendation import CLASSES, LONGEST, recommend

    layers = {
        "gdn": "Qwen3.5-122B-A10B",
        "kda": "Kimi-Linear-48B",
        "mamba2": "Nemotron-3-Super-120B",
    }
    del record  # it goes by the package's copy, which `--check` compares with the record
    out = head("error", "layer", "checkpoint", "view", "of plain", "KL measured", f"at {LONGEST:,}")
    for error in CLASSES:
        for kind, name in layers.items():
            found = recommend(preset(name).layer, error=error)
            measured = found.evidence.states[found.state]
            formats = found.checkpoint, found.view or "-"
            out += line(
                f"`{error}`", f"{name} ({kind})", *formats, f"{found.of_plain:.3f}", measured,
                f"{found.expected:.1e}" if found.expected else "0",
            )  # fmt: skip
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


def rounding_ratios(record: dict) -> dict[tuple[str, str], dict[int, float]]:
    """KL rounded to nearest over KL rounded stochastically, by (model, checkpoint) and N."""
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
    return found


def rounding_table(record: dict) -> str:
    """KL of shared checkpoints rounded to nearest, over those rounded stochastically."""
    found = rounding_ratios(record)
    at = sorted({n for row in found.values() for n in row})
    out = head("model", "checkpoint", *(f"N = {n}" for n in at))
    for (model, state), row in found.items():
        out += line(model, state, *(times(row[n]) if n in row else "" for n in at))
    return out


def long_table(record: dict) -> str:
    """KL over long texts."""
    if "long" not in record:
        return "Not measured yet: `python benchmarks/low_precision.py --measure long`.\n"
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
    "judged": findings,
    "activations": activations_table,
    "recommended": recommended_table,
    "choices": choices_table,
    "rounding": rounding_table,
    "long": long_table,
    "decay": decay_table,
}
