"""Options that several commands have, with one help text each, and errors told as usage errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from lazystate.recommendation import Recommendation
    from lazystate.spec import LayerSpec

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
ViewOrAuto = Annotated[
    Literal[
        "none", "fp32", "fp16", "bf16", "fp8", "nvfp4", "int8", "int4", "int2", "sketch", "auto"
    ],
    typer.Option(
        help="What most steps read instead of the state: a copy in this format, or a calibrated "
        "low-rank sketch; none: the state itself; auto: checkpoint, view and rounding by recorded "
        "evidence, for --error."
    ),
]
Error = Annotated[
    str,
    typer.Option(
        help="Most KL that --view auto may cost: exact, close (what bfloat16 activations make), "
        "loose (ten times that), or nats."
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


def recommended(layer: LayerSpec, checkpoint: str, error: str, window: int) -> Recommendation:
    """What --view auto stands for in a layer.

    Raises:
        ValueError: for a checkpoint besides, or an error that is no class and no number.
    """
    from lazystate.recommendation import CLASSES, recommend

    if checkpoint != "fp32":
        raise ValueError(
            f"--view auto chooses the checkpoint, too, got --checkpoint {checkpoint}: give one of "
            "them"
        )
    try:
        wanted: Any = error if error in CLASSES else float(error)
    except ValueError:
        raise ValueError(
            f"--error must be one of {', '.join(CLASSES)}, or nats of KL, got {error!r}"
        ) from None
    return recommend(layer, error=wanted, window=window)


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
