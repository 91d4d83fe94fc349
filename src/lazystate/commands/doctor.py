"""`lazystate doctor`: what would decode a model in this environment, and why not otherwise."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from lazystate.commands.options import usage_errors

if TYPE_CHECKING:
    from lazystate.engines.diagnosis import Diagnosis, Engine
    from lazystate.engines.vllm.options import Options
    from lazystate.presets import ModelShape


def doctor(
    model: Annotated[
        str, typer.Argument(help="Model folder, shipped name, or published shape of `plan`.")
    ],
    options: Annotated[
        str, typer.Option(help="Of the vLLM plugin, the JSON object under its key.")
    ] = "{}",
    drafts: Annotated[int, typer.Option(min=0, help="Draft tokens of a step in vLLM.")] = 0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object, and no tables.")
    ] = False,
) -> None:
    """Say which engine, version and methods would decode a model here, and why not another.

    Nothing is loaded but the model's config.json. Of vLLM only what is written down as supported
    counts; what no GPU has run is called that. The exit code is 1 if no engine can be used.

    **Examples**

    ```text
    lazystate doctor ./my-model
    lazystate doctor Qwen3.5-4B --json
    lazystate doctor ./my-model --options '{"window": 32}' --drafts 4
    ```
    """
    from lazystate.engines.diagnosis import diagnose, look

    with usage_errors():
        given = _options(options)
        shape, weights = _model(model)
    found = diagnose(look(shape.architectures), shape, given, draft_tokens=drafts, **weights)
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=1, default=str))
    else:
        _show(found)
    if found.engine is None:
        raise typer.Exit(1)


def _options(given: str) -> Options:
    from lazystate.engines.vllm.options import KEY, Options

    try:
        parsed = json.loads(given)
    except ValueError as error:
        raise ValueError(f"--options must be a JSON object, got {given!r}: {error}") from error
    options = Options.of({KEY: parsed})
    assert options is not None
    return options


def _model(name: str) -> tuple[ModelShape, dict[str, str]]:
    """A model's shape, and what the engines call its weights: vLLM has no name for shipped ones."""
    from lazystate.presets import PRESETS, preset, shape_from_config
    from lazystate.shipped import model_folder, models

    if name in models():
        return replace(shape_from_config(model_folder(name)), name=name), {"name": name}
    if Path(name).exists():
        return shape_from_config(name), {"name": name, "folder": name}
    try:
        return preset(name), {}
    except KeyError as error:
        raise ValueError(
            f"model must be a folder with a config.json, a shipped name ({', '.join(models())}) or "
            f"a published shape ({', '.join(PRESETS)}), got {name!r}"
        ) from error


def _show(found: Diagnosis) -> None:
    console = Console(highlight=False)
    console.print(_environment(found))
    model = found.model
    classes = ", ".join(model.architectures) or "class not known"
    console.print(
        f"{model.name}: {model.recurrent_layers} recurrent layers of {model.layer.heads} heads, "
        f"K = {model.layer.key_dim}, V = {model.layer.value_dim} ({classes})."
    )
    for engine in found.engines:
        console.print()
        version = engine.version or "not installed"
        used = engine.name == found.engine
        verdict = "cannot be used" if engine.reasons else "would be used" if used else "could be"
        console.print(f"[bold]{engine.name}[/bold] ({version}) {verdict}.")
        for reason in engine.reasons:
            console.print(f"  - {reason}", markup=False)
        if engine.command and not engine.reasons:
            console.print(f"  {engine.command}", markup=False)
        if engine.methods:
            console.print(_methods(engine))
    if found.engine is None:
        console.print("[bold]No engine can decode this model here.[/bold]")


def _methods(engine: Engine) -> Table:
    table = Table(box=SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column(f"in {engine.name} {engine.stated_for}")
    table.add_column("")
    for method in engine.methods:
        table.add_row(method.name, method.status)
    return table


def _environment(found: Diagnosis) -> Table:
    environment = found.environment
    table = Table(box=SIMPLE, pad_edge=False, show_header=False)
    table.add_row("GPU", ", ".join(environment.gpus) or "none")
    if found.launch is not None:
        table.add_row("launch settings", found.launch)
        least = found.faster_from
        table.add_row("replay is faster", "not measured" if least is None else f"from B = {least}")
    table.add_row("Python", environment.python)
    for package, version in environment.packages.items():
        table.add_row(package, version or "not installed")
    return table
