"""`lazystate plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lazystate.cli import app
from lazystate.presets import preset
from lazystate.recommendation import recommend

KEYS = {
    "method",
    "checkpoint",
    "view",
    "window",
    "tokens",
    "state_bytes_per_token",
    "step_us",
    "request_bytes",
    "max_batch",
}


def run(*arguments: str):
    """The command's result."""
    return CliRunner().invoke(app, ["plan", *arguments])


def test_json_has_the_promised_keys():
    """One list of objects, one a method, replay the cheapest."""
    result = run("Nemotron-3-Super-120B", "--tokens", "4", "--acceptance", "3.5", "--json")
    assert result.exit_code == 0, result.output
    plans = json.loads(result.stdout)
    assert all(set(plan) == KEYS for plan in plans)
    bytes_of = {plan["method"]: plan["state_bytes_per_token"] for plan in plans}
    assert bytes_of["replay"] < bytes_of["snapshot"] < bytes_of["plain"]


def test_table_names_the_model_and_its_source():
    """The table is for a reader: model, methods, and where the shape is from."""
    result = run("qwen3.5-4b", "--batch", "8")
    assert result.exit_code == 0, result.output
    for text in ("Qwen3.5-4B, batch 8", "plain", "replay", "Table 5", "Faster on one NVIDIA H200"):
        assert text in result.output


def test_formats_are_of_replay():
    """--checkpoint and --view make replay cheaper, and its row says so; plain keeps FP32 states."""
    formats = ("--checkpoint", "fp16", "--view", "nvfp4")
    small, full = (json.loads(run("Qwen3.5-4B", *x, "--json").stdout) for x in (formats, ()))
    assert small[0] == full[0]
    assert small[1]["checkpoint"] == "fp16" and small[1]["view"] == "nvfp4"
    assert small[1]["state_bytes_per_token"] < full[1]["state_bytes_per_token"] / 2
    shown, usual = (run("Qwen3.5-4B", *x).output for x in (formats, ()))
    assert "fp16, nvfp4" in shown and "No kernel was timed" in shown
    assert "No kernel was timed" not in usual
    assert run("Qwen3.5-4B", "--checkpoint", "int2").exit_code == 2


def test_auto_says_what_it_chose_and_why():
    """--view auto is what `recommend` says, with its sentence; the error class matters."""
    shape = preset("Qwen3.5-4B")
    shown = words(run("Qwen3.5-4B", "--view", "auto").output)
    assert f"Recommended: {recommend(shape.layer)}." in shown
    chosen = {}
    for error in ("exact", "close", "loose", "10"):
        result = run("Qwen3.5-4B", "--view", "auto", "--error", error, "--json")
        assert result.exit_code == 0, result.output
        plain, replay = json.loads(result.stdout)
        assert plain["checkpoint"] == "fp32"
        found = recommend(shape.layer, error=float(error) if error == "10" else error)
        assert (replay["checkpoint"], replay["view"]) == (found.checkpoint, found.view or "full")
        chosen[error] = replay["state_bytes_per_token"]
    assert chosen["exact"] > chosen["close"] > chosen["loose"] > chosen["10"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--checkpoint", "fp16"), "--view auto chooses the checkpoint, too"),
        (("--error", "small"), "--error must be one of exact, close, loose"),
        (("--error", "-1"), "error must be nats of KL, 0 or more"),
    ],
)
def test_auto_refuses(given: tuple[str, str], message: str):
    """A checkpoint besides, and errors that are none."""
    result = run("Qwen3.5-4B", "--view", "auto", *given)
    assert result.exit_code == 2
    assert message in words(result.output)


def test_table_is_not_cut():
    """All numbers are whole in 80 columns."""
    out = run("Nemotron-3-Super-120B", "--checkpoint", "fp16", "--view", "nvfp4").output
    assert "335,544,320" in out and "…" not in out


def test_unknown_model_is_a_usage_error():
    """Exit code 2, and the names that exist."""
    result = run("qwen4")
    assert result.exit_code == 2
    assert "Kimi-Linear-48B" in result.output.replace("\n", " ")


def test_help_has_examples():
    """`--help` is enough."""
    assert "lazystate plan" in run("--help").output


def test_acceptance_above_tokens_is_named():
    """The option that is wrong is the one that the error names."""
    result = run("qwen3.5-4b", "--tokens", "4", "--acceptance", "9")
    assert result.exit_code == 2
    assert "--acceptance must be 1 to --tokens (4)" in result.output.replace("\n", " ")


GDN = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1, 2], "config must be a JSON object, got list"),
        (None, "config must be a JSON object, got NoneType"),
        ({"model_type": ["mamba2"]}, "supported are"),
        ({"text_config": 3}, "text_config must be a JSON object"),
        (GDN | {"linear_num_value_heads": None}, "whole numbers"),
        (GDN | {"full_attention_interval": 0}, "whole numbers"),
        (GDN | {"num_hidden_layers": "4"}, "whole numbers"),
        (GDN | {"num_hidden_layers": 0}, "at least one recurrent layer, got 0"),
    ],
)
def test_an_odd_config_is_a_usage_error(config: object, message: str, tmp_path: Path):
    """Whatever a config.json holds, the error says what it must hold."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(str(tmp_path))
    assert result.exit_code == 2, result.output
    assert message in words(result.output)


def test_a_folder_without_config_is_a_usage_error(tmp_path: Path):
    """Exit code 2, and the file that is missing."""
    result = run(str(tmp_path))
    assert result.exit_code == 2 and "No such file" in words(result.output)


def test_infinite_memory_is_named():
    """The largest batch needs a number."""
    result = run("qwen3.5-4b", "--weights", "inf")
    assert result.exit_code == 2
    assert "--weights must be a finite number" in words(result.output)


@pytest.mark.parametrize("tokens", ["20", "100"])
def test_steps_longer_than_a_usual_window(tokens: str):
    """Snapshots have no window, and replay's is as long as the step at least."""
    result = run("qwen3.5-4b", "--tokens", tokens, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)[-1]["window"] >= int(tokens)


def test_window_below_tokens_is_named():
    """The options are named; methods without a window do not mind it."""
    short = ("qwen3.5-4b", "--tokens", "4", "--window", "2")
    result = run(*short)
    assert result.exit_code == 2
    assert "--window must be at least --tokens (4), got 2" in words(result.output)
    assert run(*short, "--method", "snapshot").exit_code == 0


def words(output: str) -> str:
    """The text of a framed error on one line."""
    return " ".join(output.replace("│", " ").split())
