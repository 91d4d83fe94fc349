"""Methods whose whole-model speed is compared, and what their engines are loaded with."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import Setup, refusals

BATCHES = (1, 8, 32, 128, 256, 512)
CYCLE = 32  # steps that are timed at once: whole windows of every method
SYNTHETIC = "synthetic"  # in the place of a calibration's path
BUDGET = 8192  # tokens of a step
GROWN = 128  # steps that a request of the middle batches has decoded when it is timed


@dataclass(frozen=True)
class Method:
    """One way of decoding.

    Attributes:
        name: of rows. options: of lazystate, None for vLLM's own layers.
        settings: further arguments of vLLM's `LLM`. versions: that have them.
        draftless: why it is not timed with drafts; "" if it is.
    """

    name: str
    options: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    versions: tuple[str, ...] = ("0.26", "0.33")
    draftless: str = ""

    @property
    def impl(self) -> Literal["stock", "lazystate"]:
        """Whose layers."""
        return "stock" if self.options is None else "lazystate"

    def refused(self, version: str, architectures: tuple[str, ...], drafts: int) -> list[str]:
        """Why it cannot be timed on a minor version; none if it can."""
        if version not in self.versions:
            return [f"vLLM {version} has no {', '.join(self.settings)}"]
        if drafts and self.draftless:
            return [self.draftless]
        if self.options is None:
            return []
        return refusals(Setup(version, architectures, draft_tokens=drafts), Options(**self.options))

    def given(self, calibration: str) -> dict[str, Any] | None:
        """The options, with the path of a synthetic calibration where one is needed."""
        if self.options is None or self.options.get("calibration") != SYNTHETIC:
            return self.options
        return self.options | {"calibration": calibration}


METHODS = {
    method.name: method
    for method in (
        Method("stock"),
        Method(
            "vllm-replay",
            settings={"use_replayssm": True},
            versions=("0.33",),
            draftless="vLLM's own replay takes drafts with FlashInfer only",
        ),
        Method("exact", options={}),
        Method("fp16", options={"checkpoint": "fp16"}),
        Method("view-fp8", options={"view": "fp8"}),
        Method("view-nvfp4", options={"view": "nvfp4"}),
        Method("fp16-view-nvfp4", options={"checkpoint": "fp16", "view": "nvfp4"}),
        Method(
            "fp16-sketch-synthetic",
            options={
                "checkpoint": "fp16",
                "view": "sketch",
                "calibration": SYNTHETIC,
                "mean_rank": 8,
                "window": 32,
            },
        ),
    )
}


@dataclass(frozen=True)
class Load:
    """What every engine of a comparison gets: requests that are added until a batch is full.

    Attributes:
        batches: requests decoding, rising. context: tokens that a request holds, about.
        cycles: timed at each batch. settle: steps before.
        drafts: of n-gram lookup, a step. accepted: mean tokens a step that synthetic acceptance
            keeps, the first included.
    """

    batches: tuple[int, ...] = BATCHES
    context: int = 2048
    cycles: int = 3
    settle: int = 8
    drafts: int = 0
    accepted: float = 1.0

    @property
    def tokens(self) -> int:
        """T, of a request's step."""
        return 1 + self.drafts

    @property
    def prompt(self) -> int:
        """Tokens of a prompt, less than the context by what requests have grown when timed."""
        return max(self.context - round(GROWN * self.accepted), 16)

    @property
    def steps(self) -> int:
        """Most steps of a request: prefill in steps that are half full, timing, profiling."""
        prefilling = 2 * math.ceil(self.batches[-1] * self.context / BUDGET)
        each = 2 * self.settle + (self.cycles + 1) * CYCLE
        return prefilling + len(self.batches) * each

    @property
    def longest(self) -> int:
        """Most tokens of a request, if everything were accepted; a multiple of 256."""
        return -(-(self.prompt + self.steps * self.tokens) // 256) * 256

    def settings(self, method: Method, cache_bytes: int) -> dict[str, Any]:
        """Arguments of vLLM's `LLM`: graphs for the batches that are timed and no others."""
        given: dict[str, Any] = {
            "load_format": "dummy",
            "dtype": "bfloat16",
            "mamba_ssm_cache_dtype": "float32",
            "max_model_len": self.longest,
            "max_num_seqs": self.batches[-1],
            "max_num_batched_tokens": BUDGET,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": cache_bytes,
            "compilation_config": {
                "cudagraph_capture_sizes": [batch * self.tokens for batch in self.batches]
            },
        }
        if self.drafts:
            given["speculative_config"] = {
                "method": "ngram",
                "num_speculative_tokens": self.drafts,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 1,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": self.accepted,
            }
        return given | method.settings

    def as_json(self) -> dict[str, Any]:
        """As it is written beside the numbers."""
        return asdict(self)
