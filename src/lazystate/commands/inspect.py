"""`lazystate inspect`: what a calibration says about heads, ranks and what they cost."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lazystate.commands.options import Json, usage_errors

if TYPE_CHECKING:
    from lazystate.sketch.allocation import Criterion
    from lazystate.sketch.calibration_file import Calibration, Ranks


def inspect(
    file: Annotated[
        str, typer.Argument(help="Calibration file, also of sketchssm, or a shipped model's name.")
    ],
    mean_rank: Annotated[float, typer.Option(min=1, help="Budget: what this rank costs.")] = 8,
    criterion: Annotated[
        str, typer.Option(help="paired: what the loss feels; error or gradient alone.")
    ] = "paired",
    plot: Annotated[
        Path | None, typer.Option(help="Draw curves and ranks to this PNG (extra: eval).")
    ] = None,
    json: Json = False,
) -> None:
    """Show a calibration: the ranks its heads get, and what they miss.

    For every layer: the ranks that heads get when all reads together cost what --mean-rank for
    every head would; how much of the state's output they retain (1 minus what they miss, over
    what there is); and the layer's share of the cost, the loss's expected square change. The last
    line has a certificate: no choice of ranks is better by more than the gap.

    **Examples**

    ```text
    lazystate inspect gdn --mean-rank 4
    lazystate inspect mine.safetensors --plot mine.png
    ```
    """
    from lazystate.sketch.files import open_calibration

    with usage_errors():
        found = open_calibration(file)
        ranks = found.allocate(mean_rank, criterion=_criterion(criterion))
        if plot is not None:
            from lazystate.evaluation.sketch_plots import draw

            draw(found, ranks, plot)
    rows = _rows(found, ranks)
    if json:
        typer.echo(jsons.dumps(rows, indent=1))
        return
    _show(found, ranks, rows)


def _criterion(name: str) -> Criterion:
    from lazystate.sketch.allocation import CRITERIA

    if name not in CRITERIA:
        raise ValueError(f"--criterion must be one of {', '.join(CRITERIA)}, got {name!r}")
    return name  # pyright: ignore (checked)


def _rows(found: Calibration, ranks: Ranks) -> list[dict[str, Any]]:
    """One dictionary a layer."""
    from lazystate.sketch.view import DENSE

    chosen = ranks.ranks  # 0 of dense heads, which miss nothing
    dense = chosen == DENSE
    cost = found.paired.gather(2, chosen.unsqueeze(2)).squeeze(2).where(~dense, 0)
    total = float(cost.sum())
    kept = None
    if found.missed is not None:
        missed = found.missed.gather(2, chosen.unsqueeze(2)).squeeze(2).where(~dense, 0)
        kept = 1 - missed.sum(1) / found.missed[..., 0].sum(1)
    return [
        {
            "layer": layer,
            "ranks": chosen[row].tolist(),
            "dense": int(dense[row].sum()),
            "mean_rank": float(chosen[row].sum() / (~dense[row]).sum().clamp_min(1)),
            "retained": None if kept is None else float(kept[row]),
            "cost": float(cost[row].sum()),
            "share": float(cost[row].sum()) / total if total else 0.0,
        }
        for row, layer in enumerate(found.origin.layers)
    ]


def _show(found: Calibration, ranks: Ranks, rows: list[dict[str, Any]]) -> None:
    origin = found.origin
    table = Table(
        title=f"{origin.model}: {found.heads} heads a layer, K = {found.key_dim}, "
        f"V = {origin.value_dim}, window {origin.window}, ranks to {found.largest_rank}",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in ("layer", "mean rank", "smallest", "largest", "dense", "retained", "share of cost"):
        table.add_column(name, justify="right")
    for row in rows:
        some = [rank for rank in row["ranks"] if rank] or [0]
        table.add_row(
            str(row["layer"]),
            f"{row['mean_rank']:.1f}",
            str(min(some)),
            str(max(some)),
            str(row["dense"]),
            "-" if row["retained"] is None else f"{row['retained']:.3f}",
            f"{row['share']:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    allocation = ranks.allocation
    console.print(
        f"{allocation.bytes:,} of {allocation.budget:,} bytes a step and request; cost "
        f"{allocation.objective:.3g}, at most {100 * allocation.gap:.2g}% above the best."
    )
