"""The list-of-tokens model with rounded checkpoints and views: it knows when a row folds.

Between folds a slot is a rounded state and the tokens since, as `TokenCache` has it. At a fold the
exact state is rounded, into the checkpoint and into the view. Outputs come from the view, with the
corrections that earlier steps computed; on a folding row they come from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lazystate import LayerSpec
from lazystate.formats import Format, Parts
from lazystate.philox import state_bits
from lazystate.reference.tokens import Drafts, Token, TokenCache
from lazystate.sketch.view import Sketch


@dataclass
class Request:
    """What a slot holds besides its tokens, by layer where it is a list.

    Attributes:
        limit: records that it holds before it folds. writes: rounded states before the next one.
        stored: bytes of checkpoint and view, None before anything was rounded.
        views: [HV, V, K] in FP64. corrections: u of every committed token since the fold.
    """

    limit: int
    writes: int
    stored: list[dict[str, Parts] | None]
    views: list[Tensor]
    corrections: list[list[Tensor]] = field(default_factory=list)


class RoundedCache(TokenCache):
    """`TokenCache` of a window, with formats.

    Args:
        view: None where steps read the checkpoint; of a sketch the model has its low-rank product.
        seed: of stochastic rounding; None: to nearest.
    """

    def __init__(
        self,
        specs: Sequence[LayerSpec],
        slots: int,
        window: int,
        checkpoint: Format,
        view: Format | Sketch | None,
        seed: int | None,
    ) -> None:
        super().__init__(specs, slots)
        self.window, self.checkpoint, self.view, self.seed = window, checkpoint, view, seed
        self.requests = [self._new(0) for _ in range(slots)]

    def load(self, slot, states, conv=None, phase=0) -> None:
        """As `TokenCache.load`, and rounded; the first fold comes `phase` tokens early."""
        super().load(slot, states, conv)
        self.requests[slot] = replace(
            self._new(self.requests[slot].writes), limit=self.window - phase
        )
        self._round(slot)

    def reset(self, slot: int) -> None:
        """As `TokenCache.reset`; draws start over."""
        super().reset(slot)
        self.requests[slot] = self._new(0)

    def begin(self, slots: Sequence[int], lengths: Sequence[int]) -> Drafts:
        """As `TokenCache.begin`; decides which rows fold."""
        self.due = {
            slot
            for slot, length in zip(slots, lengths, strict=True)
            if slot >= 0
            and length
            and len(self.slots[slot][0].tokens) + length > self.requests[slot].limit
        }
        self.drafted: dict[tuple[int, int], list[Tensor]] = {}
        return super().begin(slots, lengths)

    def step(self, drafts, layer, q, k, v, log_decay, beta=None, skip=None) -> Tensor:
        """Outputs from view or checkpoint and the corrections so far."""
        super().step(drafts, layer, q, k, v, log_decay, beta, skip)  # keeps the tokens
        out = torch.zeros(v.shape, dtype=torch.float64)
        for row, slot in enumerate(drafts.slots):
            if slot < 0:
                continue
            own, request = self.slots[slot][layer], self.requests[slot]
            state = own.initial if slot in self.due else request.views[layer]
            for token, u in zip(own.tokens, request.corrections[layer], strict=True):
                state = _written(state, token, u)
            us = self.drafted[slot, layer] = []
            for t, token in enumerate(drafts.tokens[layer][row]):
                us.append(_correction(self.specs[layer], state, token))
                state = _written(state, token, us[-1])
                query = token.q.repeat_interleave(self.specs[layer].group, 0)
                out[row, t] = (state @ query.unsqueeze(2)).squeeze(2)
                if skip is not None:
                    out[row, t] += skip.double().reshape(len(token.v), -1) * token.v
        return out

    def commit(self, drafts: Drafts, kept: Sequence[int]) -> None:
        """Fold the rows that are due, then append."""
        self._fold()
        super().commit(drafts, kept)
        for slot, n in zip(drafts.slots, kept, strict=True):
            for layer in range(len(self.specs)):
                if (slot, layer) in self.drafted:
                    self.requests[slot].corrections[layer] += self.drafted[slot, layer][:n]

    def discard(self, drafts: Drafts) -> None:
        """Fold the rows that are due, and append nothing."""
        super().discard(drafts)
        self._fold()

    def _fold(self) -> None:
        """Exact states of the rows that are due, rounded; their tokens are in them now."""
        for slot in self.due:
            self.slots[slot] = [
                replace(layer, initial=layer.state(), tokens=(), known=None)
                for layer in self.slots[slot]
            ]
            self.requests[slot].limit = self.window
            self._round(slot)

    def export(self, slot: int) -> list:
        """Tokens and the rest, by layer."""
        return [*super().export(slot), _copied(self.requests[slot])]

    def import_(self, slot: int, exported: list) -> None:
        """Take over both."""
        super().import_(slot, exported[:-1])
        self.requests[slot] = _copied(exported[-1])

    def _new(self, writes: int) -> Request:
        """A fresh request."""
        zeros = [torch.zeros(spec.state_shape, dtype=torch.float64) for spec in self.specs]
        n = len(self.specs)
        return Request(self.window, writes, [None] * n, zeros, [[] for _ in range(n)])

    def _round(self, slot: int) -> None:
        """Round the slot's states, which hold no tokens, into checkpoint and view."""
        request = self.requests[slot]
        for index, own in enumerate(self.slots[slot]):
            bits, shape, key_dim = None, own.spec.state_shape, own.spec.key_dim
            if self.seed is not None:
                numbers = torch.tensor([slot]), torch.tensor([request.writes])
                bits = state_bits((self.seed, index), *numbers, shape)[0]
            parts = {"checkpoint": self.checkpoint.encode(own.initial, bits)}
            state = self.checkpoint.decode(parts["checkpoint"], key_dim).double()
            request.views[index] = state
            if isinstance(self.view, Sketch):
                request.views[index] = _sketched(self.view, index, own.spec, own.initial)
            elif self.view is not None:
                parts["view"] = self.view.encode(own.initial)
                request.views[index] = self.view.decode(parts["view"], key_dim).double()
            request.stored[index] = parts
            request.corrections[index] = []
            self.slots[slot][index] = replace(own, initial=state)
        request.writes += 1


