"""Published shapes, and shapes read from transformers' own configurations."""

from __future__ import annotations

import json

import pytest
import transformers

from lazystate.engines.transformers.adapters import ADAPTERS
from lazystate.presets import PRESETS, preset, shape_from_config
from tiny_models import CONFIGS, stock

# Heads of all layers, as SketchSSM Fig. 8 and ReplaySSM Table 5 state them.
HEADS = {
    "Nemotron-3-Nano-4B": 21 * 96,
    "Nemotron-3-Super-120B": 5_120,
    "Nemotron-Nano-9B-v2": 3_456,
    "Qwen3.5-4B": 24 * 32,
    "Qwen3.5-122B-A10B": 36 * 64,
    "Qwen3.8-Flash-Next": 1_728,
    "GLM-5.3-Flash": 2_176,
    "Kimi-Linear-48B": 20 * 32,
}


@pytest.mark.parametrize("name", PRESETS)
def test_heads(name):
    """Every preset has the published number of heads, and says where its numbers are from."""
    shape = preset(name.upper())
    assert shape.recurrent_layers * shape.layer.heads == HEADS[name]
    assert len(shape.source) > 20


def test_unknown_preset_helps():
    """A near miss is named, and the list given."""
    with pytest.raises(KeyError, match=r"did you mean Qwen3\.5-4B.*Kimi-Linear-48B"):
        preset("qwen3.5-4")


@pytest.mark.parametrize(
    "config",
    [
        transformers.Mamba2Config(),
        transformers.BambaConfig(),
        transformers.FalconH1Config(),
        transformers.GraniteMoeHybridConfig(
            layer_types=["mamba"] * 3 + ["attention"], num_hidden_layers=4
        ),
        transformers.NemotronHConfig(),
        transformers.Zamba2Config(),
        transformers.Qwen3NextConfig(),
        transformers.OlmoHybridConfig(),
        transformers.KimiLinearConfig(),
        transformers.Qwen3_5TextConfig(),
        transformers.Qwen3_5MoeTextConfig(),
    ],
    ids=lambda config: config.model_type,
)
def test_reads_transformers_configs(config, tmp_path):
    """Every class's own default configuration, saved, is read to plausible layers."""
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    shape = shape_from_config(tmp_path)
    total = config.num_hidden_layers
    assert 0 < shape.recurrent_layers <= total
    if config.model_type == "falcon_h1":
        assert shape.recurrent_layers == shape.attention_layers == total
    elif config.model_type not in ("nemotron_h", "zamba2"):
        assert shape.recurrent_layers + (shape.attention_layers or 0) == total
    layer = shape.layer
    assert layer.heads % layer.key_heads == 0
    assert layer.conv_width in (3, 4)


@pytest.mark.parametrize("mixer", CONFIGS)
def test_reads_the_layer_that_the_engine_builds(mixer):
    """A config describes the very layers that its model has: all sizes, and how many."""
    model = stock(mixer)
    shape = shape_from_config(model.config.to_dict())
    mixers = [module for module in model.modules() if type(module).__name__ == mixer]
    assert shape.recurrent_layers == len(mixers)
    assert shape.layer == ADAPTERS[mixer].spec(mixers[0], shape.layer.activation)


def test_unknown_model_type_lists_the_known(tmp_path):
    """A model without a recurrent layer is refused with what is supported."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match=r"'llama'.*nemotron_h"):
        shape_from_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"model_type": "qwen3_next"}', "linear_num_value_heads"),
        ('{"model_type": "mamba2", "num_hidden_layers": 4}', "mamba_num_heads or mamba_n_heads"),
        ('{"model_type": "kimi_linear", "layer_types": []}', "linear_num_heads"),
        ("not JSON", "JSON file"),
    ],
)
def test_damaged_config_is_named(tmp_path, text, names):
    """A file that is not JSON, or lacks a size, is one error that says so."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=names):
        shape_from_config(tmp_path)
