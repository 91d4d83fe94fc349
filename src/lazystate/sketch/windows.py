"""The recurrence over whole texts, window by window, with gradients: what calibration looks at."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lazystate.gates import Inputs
from lazystate.ops.torch.decay import suffix_sums
from lazystate.ops.torch.step import per_head, solve, within
from lazystate.sketch.statistics import effective_queries
from lazystate.spec import LayerSpec


class Window(NamedTuple):
    """One whole window of a batch, detached.

    Attributes:
        start, stop: its tokens. state: [B, HV, V, K], before them.
        queries: effective queries [B, T, HV, K], which read that state.
    """

    start: int
    stop: int
    state: Tensor
    queries: Tensor


class Run(NamedTuple):
    """A layer's recurrence over a batch of texts.

    Attributes:
        out: [B, T, HV, V], activation dtype, with its graph. windows: the whole ones.
    """

    out: Tensor
    windows: list[Window]


def run(spec: LayerSpec, inputs: Inputs, window: int, *, first: int = 0) -> Run:
    """The recurrence from a zero state.

    Args:
        inputs: of T tokens, any T. window: L.
        first: a token at which a window begins (where decoding took over from prefill); windows
            lie before and after it without a gap, and only whole ones from it on are returned.
    """
    q = inputs.q
    batch, tokens = q.shape[:2]
    state = q.new_zeros(batch, *spec.state_shape, dtype=spec.compute)
    outputs, windows = [], []
    for start, stop in _borders(tokens, window, first):
        part = _cut(inputs, start, stop)
        if start >= first and stop - start == window:
            windows.append(Window(start, stop, state.detach(), _queries(spec, part)))
        out, state = _advance(spec, part, state)
        outputs.append(out)
    out = torch.cat(outputs, 1)
    if inputs.skip is not None:
        out = out + inputs.skip.to(out.dtype).view(spec.heads, -1) * inputs.v.to(out.dtype)
    return Run(out.to(inputs.v.dtype), windows)


def _cut(inputs: Inputs, start: int, stop: int) -> Inputs:
    q, k, v, log_decay = (x[:, start:stop] for x in inputs[:4])
    return Inputs(q, k, v, log_decay, None if inputs.beta is None else inputs.beta[:, start:stop])


def _borders(tokens: int, window: int, first: int) -> Iterator[tuple[int, int]]:
    start, stop = 0, first % window or window
    while start < tokens:
        yield start, min(stop, tokens)
        start, stop = stop, stop + window


@torch.no_grad()
def _queries(spec: LayerSpec, part: Inputs) -> Tensor:
    q, k = part.q.to(spec.compute), part.k.to(spec.compute)
    return effective_queries(q, k, part.log_decay, part.beta, erase=spec.erase)


def _advance(spec: LayerSpec, part: Inputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, HV, V] of a window and the state after it (Eq. 8, 10-13)."""
    q, k, v = (x.to(spec.compute) for x in part[:3])
    log_decay, tokens = part.log_decay, q.shape[1]
    vectors = torch.cat([q, k], 1) if spec.erase else q
    prefix = log_decay.cumsum(1).exp().repeat(1, 1 + spec.erase, *[1] * (log_decay.dim() - 2))
    prefix = prefix.view(*prefix.shape[:3], -1).permute(0, 2, 3, 1)  # [B, HV, 1 or K, n]
    known = state @ (per_head(vectors.permute(0, 2, 3, 1), spec.group, 1) * prefix)
    scores = within(k, vectors, log_decay, spec.group)
    u = v.permute(0, 2, 3, 1)
    if spec.erase:
        assert part.beta is not None
        u = solve(u - known[..., tokens:], scores[..., tokens:], part.beta)
    elif part.beta is not None:
        u = u * part.beta.transpose(1, 2).unsqueeze(2)
    out = known[..., :tokens] + u @ scores[..., :tokens]
    newer, total = suffix_sums(F.pad(log_decay.flip(1), [0, 0] * (log_decay.dim() - 2) + [1, 0]))
    after = newer.flip(1).exp().view(*log_decay.shape[:3], -1).transpose(1, 2)
    keys = per_head(k.transpose(1, 2), spec.group, 1) * after
    state = state * total.exp().view(*total.shape[:2], 1, -1) + u @ keys
    return out.permute(0, 3, 1, 2), state
