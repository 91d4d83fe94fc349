"""Running stock forwards over many tokens: prefill, and continuations longer than a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

if TYPE_CHECKING:
    from lazystate.engines.transformers.mixer import Entry, Mixer


class LayerState(NamedTuple):
    """One layer of a batch: state [B, HV, V, K] and last convolution inputs [B, C, width - 1]."""

    state: Tensor
    conv: Tensor


def state_of(mixer: Mixer, layer: LinearAttentionLayer) -> LayerState:
    """What a stock cache layer holds, in this package's layout."""
    state, conv = layer.recurrent_states[0], layer.conv_states[0]
    assert state is not None and conv is not None
    state = state.transpose(-1, -2) if mixer.adapter.key_first else state
    return LayerState(state, conv[..., 1 - mixer.module.conv_kernel_size :])


def run(
    mixer: Mixer,
    hidden: Tensor,
    mask: Tensor | None,
    before: LayerState | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, LayerState]:
    """One stock forward [B, T, D], from a state (None: the start of a sequence) to a state.

    It is given a cache of its own, in which only the module's own layer matters.
    """
    layer = LinearAttentionLayer()
    if before is not None:
        state = before.state
        if mixer.adapter.key_first:
            state = state.transpose(-1, -2).contiguous()
        layer.update_conv_state(before.conv, conv_kernel_size=mixer.module.conv_kernel_size)
        layer.update_recurrent_state(state)
    scratch = Cache(layers=[layer] * (mixer.module.layer_idx + 1))
    out = mixer.stock(hidden, scratch, mask, **kwargs)
    return out, state_of(mixer, layer)


class StockPass:
    """One model step through the stock forwards, layer by layer.

    Args:
        before: the state of every layer, or None at the start of a sequence.
        draft: how many of the last tokens may be taken back. They run in a call of their own, so
            that the state before them is known, and their inputs are noted.

    Attributes:
        after: the states behind all tokens. base: those before the draft. entries: its inputs.
    """

    def __init__(self, before: list[LayerState] | None, draft: int) -> None:
        self.draft = draft
        self.after: list[LayerState] = []
        self.base: list[LayerState] = []
        self.entries: list[Entry] = []
        self._before = before

    def forward(
        self, mixer: Mixer, hidden: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """One mixer over all tokens [B, T, D]."""
        state = None if self._before is None else self._before[mixer.index]
        cut = hidden.shape[1] - self.draft
        outs = []
        for start, end in ((0, cut), (cut, hidden.shape[1])):
            if start == end:
                continue
            tokens, padding = hidden[:, start:end], None if mask is None else mask[:, start:end]
            if start == cut:
                assert state is not None
                self.base.append(state)
                self.entries.append(mixer.project(tokens, padding)[0])
            out, state = run(mixer, tokens, padding, state, kwargs)
            outs.append(out)
        assert state is not None
        self.after.append(state)
        return torch.cat(outs, 1) if len(outs) > 1 else outs[0]
