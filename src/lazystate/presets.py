"""Shapes of published hybrid models, and the shape that a transformers config describes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lazystate.spec import LayerSpec


@dataclass(frozen=True)
class ModelShape:
    """The recurrent side of a model, and what of its attention a planner needs.

    Attributes:
        name: the model. layer: one recurrent layer (all are alike).
        recurrent_layers, attention_layers: how many; None where not stated anywhere we read.
        kv_bytes: bytes of KV cache that one attention layer keeps for a token, or None if unknown.
        source: where each number is from.
        architectures: model classes, as in config.json; () where not stated anywhere we read.
    """

    name: str
    layer: LayerSpec
    recurrent_layers: int
    attention_layers: int | None
    kv_bytes: int | None
    source: str
    architectures: tuple[str, ...] = ()


def _mamba2(heads: int, groups: int, state: int, head_dim: int, conv: int = 4) -> LayerSpec:
    channels = heads * head_dim + 2 * groups * state
    return LayerSpec(
        heads, groups, state, head_dim, "scalar", False, conv_channels=channels, conv_width=conv
    )


def _gdn(heads: int, key_heads: int, key_dim: int, value_dim: int, conv: int = 4) -> LayerSpec:
    channels = heads * value_dim + 2 * key_heads * key_dim
    return LayerSpec(
        heads,
        key_heads,
        key_dim,
        value_dim,
        "scalar",
        True,
        conv_channels=channels,
        conv_width=conv,
    )


def _kda(heads: int, head_dim: int, conv: int = 4) -> LayerSpec:
    return LayerSpec(
        heads,
        heads,
        head_dim,
        head_dim,
        "channel",
        True,
        conv_channels=3 * heads * head_dim,
        conv_width=conv,
    )


_REPLAY = "ReplaySSM (arXiv 2610.13778) Table 5"
_SKETCH = "SketchSSM (arXiv 2609.33051)"
_WIDTH = "convolution width 4 as in the model family's transformers configuration"

# The class that transformers has for the model's family.
_NEMOTRON = ("NemotronHForCausalLM",)

PRESETS: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            "Nemotron-3-Nano-4B",
            _mamba2(96, 8, 128, 80),
            21,
            4,
            None,
            f"{_REPLAY}; {_WIDTH}; KV heads not stated there",
            _NEMOTRON,
        ),
        ModelShape(
            "Nemotron-3-Super-120B",
            _mamba2(128, 8, 128, 64),
            40,
            8,
            512,
            f"{_REPLAY}; FP8 KV cache of 2 heads of 128, App. C.2; {_WIDTH}",
            _NEMOTRON,
        ),
        ModelShape(
            "Nemotron-Nano-9B-v2",
            _mamba2(128, 8, 128, 80),
            27,
            4,
            4096,
            f"{_SKETCH} Fig. 8: 3,456 heads; layers, 128 heads of 80, 8 groups and a BF16 KV cache "
            "of 8 heads of 128 from NVIDIA/Megatron-LM, examples/post_training/modelopt/conf/"
            f"nvidia/NVIDIA-Nemotron-Nano-9B-v2.sh; {_WIDTH}",
            _NEMOTRON,
        ),
        ModelShape(
            "Qwen3.5-4B",
            _gdn(32, 16, 128, 128),
            24,
            8,
            4096,
            f"{_REPLAY}; BF16 KV cache of 4 heads of 256, its config.json as quoted by others; "
            f"{_WIDTH}",
            ("Qwen3_5ForConditionalGeneration",),
        ),
        ModelShape(
            "Qwen3.5-122B-A10B",
            _gdn(64, 16, 128, 128),
            36,
            12,
            None,
            f"{_REPLAY}; {_WIDTH}; KV heads not stated there",
            ("Qwen3_5MoeForConditionalGeneration",),
        ),
        ModelShape(
            "Qwen3.8-Flash-Next",
            _gdn(48, 16, 128, 128),
            36,
            12,
            None,
            f"{_SKETCH} App. D: 36 recurrent layers, Fig. 8: 1,728 heads, so 48 a layer, K = V = "
            "128; 16 key heads, 12 sparse attention layers and width 4 from its config.json as "
            "quoted by others; KV bytes left out: its indexer keeps keys besides",
        ),
        ModelShape(
            "GLM-5.3-Flash",
            _kda(64, 128),
            34,
            11,
            None,
            f"{_SKETCH} App. D and Fig. 8: 34 layers, 2,176 heads; transformers Glm5NextConfig: "
            "45 layers, 64 heads of 128, width 4, bounded gate of -5",
            ("Glm5NextForConditionalGeneration",),
        ),
        ModelShape(
            "Kimi-Linear-48B",
            _kda(32, 128),
            20,
            7,
            None,
            "transformers KimiLinearConfig: 27 layers, 32 heads of 128, width 4; 20 KDA and 7 MLA "
            "layers by its schedule (Kimi Linear, arXiv 2510.26692: three to one)",
            ("KimiLinearForCausalLM",),
        ),
    )
}


def preset(name: str) -> ModelShape:
    """The preset of a name, in any case.

    Raises:
        KeyError: with the names that exist, closest first.
    """
    by_lower = {known.lower(): shape for known, shape in PRESETS.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.5)
    hint = f" (did you mean {by_lower[close[0]].name}?)" if close else ""
    raise KeyError(f"no preset {name!r}{hint}; there are {', '.join(PRESETS)}")


def shape_from_config(config: str | Path | Mapping[str, Any]) -> ModelShape:
    """The shape of a transformers model from its config.json.

    Args:
        config: the file, the model folder, or the parsed file.

    Raises:
        ValueError: for a model type without a supported recurrent layer, listing those that are, a
            file that is not JSON, or one that lacks a size.
        FileNotFoundError: if there is no such file.
    """
    if isinstance(config, Mapping):
        given: Mapping[str, Any] = config
        source = "configuration"
    else:
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            given = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"config must be a JSON file, got {path}: {error}") from error
        if not isinstance(given, Mapping):
            raise ValueError(f"config must be a JSON object, got {type(given).__name__} in {path}")
        source = path.name
    text = given.get("text_config") or given
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be a JSON object, got {text!r}")
    kind = text.get("model_type", given.get("model_type"))
    if not isinstance(kind, str) or kind not in _READERS:
        raise ValueError(
            f"model_type {kind!r} has no recurrent layer known here; supported are "
            f"{', '.join(sorted(_READERS))}"
        )
    try:
        layer, recurrent, attention = _READERS[kind](text)
    except KeyError as missing:
        raise ValueError(
            f"config must state {missing} for model_type {kind!r}, it does not"
        ) from missing
    except (TypeError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"config must state whole numbers as sizes for model_type {kind!r}: {error}"
        ) from error
    if not isinstance(recurrent, int) or recurrent < 1:
        raise ValueError(f"config must have at least one recurrent layer, got {recurrent!r}")
    name = given.get("_name_or_path") or kind
    classes = _architectures(given)
    return ModelShape(name, layer, recurrent, attention, _kv_bytes(text), source, classes)


def _architectures(config: Mapping[str, Any]) -> tuple[str, ...]:
    names = config.get("architectures") or ()
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of class names, got {names!r}")
    return tuple(names)


def _kv_bytes(config: Mapping[str, Any]) -> int | None:
    """K and V of one token in BF16, where heads are stated and not compressed (MLA)."""
    heads, queries = config.get("num_key_value_heads"), config.get("num_attention_heads")
    if not heads or not queries or config.get("kv_lora_rank"):
        return None
    size = config.get("head_dim") or config["hidden_size"] // queries
    return 2 * 2 * heads * size


def _counted(types: list[str], recurrent: str) -> tuple[int, int]:
    both = types.count("hybrid")
    attention = sum("attention" in kind and kind != recurrent for kind in types)
    return types.count(recurrent) + both, attention + both


def _stated(config: Mapping[str, Any], *names: str) -> Any:
    """The value of the first name that the config states: a default would be another model's."""
    for name in names:
        if config.get(name) is not None:
            return config[name]
    raise KeyError(" or ".join(names))


