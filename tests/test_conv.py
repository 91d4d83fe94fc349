"""The short convolution is the naive one of the committed stream, rollback included."""

from __future__ import annotations

import pytest
import torch

import samples
import tolerance
from lazystate import LayerSpec, StateCache, StepError
from lazystate.reference import recurrence

CHANNELS, WIDTH = 6, 4


def convolving(activation: torch.dtype = torch.float64, width: int = WIDTH) -> LayerSpec:
    """A layer with a short convolution."""
    return samples.layer("mamba2", activation, conv_channels=CHANNELS, conv_width=width)


def advance(
    cache: StateCache,
    rows: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    silu: bool = True,
) -> torch.Tensor:
    """One model step of which the convolution's output is returned."""
    ticket = cache.begin(rows, x.shape[1])
    out = cache.convolve(ticket, 0, x, weight, bias, silu=silu)
    cache.step(ticket, 0, *samples.draw(cache.specs[0], *x.shape[:2]))
    cache.commit(ticket, kept)
    return out


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize(
    "activation", [torch.float64, torch.float32, torch.float16, torch.bfloat16]
)
def test_outputs_are_the_naive_convolution(
    activation: torch.dtype, width: int, with_bias: bool, silu: bool
) -> None:
    """Over a long stream, from a given history, in every dtype: rounded once at the end."""
    cache = StateCache(convolving(activation, width), 1, window=3)
    weight, bias = torch.randn(CHANNELS, width), torch.randn(CHANNELS) if with_bias else None
    history = torch.randn(1, CHANNELS, width - 1).to(activation)
    cache.load(samples.slots(0), [torch.zeros(1, *cache.specs[0].state_shape)], [history])
    x = torch.randn(1, 12, CHANNELS).to(activation)
    out = [
        advance(cache, samples.slots(0), x[:, t : t + 1], weight, bias, silu=silu)
        for t in range(12)
    ]
    expected = recurrence.convolve(history[0], x[0], weight, bias, silu=silu)
    bound = tolerance.eps(activation) / 2 + (width + 4) * tolerance.eps(cache.specs[0].compute)
    assert tolerance.error(torch.cat(out, 1)[0], expected) <= bound


def test_a_rejected_draft_leaves_the_convolution() -> None:
    """After any acceptance the next outputs follow the kept inputs, rejected ones being NaN."""
    cache = StateCache(convolving(), 4, window=5, max_tokens=4)
    rows, weight = torch.arange(4), torch.randn(CHANNELS, WIDTH, dtype=torch.float64)
    stream = torch.zeros(4, WIDTH - 1, CHANNELS, dtype=torch.float64)
    streams = list(stream)
    for step in range(10):
        x = torch.randn(4, 4, CHANNELS, dtype=torch.float64)
        kept = (rows + step) % 4 + 1
        for row, n in enumerate(kept.tolist()):
            x[row, n:] = float("nan")
        out = advance(cache, rows, x, weight, kept=kept)
        for row, n in enumerate(kept.tolist()):
            expected = recurrence.convolve(streams[row][1 - WIDTH :].T, x[row, :n], weight)
            assert tolerance.error(out[row, :n], expected) <= tolerance.EXACT
            streams[row] = torch.cat([streams[row], x[row, :n]])
    (history,) = cache.conv_history(rows)
    assert history is not None
    assert torch.equal(history, torch.stack([s[1 - WIDTH :].T for s in streams]))


@pytest.mark.parametrize("activation", [torch.float32, torch.bfloat16])
def test_outputs_do_not_depend_on_the_step_length(activation: torch.dtype) -> None:
    """Drafted together or decoded one by one: the same bits."""
    weight = torch.randn(CHANNELS, WIDTH).to(activation)
    x = torch.randn(2, 8, CHANNELS).to(activation)
    outs = []
    for tokens in (1, 2, 4):
        cache = StateCache(convolving(activation), 2, window=4, max_tokens=4)
        parts = [advance(cache, torch.arange(2), part, weight) for part in x.split(tokens, 1)]
        outs.append(torch.cat(parts, 1))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


def test_padded_rows_and_tails_are_zero() -> None:
    """Padded rows and positions behind a row's length give exact zeros, NaN in or not."""
    cache = StateCache(convolving(), 3, window=4, max_tokens=3)
    x = torch.randn(3, 3, CHANNELS, dtype=torch.float64)
    x[0], x[1, 1:] = float("nan"), float("nan")
    ticket = cache.begin(samples.slots(-1, 2, 0), 3, torch.tensor([3, 1, 3]))
    out = cache.convolve(ticket, 0, x, torch.randn(CHANNELS, WIDTH))
    assert out.isfinite().all()
    assert not out[0].any() and not out[1, 1:].any()
    assert out[1, 0].any() and out[2].any()


def test_a_reset_slot_has_zero_inputs() -> None:
    """reset and a load without inputs start the convolution from zeros."""
    cache = StateCache(convolving(), 2, window=4)
    weight = torch.randn(CHANNELS, WIDTH)
    for _ in range(3):
        advance(cache, torch.arange(2), torch.randn(2, 1, CHANNELS).double(), weight)
    cache.reset(samples.slots(0))
    cache.load(samples.slots(1), [torch.zeros(1, *cache.specs[0].state_shape)])
    (history,) = cache.conv_history(torch.arange(2))
    assert history is not None and not history.any()


def test_misuse_is_named() -> None:
    """A forgotten convolution, or wrong x, weight or bias: one error that says so."""
    cache = StateCache([convolving(), samples.layer("gdn")], 2)
    ticket = cache.begin(torch.arange(2))
    x, weight = torch.randn(2, 1, CHANNELS).double(), torch.randn(CHANNELS, WIDTH)
    with pytest.raises(StepError, match="step before convolve in layer 0"):
        cache.step(ticket, 0, *samples.draw(cache.specs[0], 2, 1))
    with pytest.raises(ValueError, match="layer 1 has no convolution"):
        cache.convolve(ticket, 1, x, weight)
    with pytest.raises(ValueError, match=r"^x must have shape \[2, 1, 6\], got \[2, 1, 5\]"):
        cache.convolve(ticket, 0, x[..., 1:], weight)
    with pytest.raises(ValueError, match=r"^x must be torch\.float64, got torch\.float32"):
        cache.convolve(ticket, 0, x.float(), weight)
    with pytest.raises(ValueError, match=r"^weight"):
        cache.convolve(ticket, 0, x, weight[:, 1:])
    with pytest.raises(ValueError, match=r"^bias"):
        cache.convolve(ticket, 0, x, weight, torch.zeros(1))
