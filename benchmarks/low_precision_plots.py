"""The pictures of docs/low_precision.md."""

from __future__ import annotations

from low_precision_tables import Points
from page import ROOT

IMAGES = ROOT / "docs" / "images"


def plots(record: dict) -> None:
    """The three pictures of the page."""
    import matplotlib

    matplotlib.use("Agg")
    _plot_kl(record)
    _plot_windows(record)
    _plot_decay(record)


def _save(figure, name: str) -> None:
    path = IMAGES / f"{name}.png"
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
