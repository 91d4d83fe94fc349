"""Published shapes of whole models, for timing with random weights."""

from __future__ import annotations

from typing import Any

# Layers, sizes and pattern as the model's config.json is quoted in public repositories; 21
# recurrent and 4 attention layers as in ReplaySSM (arXiv 2610.13778) Table 5.
NANO: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
    "hidden_size": 3136,
    "intermediate_size": 12544,
    "num_hidden_layers": 42,
    "hybrid_override_pattern": "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-",
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_hidden_act": "relu2",
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "layer_norm_epsilon": 1e-05,
    "ssm_state_size": 128,
    "mamba_num_heads": 96,
    "mamba_head_dim": 80,
    "mamba_n_groups": 8,
    "n_groups": 8,
    "mamba_d_conv": 4,
    "conv_kernel": 4,
    "mamba_expand": 2,
    "expand": 2,
    "mamba_hidden_act": "silu",
    "mamba_conv_bias": True,
    "use_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_chunk_size": 256,
    "chunk_size": 256,
    "mamba_ssm_cache_dtype": "float32",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# The language model of its config.json as quoted in public repositories; 24 recurrent and 8
# attention layers as in ReplaySSM Table 5.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-06,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

SHAPES = {"Nemotron-3-Nano-4B": NANO, "Qwen3.5-4B": QWEN}
