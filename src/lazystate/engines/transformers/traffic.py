"""Counting what stock decoding moves, to compare with `lazystate.count_traffic`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from lazystate.engines.transformers.adapters import ADAPTERS
from lazystate.engines.transformers.patching import patched_mixers
from lazystate.ops import Traffic


@contextmanager
def count_plain_state_bytes(model: nn.Module) -> Iterator[Traffic]:
    """Count the state bytes that an unpatched model moves while decoding inside the `with` block.

    Every forward that continues from a state reads the states of all recurrent layers and writes
    them back: 2 x their bytes. Convolution inputs are left out, as they are for replay.

    Raises:
        ValueError: if the model is patched, or has no recurrent layer.
    """
    if patched_mixers(model):
        raise ValueError("model must not be patched: count a patched one with count_traffic")
    mixers: list[Any] = [m for m in model.modules() if type(m).__name__ in ADAPTERS]
    if not mixers:
        raise ValueError(f"model must have a recurrent layer, got {type(model).__name__}")
    traffic = Traffic()

    def count(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("cache", kwargs.get("cache_params"))
        layer = None if cache is None else cache.layers[module.layer_idx]
        if not isinstance(layer, LinearAttentionCacheLayerMixin) or not layer.has_previous_state[0]:
            return
        state = layer.recurrent_states[0]
        assert state is not None
        traffic.read += state.nbytes
        traffic.written += state.nbytes
        if module is mixers[0]:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            traffic.tokens += hidden.shape[0] * hidden.shape[1]

    hooks = [mixer.register_forward_pre_hook(count, with_kwargs=True) for mixer in mixers]
    try:
        yield traffic
    finally:
        for hook in hooks:
            hook.remove()
