"""One case in one process: `python -m serving.run_case SPEC.json OUT.json`; drive.py starts it."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from serving.cases import TOKENS, Case
from serving.engine import ENVIRONMENT, Engine, Request
from serving.prompts import encoded, related, short, various


def together(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """All prompts at once."""
    return _served(engine, [Request(each, TOKENS) for each in various(text)], case)


def eights(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """The same prompts, eight at a time."""
    requests = [Request(each, TOKENS) for each in various(text)]
    parts = [_served(engine, requests[at : at + 8], case) for at in range(0, len(requests), 8)]
    return _joined(parts)


def arrivals(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """The same prompts, each before some step of the first 200."""
    pick = random.Random(3)
    requests = [Request(each, TOKENS, pick.randrange(200)) for each in various(text)]
    return _served(engine, requests, case)


def shared(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """Prompts that share their beginnings, twice over."""
    parts = [
        _served(engine, [Request(each, TOKENS) for each in related(text)], case) for _ in range(2)
    ]
    return _joined(parts)


def turns(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """All prompts at once, then each with its continuation and a few more tokens of the text."""
    first = [Request(each, TOKENS) for each in various(text)]
    parts = [_served(engine, first, case)]
    more = [text[8 * row : 8 * row + 1 + row % 8] for row in range(len(first))]
    second = [Request(r.prompt + r.tokens + end, 64) for r, end in zip(first, more, strict=True)]
    return _joined([*parts, _served(engine, second, case)])


def sizes(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """1, 2, 4 ... 256 requests at once, 32 tokens each."""
    prompts = various(text, 256)
    parts = [
        _served(engine, [Request(each, 32) for each in prompts[: 2**power]], case)
        for power in range(9)
    ]
    return _joined(parts)


def many(engine: Engine, text: list[int], case: Case) -> dict[str, Any]:
    """10,000 requests of a few tokens."""
    requests = [Request(prompt, count) for prompt, count in short(text)]
    return _served(engine, requests, case)


TRAFFIC = {
    "together": together,
    "eights": eights,
    "arrivals": arrivals,
    "shared": shared,
    "turns": turns,
    "sizes": sizes,
    "short": many,
}


def _served(engine: Engine, requests: list[Request], case: Case) -> dict[str, Any]:
    before, preempted = engine.free, engine.preemptions
    found = engine.serve(requests, logprobs=not case.drafts)
    return found | {
        "tokens": [one.tokens for one in requests],
        "logprobs": [[round(value, 6) for value in one.logprobs] for one in requests],
        "margins": [[round(value, 6) for value in one.margins] for one in requests],
        "cached": sum(one.cached for one in requests),
        "preemptions": engine.preemptions - preempted,
        "blocks_kept": before - engine.free,
    }


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Lists one behind the other, numbers summed but for the mean."""
    joined = {name: sum((part[name] for part in parts[1:]), parts[0][name]) for name in parts[0]}
    joined["tokens_a_step"] = parts[0]["tokens_a_step"]
    return joined


def main() -> None:
    """Start the engine of a specification, serve its traffic, write the file after each."""
    spec, out = json.loads(Path(sys.argv[1]).read_text("utf8")), Path(sys.argv[2])
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    begun = time.monotonic()
    case = Case(**{**spec["case"], "traffic": tuple(spec["case"]["traffic"])})
    engine = Engine(Path(spec["folder"]), spec["settings"], spec["options"])
    import torch
    import vllm

    record = {
        "model": spec["model"],
        "engine": spec["engine"],
        "case": case.as_json(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "start_s": round(engine.start_s, 1),
        "blocks": engine.scheduler.kv_cache_config.num_blocks,
        "runs": {},
    }
    print(f"started in {time.monotonic() - begun:.0f} s, {record['blocks']} blocks", flush=True)
    text = encoded(spec["model"])
    for name in case.traffic:
        record["runs"][name] = TRAFFIC[name](engine, text, case)
        out.write_text(json.dumps(record), "utf8")
        print(f"{name}: {record['runs'][name]['seconds']:.1f} s", flush=True)


if __name__ == "__main__":
    main()
