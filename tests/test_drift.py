"""Folding for long does not drift: 4,096 tokens, 256 windows, BF16 inputs, FP32 checkpoint."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import drift
from page import filled

# Student's t at 15 degrees of freedom: what 16 heads without a trend exceed once in 1,000 runs.
SIGNIFICANT = 3.73


@pytest.mark.parametrize("name", drift.LAYERS)
def test_the_raw_fold_does_not_drift(name: str) -> None:
    """The raw fold's state error stays below 1e-6 and does not grow; the cached one's is larger."""
    found = drift.measure(name)
    assert found["raw"].worst <= 1e-6
    assert found["raw"].t <= SIGNIFICANT and found["raw"].growth <= 0.05
    if "cached" in found:
        assert found["raw"].mean < found["cached"].mean <= 1e-3


def test_a_drift_would_be_seen() -> None:
    """The trend of rounding errors that pile up, or of a tenth more error, is significant."""
    generator = torch.Generator().manual_seed(0)
    windows = drift.TOKENS // drift.WINDOW
    noise = torch.randn(windows, drift.HEADS, 64, generator=generator, dtype=torch.float64)
    steady = noise.norm(dim=2)
    ramp = torch.linspace(1, 1.1, windows, dtype=torch.float64).unsqueeze(1)
    assert drift.trend(steady).t <= SIGNIFICANT
    assert drift.trend(steady * ramp).t > SIGNIFICANT
    piled = drift.trend(noise.cumsum(0).norm(dim=2))
    assert piled.t > SIGNIFICANT and piled.growth > 0.5


def test_the_page_shows_the_numbers() -> None:
    """docs/measured.md is what benchmarks/drift.py writes from its JSON."""
    page = drift.PAGE.read_text("utf8")
    table = drift.table(json.loads(drift.RESULTS.read_text("utf8")))
    assert page == filled(page, "drift", table)
