"""`lazystate compare`: shipped models on a held-out book, stock transformers beside lazystate."""

from __future__ import annotations

import json as jsons
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from lazystate import shipped
from lazystate.commands.options import (
    CalibrationFile,
    Checkpoint,
    Device,
    DraftTokens,
    Json,
    MeanRank,
    View,
    Window,
    usage_errors,
)

if TYPE_CHECKING:
    from lazystate.commands.decoding import Method
    from lazystate.commands.measure import Result


def compare(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Shipped models or folders of transformers; all shipped ones if none."),
    ] = None,
    book: Annotated[
        str, typer.Option(help="Book to continue: pride-and-prejudice or moby-dick.")
    ] = "pride-and-prejudice",
    offset: Annotated[
        int,
        typer.Option(min=0, help="Character of the book behind which the prompt's paragraph is."),
    ] = 200_000,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to decode.")] = 256,
    window: Window = 16,
    draft_tokens: DraftTokens = 4,
    checkpoint: Checkpoint = "fp32",
    view: View = "none",
    mean_rank: MeanRank = 8,
    calibration: CalibrationFile = None,
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs of each method; the median is shown.")
    ] = 3,
    device: Device = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; small models are fastest on one.")
    ] = 1,
    json: Json = False,
) -> None:
    """Decode real text with stock transformers and with lazystate, and compare.

    Each model continues the same page of a book it has not been trained on, greedily and in
    float32, in three ways: plain (stock transformers), replay, and replay with drafts from prompt
    lookup. The table has, for each: are all tokens those of plain; the largest difference of a
    logit, from the logits of every step of the same runs; bytes of recurrent state moved for a
    token, as counted where they are moved and as the planner predicts them; tokens a second (timed
    in further runs, without counting); and tokens kept a step.

    The exit code is 1 if a token differs, unless --checkpoint or --view round the states, so that
    tokens may: `lazystate evaluate kl` says by how much.

    **Examples**

    ```text
    lazystate compare
    lazystate compare gdn --book moby-dick --tokens 512 --window 32
    lazystate compare gdn --checkpoint fp16 --view nvfp4
    lazystate compare gdn --view sketch --mean-rank 8 --window 32
    lazystate compare ./my-model --draft-tokens 7
    lazystate compare --json > compare.json
    ```
    """
    import torch

    torch.set_num_threads(threads)
    from lazystate.commands.decoding import Method

    with usage_errors():
        states = checkpoint, None if view == "none" else view, mean_rank, calibration
        replay = Method(window, 0, *states)
        results, samples = _measure(
            models or shipped.models(),
            _page(book, offset, prompt_tokens),
            prompt_tokens,
            tokens,
            [Method(), replay, Method(window, draft_tokens, *states)],
            repeats,
            device,
        )
    if json:
        typer.echo(jsons.dumps([asdict(result) for result in results], indent=2))
    else:
        _show(results, samples, tokens)
    if replay.exact and not all(result.identical for result in results):
        raise typer.Exit(1)


def _measure(
    names: list[str],
    text: str,
    prompt_tokens: int,
    tokens: int,
    methods: list[Method],
    repeats: int,
    device: Literal["cpu", "cuda"],
) -> tuple[list[Result], dict[str, str]]:
    """Results of all models, and the first words that each wrote; a progress bar meanwhile."""
    from lazystate.commands import decoding, measure

    results, samples = [], {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(methods) * (1 + repeats))
        for name in names:
            progress.update(task, description=name)
            loaded = decoding.load(name, device=device)
            loaded.model.generation_config.eos_token_id = None  # all write the same length
            prompt = loaded.encode(text)[:, :prompt_tokens]
            if prompt.shape[1] < prompt_tokens:
                raise ValueError(
                    f"offset must leave prompt_tokens ({prompt_tokens}) to the end of the book, "
                    f"got {prompt.shape[1]}"
                )
            rows, new = measure.side_by_side(
                loaded, prompt, methods, tokens, repeats, lambda: progress.advance(task)
            )
            results += rows
            samples[name] = str(loaded.tokenizer.decode(new[:32]))
    return results, samples


def _page(book: str, offset: int, tokens: int) -> str:
    """The book from its first paragraph behind `offset`, surely enough for a prompt."""
    text = shipped.book(book)
    start = text.find("\n\n", offset) + 2
    if start < 2:
        raise ValueError(f"offset must be below {len(text)}, the book's characters, got {offset}")
    return text[start : start + 16 * tokens]


def _show(results: list[Result], samples: dict[str, str], tokens: int) -> None:
    """The table, what each model wrote, and the verdict."""
    table = Table(
        title=f"{tokens} tokens after a page that the models have not been trained on",
        box=SIMPLE,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("model")
    table.add_column("decoding")
    for heading in (
        "same\ntokens",
        "logit\ndiff",
        "state kB\n/token",
        "of\nplain",
        "by the\nplanner",
        "tokens\n/s",
        "tokens\n/step",
    ):
        table.add_column(heading, justify="right")
    plain = 0.0
    for result in results:
        if result.method == "plain":
            table.add_section()
            plain = result.state_bytes_per_token
        table.add_row(
            Path(result.model).name if result.method == "plain" else "",
            result.method if result.draft == "none" else "+ drafts",
            "[green]yes[/green]" if result.identical else "[red]no[/red]",
            f"{result.max_logit_diff:.0e}" if result.max_logit_diff else "0",
            f"{result.state_bytes_per_token / 1000:.1f}",
            f"{result.state_bytes_per_token / plain:.2f}",
            f"{result.predicted_state_bytes_per_token / 1000:.1f}",
            f"{result.tokens_per_s:.0f}",
            f"{result.acceptance:.2f}",
        )
    console = Console(highlight=False)
    console.print(table)
    for name, text in samples.items():
        written = escape(" ".join(text.split()))
        console.print(f"[bold]{Path(name).name}[/bold] [dim]... {written} ...[/dim]")
    console.print(_verdict(results))


def _verdict(results: list[Result]) -> str:
    """One line: are all tokens the same, and how much less state was moved."""
    if wrong := [f"{r.model} ({r.method}, {r.draft})" for r in results if not r.identical]:
        rounded = any(r.checkpoint != "fp32" or r.view not in ("full", "fp32") for r in results)
        colour, why = ("yellow", " (states are rounded)") if rounded else ("red", "")
        return f"[{colour}]Different tokens{why}:[/{colour}] {escape(', '.join(wrong))}"
    plain = {r.model: r.state_bytes_per_token for r in results if r.method == "plain"}
    ratios = [r.state_bytes_per_token / plain[r.model] for r in results if r.method == "replay"]
    return (
        f"[green]All tokens are the same,[/green] with {min(ratios):.2f} to {max(ratios):.2f} of "
        "the state traffic."
    )
