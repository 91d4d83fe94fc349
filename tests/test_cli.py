"""The command line: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from lazystate import LayerSpec, __version__, recommend
from lazystate.cli import app
from lazystate.commands import compare as compare_command
from lazystate.commands import decoding, measure
from lazystate.commands.recorder import Recorder, Step

SHORT = ("--prompt-tokens", "48", "--tokens", "40", "--repeats", "1")


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=input, env={"COLUMNS": "200"})


def test_version() -> None:
    """`--version` prints the package's version."""
    assert run("--version").stdout.strip() == f"lazystate {__version__}"


@pytest.mark.parametrize(
    "command", ["compare", "generate", "plan", "calibrate", "inspect", "doctor"]
)
def test_help_has_examples(command: str) -> None:
    """Every command's help shows how it is called."""
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"lazystate {command}" in result.stdout


def test_help_lists_commands() -> None:
    """`lazystate --help` is enough to find every command."""
    result = run("--help")
    assert all(command in result.stdout for command in ("compare", "generate", "plan"))


@pytest.mark.parametrize("method", ["plain", "replay"])
def test_generate_streams_text_and_says_what_it_cost(method: str) -> None:
    """Text goes to standard output, the costs to standard error."""
    result = run("generate", "gdn", "--prompt", "It was", "--method", method, "--tokens", "8")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("It was")
    assert "tokens/s" in result.stderr and "bytes of state" in result.stderr


def test_generate_of_one_token_claims_no_speed() -> None:
    """It comes from prefill: nothing is decoded, and nothing timed."""
    result = run("generate", "gdn", "--prompt", "It was", "--tokens", "1")
    assert result.exit_code == 0 and result.stdout.startswith("It was")
    assert "1 token, from prefill" in result.stderr and "tokens/s" not in result.stderr


def test_generate_is_the_same_by_both_methods(tmp_path: Path) -> None:
    """Plain, replay and drafts write the same text, from a file as from standard input."""
    text = "the cat and the dog and the cat and the dog and the"
    (tmp_path / "text.txt").write_text(text)
    plain = run("generate", "mamba2", "--method", "plain", "--tokens", "24", input=text)
    drafts = ("--draft", "prompt-lookup", "--draft-tokens", "3", "--tokens", "24")
    drafted = run("generate", "mamba2", "--file", str(tmp_path / "text.txt"), *drafts)
    assert plain.exit_code == drafted.exit_code == 0, plain.output + drafted.output
    assert plain.stdout == drafted.stdout


def test_generate_samples_by_seed() -> None:
    """The same seed gives the same text, another seed another."""
    once, again, other = (
        run("generate", "kda", "--prompt", "It", "--temperature", "1", "--seed", seed).stdout
        for seed in ("1", "1", "2")
    )
    assert once == again != other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "nothing-there", "--prompt", "a"), "mamba2"),
        (("generate", "gdn", "--prompt", "a", "--file", __file__), "not both"),
        (("generate", "gdn", "--prompt", ""), "empty"),
        (
            ("generate", "gdn", "--prompt", "a", "--method", "plain", "--draft", "prompt-lookup"),
            "cannot crop a recurrent state",
        ),
        (("generate", "gdn", "--prompt", "a", "--method", "fast"), "replay"),
        (("compare", "--book", "ulysses"), "moby-dick"),
        (("compare", "--offset", "100000000"), "offset"),
        (("compare", "--window", "4"), "draft_tokens"),
    ],
)
def test_errors_help(arguments: tuple[str, ...], message: str) -> None:
    """A wrong argument is a usage error that says what would be right."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_compare_prints_every_key() -> None:
    """`--json` is one list with an object for each way to decode."""
    result = run("compare", "gdn", *SHORT, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [(row["method"], row["draft"]) for row in rows] == [
        ("plain", "none"),
        ("replay", "none"),
        ("replay", "prompt-lookup"),
    ]
    assert all(list(row) == [field.name for field in fields(measure.Result)] for row in rows)
    assert all(row["identical"] and row["layer"] == "gdn" for row in rows)
    assert rows[1]["acceptance"] == 1.0
    assert rows[1]["state_bytes_per_token"] == rows[1]["predicted_state_bytes_per_token"]
    assert rows[1]["state_bytes_per_token"] < rows[0]["state_bytes_per_token"]


def test_compare_fails_where_tokens_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A differing token gives exit code 1 and names the model."""

    def wrong(*arguments: object, **options: object) -> tuple[list[measure.Result], torch.Tensor]:
        names = "none", view_format[0], view_format[1]
        row = measure.Result("gdn", "gdn", "replay", *names, False, 1.0, 1.0, 1.0, 1.0, 1.0)
        plain = measure.Result("gdn", "gdn", "plain", *names, True, 0.0, 1.0, 1.0, 1.0, 1.0)
        return [plain, row], torch.zeros(1, dtype=torch.int64)

    view_format = "fp32", "full"
    monkeypatch.setattr(measure, "side_by_side", wrong)
    result = run("compare", "gdn")
    assert result.exit_code == 1
    assert "Different tokens: gdn (replay, none)" in result.stdout
    view_format = "fp16", "nvfp4"
    result = run("compare", "gdn", "--checkpoint", "fp16", "--view", "nvfp4")
    assert result.exit_code == 0
    assert "Different tokens (states are rounded): gdn (replay, none)" in result.stdout


