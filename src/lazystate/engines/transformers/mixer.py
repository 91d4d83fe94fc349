"""A patched mixer: the stock module, its adapter, and the forward that replaces the stock one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lazystate.cache import StateCache, StepError, Ticket
from lazystate.engines.transformers.adapters import Adapter
from lazystate.engines.transformers.layers import ReplayLayer, attach
from lazystate.spec import LayerSpec


class Entry(NamedTuple):
    """What a mixer feeds its recurrence for T tokens; with it the tokens can be run again.

    Attributes:
        conv: [B, T, C]. raw: raw gates, each [B, T, ...].
        mask: [B, T], 0 on padding, where the adapter masks behind the convolution; else None.
    """

    conv: Tensor
    raw: tuple[Tensor, ...]
    mask: Tensor | None

    @property
    def tokens(self) -> int:
        """T."""
        return self.conv.shape[1]

    def cut(self, start: int, end: int) -> Entry:
        """The tokens start to end - 1."""
        mask = None if self.mask is None else self.mask[:, start:end]
        return Entry(self.conv[:, start:end], tuple(raw[:, start:end] for raw in self.raw), mask)


@dataclass(eq=False)
class Patch:
    """What was done to a model: the options of `patch` and the mixers, in the model's order.

    `storage` are the options of `StateCache` that say how states are stored and by what; `stateful`
    the modules that had called themselves unfit for assisted generation.
    """

    window: int
    max_tokens: int
    storage: dict[str, Any]
    mixers: list[Mixer] = field(default_factory=list)
    stateful: list[nn.Module] = field(default_factory=list)

    def specs(self, activation: torch.dtype) -> list[LayerSpec]:
        """The recurrence of every mixer."""
        return [mixer.adapter.spec(mixer.module, activation) for mixer in self.mixers]


@dataclass(eq=False)
class Mixer:
    """One recurrent layer of a patched model.

    Attributes:
        module: the stock module. adapter: its class's. index: its place among the mixers.
        stock: the module's own forward. patch: of the whole model.
    """

    module: Any
    adapter: Adapter
    index: int
    stock: Callable[..., Tensor]
    patch: Patch

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickle: pickle looks a bound method up by name, and may find the patched forward."""
        vars(self).update(state)
        if isinstance(getattr(self.stock, "__self__", None), Mixer):
            self.stock = MethodType(type(self.module).forward, self.module)

    @torch.compiler.disable
    def forward(
        self,
        hidden_states: Tensor,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
        cache_params: Cache | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The module's forward while it is patched; `cache_params` is an older name of `cache`.

        Without a cache, and where gradients are wanted, the stock forward runs. A compiled model
        leaves its graph here: what a step does is decided on the host.

        Raises:
            StepError: for gradients through a cache that was filled without them.
        """
        cache = cache_params if cache is None else cache
        if cache is None:
            return self.stock(hidden_states, None, attention_mask, **kwargs)
        if torch.is_grad_enabled() and self._wants_gradients(hidden_states):
            if isinstance(cache.layers[self.module.layer_idx], ReplayLayer):
                raise StepError(
                    "this cache was filled without gradients and cannot carry any: call the model "
                    "under torch.no_grad(), or begin with a new cache"
                )
            return self.stock(hidden_states, cache, attention_mask, **kwargs)
        return attach(cache, self.patch).forward(self, hidden_states, attention_mask, kwargs)

    def project(self, hidden: Tensor, mask: Tensor | None) -> tuple[Entry, Tensor]:
        """What feeds the recurrence, and the output gate, of hidden states [B, T, D]."""
        if mask is not None:
            hidden = (hidden * mask.unsqueeze(-1)).to(hidden.dtype)
        conv, gate, raw = self.adapter.project(self.module, hidden)
        return Entry(conv, raw, mask if self.adapter.masks_conv else None), gate

    def recur(self, state: StateCache, ticket: Ticket, entry: Entry) -> Tensor:
        """Convolution and recurrence of the ticket's tokens: [B, T, HV, V]."""
        conv1d = self.module.conv1d
        weight = conv1d.weight.squeeze(1)
        mixed = state.convolve(ticket, self.index, entry.conv, weight, conv1d.bias)
        if entry.mask is not None:
            mixed = (mixed * entry.mask.unsqueeze(-1)).to(mixed.dtype)
        return state.step(ticket, self.index, *self.adapter.inputs(self.module, mixed, entry.raw))

    def finish(self, out: Tensor, gate: Tensor) -> Tensor:
        """Norm, gate and output projection: hidden states [B, T, D]."""
        return self.adapter.finish(self.module, out, gate)

    def _wants_gradients(self, hidden: Tensor) -> bool:
        return hidden.requires_grad or any(p.requires_grad for p in self.module.parameters())
