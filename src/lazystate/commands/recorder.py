"""What a generation did, step by step: tokens, time, state bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer, TextStreamer

from lazystate.ops import Traffic


@dataclass(frozen=True)
class Step:
    """One model step as it ended.

    Attributes:
        given: tokens the model was given, drafts included. tokens: new tokens that came of it.
        clock: seconds. moved: state bytes so far.
    """

    given: int
    tokens: int
    clock: float
    moved: int


@dataclass
class Recorder(BaseStreamer):
    """Notes every step of a generation, and passes its tokens on to be printed.

    The first step is prefill; it is kept to mark where decoding begins.
    """

    traffic: Traffic | None = None
    printer: TextStreamer | None = None
    steps: list[Step] = field(default_factory=list)
    _prompt_seen: bool = False
    _given: int = 0

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note how many tokens the model is given, inside the `with` block."""

        def note(_: nn.Module, __: tuple, arguments: dict[str, Any]) -> None:
            self._given = arguments["input_ids"].shape[1]

        hook = model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def put(self, value: Tensor) -> None:
        """Called by transformers with the prompt, then with the tokens of every step."""
        if self.printer is not None:
            self.printer.put(value)
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        moved = 0 if self.traffic is None else self.traffic.read + self.traffic.written
        self.steps.append(Step(self._given, value.numel(), time.perf_counter(), moved))

    def end(self) -> None:
        """Called by transformers after the last step."""
        if self.printer is not None:
            self.printer.end()

    @property
    def tokens(self) -> int:
        """New tokens, the one from prefill included."""
        return sum(step.tokens for step in self.steps)

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed, prefill excluded; 0 if nothing was decoded."""
        elapsed = self.steps[-1].clock - self.steps[0].clock
        return sum(step.tokens for step in self.steps[1:]) / elapsed if elapsed else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens that a decoding step gave: 1 without drafts."""
        decoded = self.steps[1:]
        return sum(step.tokens for step in decoded) / len(decoded) if decoded else 1.0

    @property
    def given_per_step(self) -> float:
        """Mean tokens that a decoding step was given: 1 and its drafts."""
        decoded = self.steps[1:]
        return sum(step.given for step in decoded) / len(decoded) if decoded else 1.0

    @property
    def bytes_per_token(self) -> float:
        """State bytes moved for a decoded token."""
        moved = self.steps[-1].moved - self.steps[0].moved
        tokens = sum(step.tokens for step in self.steps[1:])
        return moved / tokens if tokens else 0.0

    def settled(self, window: int) -> Recorder:
        """The steps behind the first window, which ends without a fold as no later one does.

        Without drafts whole windows, so that each has its one fold; all steps if there are too few.
        """
        ends = list(accumulate(step.tokens for step in self.steps[1:]))
        first = next((i + 1 for i, end in enumerate(ends) if end >= window), 0)
        last = len(ends)
        if self.tokens_per_step == 1.0:
            last -= (last - first) % window
        return self if first == last else Recorder(steps=self.steps[first : last + 1])
