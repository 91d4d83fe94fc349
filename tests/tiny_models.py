"""Every supported mixer class in a small random model whose state counts."""

from __future__ import annotations

import copy
import functools
import inspect
from typing import NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

from lazystate.engines.transformers.layers import ReplayLayer
from lazystate.engines.transformers.replay import Replay

VOCABULARY = 96

# Bound of FP32 logits behind a few layers, relative to a token's largest. Measured: 2e-6, which is
# also how far stock FP32 is from stock FP64.
FP32 = 1e-5

SHARED = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "initializer_range": 0.06,
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
        getattr(transformers, config)(**{**SHARED, **arguments, **changes}),
        experts_implementation="eager",
    )
    return remember(model.eval())


@functools.cache
def stock(mixer: str) -> PreTrainedModel:
    """`build`, once for all tests; leave it as it was, or patch a copy."""
    return build(mixer)


def copied(mixer: str) -> PreTrainedModel:
    """A copy of `stock`, to be patched."""
    return copy.deepcopy(stock(mixer))


def cache_name(model: PreTrainedModel) -> str:
    """What this version of transformers calls a model's cache."""
    names = inspect.signature(model.forward).parameters
    return next(name for name in ("cache", "past_key_values", "cache_params") if name in names)


@torch.no_grad()
def call(
    model: PreTrainedModel, tokens: Tensor, cache: Cache | None = None
) -> tuple[Tensor, Cache]:
    """One forward by hand: logits of all tokens and the cache."""
    inputs = {"input_ids": tokens, "use_cache": True, cache_name(model): cache}
    if cache is not None and not all(cache.is_linear):
        # Bamba's own default counts from 0 whatever is cached.
        start = cache.get_seq_length()
        inputs["position_ids"] = torch.arange(start, start + tokens.shape[1]).unsqueeze(0)
    out = model(**inputs)
    return out.logits, getattr(out, cache_name(model))


class Greedy(NamedTuple):
    """Greedy decoding: prompt [1, n], sequences [1, n + steps], logits [steps, 1, vocabulary]."""

    prompt: Tensor
    sequences: Tensor
    logits: Tensor


def greedy(model: PreTrainedModel, tokens: Tensor, steps: int, **options) -> Greedy:
    """`generate` without sampling; the prompt is not padded."""
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=steps,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    return Greedy(tokens, out.sequences, torch.stack(out.logits))


@functools.cache
def expected(mixer: str, tokens: int = 20, repeats: int = 1, steps: int = 200) -> Greedy:
    """What the stock model says to the first random prompt to which its answer has no near-tie.

    At a near-tie two correct computations may choose differently. The prompt is `tokens` random
    tokens, `repeats` times.
    """
    for seed in range(10):
        answer = greedy(stock(mixer), prompt(tokens, seed=seed).repeat(1, repeats), steps)
        best = answer.logits.topk(2, -1).values
        if ((best[..., 0] - best[..., 1]) > 4 * FP32 * answer.logits.abs().amax(-1)).all():
            return answer
    raise AssertionError("every prompt led to a near-tie")


def new_cache(model: PreTrainedModel) -> Cache:
    """An empty stock cache for a model."""
    return DynamicCache(config=model.config)


def replay_of(cache: Cache) -> Replay:
    """The state behind a cache of a patched model."""
    return next(layer.replay for layer in cache.layers if isinstance(layer, ReplayLayer))


def relative(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of logits [..., vocabulary], relative to each token's largest logit."""
    difference = (actual - expected).abs().amax(-1)
    return float((difference / expected.abs().amax(-1)).max())


def prompt(tokens: int = 20, rows: int = 1, seed: int = 0) -> Tensor:
    """Random tokens, int64 [rows, tokens]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (rows, tokens), generator=generator)


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
