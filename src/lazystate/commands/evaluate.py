"""`lazystate evaluate`: what rounded and sketched states do to a model's outputs."""

from __future__ import annotations

import json as jsons
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lazystate import shipped
from lazystate.commands.options import Backend, CalibrationFile, Device, Json, usage_errors

if TYPE_CHECKING:
    from lazystate.commands.decoding import Loaded
    from lazystate.evaluation.kl import Config

STATES = (
    "fp32",
    "fp16",
    "fp16:nearest",
    "fp8",
    "fp8:nearest",
    "nvfp4",
    "nvfp4:nearest",
    "fp32,fp8",
    "fp16,fp8",
    "fp8,fp8",
    "fp32,nvfp4",
    "fp16,nvfp4",
    "fp8,nvfp4",
    "fp32,int4",
    "fp32,int2",
)

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")


@app.callback()
def evaluate() -> None:
    """Measure how far rounded and sketched states take outputs from those of FP32 states."""


@app.command()
def kl(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Shipped models or folders of transformers; all shipped ones if none."),
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="How states are kept: checkpoint, or checkpoint,view; ':nearest' behind it rounds "
            "the checkpoint to nearest. Repeat it for more.  [default: 15 of them, and again]"
        ),
    ] = None,
    calibration: CalibrationFile = None,
    window: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens between folds; repeat it for more.  [default: 16]"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded behind the prompt.")] = 1024,
    streams: Annotated[int, typer.Option(min=1, help="Pages of the held-out books.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 512,
    seed: Annotated[int, typer.Option(min=0, help="Of stochastic rounding.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16"],
        typer.Option(help="Number format of the model; that of the reference stays float32."),
    ] = "float32",
    device: Device = "cpu",
    backend: Backend = "auto",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; small models are fastest on one.")
    ] = 1,
    json: Json = False,
) -> None:
    """KL divergence of the next-token distribution from FP32-state decoding.

    Each model is fed pages of books that it has not been trained on, behind a prompt whose state is
    exact, with every kind of state. D(p_FP32 || p) in nats is taken over the
    whole vocabulary and averaged over the streams and over the (at most) 256 positions that end at
    the N-th token. The reference is stock transformers with FP32 states; "fp32" is replay without
    rounding, and "again" stock transformers in two batches: what an order of additions makes.
    With --dtype bfloat16 the model that is compared has bfloat16 weights and activations: beside
    "fp32" this says how much of its error is that of states.

    **Examples**

    ```text
    lazystate evaluate kl
    lazystate evaluate kl gdn --state fp16,nvfp4 --state nvfp4 --tokens 4096
    lazystate evaluate kl gdn --state fp32,sketch4 --state fp32,sketch8 --window 32
    lazystate evaluate kl gdn --state fp8 --window 1 --window 16 --window 64
    lazystate evaluate kl gdn --dtype bfloat16 --state fp32 --state fp16,nvfp4
    lazystate evaluate kl --json > kl.json
    ```
    """
    import torch

    from lazystate.commands import decoding
    from lazystate.evaluation import kl as protocol

    torch.set_num_threads(threads)
    with usage_errors():
        kept = [protocol.States.parse(each) for each in state or STATES]
        configs = [] if state else [protocol.AGAIN]
        configs += [
            protocol.Config(each, length, seed=seed, backend=backend)
            for length in window or [16]
            for each in kept
            if not (each.view and length == 1)  # every step folds: the view is never read
        ]
        rows = []
        names = models or shipped.models()
        with _progress(len(names) * (1 + len(configs)) * tokens) as step:
            for name in names:
                loaded = decoding.load(name, device=device)
                known = [_with_sketch(loaded, each, calibration) for each in configs]
                compared = loaded if dtype == "float32" else decoding.load(name, dtype, device)
                rows += _measure(loaded, compared, known, prompt_tokens, tokens, streams, step)
    if json:
        typer.echo(jsons.dumps(rows, indent=1))
        return
    for name in names:
        _show_kl([row for row in rows if row["model"] == name], name)