def _sketched(sketch: Sketch, layer: int, spec: LayerSpec, state: Tensor) -> Tensor:
    """What reads of a sketch of the state [HV, V, K] multiply, as such a matrix."""
    room = sketch.allocate(layer, spec, 1, state.device)
    room.store(torch.tensor([0]), state.unsqueeze(0))
    eye = torch.eye(spec.key_dim, dtype=state.dtype)
    return room.read(None, eye.expand(1, spec.heads, -1, -1))[0]


def _copied(request: Request) -> Request:
    """Lists of its own; the tensors are never changed."""
    return replace(
        copy(request),
        stored=list(request.stored),
        views=list(request.views),
        corrections=[list(us) for us in request.corrections],
    )


def _decayed(state: Tensor, token: Token) -> Tensor:
    return state * token.log_decay.exp().reshape(len(state), 1, -1)


def _keys(state: Tensor, token: Token) -> Tensor:
    return token.k.repeat_interleave(len(state) // len(token.k), 0)


def _correction(spec: LayerSpec, state: Tensor, token: Token) -> Tensor:
    """u of a token, given the state before it: [HV, V]."""
    u = token.v
    if spec.erase:
        u = u - (_decayed(state, token) @ _keys(state, token).unsqueeze(2)).squeeze(2)
    return u if token.beta is None else u * token.beta.unsqueeze(1)


def _written(state: Tensor, token: Token, u: Tensor) -> Tensor:
    """The state after a token whose correction is known."""
    return _decayed(state, token) + u.unsqueeze(2) * _keys(state, token).unsqueeze(1)
