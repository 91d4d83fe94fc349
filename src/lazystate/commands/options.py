"""Options that several commands have, with one help text each, and errors told as usage errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

MOST_WINDOW = 65_536  # far above any that saves bytes, and still in memory

Window = Annotated[
    int,
    typer.Option(
        min=1,
        max=MOST_WINDOW,
        help="Tokens whose records are kept before they are folded into the state.",
    ),
]
DraftTokens = Annotated[
    int, typer.Option(min=1, help="Most tokens a draft proposes for one step; below the window.")
]
Checkpoint = Annotated[
    Literal["fp32", "fp16", "bf16", "fp8", "nvfp4"],
    typer.Option(help="Format of the state that is carried on, rounded stochastically."),
]
View = Annotated[
    Literal["none", "fp32", "fp16", "bf16", "fp8", "nvfp4", "int8", "int4", "int2", "sketch"],
    typer.Option(
        help="What most steps read instead of the state: a copy in this format, or a calibrated "
        "low-rank sketch; none: the state itself."
    ),
]
MeanRank = Annotated[
    float, typer.Option(min=1, help="Mean rank of --view sketch; heads get their own.")
]
CalibrationFile = Annotated[
    Path | None,
    typer.Option(
        "--calibration",
        exists=True,
        dir_okay=False,
        help="Of --view sketch, from lazystate calibrate; shipped models have their own.",
    ),
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option(help="Where the model runs.")]
Backend = Annotated[
    Literal["auto", "torch", "triton"],
    typer.Option(help="What computes the recurrence; auto: Triton on a GPU, else PyTorch."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON list, and no table.")]


@contextmanager
def usage_errors() -> Iterator[None]:
    """Tell a wrong argument found by the package as a usage error (exit code 2, no traceback).

    So are files that cannot be read: transformers raises OSError for a folder without weights.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
