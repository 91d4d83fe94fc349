"""`lazystate calibrate` and `lazystate inspect`, from a text to ranks, a table and a plot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from lazystate import shipped
from lazystate.cli import app
from lazystate.sketch.calibration_file import load

SMALL = [
    *("--prompts", "2", "--prompt-tokens", "16", "--new-tokens", "32"),
    *("--texts", "2", "--text-tokens", "40", "--warmup", "8"),
    *("--rank", "8", "--batch", "1"),
]


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def words(result: Result) -> str:
    """All output on one line, without the frame around an error."""
    return " ".join((result.output + result.stderr).replace("│", " ").split())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "page.txt"
    path.write_text(shipped.book("moby-dick")[:12_000], "utf8")
    return path


@pytest.fixture(scope="module")
def file(text: Path) -> Path:
    """A small calibration of a shipped model."""
    out = text.with_name("gdn.safetensors")
    result = call("calibrate", "gdn", "--text", text, "--out", out, *SMALL)
    assert result.exit_code == 0, result.output
    return out


def test_calibrate_writes_a_file(file: Path) -> None:
    """With where it is from; nothing is left beside it."""
    found = load(file)
    assert (found.origin.model, found.largest_rank, found.origin.window) == ("gdn", 8, 16)
    assert found.origin.notes["states"] == 2 and len(found.origin.text) == 64
    assert sorted(path.name for path in file.parent.iterdir()) == ["gdn.safetensors", "page.txt"]


def test_two_processes_find_what_one_finds(file: Path, text: Path, tmp_path: Path) -> None:
    """Sums of two shares are the sums of all, but for the order of additions."""
    out = tmp_path / "both.safetensors"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--standalone",
    ]
    command += ["-m", "lazystate", "calibrate", "gdn", "--text", str(text), "--out", str(out)]
    done = subprocess.run([*command, *SMALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    one, both = load(file), load(out)
    assert one.origin == both.origin
    for name, tensor in one.tensors().items():
        scale = float(tensor.abs().max())
        assert torch.allclose(both.tensors()[name], tensor, rtol=1e-5, atol=1e-5 * scale), name
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_inspect_shows_ranks(file: Path) -> None:
    """A table with the certificate; as JSON a list of layers, whose ranks cost the budget."""
    shown = words(call("inspect", file, "--mean-rank", "4"))
    assert "gdn: 4 heads a layer" in shown and "above the best" in shown
    rows = json.loads(call("inspect", file, "--mean-rank", "4", "--json").stdout)
    assert [row["layer"] for row in rows] == [0, 1, 2, 4, 5, 6]
    assert all(0 <= rank <= 8 for row in rows for rank in row["ranks"])
    assert all(0 < row["retained"] <= 1 for row in rows)
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    other = json.loads(
        call("inspect", file, "--mean-rank", "4", "--criterion", "error", "--json").stdout
    )
    assert [row["ranks"] for row in other] != [row["ranks"] for row in rows]


def test_inspect_draws(file: Path, tmp_path: Path) -> None:
    """An image that is not empty."""
    result = call("inspect", file, "--mean-rank", "4", "--plot", tmp_path / "plot.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"


def test_inspect_reads_public_files(tmp_path: Path) -> None:
    """Ranks of a file of sketchssm; it has nothing to draw curves from."""
    public = Path(__file__).parent / "data" / "sketchssm-calibration.pt"
    assert call("inspect", public, "--mean-rank", "2").exit_code == 0
    drawn = call("inspect", public, "--mean-rank", "2", "--plot", tmp_path / "no.png")
    assert drawn.exit_code == 2 and "errors and sensitivities" in words(drawn)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["--prompts", "4000"], "must have at least"),
        (["--out", "nowhere/c.safetensors"], "a folder that is there"),
        (["--new-tokens", "16"], "new_tokens must be at least 32"),
        (["--rank", "65"], "rank must be 1 to 64"),
    ],
)
def test_calibrate_says_what_is_wrong(text: Path, tmp_path: Path, changes, reason: str) -> None:
    options = ["--text", text, "--out", tmp_path / "c.safetensors", *SMALL, *changes]
    result = call("calibrate", "gdn", *options)
    assert result.exit_code == 2 and reason in words(result), result.output


def test_what_is_there_is_not_overwritten(file: Path, text: Path) -> None:
    result = call("calibrate", "gdn", "--text", text, "--out", file, *SMALL)
    assert result.exit_code == 2 and "must be a new file" in words(result)


def test_generate_reads_a_calibration(file: Path, tmp_path: Path) -> None:
    """--view sketch with a file of the model; one of another model is refused."""
    options = ["--prompt", "Once", "--tokens", "24", "--view", "sketch", "--calibration", file]
    result = call("generate", "gdn", *options, "--mean-rank", "4")
    assert result.exit_code == 0, result.output
    other = call("generate", "kda", *options)
    assert other.exit_code == 2 and "of another model (gdn)" in words(other)
