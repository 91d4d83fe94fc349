"""Cache layers that transformers can crop, and how a stock cache gets them."""

from __future__ import annotations

from functools import cache as memoized
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from lazystate.cache import StepError
from lazystate.engines.transformers.replay import Replay
from lazystate.engines.transformers.stock import state_of

if TYPE_CHECKING:
    from lazystate.engines.transformers.mixer import Patch


class ReplayLayer(LinearAttentionLayer):
    """A layer of a transformers cache whose recurrent state is kept in the model's `Replay`.

    The state belongs to all layers together: of calls that transformers makes on every layer, the
    first one's counts. Layers with attention beside the recurrence handle that part as before.

    Attributes:
        replay: shared by all layers. index: this one's place among the recurrent layers.
        attention: the class that handles the attention beside the recurrence, if there is any.
    """

    replay: Replay
    index: int
    attention: type[CacheLayerMixin] | None = None

    @property
    def has_previous_state(self) -> dict[int, bool]:  # pyright: ignore
        """Whether there is a state, for the layer's only recurrence."""
        return {0: self.replay.started}

    @property
    def record_past(self) -> bool:  # pyright: ignore
        """Whether tokens since the last crop are kept, so that crops can reach back to it."""
        return self.replay.recording

    @record_past.setter
    def record_past(self, on: bool) -> None:
        self.replay.recording = on

    @property
    def is_croppable(self) -> bool:
        """True, unless attention beside the recurrence says otherwise."""
        part = getattr(self.attention, "is_croppable", True)
        return part.__get__(self) if isinstance(part, property) else part

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens, see `Replay.crop`."""
        if self.index == 0:
            self.replay.crop(int(tokens_to_remove))  # transformers 5.17 counts in a tensor
        self._attention("crop", tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make batch row i what row beam_idx[i] was."""
        if self.index == 0:
            self.replay.reorder(beam_idx)
        self._attention("reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every batch row."""
        if self.index == 0:
            self.replay.select(self.replay.rows.repeat_interleave(repeats))
        self._attention("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these batch rows; indices are int64, or bool [B]."""
        if self.index == 0:
            self.replay.select(self.replay.rows[indices.to(self.replay.rows.device)])
        self._attention("batch_select_indices", indices)

    def reset(self) -> None:
        """Forget the state."""
        if self.index == 0:
            self.replay.reset()
        self._attention("reset")

    def update_conv_state(self, *_: Any, **__: Any) -> NoReturn:
        """What a stock mixer calls to leave its state here.

        Raises:
            StepError: always, as the state is elsewhere.
        """
        raise StepError(
            "this cache was filled by a patched model and only that can continue it: patch the "
            "model again, or begin with a new cache"
        )

    update_recurrent_state = update_conv_state
    # And what it reads to find the state.
    conv_states = property(update_conv_state)  # pyright: ignore
    recurrent_states = property(update_conv_state)  # pyright: ignore

    def _attention(self, name: str, *args: Any) -> None:
        if self.attention is not None:
            getattr(self.attention, name)(self, *args)


class IdleLayer(LinearAttentionLayer):
    """A linear attention layer that nothing has been left in: it can be cropped.

    transformers 5.17 gives layers without a mixer (Nemotron-H's MLPs) one, and fails to crop it.
    """

    @property
    def is_croppable(self) -> bool:
        """True while there is nothing to take back."""
        return not self._used or super().is_croppable

    def crop(self, tokens_to_remove: int) -> None:
        """Nothing to take back, unless the layer is used after all."""
        if self._used:
            super().crop(tokens_to_remove)

    @property
    def _used(self) -> bool:
        return any(self.has_previous_state.values())


def attach(cache: Cache, patch: Patch) -> Replay:
    """The state behind a cache; at first use its stock layers are replaced.

    A state that stock forwards have left in them is taken over.

    Raises:
        ValueError: if the cache was not made for this model.
    """
    first = patch.mixers[0].module.layer_idx
    layers = getattr(cache, "layers", [])
    if len(layers) > first and isinstance(layer := layers[first], ReplayLayer):
        return layer.replay
    stock = [_stock_layer(layers, mixer.module.layer_idx) for mixer in patch.mixers]
    replay = Replay(patch, recording=stock[0].record_past)
    if all(layer.has_previous_state[0] for layer in stock):
        pairs = zip(patch.mixers, stock, strict=True)
        replay.adopt([state_of(mixer, layer) for mixer, layer in pairs])
    for mixer, layer in zip(patch.mixers, stock, strict=True):
        layers[mixer.module.layer_idx] = _replaced(layer, replay, mixer.index)
    for index, layer in enumerate(layers):
        if type(layer) is LinearAttentionLayer and not any(layer.has_previous_state.values()):
            layers[index] = IdleLayer()
    return replay


def _stock_layer(layers: list[Any], index: int) -> LinearAttentionLayer:
    layer = layers[index] if index < len(layers) else None
    if isinstance(layer, LinearAttentionLayer):
        return layer
    raise ValueError(
        f"cache must have a linear attention layer at index {index}, got {type(layer).__name__}: "
        "build it with DynamicCache(config=model.config), or pass none"
    )


def _replaced(layer: LinearAttentionLayer, replay: Replay, index: int) -> ReplayLayer:
    """A layer with the attention of `layer` and the recurrent state of `replay`."""
    new = object.__new__(_replay_type(type(layer)))
    new.replay, new.index = replay, index
    initialised = {"is_conv_states_initialized", "is_recurrent_states_initialized"}
    for name, value in vars(layer).items():
        if name in initialised:  # so that inherited code that moves the states passes by
            value = dict.fromkeys(value, False)
        if name not in ("conv_states", "recurrent_states", "has_previous_state", "record_past"):
            setattr(new, name, value)
    return new


@memoized
def _replay_type(stock: type[LinearAttentionLayer]) -> type[ReplayLayer]:
    """The ReplayLayer that is also a `stock`, whose second base, if any, is its attention part."""
    attention = stock.__bases__[1] if len(stock.__bases__) > 1 else None
    bases = (ReplayLayer,) if attention is None else (ReplayLayer, stock)
    return type(f"Replay{stock.__name__}", bases, {"attention": attention})
