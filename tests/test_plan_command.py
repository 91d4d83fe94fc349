"""`lazystate plan`."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from lazystate.cli import app

KEYS = {
    "method",
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
    for text in ("Qwen3.5-4B, batch 8", "plain", "replay", "Table 5"):
        assert text in result.output


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