def _read_mamba2(config: Mapping[str, Any]) -> tuple[LayerSpec, int, int]:
    """mamba2, bamba, falcon_h1, granitemoehybrid, nemotron_h and zamba2 name the same things."""
    heads = _stated(config, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    head_dim = _stated(config, "mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    if head_dim == "auto":
        head_dim = int(_stated(config, "mamba_expand", "expand") * config["hidden_size"]) // heads
    state = _stated(config, "ssm_state_size", "mamba_d_state", "state_size")
    groups = _stated(config, "n_groups", "mamba_n_groups", "mamba_ngroups")
    conv = _stated(config, "mamba_d_conv", "conv_kernel")
    layer = _mamba2(heads, groups, state, head_dim, conv)
    return (layer, *_mamba2_layers(config))


def _mamba2_layers(config: Mapping[str, Any]) -> tuple[int, int]:
    if pattern := config.get("hybrid_override_pattern"):
        return pattern.count("M"), pattern.count("*")
    if types := config.get("layers_block_type") or config.get("layer_types"):
        names = ("mamba2", "mamba", "linear_attention")
        return _counted(list(types), next((name for name in names if name in types), "mamba"))
    layers = config["num_hidden_layers"]
    if "attn_layer_indices" in config:
        attention = len(config["attn_layer_indices"] or [])
        return layers - attention, attention
    return layers, layers if config["model_type"] == "falcon_h1" else 0


def _read_gdn(config: Mapping[str, Any]) -> tuple[LayerSpec, int, int]:
    layer = _gdn(
        config["linear_num_value_heads"],
        config["linear_num_key_heads"],
        config["linear_key_head_dim"],
        config["linear_value_head_dim"],
        config.get("linear_conv_kernel_dim", 4),
    )
    layers = config["num_hidden_layers"]
    if types := config.get("layer_types"):
        return (layer, *_counted(list(types), "linear_attention"))
    attention = layers // config.get("full_attention_interval", 4)
    return layer, layers - attention, attention


def _read_kda(config: Mapping[str, Any]) -> tuple[LayerSpec, int, int]:
    linear = config.get("linear_attn_config") or {}
    sizes = {
        "linear_num_heads": linear.get("num_heads"),
        "linear_head_dim": linear.get("head_dim"),
        "linear_conv_kernel_dim": linear.get("short_conv_kernel_size"),
    }
    stated = {**config, **{name: size for name, size in sizes.items() if size is not None}}
    layer = _kda(*(_stated(stated, name) for name in sizes))
    if "kda_layers" in linear:
        return layer, len(linear["kda_layers"]), len(linear["full_attn_layers"])
    return (layer, *_counted(list(config["layer_types"]), "linear_attention"))


_READERS = {
    **dict.fromkeys(
        ("mamba2", "bamba", "falcon_h1", "granitemoehybrid", "nemotron_h", "zamba2"), _read_mamba2
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
        _read_gdn,
    ),
    **dict.fromkeys(("kimi_linear", "glm5_next", "glm5_next_text"), _read_kda),
}
