"""The published kernels are called rightly: they agree with the PyTorch backend, interpreted."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from samples import layer
from test_house import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import peers
from kernels import vllm
from kernels.cases import Case, Ceilings
from kernels.checks import BOUND

CEILINGS = Ceilings(4600.0, 4260.0)
pytestmark = [pytest.mark.skipif(vllm.installed() is None, reason="vllm is not installed")]
if torch.cuda.is_available():
    pytestmark.append(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Two layers; functions that the interpreter replaces in `tl` alone are called from there."""
    monkeypatch.setattr(Case, "copies", lambda *_: 2)
    if not torch.cuda.is_available():
        vllm.load()
        for name in (vllm.FLA, vllm.KDA):
            module = sys.modules[f"{name}.fused_recurrent"]
            monkeypatch.setattr(module, "exp", _exp)
            monkeypatch.setattr(module, "log", _log, raising=False)


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _log(x):
    return tl.log(x)


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_vllm_agrees(kind, tokens):
    """Conventional steps of one token and of drafts, and replay of Mamba-2 over a window."""
    # FP16, as the interpreter does not know how to multiply BF16 matrices.
    spec = layer(kind, torch.float16, key_dim=16, value_dim=16)
    case = replace(Case("tiny", spec, batch=2, window=4), tokens=tokens, kept=tokens)
    rows = list(peers.rows(case, CEILINGS))
    methods = {row["method"] for row in rows}
    replay = {"replay"} if (kind, tokens) == ("mamba2", 1) else set()
    assert methods == {"plain" if tokens == 1 else "snapshot"} | replay
    for row in rows:
        assert row["impl"] == "vllm" and row["error"] <= BOUND and row["us"] > 0, row
    assert not list(peers.rows(case, CEILINGS, True))
