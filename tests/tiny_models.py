"""Every supported mixer class in a random model of 3 or 4 small layers, with a state that counts."""

from __future__ import annotations

import functools

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 96

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 32,
    "mamba_chunk_size": 16,
}
GDN = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "layer_types": LAYERS,
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}

# Mixer class: configuration class and arguments.
CONFIGS: dict[str, tuple[str, dict]] = {
    "Mamba2Mixer": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "state_size": 32, "n_groups": 2, "chunk_size": 16},
    ),
    "BambaMixer": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "FalconH1Mixer": (
        "FalconH1Config",
        {
            **MAMBA,
            "mamba_d_ssm": 128,
            "mamba_rms_norm": True,
            "ssm_in_multiplier": 1.25,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 0.7],
        },
    ),
    "GraniteMoeHybridMambaLayer": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "layer_types": LAYERS, "num_local_experts": 2, "shared_intermediate_size": 48},
    ),
    "NemotronHMamba2Mixer": (
        "NemotronHConfig",
        {
            "layers_block_type": [*LAYERS, "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 32,
            "head_dim": 16,
            "chunk_size": 16,
        },
    ),
    "Zamba2MambaMixer": (
        "Zamba2Config",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "n_mamba_heads": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 32,
            "chunk_size": 16,
            "num_key_value_heads": 4,
        },
    ),
    "Qwen3NextGatedDeltaNet": ("Qwen3NextConfig", {**GDN, **EXPERTS, "head_dim": 16}),
    "Qwen3_5GatedDeltaNet": ("Qwen3_5TextConfig", {**GDN, "head_dim": 16}),
    "Qwen3_5MoeGatedDeltaNet": ("Qwen3_5MoeTextConfig", {**GDN, **EXPERTS, "head_dim": 16}),
    "OlmoHybridGatedDeltaNet": ("OlmoHybridConfig", GDN),
    "KimiLinearDeltaAttention": (
        "KimiLinearConfig",
        {
            "layer_types": LAYERS,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "linear_head_dim": 32,
            "linear_num_heads": 2,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_key_value_heads": 4,
        },
    ),
}
# One class of each family.
FAMILIES = ("BambaMixer", "Qwen3_5GatedDeltaNet", "KimiLinearDeltaAttention")


def build(mixer: str, **changes) -> PreTrainedModel:
    """A new random FP32 model of that mixer class; the same one at every call."""
    config, arguments = CONFIGS[mixer]
    torch.manual_seed(len(mixer))
    model = AutoModelForCausalLM.from_config(
        getattr(transformers, config)(**{**SHARED, **arguments, **changes})
    )
    return remember(model.eval())


@functools.cache
def shared(mixer: str) -> PreTrainedModel:
    """`build`, once for all tests; leave it as it was."""
    return build(mixer)


@torch.no_grad()
def remember(model: PreTrainedModel) -> PreTrainedModel:
    """Give gates that keep a state for some to some hundred tokens, and give states weight.

    Stock initial values forget within two tokens: a test of such a model would prove nothing.
    """
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(0.05, 1).log_()
        elif name.endswith("dt_bias"):
            parameter.uniform_(-4, -1)
        elif name.endswith(".D"):
            parameter.uniform_(-0.5, 0.5)
        elif name.endswith("conv1d.weight"):
            parameter.normal_(0, 0.5)
    return model
