"""Sizes of the three model kinds, and their initialisation.

Every kind is a stock transformers class: six recurrent layers for two attention layers in the
`small` size, nine for three in the `study` size.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.nemotron_h import NemotronHConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig

import rearrange

KINDS = ("mamba2", "gdn", "kda")
SIZES = ("small", "study")
END_TOKEN = 0
COMMON = {
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "bos_token_id": END_TOKEN,
    "eos_token_id": END_TOKEN,
    "pad_token_id": END_TOKEN,
    "dtype": "bfloat16",
}
MAMBA2 = {
    "small": {
        "hybrid_override_pattern": "M-M-M*-M-M-M*",
        "hidden_size": 192,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "ssm_state_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "n_groups": 2,
    },
    "study": {
        "hybrid_override_pattern": "M-MM-M*-MM-M*-MM-M*-",
        "hidden_size": 512,
        "intermediate_size": 768,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "ssm_state_size": 128,
        "mamba_num_heads": 16,
        "mamba_head_dim": 64,
        "n_groups": 2,
    },
}
GDN = {
    "small": {
        "num_hidden_layers": 8,
        "hidden_size": 192,
        "intermediate_size": 288,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "study": {
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "intermediate_size": 704,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
}
KDA = {
    "small": {
        "num_hidden_layers": 8,
        "hidden_size": 160,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_head_dim": 64,
        "linear_num_heads": 4,
    },
    "study": {
        "num_hidden_layers": 12,
        "hidden_size": 512,
        "intermediate_size": 640,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "linear_head_dim": 128,
        "linear_num_heads": 4,
    },
}


def mamba2_config(size: str) -> PreTrainedConfig:
    """Mamba-2, attention and MLP layers. The class cannot tie its embeddings.

    `time_step_min` is also the lower clamp of the time step in the chunked form, but not in the
    one-token form; a tiny value keeps the two equal.
    """
    sizes = MAMBA2[size]
    return NemotronHConfig(
        **COMMON,
        **sizes,
        num_hidden_layers=len(sizes["hybrid_override_pattern"]),
        conv_kernel=4,
        expand=2,
        chunk_size=64,
        use_conv_bias=True,
        time_step_min=1e-6,
        num_logits_to_keep=1,
    )


def gdn_config(size: str) -> PreTrainedConfig:
    """Gated DeltaNet and gated attention, an MLP behind each."""
    sizes = GDN[size]
    layers = sizes["num_hidden_layers"]
    return Qwen3_5TextConfig(
        **COMMON,
        **sizes,
        tie_word_embeddings=True,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        **rearrange.rope_options(sizes["head_dim"], 10000.0, 0.5),
    )


def kda_config(size: str) -> PreTrainedConfig:
    """Kimi Delta Attention and latent attention without positions, dense MLPs everywhere.

    The class cannot tie its embeddings.
    """
    sizes = KDA[size]
    layers = sizes["num_hidden_layers"]
    return KimiLinearConfig(
        **COMMON,
        **sizes,
        tie_word_embeddings=False,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        mlp_layer_types=["dense"] * layers,
        first_k_dense_replace=layers,
        num_local_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=32,
        linear_attn_config={
            "head_dim": sizes["linear_head_dim"],
            "num_heads": sizes["linear_num_heads"],
            "short_conv_kernel_size": 4,
            "kda_layers": [i + 1 for i in range(layers) if i % 4 != 3],
            "full_attn_layers": [i + 1 for i in range(layers) if i % 4 == 3],
        },
        mla_use_nope=True,
    )


CONFIGS = {"mamba2": mamba2_config, "gdn": gdn_config, "kda": kda_config}


def build(kind: str, size: str, seed: int) -> PreTrainedModel:
    """A freshly initialised model in float32."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](size), dtype=torch.float32)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: PreTrainedModel) -> None:
    """Normal weights of fan-in scale; decay rates in [1, 16] and time steps in [0.001, 0.1]."""
    depth = model.config.num_hidden_layers
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            deviation = module.in_features**-0.5
            if name.endswith(("o_proj", "out_proj", "down_proj")):
                deviation /= math.sqrt(2 * depth)
            nn.init.normal_(module.weight, std=deviation)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=model.config.hidden_size**-0.5)
        elif isinstance(module, nn.Conv1d):
            nn.init.uniform_(module.weight, -0.5, 0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(1.0, 16.0).log_()
        elif name.endswith("dt_bias"):
            steps = torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            parameter.copy_(steps + torch.log(-torch.expm1(-steps)))


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: matrices only, never the state's own parameters."""
    return parameter.ndim == 2 and not name.endswith(("A_log", "dt_bias", "D"))


def stays_float32(name: str) -> bool:
    """Parameters that are stored in float32 beside the bfloat16 weights."""
    return name.endswith(("A_log", "dt_bias", ".D"))