@app.command()
def recall(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Shipped models or folders of transformers; all shipped ones if none."),
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="As of kl; repeat it for more.  [default: fp32]")
    ] = None,
    calibration: CalibrationFile = None,
    window: Annotated[int, typer.Option(min=1, help="Tokens between folds.")] = 16,
    context: Annotated[int, typer.Option(min=64, help="Tokens that the facts lie in.")] = 256,
    examples: Annotated[int, typer.Option(min=1, help="Contexts of each task.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Of the examples and of rounding.")] = 0,
    device: Device = "cpu",
    backend: Backend = "auto",
    json: Json = False,
) -> None:
    """Share of facts found again in a context of book text, with every kind of state.

    single: one fact, one question. multi-key: four facts, one question. multi-query: two questions.
    multi-value: two facts of one name, and both are asked for. The context is prefill; questions
    and answers are decoded.

    **Examples**

    ```text
    lazystate evaluate recall
    lazystate evaluate recall kda --state fp32 --state fp32,sketch2 --state fp32,int2
    ```
    """
    import torch

    from lazystate.commands import decoding
    from lazystate.evaluation import kl, retrieval

    torch.set_num_threads(1)
    with usage_errors():
        states = [kl.States.parse(each) for each in state or ["fp32"]]
        names, rows = models or shipped.models(), []
        with _progress(len(names) * len(states) * len(retrieval.TASKS)) as step:
            for name in names:
                loaded = decoding.load(name, device=device)
                for kept in states:
                    config = kl.Config(kept, window, seed=seed, backend=backend)
                    config = _with_sketch(loaded, config, calibration)
                    row = {"model": name, "state": str(kept), "window": window, "context": context}
                    for task in retrieval.TASKS:
                        drawn = retrieval.examples(loaded.tokenizer, task, examples, context, seed)
                        right = retrieval.accuracy(loaded.model, drawn, config)
                        row[task] = sum(right) / len(right)
                        step(1)
                    rows.append(row)
    if json:
        typer.echo(jsons.dumps(rows, indent=1))
        return
    table = _table(f"answers found, {examples} contexts of {context} tokens")
    for heading in ("model", "state", *retrieval.TASKS):
        table.add_column(heading, justify="left" if heading in ("model", "state") else "right")
    for row in rows:
        table.add_row(row["model"], row["state"], *(f"{row[task]:.2f}" for task in retrieval.TASKS))
    Console(highlight=False).print(table)


@app.command()
def copy(
    models: Annotated[
        list[str] | None,
        typer.Argument(help="Shipped models or folders of transformers; all shipped ones if none."),
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option(help="As of kl; repeat it for more.  [default: fp32]")
    ] = None,
    calibration: CalibrationFile = None,
    window: Annotated[int, typer.Option(min=1, help="Tokens between folds.")] = 16,
    passages: Annotated[int, typer.Option(min=1, help="Passages to copy.")] = 64,
    length: Annotated[int, typer.Option(min=9, help="Tokens of a passage.")] = 64,
    gap: Annotated[int, typer.Option(min=1, help="Tokens between it and its copy.")] = 128,
    device: Device = "cpu",
    backend: Backend = "auto",
    json: Json = False,
) -> None:
    """Copying from the context until the model stops by itself, with every kind of state.

    A passage of a book ends in an empty line; behind it come other text and the first 8 tokens of
    the passage again. The model continues greedily until it writes an empty line itself. Reported
    are the passages copied without an error, and the tokens until the model stopped, which are
    those of the passage if all goes well.

    **Examples**

    ```text
    lazystate evaluate copy mamba2
    lazystate evaluate copy gdn --state fp32 --state fp32,sketch2 --state fp32,int2
    ```
    """
    import torch

    from lazystate.commands import decoding
    from lazystate.evaluation import copying, kl

    torch.set_num_threads(1)
    with usage_errors():
        states = [kl.States.parse(each) for each in state or ["fp32"]]
        names, rows = models or shipped.models(), []
        with _progress(len(names) * len(states)) as step:
            for name in names:
                loaded = decoding.load(name, device=device)
                drawn = copying.passages(loaded.tokenizer, passages, length, gap)
                for kept in states:
                    config = _with_sketch(
                        loaded, kl.Config(kept, window, backend=backend), calibration
                    )
                    copies = copying.copy(loaded.model, drawn, config)
                    row = {"model": name, "state": str(kept), "window": window}
                    row["passage"] = drawn.rest.shape[1]
                    row["tokens"] = float(copies.tokens.double().mean())
                    row["copied"] = float(copies.right.double().mean())
                    rows.append(row)
                    step(1)
    if json:
        typer.echo(jsons.dumps(rows, indent=1))
        return
    table = _table(f"{passages} passages, {rows[0]['passage']} tokens to go")
    for heading in ("model", "state", "tokens until stop", "copied"):
        table.add_column(heading, justify="left" if heading in ("model", "state") else "right")
    for row in rows:
        table.add_row(row["model"], row["state"], f"{row['tokens']:.1f}", f"{row['copied']:.2f}")
    Console(highlight=False).print(table)


