"""`lazystate plan`: what each method moves and keeps for a model on a GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lazystate.commands.options import (
    MOST_WINDOW,
    Checkpoint,
    Error,
    Json,
    MeanRank,
    ViewOrAuto,
    recommended,
    usage_errors,
)

NOT_TIMED = "No kernel was timed with these states yet: the times are those of their bytes."


def plan(
    model: Annotated[
        str, typer.Argument(help="Published shape (see below), a config.json, or a model folder.")
    ],
    batch: Annotated[int, typer.Option(min=1, help="Requests decoded together.")] = 256,
    method: Annotated[
        Literal["all", "plain", "snapshot", "replay"],
        typer.Option(help="plain: read and write the state. snapshot: a state for every draft."),
    ] = "all",
    tokens: Annotated[int, typer.Option(min=1, help="T, tokens of a step: 1 + drafts.")] = 1,
    acceptance: Annotated[
        float | None,
        typer.Option(help="Mean tokens a step that are kept, 1 to T.  [default: T]"),
    ] = None,
    window: Annotated[
        int | None, typer.Option(min=1, max=MOST_WINDOW, help="Of replay.  [default: the best]")
    ] = None,
    checkpoint: Checkpoint = "fp32",
    view: ViewOrAuto = "none",
    error: Error = "close",
    mean_rank: MeanRank = 8,
    bandwidth: Annotated[
        float, typer.Option(min=1, help="GB/s that a plain read reaches.")
    ] = 4600.0,
    copy_bandwidth: Annotated[
        float, typer.Option(min=1, help="GB/s of a copy, bytes read plus written.")
    ] = 4260.0,
    gpu_memory: Annotated[
        float, typer.Option(min=0, help="GiB of the GPU, to find the largest batch.")
    ] = 139.0,
    weights: Annotated[float, typer.Option(min=0, help="GB taken by weights and the rest.")] = 0.0,
    context: Annotated[
        int, typer.Option(min=0, help="Tokens of KV cache a request holds, where known.")
    ] = 0,
    gpu: Annotated[
        str, typer.Option(help="Whose measured times choose the method, as its driver names it.")
    ] = "NVIDIA H200",
    as_json: Json = False,
) -> None:
    """Plan decoding: bytes of recurrent state a token, time a step, memory, the largest batch.

    Times are the least that the bytes take at the given bandwidths (the defaults are those measured
    on one H200); recurrent layers only. --checkpoint and --view are of replay; the other methods
    keep FP32 states. --view auto takes the fewest bytes whose recorded error is small enough, and
    says what it rests on.

    **Published shapes**: Nemotron-3-Nano-4B, Nemotron-3-Super-120B, Nemotron-Nano-9B-v2,
    Qwen3.5-4B, Qwen3.5-122B-A10B, Qwen3.8-Flash-Next, GLM-5.3-Flash, Kimi-Linear-48B.

    **Examples**

    ```text
    lazystate plan Nemotron-3-Super-120B --batch 256 --weights 80
    lazystate plan Qwen3.5-4B --tokens 4 --acceptance 3.2
    lazystate plan Qwen3.5-4B --checkpoint fp16 --view nvfp4
    lazystate plan Qwen3.5-4B --view auto --error loose
    lazystate plan Nemotron-3-Super-120B --view sketch --mean-rank 8
    lazystate plan ./my-model/config.json --method replay --window 16 --json
    ```
    """
    from lazystate import planner
    from lazystate.ops.auto import auto
    from lazystate.ops.tables import entries
    from lazystate.presets import shape_from_config
    from lazystate.sketch.traffic import sketched

    with usage_errors():
        kept = _kept(acceptance, tokens)
        if window is not None and window < tokens and method in ("all", "replay"):
            raise ValueError(f"--window must be at least --tokens ({tokens}), got {window}")
        bandwidths = {"read_gbs": bandwidth, "copy_gbs": copy_bandwidth}
        free = _free_bytes(gpu_memory, weights)
        shape = shape_from_config(model) if Path(model).exists() else _preset(model)
        longest = max(window or 16, tokens)
        layer = shape.layer
        found = recommended(layer, checkpoint, error, longest) if view == "auto" else None
        if found is not None:
            checkpoint, view = found.checkpoint, found.view or "none"  # pyright: ignore (names)
        read = sketched(layer, mean_rank) if view == "sketch" else view
        plans = [
            planner.plan(
                shape,
                each,
                batch=batch,
                **bandwidths,
                window=window if each == "replay" else None,
                tokens=tokens if each != "plain" else 1,
                kept=kept if each != "plain" else 1.0,
                checkpoint=checkpoint if each == "replay" else "fp32",
                view=read if each == "replay" and view != "none" else None,
                free_bytes=free,
                context=context,
            )
            for each in _methods(method, tokens)
        ]
        choice = auto(layer, batch, tokens, table=entries(gpu), window=longest, **bandwidths)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in plans], indent=1))
        return
    timed = (checkpoint, view) == ("fp32", "none")
    _show(
        _table(f"{shape.name}, batch {batch}", plans),
        f"Recommended: {found}." if found else None,
        f"Faster on one {gpu}: {choice}." if timed else NOT_TIMED,
        f"[dim]Shape: {shape.source}.[/dim]",
    )


def _show(*lines: Table | str | None) -> None:
    """Print what there is."""
    console = Console(highlight=False)
    for each in lines:
        if each is not None:
            console.print(each)


def _kept(acceptance: float | None, tokens: int) -> float:
    """Mean tokens that a step keeps."""
    kept = float(tokens) if acceptance is None else acceptance
    if not 1 <= kept <= tokens:
        raise ValueError(f"--acceptance must be 1 to --tokens ({tokens}), got {kept}")
    return kept


def _free_bytes(gpu_memory: float, weights: float) -> int:
    """Bytes for requests, from GiB and GB."""
    for name, given in (("--gpu-memory", gpu_memory), ("--weights", weights)):
        if not math.isfinite(given):
            raise ValueError(f"{name} must be a finite number, got {given}")
    return round(gpu_memory * 2**30 - weights * 1e9)


def _preset(name: str):
    from lazystate.presets import preset

    try:
        return preset(name)
    except KeyError as error:
        raise ValueError(f"{error.args[0]}; or give a config.json or a model folder") from error


def _methods(method: str, tokens: int) -> Sequence:
    """ "all" is what can verify T tokens: conventional decoding has no use for drafts."""
    if method != "all":
        return [method]
    return ["plain", "replay"] if tokens == 1 else ["plain", "snapshot", "replay"]


def _table(title: str, plans: Sequence) -> Table:
    table = Table(title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)
    for name in (
        "method",
        "states",
        "window",
        "T",
        "state bytes\n/token",
        "step, us",
        "MiB\n/request",
        "max batch",
    ):
        table.add_column(name, justify="left" if name in ("method", "states") else "right")
    for each in plans:
        table.add_row(
            each.method,
            each.checkpoint if each.view == "full" else f"{each.checkpoint}, {each.view}",
            "-" if each.window is None else str(each.window),
            str(each.tokens),
            f"{each.state_bytes_per_token:,.0f}",
            f"{each.step_us:,.0f}",
            f"{each.request_bytes / 2**20:,.1f}",
            "-" if each.max_batch is None else f"{each.max_batch:,}",
        )
    return table
