"""Weights rearranged for serving engines are the same model; needs the folder `training`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PreTrainedModel

from lazystate import patch
from tiny_models import VOCABULARY, build

SOURCE = Path(__file__).parents[1] / "training" / "rearrange.py"
DENSE = {"mlp_only_layers": [0, 1, 2]}
ROPE = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}


@pytest.fixture(scope="module")
def rearrange() -> ModuleType:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("rearrange", SOURCE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def loaded(folder: Path) -> PreTrainedModel:
    """A saved model, nothing missing and nothing left over."""
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(found.values()), found
    return model.eval()


def names(folder: Path) -> list[str]:
    """What the weights of a folder are called."""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return list(file.keys())


@torch.no_grad()
def assert_same(one: PreTrainedModel, other: PreTrainedModel) -> None:
    """The same logits for whole rows, and the same tokens decoded, stock and patched."""
    rows = torch.randint(1, VOCABULARY, (2, 90))
    assert torch.equal(one(rows).logits, other(rows).logits)
    options = {"max_new_tokens": 20, "do_sample": False}
    for change in (lambda model: model, lambda model: patch(model, window=8)):
        texts = [change(model).generate(rows[:, :9], **options) for model in (one, other)]
        assert torch.equal(*texts)


def test_dense_qwen3_next_becomes_qwen3_5(rearrange: ModuleType, tmp_path: Path) -> None:
    """Another class, the same model; the other files come along, the record says what was done."""
    old, new = tmp_path / "old", tmp_path / "new"
    model = build("Qwen3NextGatedDeltaNet", **DENSE, rope_parameters=ROPE)
    model.save_pretrained(old)
    (old / "tokenizer.json").write_text("{}")
    (old / "run.json").write_text('{"kind": "gdn"}')
    rearrange.rearrange(old, new)
    assert_same(loaded(old), loaded(new))
    assert type(loaded(new)).__name__ == "Qwen3_5ForCausalLM"
    assert {path.name for path in new.iterdir()} == {path.name for path in old.iterdir()}
    record = json.loads((new / "run.json").read_text())
    assert record == {"kind": "gdn", "rearranged_from": "Qwen3NextForCausalLM"}
    rope = json.loads((new / "config.json").read_text())["rope_parameters"]
    assert rope == {**ROPE, "mrope_section": [2, 1, 1], "mrope_interleaved": True}


def test_experts_cannot_be_rearranged(rearrange: ModuleType, tmp_path: Path) -> None:
    """A model with experts has no dense class."""
    build("Qwen3NextGatedDeltaNet").save_pretrained(tmp_path / "old")
    with pytest.raises(ValueError, match="dense layers only"):
        rearrange.rearrange(tmp_path / "old", tmp_path / "new")
    build("KimiLinearDeltaAttention").save_pretrained(tmp_path / "kimi")
    with pytest.raises(ValueError, match="has experts"):
        rearrange.name_dense_layers(tmp_path / "kimi")


def test_dense_kimi_layers_have_their_published_names(
    rearrange: ModuleType, tmp_path: Path
) -> None:
    """All MLPs are called `mlp`, and the model stays the same."""
    model = build("KimiLinearDeltaAttention", mlp_layer_types=["dense"] * 3)
    model.save_pretrained(tmp_path)
    rearrange.name_dense_layers(tmp_path)
    assert not any("block_sparse_moe" in name for name in names(tmp_path))
    assert sum(name.endswith(".mlp.up_proj.weight") for name in names(tmp_path)) == 3
    assert_same(model, loaded(tmp_path))
