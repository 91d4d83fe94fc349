"""The command line: one command a file, in `commands/`."""

from __future__ import annotations

from typing import Annotated

import typer

import lazystate
from lazystate.commands import evaluate
from lazystate.commands.calibrate import calibrate
from lazystate.commands.compare import compare
from lazystate.commands.doctor import doctor
from lazystate.commands.generate import generate
from lazystate.commands.inspect import inspect
from lazystate.commands.plan import plan

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"lazystate {lazystate.__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Decode hybrid language models (Mamba-2, Gated DeltaNet, Kimi Delta Attention) without
    touching the state.

    A recurrent layer's state is much larger than what one token adds to it. lazystate keeps the
    last few tokens' inputs instead, reads the state once a step, and rewrites it once a window.

    **Start here**

    ```text
    lazystate compare        # the shipped models, both ways, side by side
    lazystate generate gdn --prompt "It was a dark night, and"
    lazystate doctor ./my-model # which engine decodes it here, and why not another
    lazystate plan --help    # what it saves on a given model and GPU
    lazystate evaluate --help  # what states of few bits do to outputs
    lazystate calibrate --help # a sketch of the states of your own model
    ```
    """


app.command()(compare)
app.command()(generate)
app.command()(plan)
app.command()(doctor)
app.command()(calibrate)
app.command()(inspect)
app.add_typer(evaluate.app, name="evaluate")
