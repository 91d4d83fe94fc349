"""The cache as lists of tokens: every slot is an initial state and the tokens committed since.

It has the verbs of `lazystate.StateCache` and no window, ring or fold. A state is what the
recurrence gives for the list, so there is nothing that a fold or a rollback could get wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lazystate.reference import recurrence
from lazystate.spec import LayerSpec


@dataclass(frozen=True)
class Token:
    """What one token brings to one layer: q, k [H, K], v [HV, V], log_decay, beta (or None)."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None


@dataclass(frozen=True)
class Slot:
    """One layer of one request. Values, never changed in place: copies may share them.

    Attributes:
        spec: the layer.
        initial: [HV, V, K], FP64, before the first token.
        tokens: committed tokens, oldest first.
        inputs: committed convolution inputs [n, C], the width - 1 before the first token included.
        known: memo, a number of tokens and the state after them; what follows is computed anew.
    """

    spec: LayerSpec
    initial: Tensor
    tokens: tuple[Token, ...] = ()
    inputs: Tensor | None = None
    known: tuple[int, Tensor] | None = None

    def state(self) -> Tensor:
        """The state after all committed tokens: [HV, V, K], FP64."""
        count, state = (0, self.initial) if self.known is None else self.known
        for committed in self.tokens[count:]:
            _, state = self._apply(state, committed, None)
        return state

    def outputs(self, drafted: Sequence[Token], skip: Tensor | None) -> list[Tensor]:
        """Outputs [HV, V] of tokens that follow the committed ones; nothing is committed."""
        outputs, state = [], self.state()
        for drafted_token in drafted:
            out, state = self._apply(state, drafted_token, skip)
            outputs.append(out)
        return outputs

    def history(self) -> Tensor:
        """The last width - 1 committed convolution inputs: [C, width - 1], oldest first."""
        assert self.inputs is not None
        return self.inputs[len(self.inputs) - (self.spec.conv_width - 1) :].T

    def append(self, tokens: Sequence[Token], inputs: Tensor | None) -> Slot:
        """This slot with more committed tokens, and their convolution inputs [n, C]."""
        parts = [part for part in (self.inputs, inputs) if part is not None]
        inputs = torch.cat(parts) if parts else None
        known = (len(self.tokens), self.state())
        return replace(self, tokens=(*self.tokens, *tokens), inputs=inputs, known=known)

    def _apply(self, state: Tensor, t: Token, skip: Tensor | None) -> tuple[Tensor, Tensor]:
        return recurrence.token(
            state, t.q, t.k, t.v, t.log_decay, t.beta, erase=self.spec.erase, skip=skip
        )


@dataclass
class Drafts:
    """A model step in progress: slot (negative: padded) and length of each row, tokens by layer."""

    slots: list[int]
    lengths: list[int]
    tokens: dict[int, list[list[Token]]] = field(default_factory=dict)
    inputs: dict[int, Tensor] = field(default_factory=dict)


class TokenCache:
    """`slots` requests in all layers of a model, as lists of tokens.

    Args:
        specs: one LayerSpec a recurrent layer.
        slots: requests held.
    """

    def __init__(self, specs: Sequence[LayerSpec], slots: int) -> None:
        self.specs = tuple(specs)
        self.slots = [[self._fresh(spec) for spec in self.specs] for _ in range(slots)]

    def load(
        self,
        slot: int,
        states: Sequence[Tensor],
        conv: Sequence[Tensor | None] | None = None,
        phase: int = 0,
    ) -> None:
        """Start a slot from states [HV, V, K] and convolution inputs [C, width - 1] (None: 0).

        phase: of no consequence here, where nothing folds.
        """
        del phase
        fresh = [self._fresh(spec) for spec in self.specs]
        given = [None] * len(self.specs) if conv is None else conv
        self.slots[slot] = [
            replace(layer, initial=state.double(), inputs=layer.inputs if x is None else x.T)
            for layer, state, x in zip(fresh, states, given, strict=True)
        ]

    def reset(self, slot: int) -> None:
        """Make a slot fresh: zero state, zero convolution inputs, no tokens."""
        self.slots[slot] = [self._fresh(spec) for spec in self.specs]

    def begin(self, slots: Sequence[int], lengths: Sequence[int]) -> Drafts:
        """Start a model step over rows of given slots (negative: padded) and lengths."""
        return Drafts(list(slots), list(lengths))

    def convolve(
        self, drafts: Drafts, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Tensor:
        """Convolution of [B, T, C] with SiLU, FP64; zeros on padded rows and behind lengths."""
        drafts.inputs[layer] = x
        out = torch.zeros(x.shape, dtype=torch.float64)
        for row, (slot, length) in enumerate(zip(drafts.slots, drafts.lengths, strict=True)):
            if slot >= 0 and length:
                history = self.slots[slot][layer].history()
                out[row, :length] = recurrence.convolve(history, x[row, :length], weight, bias)
        return out

    def step(
        self,
        drafts: Drafts,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor,
        beta: Tensor | None = None,
        skip: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, T, HV, V], FP64; zeros on padded rows and behind a row's length."""
        out = torch.zeros(v.shape, dtype=torch.float64)
        rows = drafts.tokens[layer] = []
        for row, (slot, length) in enumerate(zip(drafts.slots, drafts.lengths, strict=True)):
            own = q[row], k[row], v[row], log_decay[row], None if beta is None else beta[row]
            rows.append([_token(t, *own) for t in range(length)])
            if slot >= 0:
                for t, o in enumerate(self.slots[slot][layer].outputs(rows[row], skip)):
                    out[row, t] = o
        return out

    def commit(self, drafts: Drafts, kept: Sequence[int]) -> None:
        """Append the first `kept` tokens of each row to its slot's list."""
        for row, (slot, n) in enumerate(zip(drafts.slots, kept, strict=True)):
            if slot < 0 or drafts.lengths[row] == 0:
                continue
            for layer, rows in drafts.tokens.items():
                x = drafts.inputs[layer][row, :n] if layer in drafts.inputs else None
                self.slots[slot][layer] = self.slots[slot][layer].append(rows[row][:n], x)

    def discard(self, drafts: Drafts) -> None:
        """End a model step and keep nothing of it: there is nothing to do."""

    def materialize(self, slot: int) -> list[Tensor]:
        """For every layer the state after all committed tokens: [HV, V, K], FP64."""
        return [layer.state() for layer in self.slots[slot]]

    def conv_history(self, slot: int) -> list[Tensor | None]:
        """For every layer the last committed inputs [C, width - 1], None without convolution."""
        return [layer.history() if layer.spec.conv_channels else None for layer in self.slots[slot]]

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy slots to slots; all are read before one is written."""
        for slot, layers in zip(target, [self.export(slot) for slot in source], strict=True):
            self.import_(slot, layers)

    def export(self, slot: int) -> list[Slot]:
        """One request, by layer."""
        return list(self.slots[slot])

    def import_(self, slot: int, exported: list[Slot]) -> None:
        """Put an exported request into a slot."""
        self.slots[slot] = list(exported)

    @staticmethod
    def _fresh(spec: LayerSpec) -> Slot:
        inputs = None
        if spec.conv_channels:
            inputs = torch.zeros(spec.conv_width - 1, spec.conv_channels, dtype=torch.float64)
        return Slot(spec, torch.zeros(spec.state_shape, dtype=torch.float64), inputs=inputs)


def _token(
    t: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor | None
) -> Token:
    """Token t of one row's inputs [T, ...]."""
    return Token(q[t], k[t], v[t], log_decay[t], None if beta is None else beta[t])
