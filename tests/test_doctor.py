"""`lazystate doctor`: what would be used in made-up environments, and what the command prints."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from lazystate.cli import app
from lazystate.engines import diagnosis
from lazystate.engines.diagnosis import Environment, diagnose, look
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import PREFIX, SPECULATIVE, VERSIONS
from lazystate.presets import PRESETS, preset
from test_house import ROOT

NANO = preset("Nemotron-3-Nano-4B")
SERVER = Environment(
    "3.12.3",
    {
        "lazystate": "0.1.0",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "transformers": "5.17.0",
        "vllm": "0.33.0",
    },
    ("NVIDIA H200",),
    True,
    {"NemotronHForCausalLM": "NemotronHMamba2Mixer"},
)


def without(package: str, **changed: Any) -> Environment:
    """The server without a package."""
    return replace(SERVER, packages={**SERVER.packages, package: None}, **changed)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments], env={"COLUMNS": "120"})


def test_a_server_uses_vllm() -> None:
    """With a GPU, a supported vLLM and the plugin, nothing stands in the way."""
    found = diagnose(SERVER, NANO, Options(), folder="folder")
    vllm, transformers = found.engines
    assert found.engine == "vllm" and vllm.reasons == transformers.reasons == ()
    assert vllm.command and vllm.command.startswith("vllm serve folder --additional-config")
    assert found.launch == "tuned for NVIDIA H200"


def test_nothing_is_said_of_vllm_that_its_data_do_not_say() -> None:
    """Methods and their status are support.py's, of the installed version."""
    for version in VERSIONS:
        packages = {**SERVER.packages, "vllm": version.tested}
        vllm, _ = diagnose(replace(SERVER, packages=packages), NANO, Options()).engines
        told = [(each.name, each.status) for each in vllm.methods]
        assert told == [(each.name, each.status) for each in version.features]
        off = "--no-enable-prefix-caching" in (vllm.command or "")
        assert off == bool(version.missing(PREFIX))


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (without("vllm"), f"pip install vllm=={VERSIONS[0].tested}"),
        (replace(SERVER, plugin=False), "install lazystate with pip into vLLM's environment"),
        (replace(SERVER, gpus=()), "no CUDA device: run it on"),
        (replace(SERVER, packages={**SERVER.packages, "vllm": "0.30.1"}), "vLLM 0.30.1 is not"),
    ],
)
def test_why_not_vllm(environment: Environment, says: str) -> None:
    """One reason, with what to do; transformers is used instead."""
    found = diagnose(environment, NANO, Options())
    assert found.engine == "transformers"
    (reason,) = found.engines[0].reasons
    assert says in reason


def test_a_missing_vllm_is_recommended_in_a_version_that_takes_the_model() -> None:
    """Kimi Linear has adapters in some versions only."""
    kimi = preset("Kimi-Linear-48B")
    (name,) = kimi.architectures
    takes = next(version for version in VERSIONS if version.architecture(name))
    vllm, _ = diagnose(without("vllm"), kimi, Options()).engines
    assert vllm.reasons == (f"vLLM is not installed: pip install vllm=={takes.tested}",)
    assert vllm.stated_for == takes.minor and vllm.methods


def test_what_is_asked_of_vllm_is_judged() -> None:
    """Drafts and windows are refused as the engine would refuse them."""
    vllm, _ = diagnose(SERVER, NANO, Options(window=2), draft_tokens=4).engines
    assert any("window must be above the 4 drafts" in reason for reason in vllm.reasons)
    refused = any(SPECULATIVE in reason for reason in vllm.reasons)
    assert refused == bool(VERSIONS[0].missing(SPECULATIVE))
    other = Options(view="sketch", calibration="kda")
    vllm, _ = diagnose(SERVER, NANO, other).engines
    assert any("calibration is of another model" in reason for reason in vllm.reasons)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (without("transformers"), "transformers is not installed: pip install"),
        (replace(SERVER, packages={**SERVER.packages, "transformers": "5.16.2"}), "too old: pip"),
        (replace(SERVER, mixers={}), "has no NemotronHForCausalLM: take a newer one"),
        (replace(SERVER, mixers={"NemotronHForCausalLM": None}), "has an adapter: take a model"),
        (without("triton"), "Triton is not installed"),
    ],
)
def test_why_not_transformers(environment: Environment, says: str) -> None:
    """One reason, with what to do."""
    _, transformers = diagnose(environment, NANO, Options()).engines
    (reason,) = transformers.reasons
    assert says in reason


def test_a_model_of_no_known_class() -> None:
    """Neither engine can be asked about it, and no method is claimed."""
    found = diagnose(SERVER, replace(NANO, architectures=()), Options())
    assert found.engine is None
    assert all("give the folder" in engine.reasons[-1] for engine in found.engines)
    assert not any(engine.methods for engine in found.engines)


def test_speed_is_measured_or_not_said() -> None:
    """From which batch on replay is faster is said of a GPU with a table, and of no other."""
    assert diagnose(SERVER, NANO, Options()).faster_from in (1, 2, 4, 8, 16, 32)
    other = diagnose(replace(SERVER, gpus=("Some GPU",)), NANO, Options())
    assert other.faster_from is None and other.launch and "none are tuned" in other.launch


def test_the_oldest_transformers_is_the_dependency() -> None:
    """The package asks pip for the same version."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf8"))["project"]
    oldest = ".".join(map(str, diagnosis.OLDEST_TRANSFORMERS))
    assert f"transformers>={oldest}" in project["dependencies"]


def test_this_environment() -> None:
    """What is installed here is found, with the adapters of published shapes' classes."""
    names = [name for shape in PRESETS.values() for name in shape.architectures]
    found = look(names)
    assert found.packages["torch"] == torch.__version__
    assert found.mixers["NemotronHForCausalLM"] and found.mixers["KimiLinearForCausalLM"]
    assert found.mixers["Qwen3_5ForConditionalGeneration"]


def test_the_command_tells_engines_and_reasons() -> None:
    """Both engines with their reasons, and the exit code is 0, as transformers is there."""
    result = run("gdn")
    assert result.exit_code == 0, result.output
    for text in ("GPU", "gdn: 6 recurrent layers", "transformers", "lazystate generate gdn"):
        assert text in result.output
    assert "cannot be used" in result.output or torch.cuda.is_available()


def test_json_has_the_promised_keys() -> None:
    """One object; a published shape has no command for its weights."""
    result = run("Qwen3.5-4B", "--json")
    found = json.loads(result.stdout)
    keys = {"environment", "model", "engine", "engines", "launch", "faster_from"}
    assert set(found) == keys
    assert [engine["name"] for engine in found["engines"]] == ["vllm", "transformers"]
    assert found["engines"][1]["command"] is None
    assert found["model"]["architectures"] == ["Qwen3_5ForConditionalGeneration"]


def test_the_exit_code_says_that_nothing_can_be_used(tmp_path: Path) -> None:
    """A hybrid whose class nobody has."""
    config = json.loads((ROOT / "src/lazystate/assets/models/gdn/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Nobodys"]}))
    result = run(str(tmp_path))
    assert result.exit_code == 1, result.output
    assert "No engine can decode this model here" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("nothing",), "a published shape (Nemotron"),
        (("gdn", "--options", "{"), "--options must be a JSON object"),
        (("gdn", "--options", '{"windw": 1}'), "no option 'windw'"),
    ],
)
def test_wrong_arguments_are_usage_errors(arguments: tuple[str, ...], says: str) -> None:
    """Exit code 2, with what is accepted."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert says in " ".join(result.output.replace("│", " ").split())
