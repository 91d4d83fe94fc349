"""Copying until the model stops, and whether errors at folds predict those between them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from lazystate.cli import app
from lazystate.commands import decoding
from lazystate.evaluation import copying, kl, read_error
from lazystate.evaluation.kl import Config, States
from lazystate.sketch.files import open_calibration


@pytest.fixture(scope="module")
def loaded() -> decoding.Loaded:
    """The shipped model that copies best."""
    return decoding.load("mamba2")


def test_passages_return_behind_their_gap(loaded: decoding.Loaded) -> None:
    """What is given ends where the passage begins again; its rest and an empty line follow."""
    drawn = copying.passages(loaded.tokenizer, 3, length=20, gap=30)
    begun, stop = copying.BEGUN, drawn.stop
    assert drawn.given.shape == (3, 20 + 1 + 30 + 1 + begun)
    assert torch.equal(drawn.given[:, -begun:], drawn.given[:, :begun])
    assert torch.equal(drawn.rest[:, :-1], drawn.given[:, begun:20])
    for tokens, count in ((drawn.given, 2), (drawn.rest, 1)):
        assert ((tokens == stop).sum(1) == count).all()
    with pytest.raises(ValueError, match="length"):
        copying.passages(loaded.tokenizer, 3, length=8)


def test_copies_stop_where_the_passage_does(loaded: decoding.Loaded) -> None:
    """With exact states all is copied; other tokens are wrong, and patience with no stop ends."""
    drawn = copying.passages(loaded.tokenizer, 4, length=24, gap=16)
    length = drawn.rest.shape[1]
    exact = copying.copy(loaded.model, drawn, Config(States(), 4))
    assert exact.right.all() and exact.tokens.tolist() == [length] * 4
    other = replace(drawn, rest=drawn.rest.roll(1, 1), stop=-1)
    wrong = copying.copy(loaded.model, other, Config(States(), 4))
    assert not wrong.right.any() and wrong.tokens.tolist() == [copying.PATIENCE * length] * 4


def test_copy_command() -> None:
    """A row for every model and state."""
    line = ["evaluate", "copy", "mamba2", "--passages", "2", "--length", "16", "--gap", "8"]
    result = CliRunner().invoke(
        app, [*line, "--state", "fp32", "--state", "fp32,sketch2", "--json"]
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["state"] for row in rows] == ["fp32", "fp32,sketch2"]
    assert rows[0]["tokens"] == rows[0]["passage"] == 9 and rows[0]["copied"] == 1.0


def test_rank_correlation_by_hand() -> None:
    """1 for a monotone relation, -1 for the reverse, NaN where nothing varies."""
    a = torch.tensor([0.1, 3.0, 2.0, 70.0])
    assert read_error.rank_correlation(a, a.exp()) == pytest.approx(1)
    assert read_error.rank_correlation(a, -a) == pytest.approx(-1)
    assert read_error.rank_correlation(a, torch.ones(4)) != read_error.rank_correlation(a, a)


def test_watched_errors_are_the_views(loaded: decoding.Loaded) -> None:
    """Outputs do not change while watched; an exact view shows no error, a coarse one some."""
    given = kl.streams(loaded.tokenizer, 2, 16 + 26)

    def run(view: str) -> tuple[torch.Tensor, read_error.Watch]:
        config = Config(States("fp32", view), 8, backend="torch")
        plain = torch.stack(list(kl.logits(loaded.model, given, 16, config)))
        with read_error.watching(6) as seen:
            watched = torch.stack(list(kl.logits(loaded.model, given, 16, config)))
        assert torch.equal(plain, watched)
        return watched, seen

    _, none = run("fp32")
    _, some = run("int4")
    for seen in (none, some):
        assert [len(step) for step in seen.folds] == [6] * 3
        assert [len(step) for step in seen.between] == [6] * 3
    assert all(float(layer.max()) == 0 for step in none.folds for layer in step)
    assert all(float(layer.min()) > 0 for step in some.folds for layer in step)


def test_prediction_of_a_view(loaded: decoding.Loaded) -> None:
    """Correlations are correlations, and heads that err at folds are those that err between."""
    found = open_calibration("mamba2")
    given = kl.streams(loaded.tokenizer, 2, 64 + 96)
    reference = kl.Reference.of(loaded.model, given, 64)
    config = Config(States("fp32", "sketch"), 8, sketch=found.sketch(2), backend="torch")
    assert found.slopes is not None
    seen = read_error.predict(loaded.model, reference, config, found.slopes, 6)
    values = (seen.heads, seen.windows, seen.outputs, seen.recent)
    assert all(-1 <= value <= 1 for value in values)
    assert seen.heads > 0.5
