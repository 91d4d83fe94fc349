"""Train one model: text of the training set plus synthetic copy and recall rows.

`--minutes` sets a time budget, counted from the start of the process; `--steps` a step budget.
The learning rate warms up, stays, and falls to zero over the last part of the budget. The weights
are saved rounded to bfloat16; `--start` continues from a saved model.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel

import measure
import operators
import presets
import rearrange
from rows import Rows, batches
from step import Step

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class Budget:
    """Progress from 0 to 1, by time or by steps, and the learning rate that follows it."""

    def __init__(self, steps: int | None, minutes: float | None, peak: float, fall: float) -> None:
        if (steps is None) == (minutes is None):
            raise SystemExit("give either --steps or --minutes")
        self.steps, self.seconds, self.peak, self.part = steps, (minutes or 0) * 60, peak, fall
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        """The share of the budget that is used."""
        if self.steps is not None:
            return step / self.steps
        return (time.monotonic() - self.start) / self.seconds

    def rate(self, step: int, warmup: int = 100) -> float:
        """The learning rate."""
        rise = min(1.0, (step + 1) / min(warmup, self.steps or warmup))
        fall = min(1.0, max(0.0, (1 - self.progress(step)) / self.part))
        return self.peak * rise * fall


def fit(model: PreTrainedModel, args: argparse.Namespace, budget: Budget) -> dict:
    """The training loop; returns the counts and the losses."""
    torch._dynamo.config.cache_size_limit = 64
    count = max(1, args.batch_tokens // args.length)
    rows = Rows(args.data, count, args.length, (args.noise, args.repeat, args.recall), args.seed)
    stream = batches(rows, args.workers, args.device)
    step_of = Step(model, args.weight_decay, args.compile, args.device == "cuda" and args.graph)
    step, tokens, log, began = 0, 0, [], time.monotonic()
    mark, marked = began, 0
    while budget.progress(step) < 1:
        step_of(next(stream), budget.rate(step))
        step += 1
        tokens += count * args.length
        if step % args.log_every == 0 or step == 1:
            found = step_of.read()  # also waits for the device
            now = time.monotonic()
            speed = (tokens - marked) / (now - mark)
            mark, marked = now, tokens
            log.append({"step": step, "tokens": tokens, **found})
            line = ", ".join(f"{k} {v['loss']:.3f} {v['accuracy']:.3f}" for k, v in found.items())
            print(f"{args.kind} {step} {now - began:.0f}s {speed:.0f} tok/s: {line}", flush=True)
    if step % args.log_every:
        log.append({"step": step, "tokens": tokens, **step_of.read()})
    seconds = time.monotonic() - began
    return {"steps": step, "tokens": tokens, "seconds": round(seconds, 1), "losses": log}


@torch.no_grad()
def save(model: PreTrainedModel, args: argparse.Namespace) -> None:
    """Write bfloat16 weights (the state's own parameters in float32) and the tokenizer."""
    args.out.mkdir(parents=True, exist_ok=True)
    for name, parameter in model.named_parameters():
        if not presets.stays_float32(name):
            parameter.data = parameter.data.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=presets.END_TOKEN,
        eos_token_id=presets.END_TOKEN,
        pad_token_id=presets.END_TOKEN,
    )
    model.save_pretrained(args.out)
    if args.kind == "kda":
        rearrange.name_dense_layers(args.out)
    for name in TOKENIZER_FILES:
        shutil.copy(args.data / name, args.out / name)


def report(args: argparse.Namespace, model: PreTrainedModel, run: dict) -> dict:
    """Facts about the run that belong beside the measurements."""
    return {
        "kind": args.kind,
        "size": args.size,
        "parameters": sum(p.numel() for p in model.parameters()),
        "seed": args.seed,
        "batch_tokens": args.batch_tokens,
        "length": args.length,
        "shares": {"noise": args.noise, "repeat": args.repeat, "recall": args.recall},
        "peak_rate": args.rate,
        "fall": args.fall,
        "start": str(args.start) if args.start else None,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "command": " ".join(["python", "training/train.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **run,
    }


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=presets.KINDS)
    parser.add_argument("--size", choices=presets.SIZES, default="small")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--fall", type=float, default=0.4, help="part in which the rate falls")
    parser.add_argument("--noise", type=float, default=0.05, help="share of rows")
    parser.add_argument("--repeat", type=float, default=0.05, help="share of rows")
    parser.add_argument("--recall", type=float, default=0.1, help="share of rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--no-graph", dest="graph", action="store_false")
    parser.add_argument("--compile", action="store_true", help="compile the small parts")
    parser.add_argument("--data", type=Path, default=Path("data/tokens"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="continue from this saved model")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, save and record."""
    args = parse()
    budget = Budget(args.steps, args.minutes, args.rate, args.fall)
    operators.use_chunked(args.compile)
    model = presets.build(args.kind, args.size, args.seed)
    if args.start:
        model = measure.load(args.start, args.device)[0]
    model = model.to(args.device).train()
    result = report(args, model, fit(model, args, budget))
    if args.device == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    save(model, args)
    (args.out / "run.json").write_text(json.dumps(result, indent=2) + "\n", "utf8")
    print(json.dumps({k: v for k, v in result.items() if k != "losses"}))


if __name__ == "__main__":
    main()
