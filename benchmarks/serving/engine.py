"""One vLLM engine in this process, stepped by hand so that traffic and tokens are ours to say.

Import nothing of this module before the environment of `ENVIRONMENT` is set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is read below
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "PYTHONUNBUFFERED": "1",
}


@dataclass
class Request:
    """A prompt, how many tokens to continue it by, the step before which it arrives; what came."""

    prompt: list[int]
    count: int
    arrives: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    cached: int = 0


class Engine:
    """A vLLM engine that is stepped, and what of its scheduler is watched.

    Args:
        folder: of the model. settings: of vLLM's `LLM`. options: of lazystate, None for stock.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], options: dict[str, Any] | None):
        from vllm import LLM
        from vllm.transformers_utils import config as registry
        from vllm.transformers_utils import configs

        if hasattr(configs, "NemotronHConfig"):  # 0.26's own reads the layer types it expects
            registry._CONFIG_REGISTRY.setdefault("nemotron_h", "NemotronHConfig")
        additional: dict[str, Any] = {"gdn_prefill_backend": "triton"}
        if options is not None:
            additional["lazystate"] = options
        begun = time.monotonic()
        llm = LLM(
            model=str(folder),
            skip_tokenizer_init=True,
            seed=0,
            disable_log_stats=True,
            gpu_memory_utilization=0.1,
            additional_config=additional,
            **settings,
        )
        self.start_s = time.monotonic() - begun
        self._engine: Any = llm.llm_engine
        self.scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self.preemptions, stock = 0, self.scheduler._preempt_request

        def counted(*given: Any, **named: Any) -> Any:
            self.preemptions += 1
            return stock(*given, **named)

        self.scheduler._preempt_request = counted

    @property
    def free(self) -> int:
        """Blocks of the cache that no request holds."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def fits(self) -> float:
        """How many requests of the greatest length the cache holds."""
        from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config as most

        return most(self._engine.vllm_config, self.scheduler.kv_cache_config)

    def add(self, name: str, prompt: list[int], count: int) -> None:
        """Add a request that `step` tells of by its new tokens. name: without a "-"."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        how = SamplingParams(
            temperature=0.0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, how)

    def step(self) -> list[tuple[str, int]]:
        """One step of the engine: requests that `add` added, and how many tokens they got."""
        return [
            (output.request_id.split("-")[0], len(output.outputs[0].token_ids))
            for output in self._engine.step()
        ]

    def abort(self, names: Sequence[str]) -> None:
        """End requests that `add` added."""
        self._engine.abort_request(list(names))

    def serve(self, requests: Sequence[Request], *, logprobs: bool = False) -> dict[str, Any]:
        """Run requests to their ends, greedily.

        Returns:
            "steps", "seconds", and "tokens_a_step" of a running request.
        """
        from vllm import SamplingParams

        waiting = sorted(range(len(requests)), key=lambda row: requests[row].arrives)
        steps = grew = 0
        begun = time.monotonic()
        while waiting or self._engine.has_unfinished_requests():
            while waiting and (
                requests[waiting[0]].arrives <= steps or not self._engine.has_unfinished_requests()
            ):
                row = waiting.pop(0)
                how = SamplingParams(
                    temperature=0.0,
                    max_tokens=requests[row].count,
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=2 if logprobs else None,
                )
                prompt = {"prompt_token_ids": requests[row].prompt}
                self._engine.add_request(str(row), prompt, how)
            for output in self._engine.step():
                grew += _taken(requests[int(output.request_id.split("-")[0])], output)
            steps += 1
        seconds = time.monotonic() - begun
        made = sum(len(request.tokens) for request in requests)
        return {"steps": steps, "seconds": seconds, "tokens_a_step": made / max(grew, 1)}


def _taken(request: Request, output: Any) -> int:
    """Keep what a step's output has that the last one had not; 1 if there was anything."""
    (sample,) = output.outputs
    new = list(sample.token_ids)[len(request.tokens) :]
    for at, token in enumerate(new, len(request.tokens)):
        if sample.logprobs:
            found = sample.logprobs[at]
            best = sorted((one.logprob for one in found.values()), reverse=True)
            request.logprobs.append(found[token].logprob)
            request.margins.append(best[0] - best[1] if len(best) > 1 else math.inf)
    request.tokens += new
    request.cached = output.num_cached_tokens or 0
    return bool(new)
