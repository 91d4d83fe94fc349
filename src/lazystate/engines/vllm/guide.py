"""What a reader is told of the vLLM engine, made of `support.py`: a command, tables, refusals."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields

from lazystate.engines.vllm.options import KEY, Options
from lazystate.engines.vllm.support import KINDS, PREFIX, Version


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


def models(version: Version) -> str:
    """A table of the model classes that a version takes, in Markdown."""
    lines = ["| layer | model classes | takes the place of |", "|---|---|---|"]
    for kind, title in KINDS.items():
        found = [each for each in version.architectures if each.kind == kind]
        if found:
            names = ", ".join(f"`{each.name}`" for each in found)
            layers = ", ".join(f"`{layer}`" for layer in dict.fromkeys(x.layer for x in found))
            lines.append(f"| {title} | {names} | {layers} |")
    return "".join(f"{line}\n" for line in lines)


def features(version: Version) -> str:
    """A table of what works, is untried or is refused in a version, in Markdown."""
    lines = [f"| vLLM {version.minor} | |", "|---|---|"]
    lines += [f"| {each.name} | {each.status} |" for each in version.features]
    return "".join(f"{line}\n" for line in lines)
