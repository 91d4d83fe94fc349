"""The shipped models and books: small, whole, and decoded alike by all methods."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

from lazystate import shipped
from lazystate.commands.decoding import Decoded, Loaded, Method, decode, load
from lazystate.commands.recorder import Recorder

MODELS = ("gdn", "kda", "mamba2")
MEGABYTE = 1_000_000


@pytest.fixture(scope="module", params=MODELS)
def loaded(request: pytest.FixtureRequest) -> Loaded:
    """A shipped model in float32, which does not end its text early."""
    loaded = load(request.param)
    loaded.model.generation_config.eos_token_id = None
    return loaded


def decoded(loaded: Loaded, method: Method) -> Decoded:
    """64 tokens after a page of a held-out book."""
    text = shipped.book("moby-dick")[40_000:42_000]
    prompt = loaded.encode(text)[:, :200]
    return decode(loaded, prompt, method, 64, Recorder(), keep_logits=True)


def test_names() -> None:
    """One model for each layer kind, and two books."""
    assert shipped.models() == list(MODELS)
    assert shipped.books() == ["moby-dick", "pride-and-prejudice"]


@pytest.mark.parametrize("name", MODELS)
def test_models_are_small(name: str) -> None:
    """No weight file is above 8 MB."""
    for file in shipped.model_folder(name).glob("*.safetensors"):
        assert file.stat().st_size <= 8 * MEGABYTE


def test_decoding_is_the_same_by_all_methods(loaded: Loaded) -> None:
    """Replay, with drafts and without, picks the tokens of stock transformers."""
    plain = decoded(loaded, Method())
    for method in (Method(16), Method(7), Method(16, 4)):
        replayed = decoded(loaded, method)
        assert torch.equal(replayed.tokens, plain.tokens), method
        assert plain.logits is not None and replayed.logits is not None
        # Float32 rounding, through a dozen layers that each round a few hundred times.
        scale = plain.logits.abs().max()
        assert (replayed.logits - plain.logits).abs().max() <= 1e4 * torch.finfo().eps * scale


def test_perplexity_is_the_recorded_one(loaded: Loaded) -> None:
    """The weights are those evaluated: a page of the book is about as likely as all of it."""
    recorded = json.loads((shipped.model_folder(loaded.name) / "run.json").read_text("utf8"))
    expected = recorded["evaluation"]["books"]["pride-and-prejudice"]["perplexity"]
    tokens = loaded.encode(shipped.book("pride-and-prejudice")[100_000:110_000])[:, :2048]
    with torch.no_grad():
        logits = loaded.model(tokens).logits[0, :-1]
    found = F.cross_entropy(logits, tokens[0, 1:]).exp().item()
    assert 0.75 * expected < found < 1.33 * expected


def test_wrong_names_are_explained() -> None:
    """An unknown model or book names those that exist."""
    with pytest.raises(ValueError, match=r"gdn, kda, mamba2.*no folder of that path"):
        shipped.model_folder("gpt2")
    with pytest.raises(ValueError, match="a folder without config"):
        shipped.model_folder(str(shipped.ASSETS))
    with pytest.raises(ValueError, match="moby-dick, pride-and-prejudice"):
        shipped.book("emma")
