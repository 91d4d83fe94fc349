"""`lazystate generate`: text from a model, streamed, and what it cost."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from lazystate.commands.options import (
    CalibrationFile,
    Checkpoint,
    Device,
    DraftTokens,
    Error,
    MeanRank,
    ViewOrAuto,
    Window,
    recommended,
    usage_errors,
)


def generate(
    model: Annotated[
        str, typer.Argument(help="Shipped model (gdn, kda, mamba2), or a folder of transformers.")
    ],
    prompt: Annotated[str | None, typer.Option(help="Text to continue.")] = None,
    file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text file to continue."),
    ] = None,
    method: Annotated[
        Literal["plain", "replay"],
        typer.Option(help="plain: stock transformers. replay: lazystate's engine."),
    ] = "replay",
    window: Window = 16,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to write.")] = 128,
    draft: Annotated[
        Literal["none", "prompt-lookup"],
        typer.Option(help="prompt-lookup: propose what followed the last words before."),
    ] = "none",
    draft_tokens: DraftTokens = 4,
    checkpoint: Checkpoint = "fp32",
    view: ViewOrAuto = "none",
    error: Error = "close",
    mean_rank: MeanRank = 8,
    calibration: CalibrationFile = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Number format of the model.")
    ] = "float32",
    device: Device = "cpu",
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of sampling; 0 takes the most probable token.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.")] = 0,
) -> None:
    """Continue a text with a hybrid model, and say what it cost.

    The text comes from --prompt, --file or standard input. It is written to standard output as it
    is made; a last line on standard error has tokens a second, bytes of recurrent state moved for
    a token, and tokens kept a step. --view auto says there, too, what it chose and why.

    **Examples**

    ```text
    lazystate generate gdn --prompt "It was a dark night, and"
    lazystate generate mamba2 --file chapter.txt --draft prompt-lookup
    lazystate generate gdn --prompt "Once" --checkpoint fp16 --view nvfp4
    lazystate generate gdn --prompt "Once" --view auto
    lazystate generate gdn --prompt "Once" --view sketch --mean-rank 8 --window 32
    cat chapter.txt | lazystate generate kda --method plain
    lazystate generate ./my-model --prompt "Once" --temperature 0.8 --seed 3 --dtype bfloat16
    ```
    """
    from lazystate.commands import decoding
    from lazystate.commands.recorder import Recorder
    from lazystate.engines.transformers import layer_spec

    said = Console(stderr=True, highlight=False)
    with usage_errors():
        how = decoding.Method(
            window if method == "replay" else None,
            draft_tokens if draft != "none" else 0,
            checkpoint,
            None if view == "none" else view,
            mean_rank,
            calibration,
        )
        text = _prompt(prompt, file)
        loaded = decoding.load(model, dtype, device)
        if view == "auto":
            layer = layer_spec(loaded.model, loaded.model.dtype)
            found = recommended(layer, checkpoint, error, window)
            said.print(f"[dim]Recommended: {found}.[/dim]")
            how = replace(
                how, checkpoint=found.checkpoint, view=found.view, rounding=found.rounding
            )
        ids = loaded.encode(text)
        if not ids.numel():
            raise ValueError("prompt must have at least one token, got an empty text")
        recorder = Recorder(printer=loaded.printer())
        sys.stdout.write(text)
        decoding.decode(loaded, ids, how, tokens, recorder, temperature=temperature, seed=seed)
    if len(recorder.steps) < 2:
        said.print("[dim]1 token, from prefill: no step was decoded that could be timed[/dim]")
        return
    state = loaded.predicted_bytes(how, recorder.given_per_step, recorder.tokens_per_step)
    said.print(
        f"[dim]{recorder.tokens} tokens, {recorder.tokens_per_second:.0f} tokens/s, "
        f"{state:,.0f} bytes of state a token (planner), "
        f"{recorder.tokens_per_step:.2f} tokens a step[/dim]"
    )


def _prompt(prompt: str | None, file: Path | None) -> str:
    """The text to continue, from exactly one place."""
    if prompt is not None and file is not None:
        raise ValueError("give --prompt or --file, not both")
    if prompt is not None:
        return prompt
    if file is not None:
        try:
            return file.read_text("utf8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--file must be a UTF-8 text, got {file}: {error}") from error
    if sys.stdin.isatty():
        raise ValueError("no text to continue: give --prompt TEXT or --file PATH, or pipe a text")
    return sys.stdin.read()
