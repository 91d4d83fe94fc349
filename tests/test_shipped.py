"""The shipped models and books: small, whole, and decoded alike by all methods."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

from lazystate import shipped
from lazystate.commands.decoding import Decoded, Loaded, Method, decode, load
from lazystate.commands.recorder import Recorder

ROOT = Path(__file__).parents[1]
MODELS = ("gdn", "kda", "mamba2")
CLASSES = {
    "gdn": "Qwen3_5ForCausalLM",
    "kda": "KimiLinearForCausalLM",
    "mamba2": "NemotronHForCausalLM",
}
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


@pytest.mark.parametrize("name", MODELS)
def test_other_engines_can_read_the_files(name: str) -> None:
    """Classes that vLLM has, too, under the names it knows, and no contradiction about positions.

    vLLM refuses a Qwen3-Next without experts, and looks for dense layers of Kimi Linear as `mlp`.
    """
    folder = shipped.model_folder(name)
    config = json.loads((folder / "config.json").read_text("utf8"))
    assert config["architectures"] == [CLASSES[name]]
    rope = config.get("rope_parameters", {})
    for key in ("rope_theta", "partial_rotary_factor"):
        assert key not in config or config[key] == rope[key]
    if name == "gdn":
        rotary = config["head_dim"] * rope["partial_rotary_factor"]
        assert sum(rope["mrope_section"]) == rotary // 2
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert not any("block_sparse_moe" in weight for weight in file.keys())  # noqa: SIM118


def test_decoding_is_the_same_by_all_methods(loaded: Loaded) -> None:
    """Replay, with drafts and without, picks the tokens of stock transformers."""
    plain = decoded(loaded, Method())
    for method in (Method(16), Method(7), Method(16, 4)):
        replayed = decoded(loaded, method)
        assert torch.equal(replayed.tokens, plain.tokens), method
        assert plain.logits is not None and replayed.logits is not None
        # A logit is a sum of 192 products behind eight layers: a few roundings of its scale each.
        scale = plain.logits.abs().max()
        assert (replayed.logits - plain.logits).abs().max() <= 100 * torch.finfo().eps * scale


@pytest.mark.slow
def test_perplexity_is_the_recorded_one(loaded: Loaded) -> None:
    """A sample of the book is as likely as the whole book was when the models were trained.

    6,144 tokens, whose mean loss has a standard error of about 0.035 nats: three of them.
    """
    records = json.loads((ROOT / "training" / "results.json").read_text("utf8"))
    (recorded,) = (record for record in records if record["kind"] == loaded.name)
    book = recorded["evaluation"]["books"]["pride-and-prejudice"]
    tokens = loaded.encode(shipped.book("pride-and-prejudice"))[0]
    starts = range(0, len(tokens) - 1025, len(tokens) // 12)
    losses = []
    for start in starts:
        row = tokens[start : start + 1025]
        with torch.no_grad():
            logits = loaded.model(row[None, :-1], use_cache=False).logits[0, 512:]
        losses.append(F.cross_entropy(logits, row[513:]).item())
    assert abs(sum(losses) / len(losses) - math.log(book["perplexity"])) < 0.11


def test_wrong_names_are_explained() -> None:
    """An unknown model or book names those that exist."""
    with pytest.raises(ValueError, match=r"gdn, kda, mamba2.*no folder of that path"):
        shipped.model_folder("gpt2")
    with pytest.raises(ValueError, match="a folder without config"):
        shipped.model_folder(str(shipped.ASSETS))
    with pytest.raises(ValueError, match="moby-dick, pride-and-prejudice"):
        shipped.book("emma")
