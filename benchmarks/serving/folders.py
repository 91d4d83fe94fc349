"""Model folders that vLLM loads: shipped models converted, published shapes without weights.

vLLM registers some of the model classes under other names than transformers, and reads other fields
of their config.json. Weights keep their values; only names change.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from lazystate.shipped import model_folder
from serving.shapes import SHAPES

Config = dict[str, Any]
LETTERS = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}  # NemotronH's pattern
VISION = {  # the smallest tower; language_model_only leaves it unbuilt
    "model_type": "qwen3_5",
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 1,
    "num_position_embeddings": 16,
}


def shipped(model: str, version: str, into: Path) -> Path:
    """A shipped model as a folder for a version of vLLM, "0.26" or "0.33".

    Raises:
        ValueError: for a model that is not shipped.
    """
    if model not in CONVERT:
        raise ValueError(f"model must be one of {', '.join(CONVERT)}, got {model!r}")
    source = model_folder(model)
    config = CONVERT[model](json.loads((source / "config.json").read_text("utf8")))
    wrapped = _write(config, version, into)
    weights = load_file(source / "model.safetensors")
    if wrapped:
        weights = {f"model.language_{name}": tensor for name, tensor in weights.items()}
    save_file(weights, into / "model.safetensors", metadata={"format": "pt"})
    return into


def shape(name: str, version: str, into: Path) -> Path:
    """A published shape as a folder with a config.json alone, for `load_format="dummy"`.

    Raises:
        ValueError: for a shape that is not in `SHAPES`.
    """
    if name not in SHAPES:
        raise ValueError(f"shape must be one of {', '.join(SHAPES)}, got {name!r}")
    _write(SHAPES[name], version, into)
    return into


def _write(config: Config, version: str, into: Path) -> bool:
    """Write a config.json; whether the text model is wrapped, which changes names of weights.

    0.33 has Qwen3.5's text model; 0.26 has it only inside the one with a vision tower.
    """
    wrapped = config["model_type"] == "qwen3_5_text" and version == "0.26"
    given = _wrapped(config) if wrapped else config
    into.mkdir(parents=True, exist_ok=True)
    (into / "config.json").write_text(json.dumps(given, indent=1) + "\n", "utf8")
    return wrapped


def _mamba2(config: Config) -> Config:
    """The pattern as letters, sizes under both names that vLLM's versions read."""
    pattern = "".join(LETTERS[kind] for kind in config["layers_block_type"])
    kept = (
        "architectures",
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "mlp_hidden_act",
        "attention_bias",
        "mlp_bias",
        "use_bias",
        "layer_norm_epsilon",
        "ssm_state_size",
        "mamba_num_heads",
        "mamba_head_dim",
        "mamba_hidden_act",
        "mamba_proj_bias",
        "mamba_ssm_cache_dtype",
        "tie_word_embeddings",
        "residual_in_fp32",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    twice = {
        "n_groups": "mamba_n_groups",
        "conv_kernel": "mamba_d_conv",
        "expand": "mamba_expand",
        "use_conv_bias": "mamba_conv_bias",
        "chunk_size": "mamba_chunk_size",
    }
    found = {name: config[name] for name in kept}
    found |= {name: config[name] for name in twice}
    found |= {other: config[name] for name, other in twice.items()}
    found |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
    return found | {"torch_dtype": config["dtype"]}


def _gdn(config: Config) -> Config:
    return config | {"mamba_ssm_dtype": "float32", "torch_dtype": config["dtype"]}


def _wrapped(text: Config) -> Config:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {**text, "architectures": ["Qwen3_5ForCausalLM"]},
        "vision_config": VISION | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": text["tie_word_embeddings"],
        "torch_dtype": text["torch_dtype"],
    }


def _kda(config: Config) -> Config:
    """All layers are dense: vLLM would ask for experts that no layer has."""
    left_out = {"layer_types", "mlp_layer_types", "num_experts", "num_shared_experts"}
    found = {name: value for name, value in config.items() if name not in left_out}
    return found | {"num_experts": None, "torch_dtype": config["dtype"]}


CONVERT = {"mamba2": _mamba2, "gdn": _gdn, "kda": _kda}
