"""What a reader is told of the vLLM engine, made of `support.py` and `options.py`."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import fields

from lazystate.engines.vllm.options import KEY, Options
from lazystate.engines.vllm.support import KINDS, PREFIX, Setup, Version, refusals


def serve(version: Version, model: str, options: Options) -> str:
    """The command that serves a model with lazystate.

    What vLLM does unless told otherwise, and the version refuses, is switched off.
    """
    given = {
        field.name: value
        for field in fields(options)
        if (value := getattr(options, field.name)) != field.default
    }
    words = ["vllm", "serve", model, "--additional-config", json.dumps({KEY: given})]
    if version.missing(PREFIX):
        words.append("--no-enable-prefix-caching")
    return shlex.join(words)


def supported(version: Version) -> str:
    """What a version takes, and what works, is untried or is refused in it, in Markdown."""
    lines = [[f"vLLM {version.minor}", f"written against {version.tested}"]]
    for kind, title in KINDS.items():
        names = [f"`{each.name}`" for each in version.architectures if each.kind == kind]
        lines.append([title, ", ".join(names) or "no adapter"])
    lines += [[each.name, each.status] for each in version.features]
    return _markdown(lines)


def options() -> str:
    """The options, their defaults and what `Options` says of them, in Markdown."""
    defaults = {field.name: json.dumps(field.default) for field in fields(Options)}
    _, _, text = (Options.__doc__ or "").partition("Attributes:")
    text = " ".join(text.partition("Raises:")[0].split())
    named = re.split(rf"\b((?:(?:{'|'.join(defaults)})(?:, )?)+): ", text)[1:]
    lines = [["option", "default", ""]]
    for names, said in zip(named[::2], named[1::2], strict=True):
        given = names.split(", ")
        shown = [", ".join(f"`{x}`" for x in each) for each in (given, map(defaults.get, given))]
        lines.append([*shown, said.strip()])
    return _markdown(lines)


def refused(version: Version) -> str:
    """What an engine says at its start that is asked for all that it may refuse, in Markdown."""
    setup = Setup(
        version.tested,
        (version.architectures[0].name,),
        draft_tokens=16,
        prefix_caching=True,
        cache_mode="all",
        second_runner=False,
        kv_connector="NixlConnector",
        stock_replay=True,
        specialized=True,
        conv_dim_first=True,
    )
    return "".join(f"- {reason}\n" for reason in refusals(setup, Options(view="fp8")))


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ["---"] * len(head), *rest))