def test_compare_counts_the_bytes_of_small_formats() -> None:
    """With a checkpoint and a view of few bits, counted bytes are predicted ones, and far fewer."""
    formats = ("--checkpoint", "fp16", "--view", "nvfp4")
    result = run("compare", "gdn", *SHORT, *formats, "--json")
    assert result.exit_code == 0, result.output
    plain, replay, _ = json.loads(result.stdout)
    assert (replay["checkpoint"], replay["view"]) == ("fp16", "nvfp4")
    assert replay["state_bytes_per_token"] == replay["predicted_state_bytes_per_token"]
    assert replay["state_bytes_per_token"] < 0.4 * plain["state_bytes_per_token"]
    assert 0 < replay["max_logit_diff"] < 3


def test_generate_takes_formats() -> None:
    """Text comes out, at fewer bytes; plain has no formats."""
    formats = ("--checkpoint", "fp8", "--view", "int4", "--tokens", "8", "--prompt", "Once")
    assert run("generate", "gdn", *formats).exit_code == 0
    result = run("generate", "gdn", *formats, "--method", "plain")
    assert result.exit_code == 2 and "need replay" in " ".join(result.stderr.split())


def test_generate_says_what_auto_chose() -> None:
    """On standard error, with its reason; the text is that of the same formats by name."""
    start = ("generate", "kda", "--tokens", "24", "--prompt", "Once")
    chosen = run(*start, "--view", "auto")
    assert chosen.exit_code == 0, chosen.output
    found = recommend(LayerSpec(4, 4, 64, 64, "channel", True))
    assert f"Recommended: checkpoint {found.checkpoint}, view {found.view}" in chosen.stderr
    named = run(*start, "--checkpoint", found.checkpoint, "--view", str(found.view))
    assert chosen.stdout == named.stdout
    for wrong in (("--method", "plain"), ("--checkpoint", "fp16")):
        assert run(*start, "--view", "auto", *wrong).exit_code == 2


def test_logit_difference_stops_behind_the_first_differing_token() -> None:
    """Later logits follow other texts and say nothing."""
    logits = torch.zeros(4, 3)
    other = logits.clone()
    other[1], other[2] = 0.5, 7.0
    one = decoding.Decoded(torch.tensor([0, 1, 2, 2]), logits)
    two = decoding.Decoded(torch.tensor([0, 2, 2, 2]), other)
    assert measure.logit_difference(one, two) == 0.5


def test_bytes_are_counted_over_whole_windows() -> None:
    """The first window, which ends without a fold, and a last one that is not full are left out."""
    recorder = Recorder()
    moved = 0
    for step in range(11):
        folds = step > 4 and step % 4 == 1
        moved += 100 if folds else 1
        recorder.steps.append(Step(1, 1, float(step), moved))
    assert recorder.settled(4).bytes_per_token == 103 / 4


def test_runs_as_a_process() -> None:
    """The module runs, with progress and numbers on their own streams."""
    command = [sys.executable, "-m", "lazystate", "generate", "gdn", "--prompt", "It", "--tokens"]
    done = subprocess.run([*command, "4"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("It") and "tokens/s" in done.stderr


def test_page_begins_with_a_paragraph() -> None:
    """The prompt starts where a paragraph of the book does."""
    assert compare_command._page("pride-and-prejudice", 30, 8).startswith("Chapter 1")


def test_unreadable_inputs_are_usage_errors(tmp_path: Path) -> None:
    """A binary file and a model folder without weights: one error each, and no traceback."""
    (tmp_path / "bytes").write_bytes(bytes(range(256)))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    binary = run("generate", "gdn", "--file", str(tmp_path / "bytes"))
    weights = run("generate", str(tmp_path), "--prompt", "a")
    assert binary.exit_code == weights.exit_code == 2, binary.output + weights.output
    assert "UTF-8" in binary.stderr and "model.safetensors" in weights.stderr
