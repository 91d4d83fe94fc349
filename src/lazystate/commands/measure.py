"""One model decoded in several ways, side by side: the same tokens, and at what cost?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lazystate.commands.decoding import Decoded, Loaded, Method, counting, decode
from lazystate.commands.recorder import Recorder


@dataclass(frozen=True)
class Result:
    """How one method did on one model; the keys of `lazystate compare --json`.

    Attributes:
        model: name or folder. layer: kind of its recurrent layers.
        method: "plain" or "replay". draft: "none" or "prompt-lookup".
        checkpoint, view: formats of replay's states; "full" for no view.
        identical: whether all tokens are those of plain.
        max_logit_diff: largest absolute difference of a logit from plain's, up to and including
            the first differing token.
        state_bytes_per_token: counted bytes of state and records moved for a token, all layers.
        predicted_state_bytes_per_token: the planner's, for the measured tokens a step.
        tokens_per_s: decoding speed without counting, prefill excluded.
        acceptance: mean tokens that one model step gave.
    """

    model: str
    layer: str
    method: str
    draft: str
    checkpoint: str
    view: str
    identical: bool
    max_logit_diff: float
    state_bytes_per_token: float
    predicted_state_bytes_per_token: float
    tokens_per_s: float
    acceptance: float


def side_by_side(
    loaded: Loaded,
    prompt: Tensor,
    methods: Sequence[Method],
    tokens: int,
    repeats: int,
    advance: Callable[[], None],
) -> tuple[list[Result], Tensor]:
    """Decode greedily with each method, once counted and `repeats` times against the clock.

    Args:
        prompt: int64 [1, n]. methods: the first one is what the others are compared with.
        advance: called after every decoding, to move a progress bar.

    Returns:
        A result a method, and the first method's new tokens int64 [tokens].
    """
    counted: list[tuple[Decoded, Recorder]] = []
    for method in methods:
        with counting(loaded, method) as traffic:
            recorder = Recorder(traffic)
            counted.append(
                (decode(loaded, prompt, method, tokens, recorder, keep_logits=True), recorder)
            )
        advance()
    speeds = _speeds(loaded, prompt, methods, tokens, repeats, advance)
    first = counted[0][0]
    results = []
    for method, (decoded, recorder), speed in zip(methods, counted, speeds, strict=True):
        settled = recorder.settled(method.window or 1)
        predicted = loaded.predicted_bytes(method, settled.given_per_step, settled.tokens_per_step)
        results.append(
            Result(
                model=loaded.name,
                layer=loaded.layer,
                method=method.name,
                draft=method.draft,
                checkpoint=method.checkpoint,
                view=method.view or "full",
                identical=torch.equal(decoded.tokens, first.tokens),
                max_logit_diff=logit_difference(decoded, first),
                state_bytes_per_token=settled.bytes_per_token,
                predicted_state_bytes_per_token=predicted,
                tokens_per_s=speed,
                acceptance=recorder.tokens_per_step,
            )
        )
    return results, first.tokens


def logit_difference(one: Decoded, other: Decoded) -> float:
    """Largest absolute difference of the logits, as far as both saw the same tokens before."""
    assert one.logits is not None and other.logits is not None
    length = min(len(one.tokens), len(other.tokens))
    same = (one.tokens[:length] == other.tokens[:length]).long().cumprod(0)
    compared = min(int(same.sum()) + 1, length)
    return float((one.logits[:compared] - other.logits[:compared]).abs().max())


def _speeds(
    loaded: Loaded,
    prompt: Tensor,
    methods: Sequence[Method],
    tokens: int,
    repeats: int,
    advance: Callable[[], None],
) -> list[float]:
    """Median tokens a second of each method; the methods take turns, so that none is favoured."""
    seen: list[list[float]] = [[] for _ in methods]
    for _ in range(repeats):
        for speeds, method in zip(seen, methods, strict=True):
            recorder = Recorder()
            decode(loaded, prompt, method, tokens, recorder)
            speeds.append(recorder.tokens_per_second)
            advance()
    return [statistics.median(speeds) for speeds in seen]
