"""The recurrent state behind one transformers cache: prefill, steps, crop.

All recurrent layers of a model share one `StateCache`, a slot a batch row. How many tokens of a
step stay is known only later, so its ticket stays open: the next step commits all of them, a `crop`
before it fewer. Once transformers has announced that it will crop (`recording`), the inputs of all
tokens since the last crop are kept as well, and any number of them can be taken back.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lazystate.cache import StateCache, StepError, Ticket
from lazystate.engines.transformers.stock import LayerState, StockPass

if TYPE_CHECKING:
    from lazystate.engines.transformers.mixer import Entry, Mixer, Patch

# How many of its last tokens a recorded prefill can give back: transformers runs a prompt together
# with its first draft, and does not say where that begins.
FIRST_DRAFT = 64


class Replay:
    """State of one batch in all recurrent layers of a patched model.

    Args:
        patch: of the model (held weakly, so that a copied cache does not copy the model).
        recording: whether the tokens since the last crop are kept.
    """

    def __init__(self, patch: Patch, recording: bool) -> None:
        self._patch = weakref.ref(patch)
        self._recording = recording
        self._state: StateCache | None = None
        self._slots = torch.arange(0)
        self._ticket: Ticket | None = None
        self._pass: StockPass | None = None
        self._base: list[LayerState] | None = None
        self._journal: list[list[Entry]] = []

    @property
    def started(self) -> bool:
        """Whether there is a state."""
        return self._state is not None

    @property
    def rows(self) -> Tensor:
        """int64 [B], the numbers of the batch rows."""
        return self._slots

    @property
    def recording(self) -> bool:
        """Whether the tokens since the last crop are kept."""
        return self._recording

    @recording.setter
    def recording(self, on: bool) -> None:
        self._recording = on
        if not on:
            self._forget()

    def forward(
        self, mixer: Mixer, hidden: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
    ) -> Tensor:
        """One mixer over hidden states [B, T, D]; a model's first mixer begins the model's step."""
        if mixer.index == 0:
            self._begin(mixer.patch, hidden)
        if self._pass is not None:
            out = self._pass.forward(mixer, hidden, mask, kwargs)
            if mixer.index == len(mixer.patch.mixers) - 1:
                self._end_pass(self._pass)
            return out
        assert self._state is not None and self._ticket is not None
        entry, gate = mixer.project(hidden, mask)
        if self._recording:
            self._journal[-1].append(entry)
        return mixer.finish(mixer.recur(self._state, self._ticket, entry), gate)

    def adopt(self, layers: list[LayerState]) -> None:
        """Take over a state that stock code computed."""
        if self._state is None:
            rows, conv = layers[0].state.shape[0], layers[0].conv
            self._state = self._allocate(rows, conv.dtype, conv.device)
        self._load(self._state, layers)

    def crop(self, tokens_to_remove: int) -> None:
        """Take back the last -tokens_to_remove tokens; negative or 0, as transformers counts.

        Raises:
            ValueError: for a positive number. StepError: if the tokens are not kept any more.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be 0 or negative, got {tokens_to_remove}: crop(-n) takes "
                "back n tokens"
            )
        if self._state is None:
            return
        removed, last = -tokens_to_remove, 0 if self._ticket is None else self._ticket.tokens
        recorded = 0 if self._base is None else sum(step[0].tokens for step in self._journal)
        if removed <= last:
            self._commit(last - removed)
        elif self._base is not None and removed <= recorded:
            self._commit(last)
            self._load(self._state, self._base)
            self._run_again(self._state, recorded - removed)
        else:
            raise StepError(
                f"tokens_to_remove must be 0 to {-max(last, recorded)} here, got "
                f"{tokens_to_remove}: the tokens of the last step can be taken back, and after "
                "cache.activate_past_recording() all since the last crop, of a prefill "
                f"{FIRST_DRAFT}"
            )
        self._forget()

    def reorder(self, rows: Tensor) -> None:
        """Beam search: batch row i becomes what rows[i] was. rows: int64 [B]."""
        if self._state is not None:
            self._settle()
            self._state.copy(rows.to(self._slots.device), self._slots)

    def select(self, rows: Tensor) -> None:
        """A batch of another size: row i becomes what row rows[i] was. rows: int64 [any]."""
        if self._state is None:
            return
        self._settle()
        old, exported = self._state, self._state.export(self._slots)
        self._state = self._allocate(rows.numel(), old.specs[0].activation, old.device)
        rows = rows.to(old.device)
        self._state.import_(self._slots, {name: part[rows] for name, part in exported.items()})

    def reset(self) -> None:
        """No state, as before the first prefill."""
        self._state = self._ticket = self._pass = None
        self._forget()

    def _begin(self, patch: Patch, hidden: Tensor) -> None:
        """Start a model step: in the StateCache, or for many tokens in the stock forwards."""
        batch, tokens = hidden.shape[:2]
        if self._state is None:
            # The first token cannot be taken back: there is no state to go back to.
            self._pass = StockPass(None, min(FIRST_DRAFT, tokens - 1) if self._recording else 0)
            return
        if batch != self._slots.numel():
            raise ValueError(
                f"hidden_states must have {self._slots.numel()} batch rows, as the cache has, got "
                f"{batch}"
            )
        if tokens > patch.max_tokens:
            self._settle()
            draft = min(FIRST_DRAFT, tokens) if self._recording else 0
            self._pass = StockPass(self._layers(self._state), draft)
            return
        self._close(self._state)
        self._pass = None
        self._ticket = self._state.begin(self._slots, tokens)
        if self._recording:
            self._journal.append([])

    def _end_pass(self, done: StockPass) -> None:
        """The last mixer of a stock pass is done: the states become checkpoints."""
        self.adopt(done.after)
        self._pass = None
        if done.draft:
            self._base, self._journal = done.base, [done.entries]

    def _close(self, state: StateCache) -> None:
        """A step begins and nobody has cropped the last one: it stays.

        While recording it may still be taken back, so the state before it is worked out first.
        """
        if self._ticket is None:
            return
        tokens = self._ticket.tokens
        if not self._recording or self._base is not None:
            self._commit(tokens)
            return
        self._commit(0)
        self._base = self._layers(state)
        self._run_again(state, tokens)

    def _settle(self) -> None:
        """Keep all tokens for good."""
        if self._ticket is not None:
            self._commit(self._ticket.tokens)
        self._forget()

    def _commit(self, kept: int) -> None:
        """Commit the open ticket, if there is one."""
        if self._state is None or self._ticket is None:
            return
        if kept == 0:
            self._state.discard(self._ticket)
        elif kept == self._ticket.tokens:
            self._state.commit(self._ticket)
        else:
            self._state.commit(self._ticket, torch.full_like(self._slots, kept))
        self._ticket = None

    def _forget(self) -> None:
        self._base, self._journal = None, []

    @torch.no_grad()
    def _run_again(self, state: StateCache, tokens: int) -> None:
        """Run the first tokens of the journal once more, in steps of at most max_tokens."""
        patch = self._patch()
        assert patch is not None, "the model of this cache is gone"
        for step in self._journal:
            length = min(step[0].tokens, tokens)
            tokens -= length
            for start in range(0, length, patch.max_tokens):
                end = min(start + patch.max_tokens, length)
                ticket = state.begin(self._slots, end - start)
                for mixer, entry in zip(patch.mixers, step, strict=True):
                    mixer.recur(state, ticket, entry.cut(start, end))
                state.commit(ticket)

    def _layers(self, state: StateCache) -> list[LayerState]:
        """The exact state of every layer."""
        states, histories = state.materialize(self._slots), state.conv_history(self._slots)
        pairs = zip(states, histories, strict=True)
        return [LayerState(state, conv) for state, conv in pairs if conv is not None]

    def _load(self, state: StateCache, layers: list[LayerState]) -> None:
        states, histories = zip(*layers, strict=True)
        state.load(self._slots, states, histories)

    def _allocate(self, rows: int, activation: torch.dtype, device: torch.device) -> StateCache:
        patch = self._patch()
        assert patch is not None, "the model of this cache is gone"
        self._slots = torch.arange(rows, device=device)
        return StateCache(
            patch.specs(activation),
            rows,
            window=patch.window,
            max_tokens=patch.max_tokens,
            device=device,
            **patch.storage,
        )
