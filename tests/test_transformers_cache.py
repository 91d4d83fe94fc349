"""Whatever transformers does with a cache, a patched model gives what the stock model gives."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache

from lazystate import StepError
from lazystate.engines.transformers import patch, unpatch
from tiny_models import (
    FAMILIES,
    FP32,
    cache_name,
    call,
    copied,
    new_cache,
    prompt,
    relative,
    replay_of,
    stock,
)

# The families, and the two kinds of layers with attention in the same cache layer.
LAYOUTS = (*FAMILIES, "FalconH1Mixer", "Zamba2MambaMixer")
OLD = Version(transformers.__version__) < Version("5.24")


def needs_batched_steps(mixer: str) -> None:
    """Skip where the stock class cannot decode a batch."""
    if OLD and mixer == "FalconH1Mixer":
        pytest.skip("stock FalconH1 of this version fails on a batch")


def generate(model: PreTrainedModel, tokens: Tensor, mask: Tensor | None = None, **options):
    """`generate` with all that it can return."""
    return model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens) if mask is None else mask,
        return_dict_in_generate=True,
        output_logits=True,
        **{"max_new_tokens": 40, "do_sample": False, **options},
    )


def both(mixer: str, *inputs, **options):
    """What the stock model generates, and what a patched one does."""
    plain = generate(stock(mixer), *inputs, **options)
    return plain, generate(patch(copied(mixer)), *inputs, **options)


def same(plain, replayed) -> bool:
    """The same tokens, from the same logits."""
    logits = [torch.stack(out.logits) for out in (replayed, plain)]
    return torch.equal(plain.sequences, replayed.sequences) and relative(*logits) <= FP32


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_left_padded_batch(mixer: str) -> None:
    """Three prompts of different length in one batch: same tokens, same logits."""
    needs_batched_steps(mixer)
    tokens, mask = prompt(20, rows=3), torch.ones(3, 20, dtype=torch.int64)
    mask[1, :7] = mask[2, :13] = 0
    assert same(*both(mixer, tokens.masked_fill(mask == 0, 0), mask))


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_beam_search(mixer: str) -> None:
    """Beams change rows after every step: same beams, same scores."""
    needs_batched_steps(mixer)
    plain, replayed = both(mixer, prompt(12, rows=2), num_beams=4, num_return_sequences=2)
    assert torch.equal(plain.sequences, replayed.sequences)
    torch.testing.assert_close(replayed.sequences_scores, plain.sequences_scores)


@pytest.mark.parametrize("mixer", FAMILIES)
def test_sampling(mixer: str) -> None:
    """With the same random numbers, the same samples, several of each prompt."""
    results = []
    for model in (stock(mixer), patch(copied(mixer))):
        torch.manual_seed(0)
        results.append(generate(model, prompt(rows=2), do_sample=True, num_return_sequences=3))
    assert same(*results)


@pytest.mark.parametrize("length", [1, 5, 30])
@pytest.mark.parametrize("mixer", LAYOUTS)
def test_continued_conversation(mixer: str, length: int) -> None:
    """A generation is continued with its own cache and a few, some or many new tokens."""
    results = []
    for model in (stock(mixer), patch(copied(mixer))):
        first = generate(model, prompt())
        cache = getattr(first, cache_name(model))
        tokens = torch.cat([first.sequences, prompt(length, seed=1)], 1)
        results.append(generate(model, tokens, **{cache_name(model): cache}))
    assert same(*results)


@pytest.mark.parametrize("mixer", FAMILIES)
def test_prefill_in_chunks(mixer: str) -> None:
    """Chunks longer and shorter than max_tokens: 12 + 12 + 6."""
    assert same(*both(mixer, prompt(30), prefill_chunk_size=12))


@pytest.mark.parametrize("mixer", FAMILIES)
def test_padding_inside_a_continuation(mixer: str) -> None:
    """New tokens of unequal number are padded in the middle of a sequence."""
    mask = torch.ones(2, 20, dtype=torch.int64)
    mask[1, 12:15] = 0
    results = []
    for model in (stock(mixer), patch(copied(mixer))):
        cache = new_cache(model)
        for start, end in ((0, 12), (12, 18), (18, 20)):
            inputs = {
                "input_ids": prompt(20, rows=2)[:, start:end],
                "attention_mask": mask[:, :end],
                "position_ids": (mask[:, :end].cumsum(1) - 1).clamp(0)[:, start:],
            }
            with torch.no_grad():
                out = model(**inputs, **{cache_name(model): cache})
        results.append(out.logits)
    assert relative(results[1], results[0]) <= FP32


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_static_cache(mixer: str) -> None:
    """A StaticCache has the same recurrent layers, and attention of its own."""
    tokens = prompt(30)
    right, _ = call(stock(mixer), tokens)
    model = patch(copied(mixer))
    cache = StaticCache(config=model.config, max_cache_len=64)
    for start, end in ((0, 20), (20, 24), (24, 25)):
        logits, _ = call(model, tokens[:, start:end], cache)
        assert relative(logits, right[:, start:end]) <= FP32


@pytest.mark.slow
def test_a_compiled_model() -> None:
    """`torch.compile` leaves its graph at the recurrent layers, and decodes the same."""
    tokens = prompt(24)
    right, _ = call(stock("BambaMixer"), tokens)
    model = patch(copied("BambaMixer"))
    compiled = torch.compile(model, backend="eager")
    cache = StaticCache(config=model.config, max_cache_len=64)
    call(model, tokens[:, :20], cache)
    for at in range(20, 24):
        with torch.no_grad():
            positions = torch.tensor([[at]])
            out = compiled(
                tokens[:, at : at + 1], position_ids=positions, **{cache_name(model): cache}
            )
        assert relative(out.logits, right[:, at : at + 1]) <= FP32


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_a_prefix_is_copied(mixer: str) -> None:
    """A deep copy of a cache continues by itself, in the middle of a window."""
    tokens = prompt(40)
    right, _ = call(stock(mixer), tokens)
    model = patch(copied(mixer))
    _, cache = call(model, tokens[:, :20])
    for at in range(20, 25):
        call(model, tokens[:, at : at + 1], cache)
    other = copy.deepcopy(cache)
    call(model, tokens[:, :3], cache)
    for at in range(25, 40):
        logits, _ = call(model, tokens[:, at : at + 1], other)
        assert relative(logits, right[:, at : at + 1]) <= FP32


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_rows_are_repeated_and_selected(mixer: str) -> None:
    """A batch grows and shrinks; every row continues as itself."""
    tokens = prompt(30, rows=2)
    right, _ = call(stock(mixer), tokens)
    model = patch(copied(mixer))
    _, cache = call(model, tokens[:, :20])
    call(model, tokens[:, 20:23], cache)
    cache.batch_repeat_interleave(2)
    rows = torch.tensor([0, 0, 1, 1])
    logits, _ = call(model, tokens[rows, 23:25], cache)
    assert relative(logits, right[rows, 23:25]) <= FP32
    cache.batch_select_indices(torch.tensor([3, 0]))
    logits, _ = call(model, tokens[[1, 0], 25:27], cache)
    assert relative(logits, right[[1, 0], 25:27]) <= FP32


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_reset(mixer: str) -> None:
    """A reset cache begins anew, with another number of rows."""
    needs_batched_steps(mixer)
    model = patch(copied(mixer))
    _, cache = call(model, prompt(20, rows=2))
    call(model, prompt(1, rows=2), cache)
    cache.reset()
    assert not cache.has_previous_state()
    if OLD:
        pytest.skip("attention layers of this version keep their length")
    logits, _ = call(model, prompt(25), cache)
    assert relative(logits, call(stock(mixer), prompt(25))[0]) <= FP32


@pytest.mark.parametrize("mixer", LAYOUTS)
def test_a_stock_cache_is_taken_over(mixer: str) -> None:
    """A model that is patched in the middle of a conversation goes on from the stock state."""
    tokens = prompt(40)
    right, _ = call(stock(mixer), tokens)
    model = copied(mixer)
    _, cache = call(model, tokens[:, :20])
    call(model, tokens[:, 20:21], cache)
    patch(model)
    for at in range(21, 40):
        logits, _ = call(model, tokens[:, at : at + 1], cache)
        assert relative(logits, right[:, at : at + 1]) <= FP32


def test_a_patched_cache_needs_a_patched_model() -> None:
    """A stock model cannot read a state that is not where it looks, and says so."""
    model = patch(copied("BambaMixer"))
    _, cache = call(model, prompt())
    with pytest.raises(StepError, match="patch the model again"):
        call(unpatch(model), prompt(1), cache)


def test_a_cache_of_another_batch_or_model_is_an_error() -> None:
    """Rows that the cache does not have, and a cache without recurrent layers, are named."""
    model = patch(copied("BambaMixer"))
    _, cache = call(model, prompt())
    with pytest.raises(ValueError, match="hidden_states must have 1 batch rows"):
        call(model, prompt(1, rows=2), cache)
    other = new_cache(stock("KimiLinearDeltaAttention"))
    other.layers = other.layers[1:2]
    with pytest.raises(ValueError, match="cache must have a linear attention layer at index 0"):
        call(model, prompt(), other)


@pytest.mark.parametrize("mixer", FAMILIES)
def test_without_a_cache_the_stock_forward_runs(mixer: str) -> None:
    """use_cache=False gives the stock numbers bit for bit."""
    model = patch(copied(mixer))
    with torch.no_grad():
        out, right = (m(prompt(), use_cache=False).logits for m in (model, stock(mixer)))
    assert torch.equal(out, right)


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("mixer", FAMILIES)
def test_gradients_are_those_of_stock(mixer: str, use_cache: bool) -> None:
    """Training a patched model is training the stock model, also where it makes a cache."""
    models = patch(copied(mixer)).train(), copied(mixer).train()
    for model in models:
        model(prompt(), labels=prompt(), use_cache=use_cache).loss.backward()
    for parameter, right in zip(*(model.parameters() for model in models), strict=True):
        assert (parameter.grad is None) == (right.grad is None)
        assert right.grad is None or torch.equal(parameter.grad, right.grad)


def test_gradients_through_a_filled_cache_are_an_error() -> None:
    """A state that was computed without gradients cannot carry any."""
    model = patch(copied("BambaMixer"))
    _, cache = call(model, prompt())
    with pytest.raises(StepError, match=r"torch\.no_grad"):
        model(prompt(1), **{cache_name(model): cache})


def test_one_state_serves_all_layers() -> None:
    """All recurrent layers of a cache share one StateCache, a slot a row."""
    model = patch(copied("BambaMixer"), window=5, max_tokens=3, fold="cached")
    _, cache = call(model, prompt(rows=3))
    state = replay_of(cache)._state
    assert state is not None
    assert (state.layers, state.slots, state.window, state.max_tokens) == (2, 3, 5, 3)
