"""What is served: one engine a case, and the traffic it gets."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Traffic = Literal["together", "eights", "arrivals", "shared", "turns", "sizes", "short"]
PROMPTS, TOKENS = 64, 256
LONGEST = 1024  # tokens of a prompt and its continuation
DRAFTS, MOST_DRAFTS = 4, 15


@dataclass(frozen=True)
class Case:
    """One engine and what it is sent.

    Attributes:
        name: of the setting. dtype: of weights and activations.
        traffic: in this order, each with the same prompts where it says so:
            together: 64 prompts at once. eights: the same, eight at a time.
            arrivals: the same, at random steps. shared: 64 prompts that share their beginnings,
            twice over. turns: the same as together, then every text continued by a few words and
            sent again. sizes: 1, 2, 4 ... 256 requests. short: 10,000 requests of a few tokens.
        graphs: CUDA graphs and torch.compile; else eager.
        drafts: of n-gram lookup, a step.
        caching: of prefixes. blocks: of the cache, 0 for what fits. budget: tokens a step.
        options: lazystate's, of a case that stock vLLM has not; None for what the command says.
    """

    name: str
    dtype: str
    traffic: tuple[Traffic, ...] = ("together",)
    graphs: bool = True
    drafts: int = 0
    caching: bool = False
    blocks: int = 0
    budget: int = 8192
    options: dict[str, Any] | None = None

    def settings(self, kind: str) -> dict[str, Any]:
        """Arguments of vLLM's `LLM` for a kind of recurrent layer."""
        given: dict[str, Any] = {
            "dtype": self.dtype,
            "max_model_len": 2048,
            "max_num_seqs": 256,
            "max_num_batched_tokens": self.budget,
            "enforce_eager": not self.graphs,
            "enable_prefix_caching": self.caching,
        }
        if self.blocks:
            given["num_gpu_blocks_override"] = self.blocks
        if self.drafts:
            given["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": self.drafts,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            }
        if kind != "kda" and self.dtype != "bfloat16":
            given["attention_backend"] = "TRITON_ATTN"  # the one that takes every dtype
        if kind == "kda":
            given["attention_backend"] = "TRITON_MLA"  # the one that takes every rank
        return given

    def as_json(self) -> dict[str, Any]:
        """The case as it is written beside its numbers."""
        return asdict(self)


def cases(kind: str) -> list[Case]:
    """The engines of a model: in FP32 where vLLM's prefill takes it, which is Mamba-2 alone.

    GDN and KDA kernels of vLLM refuse FP32 activations; FP16 has three bits more than BF16.
    """
    fine = "float32" if kind == "mamba2" else "float16"
    return [
        Case("exact", fine, ("together", "eights", "arrivals", "sizes")),
        Case("leak", fine, ("short",)),
        Case("bf16", "bfloat16", ("together", "eights")),
        Case("eager", fine, graphs=False),
        Case("ngram", fine, ("together", "arrivals"), drafts=DRAFTS),
        Case("ngram-most", fine, ("together",), drafts=MOST_DRAFTS),
        Case("prefix", fine, ("together", "shared", "turns"), caching=True),
        Case("prefix-ngram", fine, ("turns", "shared"), drafts=DRAFTS, caching=True),
        Case("preemption", fine, ("together",), blocks=PREEMPTING[kind]),
        Case("chunked", fine, ("together", "arrivals"), budget=CHUNK[kind]),
        *(Case(f"views-{name}", fine, options=given) for name, given in views(kind).items()),
    ]


def views(kind: str) -> dict[str, dict[str, Any]]:
    """What most steps read instead of the state, and what the state is carried in: how far texts
    part is what is asked of them.
    """
    return {
        "bf16": {"view": "bf16"},
        "fp8": {"view": "fp8"},
        "nvfp4": {"view": "nvfp4"},
        "sketch": {"view": "sketch", "calibration": kind, "mean_rank": 8},
        "nvfp4-fp16": {"view": "nvfp4", "checkpoint": "fp16", "seed": 1},
        "nvfp4-fp8": {"view": "nvfp4", "checkpoint": "fp8", "seed": 1},
    }


# Blocks that hold some of the 64 requests, not all: a request takes a few for its KV cache and one
# for every group of recurrent layers.
PREEMPTING = {"mamba2": 96, "gdn": 96, "kda": 96}
# A chunk must hold a step of every running request, and prompts be longer than what is left of it.
CHUNK = {"mamba2": 256, "gdn": 256, "kda": 256}
