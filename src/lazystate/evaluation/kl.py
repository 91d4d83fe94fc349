"""KL divergence of next-token distributions under teacher forcing, as in ReplaySSM App. E.4.3.

Every way to decode is fed the same text behind a prompt, so that only the recurrent state differs.
The reference is conventional decoding with FP32 states: the stock model, one token a step. Replay
takes a window in steps of several tokens, whose outputs are those of one token a step (Eq. 10-13).
What is reported at N is D(p_FP32 || p), over the whole vocabulary, averaged over the streams and
over the (at most) 256 positions that end at the N-th decoded token.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lazystate import shipped
from lazystate.engines.transformers import patched
from lazystate.formats import CHECKPOINTS, VIEWS, Rounding, named
from lazystate.ops import BackendName, Views

SPAN = 256  # positions averaged
MOST_TOKENS = 16  # of a step: what all backends do

Advance = Callable[[int], None]


@dataclass(frozen=True)
class States:
    """How a configuration keeps its states; `str` and `parse` are inverse.

    Attributes:
        checkpoint, view, rounding: as of `StateCache`; view None: the checkpoint serves reads, too;
            "sketch8": a sketch of mean rank 8, which `Config.sketch` then has.
    """

    checkpoint: str = "fp32"
    view: str | None = None
    rounding: Rounding = "stochastic"

    @classmethod
    def parse(cls, text: str) -> States:
        """From "fp16", "fp16:nearest" or, with a view, "fp16,nvfp4" or "fp16,sketch8".

        Raises:
            ValueError: for another form or an unknown format.
        """
        formats, _, rounding = text.partition(":")
        checkpoint, _, view = formats.partition(",")
        if rounding not in ("", "nearest"):
            raise ValueError(f"state must end in ':nearest' or nothing, got {text!r}")
        named("state", checkpoint, CHECKPOINTS)
        if view and not view.startswith("sketch"):
            named("view of a state", view, VIEWS)
        found = cls(checkpoint, view or None, "nearest" if rounding else "stochastic")
        if found.mean_rank is not None and not found.mean_rank >= 1:
            raise ValueError(f"mean rank must be at least 1, got {text!r}")
        return found

    @property
    def mean_rank(self) -> float | None:
        """Of a sketch; None for another view.

        Raises:
            ValueError: for a sketch without a rank.
        """
        if self.view is None or not self.view.startswith("sketch"):
            return None
        try:
            return float(self.view.removeprefix("sketch"))
        except ValueError as error:
            raise ValueError(
                f"sketch must have a mean rank, as sketch8, got {self.view!r}"
            ) from error

    def __str__(self) -> str:
        view = f",{self.view}" if self.view else ""
        return self.checkpoint + view + (":nearest" if self.rounding == "nearest" else "")


@dataclass(frozen=True)
class Config:
    """One way to decode: replay of a window, or conventional where window is None.

    Attributes:
        split: decode the streams in this many groups; another order of additions, no more.
        sketch: the view of the model's layers, where the states have one.
        backend: as of `StateCache`.
    """

    states: States
    window: int | None
    split: int = 1
    seed: int = 0
    sketch: Views | None = None
    backend: BackendName = "auto"

    def engine(self, model: nn.Module) -> AbstractContextManager:
        """The model decoding in this way inside a `with` block."""
        if self.window is None:
            return nullcontext()
        return patched(
            model,
            window=self.window,
            max_tokens=max(self.steps()),
            checkpoint=self.states.checkpoint,
            view=self.states.view if self.sketch is None else self.sketch,
            rounding=self.states.rounding,
            seed=self.seed,
            backend=self.backend,
        )

    def steps(self) -> list[int]:
        """Tokens of the steps that are repeated: one that folds, and the rest of its window.

        A fold comes before the first token behind a full window, and that step reads the
        checkpoint; so these steps read, token for token, what steps of one token do.
        """
        behind = 0 if self.window is None else self.window - 1
        full, last = divmod(behind, MOST_TOKENS)
        return [1, *[MOST_TOKENS] * full, *[last] * (last > 0)]


REFERENCE = Config(States(), None)
AGAIN = Config(States(), None, split=2)


@dataclass(frozen=True)
class Point:
    """KL of one configuration at one N.

    Attributes:
        kl: mean over streams, in nats; NaN where the state became non-finite.
        standard_error: of that mean, over streams; NaN for one stream. streams: by stream.
        top: mean share of positions whose most probable token is the reference's.
    """

    n: int
    kl: float
    standard_error: float
    streams: list[float]
    top: float


def streams(
    tokenizer: PreTrainedTokenizerBase, count: int, tokens: int, books: Sequence[str] | None = None
) -> Tensor:
    """Pages of held-out books: int64 [count, tokens], evenly spread, the books in turn.

    Raises:
        ValueError: if the books are too short.
    """
    names = books or shipped.books()
    rows = []
    for index in range(count):
        text = shipped.book(names[index % len(names)])
        place, of = index // len(names), -(-count // len(names))
        start = text.find("\n\n", len(text) * (2 * place + 1) // (2 * of + 1)) + 2
        page = tokenizer(text[start : start + 12 * tokens], return_tensors="pt").input_ids[0]
        if len(page) < tokens:
            raise ValueError(
                f"tokens must leave every stream a page of {tokens} tokens, got one of {len(page)}:"
                " ask for fewer tokens or streams"
            )
        rows.append(page[:tokens])
    return torch.stack(rows)


def points(tokens: int) -> list[int]:
    """The N that are reported for a length: 16, 64, 256, ... and the length itself."""
    return [n for n in (16, 64, 256, 1024, 4096, 16384) if n < tokens] + [tokens]


def _nothing(steps: int) -> None:
    """No progress bar."""
    del steps


def logits(
    model: nn.Module,
    given: Tensor,
    prompt: int,
    config: Config,
    advance: Advance = _nothing,
) -> Iterator[Tensor]:
    """Logits [streams, vocabulary] of every decoded token, while it is fed the given text.

    Args:
        given: int64 [streams, prompt + n]. prompt: tokens of prefill, in one forward.
        advance: called with the number of steps done, to move a progress bar.

    Yields:
        n times: the distribution behind each of the n tokens that follow the prompt.
    """
    parts = [part for part in given.chunk(config.split) if len(part)]
    forward: Any = model
    name = cache_argument(model)
    with config.engine(model), torch.inference_mode():
        caches = [forward(part[:, :prompt], use_cache=True)[name] for part in parts]
        sizes = itertools.cycle(config.steps())
        while prompt < given.shape[1]:
            end = min(prompt + next(sizes), given.shape[1])
            outs = [
                forward(part[:, prompt:end], **{name: cache}, use_cache=True).logits
                for part, cache in zip(parts, caches, strict=True)
            ]
            yield from torch.cat(outs).float().unbind(1)
            advance(end - prompt)
            prompt = end


def cache_argument(model: nn.Module) -> str:
    """What the model's class calls its cache; transformers has renamed it over time."""
    taken = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "cache_params", "past_key_values") if name in taken)


