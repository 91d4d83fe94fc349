"""Drafts: what is accepted, and where a cache is cropped, never changes a token."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from torch import Tensor
from transformers.generation.candidate_generator import CandidateGenerator

from lazystate import StepError
from lazystate.engines.transformers import patch
from tiny_models import (
    CONFIGS,
    FAMILIES,
    FP32,
    VOCABULARY,
    call,
    copied,
    expected,
    greedy,
    new_cache,
    prompt,
    relative,
    stock,
)

HYBRIDS = [mixer for mixer in CONFIGS if mixer != "Mamba2Mixer"]


class Oracle(CandidateGenerator):
    """Drafts of random length from the right continuation, spoilt at a random place."""

    def __init__(self, answer: list[int], longest: int) -> None:
        self.answer, self.longest = answer, longest
        self.random = torch.Generator().manual_seed(7)
        self.accepted: list[tuple[int, int]] = []
        self._length = 0

    def below(self, n: int) -> int:
        """A random number from 0 to n - 1."""
        return int(torch.randint(n, (), generator=self.random))

    def get_candidates(self, input_ids: Tensor, *_, **__) -> tuple[Tensor, None]:
        """The draft of one step, as transformers asks for it."""
        at = input_ids.shape[1]
        draft = self.answer[at : at + self.below(self.longest + 1)]
        if draft and self.below(4):
            spoilt = self.below(len(draft))
            draft[spoilt] = (draft[spoilt] + 1) % VOCABULARY
        self._length = len(draft)
        return torch.cat([input_ids, torch.tensor([draft], dtype=torch.int64)], 1), None

    def update_candidate_strategy(self, *told) -> None:
        """Told, as the last thing, how many were accepted."""
        self.accepted.append((self._length, int(told[-1])))


@pytest.mark.parametrize("mixer", HYBRIDS)
def test_prompt_lookup_equals_greedy(mixer: str) -> None:
    """On a repetitive prompt, prompt lookup gives exactly the tokens of plain greedy decoding."""
    wanted = expected(mixer, tokens=8, repeats=4, steps=100)
    drafts = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1}
    drafted = greedy(patch(copied(mixer)), wanted.prompt, 100, **drafts)
    assert drafted.sequences.tolist() == wanted.sequences.tolist()


@pytest.mark.parametrize("longest", [3, 11])
@pytest.mark.parametrize("mixer", FAMILIES)
def test_any_acceptance_equals_greedy(mixer: str, longest: int) -> None:
    """Assisted decoding over random drafts, empty, partly and wholly accepted ones, and such that
    are longer than max_tokens (11 of 4): the tokens are those of greedy decoding.
    """
    wanted = expected(mixer)
    model = patch(copied(mixer), window=8, max_tokens=4)
    oracle = Oracle(wanted.sequences[0].tolist(), longest)
    model._get_candidate_generator = MethodType(lambda *_, **__: oracle, model)
    # The option only selects assisted decoding: the oracle drafts.
    drafted = greedy(model, wanted.prompt, 200, prompt_lookup_num_tokens=1)
    assert drafted.sequences.tolist() == wanted.sequences.tolist()
    kinds = {(not length, kept == length) for length, kept in oracle.accepted}
    assert kinds == {(True, True), (False, True), (False, False)}, "not all patterns came up"


@pytest.mark.parametrize("mixer", CONFIGS)
def test_verify_and_crop_by_hand(mixer: str) -> None:
    """Steps of 1 to 4 tokens, some wrong, cropped by 0 to all of them, with and without recording:
    every logit is that of the stock model over the kept tokens.
    """
    tokens = prompt(120)
    right = call(stock(mixer), tokens)[0]
    model = patch(copied(mixer), window=6, max_tokens=4)
    random = torch.Generator().manual_seed(1)
    _, cache = call(model, tokens[:, :12])
    at, step = 12, 0
    while at < 110:
        if step == 20:
            cache.activate_past_recording()
        count = int(torch.randint(1, 5, (), generator=random))
        kept = int(torch.randint(0, count + 1, (), generator=random))
        drafted = tokens[:, at : at + count].clone()
        drafted[:, kept:] = (drafted[:, kept:] + 1) % VOCABULARY
        logits, _ = call(model, drafted, cache)
        cache.crop(kept - count)
        if kept:
            assert relative(logits[:, :kept], right[:, at : at + kept]) <= FP32
        at, step = at + kept, step + 1
    assert step > 40


@pytest.mark.parametrize("mixer", FAMILIES)
def test_crop_reaches_over_many_steps(mixer: str) -> None:
    """While recording, all steps since the last crop can be taken back, folds among them, also
    steps longer than max_tokens and part of a prefill.
    """
    tokens = prompt(120)
    right = call(stock(mixer), tokens)[0]
    model = patch(copied(mixer), window=4, max_tokens=2)
    cache = new_cache(model)
    cache.activate_past_recording()
    call(model, tokens[:, :40], cache)
    cache.crop(-7)
    at = 33
    for lengths, removed in (([1] * 9, 6), ([2, 1, 2], 5), ([9, 1, 1], 8), ([1, 1], 0), ([5], 2)):
        start = at
        for length in lengths:
            call(model, tokens[:, at : at + length], cache)
            at += length
        cache.crop(-removed)
        at -= removed
        assert start <= at
        logits, _ = call(model, tokens[:, at : at + 1], copy.deepcopy(cache))
        assert relative(logits, right[:, at : at + 1]) <= FP32


@pytest.mark.parametrize("mixer", FAMILIES)
def test_a_hybrid_assists_a_hybrid(mixer: str) -> None:
    """With a patched assistant, whose own cache is cropped over many steps, tokens are greedy's."""
    wanted = expected(mixer)
    assistant = copied(mixer)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02 * parameter.std())
    drafted = greedy(patch(copied(mixer)), wanted.prompt, 200, assistant_model=patch(assistant))
    assert drafted.sequences.tolist() == wanted.sequences.tolist()


def test_sampled_drafts_run() -> None:
    """Sampling with drafts verifies by another rule; the text has the asked length."""
    model = patch(copied("BambaMixer"))
    out = model.generate(
        prompt(8).repeat(1, 4),
        max_new_tokens=30,
        do_sample=True,
        prompt_lookup_num_tokens=3,
        max_matching_ngram_size=1,
    )
    assert out.shape[1] == 62


def test_crop_further_than_kept_is_an_error() -> None:
    """Without recording only the last step can be taken back, and never a whole prompt."""
    model = patch(copied("BambaMixer"))
    _, cache = call(model, prompt(20))
    with pytest.raises(StepError, match="tokens_to_remove must be 0 to 0 here, got -1"):
        cache.crop(-1)
    call(model, prompt(3), cache)
    call(model, prompt(2), cache)
    with pytest.raises(StepError, match="tokens_to_remove must be 0 to -2 here, got -3"):
        cache.crop(-3)
    cache.crop(-2)
    with pytest.raises(StepError, match="activate_past_recording"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative, got 5"):
        cache.crop(5)
