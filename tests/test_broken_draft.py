"""A token that is not finite reaches no earlier one, though nothing times NaN is NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import samples
from lazystate import StateCache
from lazystate.gates import Inputs

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

PARTS = ("q", "k", "v", "log_decay", "beta")


@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
@pytest.mark.parametrize("part", PARTS)
def test_a_broken_draft_reaches_no_earlier_token(kind: str, part: str) -> None:
    """Outputs before it and, once it is rejected, all that follow are those without it, in bits."""
    _check("torch", kind, part, math.nan)


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_an_infinite_draft_reaches_no_earlier_token(kind: str) -> None:
    """Nothing times infinity is NaN, too."""
    _check("torch", kind, "v", math.inf)


@pytest.mark.parametrize(
    ("kind", "part", "value"),
    [
        ("mamba2", "v", math.nan),
        ("gdn", "k", math.nan),
        ("gdn", "log_decay", math.nan),
        ("gdn", "v", math.inf),
        ("kda", "beta", math.nan),
    ],
)
def test_nor_in_the_kernels(kind: str, part: str, value: float) -> None:
    """The same of the Triton backend."""
    _check("triton", kind, part, value)


def _check(backend: str, kind: str, part: str, value: float) -> None:
    """Two tokens kept of four, of which the third and fourth are broken in one part."""
    clean, broken = (_decode(backend, kind, part, given) for given in (None, value))
    for name, right, found in zip(("kept", "next"), clean[:2], broken[:2], strict=True):
        assert torch.equal(found, right), name
    assert bool(clean[2].isfinite().all()) and not bool(broken[2].isfinite().any())


def _decode(
    backend: str, kind: str, part: str, value: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the tokens kept, of the token behind them, and of those rejected."""
    sizes = {"heads": 1, "key_heads": 1, "key_dim": 16, "value_dim": 16}
    spec = samples.layer(kind, torch.float32, **sizes)
    generator = torch.Generator().manual_seed(1)
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    cache = StateCache(spec, 1, window=8, max_tokens=4, backend=backend, device=device)
    row = torch.arange(1)

    def draw(tokens: int) -> Inputs:
        drawn = samples.draw(spec, 1, tokens, generator=generator)
        return drawn._replace(**{part: getattr(drawn, part).to(device) for part in PARTS})

    for _ in range(2):
        samples.advance(cache, row, draw(1))
    inputs = draw(4)
    if value is not None:
        getattr(inputs, part)[:, 2:] = value
    ticket = cache.begin(row, 4)
    out = cache.step(ticket, 0, *inputs)
    cache.commit(ticket, torch.tensor([2]))
    following = samples.advance(cache, row, draw(1))
    return out[:, :2], following, out[:, 2:]
