"""patch, unpatch, patched and the count of plain traffic."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import lazystate
from lazystate.engines.transformers import (
    count_plain_state_bytes,
    layer_spec,
    patch,
    patched,
    unpatch,
)
from lazystate.engines.transformers.adapters import ADAPTERS
from lazystate.engines.transformers.patching import patched_mixers
from tiny_models import CONFIGS, FAMILIES, SHARED, call, copied, prompt, stock


def test_every_supported_class_is_tested() -> None:
    """No adapter without a model in these tests."""
    assert CONFIGS.keys() == ADAPTERS.keys()


@pytest.mark.parametrize("mixer", CONFIGS)
def test_unpatch_restores_everything(mixer: str) -> None:
    """After unpatch no module has anything of its own, and the numbers are stock's bit for bit."""
    model = copied(mixer)
    before = [set(vars(module)) for module in model.modules()]
    patch(model)
    assert not model._is_stateful
    assert [type(m.module).__name__ for m in patched_mixers(model)] == [mixer] * len(
        patched_mixers(model)
    )
    call(model, prompt())
    unpatch(model)
    assert [set(vars(module)) for module in model.modules()] == before
    assert model._is_stateful == stock(mixer)._is_stateful
    logits, cache = call(model, prompt())
    right, right_cache = call(stock(mixer), prompt())
    assert torch.equal(logits, right)
    assert torch.equal(
        call(model, prompt(1), cache)[0], call(stock(mixer), prompt(1), right_cache)[0]
    )


def test_a_forward_set_before_comes_back() -> None:
    """A forward that somebody had put on a module is called while patched, and is there again."""
    model = copied("BambaMixer")
    mixer = model.model.layers[0].mamba
    calls = []
    plain = mixer.forward

    def noted(*args, **kwargs):
        calls.append(1)
        return plain(*args, **kwargs)

    mixer.forward = noted
    patch(model)
    call(model, prompt())
    unpatch(model)
    assert calls and mixer.forward is noted


def test_a_patched_model_can_be_copied() -> None:
    """A copy is patched as well, and is a model of its own."""
    model = patch(copied("BambaMixer"))
    other = copy.deepcopy(model)
    assert len(patched_mixers(other)) == len(patched_mixers(model)) == 2
    unpatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, cache = call(other, prompt())
    assert torch.isfinite(call(other, prompt(1), cache)[0]).all()
    assert call(other, prompt(1), cache)[0].abs().max() > 0


def test_patched_for_a_block() -> None:
    """`patched(model)` patches for the block only, also if the block fails."""
    model = copied("BambaMixer")
    with pytest.raises(KeyError), patched(model, window=4, max_tokens=2):
        assert patched_mixers(model)[0].patch.window == 4
        raise KeyError
    assert not patched_mixers(model)


def test_what_is_loaded_in_a_block_is_patched(tmp_path: Path) -> None:
    """`patched()` patches every model that from_pretrained returns, and only inside the block."""
    stock("BambaMixer").save_pretrained(tmp_path)
    with patched(window=4, max_tokens=2):
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        again, _ = type(model).from_pretrained(tmp_path, output_loading_info=True)
    for inside in (model, again):
        assert patched_mixers(inside)[0].patch.window == 4
    assert not patched_mixers(AutoModelForCausalLM.from_pretrained(tmp_path))


def test_a_model_without_recurrent_layers_is_an_error() -> None:
    """The error names every class that is supported."""
    model = LlamaForCausalLM(LlamaConfig(**SHARED))
    with pytest.raises(ValueError, match="got LlamaForCausalLM without one") as caught:
        patch(model)
    assert all(name in str(caught.value) for name in ADAPTERS)


def test_wrong_use_is_an_error() -> None:
    """Twice patched, not patched, options out of range, offloaded: said before anything changes."""
    model = copied("BambaMixer")
    with pytest.raises(ValueError, match="not patched"):
        unpatch(model)
    with pytest.raises(ValueError, match="max_tokens must be 1 to window"):
        patch(model, window=4, max_tokens=5)
    model.model.layers[0].mamba._hf_hook = object()
    with pytest.raises(ValueError, match="one device"):
        patch(model)
    del model.model.layers[0].mamba._hf_hook
    assert not patched_mixers(model)
    patch(model)
    with pytest.raises(ValueError, match="patched already"):
        patch(model)


def test_the_package_exports_patch() -> None:
    """`lazystate.patch` and its kin are the engine's."""
    assert (lazystate.patch, lazystate.unpatch, lazystate.patched) == (patch, unpatch, patched)
    with pytest.raises(AttributeError, match="no attribute 'patches'"):
        _ = lazystate.patches  # type: ignore[attr-defined]


@pytest.mark.parametrize("mixer", FAMILIES)
def test_plain_traffic_is_twice_the_state_a_step(mixer: str) -> None:
    """Prefill counts nothing; every step reads and writes all states of all rows."""
    model = copied(mixer)
    patch(model)
    specs = patched_mixers(model)[0].patch.specs(torch.float32)
    unpatch(model)
    state = 4 * sum(heads * v * k for heads, v, k in (spec.state_shape for spec in specs))
    with count_plain_state_bytes(model) as traffic:
        _, cache = call(model, prompt(rows=3))
        assert (traffic.read, traffic.written, traffic.tokens) == (0, 0, 0)
        for _ in range(5):
            call(model, prompt(1, rows=3), cache)
    assert (traffic.read, traffic.written, traffic.tokens) == (15 * state, 15 * state, 15)
    call(model, prompt(1, rows=3), cache)
    assert traffic.tokens == 15
    with (
        pytest.raises(ValueError, match="must not be patched"),
        count_plain_state_bytes(patch(model)),
    ):
        pass


def test_a_patched_model_can_be_pickled(tmp_path: Path) -> None:
    """torch.save and torch.load give a patched model, which decodes and can be unpatched."""
    model = patch(copied("Qwen3NextGatedDeltaNet"))
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    right, cache = call(model, prompt())
    logits, loaded_cache = call(loaded, prompt())
    assert torch.equal(logits, right)
    assert torch.equal(call(loaded, prompt(1), loaded_cache)[0], call(model, prompt(1), cache)[0])
    assert not patched_mixers(unpatch(loaded))
    assert torch.equal(call(loaded, prompt())[0], right)


@pytest.mark.parametrize("mixer", FAMILIES)
def test_patch_takes_a_recommendation(mixer: str) -> None:
    """What `recommend` says of a model's layers are arguments of patch, and they are used."""
    model = copied(mixer)
    found = lazystate.recommend(layer_spec(model), error="loose", window=8)
    patch(model, **found.options)
    (first, *_) = patched_mixers(model)
    kept = first.patch.storage
    assert first.patch.window == 8
    assert all(kept[name] == getattr(found, name) for name in ("checkpoint", "view", "rounding"))
    with torch.no_grad():
        logits, _ = call(model, prompt())
    assert bool(logits.isfinite().all())