def divergence(reference: Tensor, logits: Tensor) -> Tensor:
    """D(softmax(reference) || softmax(logits)) in nats, FP64, over the last dimension."""
    p = torch.log_softmax(reference.double(), -1)
    q = torch.log_softmax(logits.double(), -1)
    return (p.exp() * (p - q)).sum(-1)


@dataclass(frozen=True)
class Reference:
    """Logits of conventional decoding at the positions that are averaged.

    Attributes:
        kept: position (1 for the first decoded token) to [streams, vocabulary].
    """

    given: Tensor
    prompt: int
    at: list[int]
    kept: dict[int, Tensor]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        given: Tensor,
        prompt: int,
        advance: Advance = _nothing,
    ) -> Reference:
        """Decode the given text [streams, prompt + n] conventionally."""
        at = points(given.shape[1] - prompt)
        wanted = {i for n in at for i in range(max(n - SPAN, 0) + 1, n + 1)}
        decoded = enumerate(logits(model, given, prompt, REFERENCE, advance), 1)
        kept = {i: row for i, row in decoded if i in wanted}
        return cls(given, prompt, at, kept)

    def measure(
        self,
        model: nn.Module,
        config: Config,
        advance: Advance = _nothing,
    ) -> list[Point]:
        """Decode in another way and compare: a point for every N."""
        found: dict[int, Tensor] = {}
        same: dict[int, Tensor] = {}
        for i, row in enumerate(logits(model, self.given, self.prompt, config, advance), 1):
            if i in self.kept:
                found[i] = divergence(self.kept[i], row)
                same[i] = (row.argmax(-1) == self.kept[i].argmax(-1)).double()
        return [self._point(n, found, same) for n in self.at]

    def _point(self, n: int, found: dict[int, Tensor], same: dict[int, Tensor]) -> Point:
        span = range(max(n - SPAN, 0) + 1, n + 1)
        by_stream = torch.stack([found[i] for i in span]).mean(0)
        error = math.nan
        if len(by_stream) > 1:
            error = float(by_stream.std() / len(by_stream) ** 0.5)
        top = float(torch.stack([same[i] for i in span]).mean())
        return Point(n, float(by_stream.mean()), error, by_stream.tolist(), top)