@app.command()
def decay(
    state: Annotated[
        list[str] | None, typer.Option(help="Formats.  [default: fp16, fp8, nvfp4]")
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens between folds.  [default: 1, 16]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the inputs and of rounding.")] = 0,
    json: Json = False,
) -> None:
    """Error of a rounded state without a model: how it grows with slow decays.

    One state that decays by alpha a token and is rounded once a window, against the same in FP64.
    An error of mean b and variance s^2 a fold should add up to b / (1 - gamma) and
    s^2 / (1 - gamma^2) with gamma = alpha^L; the table has what was measured and this law.
    """
    import torch

    from lazystate.evaluation import decay as laws
    from lazystate.formats import CHECKPOINTS, Rounding, named

    torch.set_num_threads(1)
    with usage_errors():
        formats = [named("state", each, CHECKPOINTS).name for each in state or _NARROW]
        runs = [
            (each, rounding, alpha, length)
            for each in formats
            for rounding in get_args(Rounding)
            for length in window or [1, 16]
            for alpha in laws.ALPHAS
        ]
        found = []
        with _progress(sum(laws.settled(alpha, length) for *_, alpha, length in runs)) as step:
            for each, rounding, alpha, length in runs:
                folds = laws.settled(alpha, length)
                found.append(laws.run(each, rounding, alpha, length, folds, seed))
                step(folds)
    if json:
        typer.echo(jsons.dumps([asdict(each) for each in found], indent=1))
        return
    table = _table("rounded states of a recurrence with decay alpha")
    for name in ("state", "rounding", "L", "alpha", "deviation", "law", "ratio", "once", "KL"):
        table.add_column(name, justify="left" if name in ("state", "rounding") else "right")
    for each in found:
        table.add_row(
            each.state,
            each.rounding,
            str(each.window),
            str(each.alpha),
            f"{each.rms:.2e}",
            f"{each.law:.2e}",
            f"{each.rms / each.law:.2f}",
            f"{each.once:.1e}",
            f"{each.kl:.1e}",
        )
    Console(highlight=False).print(table)


_NARROW = ("fp16", "fp8", "nvfp4")


def _with_sketch(loaded: Loaded, config: Config, calibration: Path | None) -> Config:
    """The configuration with its sketches of this model's layers, if it has any."""
    from lazystate.commands.decoding import Method

    if (rank := config.states.mean_rank) is None:
        return config
    method = Method(config.window, view="sketch", mean_rank=rank, calibration=calibration)
    return replace(config, sketch=loaded.view(method))  # pyright: ignore (a sketch)


def _measure(
    loaded: Loaded,
    compared: Loaded,
    configs: list[Config],
    prompt_tokens: int,
    tokens: int,
    streams: int,
    step: Any,
) -> list[dict[str, Any]]:
    """A row for every configuration and N of one model, against `loaded` with FP32 states."""
    from lazystate.evaluation import kl as protocol

    given = protocol.streams(loaded.tokenizer, streams, prompt_tokens + tokens)
    given = given.to(loaded.model.device)
    reference = protocol.Reference.of(loaded.model, given, prompt_tokens, step)
    rows = []
    for config in configs:
        for point in reference.measure(compared.model, config, step):
            again = config.window is None
            rows.append(
                {
                    "model": loaded.name,
                    "layer": loaded.layer,
                    "dtype": str(compared.model.dtype).removeprefix("torch."),
                    "state": "again" if again else str(config.states),
                    "window": config.window,
                    "seed": config.seed,
                    "prompt_tokens": prompt_tokens,
                    **{key: _number(value) for key, value in asdict(point).items()},
                }
            )
    return rows


def _number(value: Any) -> Any:
    """What JSON has a word for: None in place of NaN."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def _cell(mean: float | None, error: float | None) -> str:
    """A mean with its error; a state that became non-finite says so."""
    if mean is None:
        return "not finite"
    return f"{mean:.1e}" + ("" if error is None else f" ± {error:.0e}")


def _show_kl(rows: list[dict[str, Any]], name: str) -> None:
    """One model's table: a line for every kind of state and window, a column for every N."""
    table = _table(f"{name}: KL from FP32 states, nats, at the N-th token")
    table.add_column("state")
    table.add_column("L", justify="right")
    columns = sorted({row["n"] for row in rows})
    for n in columns:
        table.add_column(f"{n:,}", justify="right")
    cells = {(row["state"], row["window"], row["n"]): row for row in rows}
    for state, window in dict.fromkeys((row["state"], row["window"]) for row in rows):
        found = [cells[state, window, n] for n in columns]
        table.add_row(
            state,
            "-" if window is None else str(window),
            *(_cell(row["kl"], row["standard_error"]) for row in found),
        )
    Console(highlight=False).print(table)


def _table(title: str) -> Table:
    return Table(title=title, box=SIMPLE, pad_edge=False, collapse_padding=True)


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar on standard error; what it yields moves it on by a number of steps."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total)
        yield lambda steps: progress.advance(task, steps)
