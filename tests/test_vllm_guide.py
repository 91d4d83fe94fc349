"""What readers are told of the vLLM engine is what its data say."""

from __future__ import annotations

import json
import shlex
from dataclasses import fields, replace

import pytest

from lazystate.engines.vllm import guide
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import PREFIX, VERSIONS, Feature, Version

OLD = Version("0.1", "0.1.2", VERSIONS[0].architectures[:1], (Feature(PREFIX, "no: --off"),))


def test_the_command_asks_for_what_was_given() -> None:
    """Only options that differ from the defaults; what is on by itself and refused is off."""
    words = shlex.split(guide.serve(OLD, "a model", Options(window=32)))
    at = words.index("--additional-config")
    assert words[:3] == ["vllm", "serve", "a model"]
    assert Options.of(json.loads(words[at + 1])) == Options(window=32)
    assert "--no-enable-prefix-caching" in words
    seen = replace(OLD, features=(Feature(PREFIX),))
    assert "--no-enable-prefix-caching" not in guide.serve(seen, "m", Options())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_table_has_all_that_a_version_supports(version: Version) -> None:
    """Every class and every feature with its status."""
    table = guide.supported(version)
    assert all(f"`{each.name}`" in table for each in version.architectures)
    assert all(f"| {each.name} | {each.status} |" in table for each in version.features)


def test_a_layer_without_an_adapter_is_said_to_have_none() -> None:
    """One model class of one kind."""
    assert guide.supported(OLD).count("no adapter") == 2


def test_every_option_is_told_with_its_default() -> None:
    """Names, defaults, and what the class says of them."""
    table = guide.options()
    for field in fields(Options):
        (line,) = (each for each in table.splitlines() if f"`{field.name}`" in each.split("|")[1])
        assert f"`{json.dumps(field.default)}`" in line and len(line.split("|")[3]) > 3


def test_refusals_are_the_engines_own() -> None:
    """Something is always refused, each in a line of its own."""
    lines = guide.refused(VERSIONS[0]).splitlines()
    assert len(lines) >= 3 and all(line.startswith("- ") for line in lines)
