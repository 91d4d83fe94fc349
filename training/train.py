"""Train one model: text of the training set plus synthetic copy and recall rows.

`--minutes` sets a time budget, counted from the start of the process; `--steps` a step budget.
The learning rate warms up, stays, and falls to zero over the last 40 % of the budget; the last
part of the budget uses rows of `--long-length` tokens. Ends with an evaluation of the saved,
bfloat16-rounded weights.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import GenerationConfig, PreTrainedModel

import measure
import operators
import presets
from synthetic import Synthetic

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


class Rows(IterableDataset):
    """Endless batches of `length + 1` tokens: windows of text and synthetic rows."""

    def __init__(self, data: Path, batch: int, length: int, share: float, seed: int) -> None:
        self.data, self.batch, self.length, self.share, self.seed = data, batch, length, share, seed

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Yield batches; every worker has its own random stream."""
        worker = get_worker_info()
        seed = self.seed * 1000 + (worker.id if worker else 0)
        rng = np.random.default_rng(seed)
        text = np.fromfile(self.data / "train.bin", dtype=np.uint16)
        tokenizer = Tokenizer.from_file(str(self.data / "tokenizer.json"))
        source = Synthetic(text, lambda t: tokenizer.encode(t).ids, presets.END_TOKEN, seed)
        size = self.length + 1
        while True:
            rows = np.empty((self.batch, size), dtype=np.int64)
            for row in rows:
                if rng.random() < self.share:
                    row[:] = source.row(size)
                else:
                    start = rng.integers(len(text) - size)
                    row[:] = text[start : start + size]
            yield torch.from_numpy(rows)


def batches(args: argparse.Namespace, length: int, seed: int) -> Iterator[torch.Tensor]:
    """Batches of `args.batch_tokens` tokens, made by worker processes."""
    count = max(1, args.batch_tokens // length)
    rows = Rows(args.data, count, length, args.synthetic, seed)
    loader = DataLoader(
        rows, batch_size=None, num_workers=args.workers, pin_memory=args.device == "cuda"
    )
    return iter(loader)


class Budget:
    """Progress from 0 to 1, by time or by steps, and the learning rate that follows it."""

    def __init__(self, steps: int | None, minutes: float | None, peak: float) -> None:
        if (steps is None) == (minutes is None):
            raise SystemExit("give either --steps or --minutes")
        self.steps, self.seconds, self.peak = steps, (minutes or 0) * 60, peak
        self.start = time.monotonic()

    def progress(self, step: int) -> float:
        """The share of the budget that is used."""
        if self.steps is not None:
            return step / self.steps
        return (time.monotonic() - self.start) / self.seconds

    def rate(self, step: int, warmup: int = 100) -> float:
        """The learning rate."""
        rise = min(1.0, (step + 1) / min(warmup, self.steps or warmup))
        fall = min(1.0, max(0.0, (1 - self.progress(step)) / 0.4))
        return self.peak * rise * fall


def optimizer_of(model: PreTrainedModel, decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[presets.is_decayed(name, parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": decay},
            {"params": groups[False], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=(0.9, 0.95),
        fused=True,
    )


def head_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next tokens."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def loss_function(model: PreTrainedModel, args: argparse.Namespace) -> Callable:
    """The loss of a batch."""
    head = torch.compile(head_loss, dynamic=False) if args.compile else head_loss

    def loss(rows: torch.Tensor) -> torch.Tensor:
        with torch.autocast(args.device, torch.bfloat16, enabled=args.device == "cuda"):
            hidden = model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            return head(hidden, model.lm_head.weight, rows[:, 1:])

    return loss


def fit(model: PreTrainedModel, args: argparse.Namespace, budget: Budget) -> dict:
    """The training loop; returns the counts and the losses."""
    torch._dynamo.config.cache_size_limit = 64
    short = batches(args, args.length, args.seed)
    long = batches(args, args.long_length, args.seed + 1) if args.long_share else short
    optimizer = optimizer_of(model, args.weight_decay)
    loss_of = loss_function(model, args)
    step, tokens, log, recent, began = 0, 0, [], [], time.monotonic()
    mark, marked = began, 0
    while (progress := budget.progress(step)) < 1:
        rows = next(long if progress > 1 - args.long_share else short)
        rows = rows.to(args.device, non_blocking=True)
        for group in optimizer.param_groups:
            group["lr"] = budget.rate(step)
        loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        tokens += rows.shape[0] * (rows.shape[1] - 1)
        recent.append(loss.detach())
        if step % args.log_every == 0 or step == 1:
            mean = torch.stack(recent).mean().item()  # also waits for the device
            now = time.monotonic()
            speed = (tokens - marked) / (now - mark)
            mark, marked, recent = now, tokens, []
            log.append({"step": step, "tokens": tokens, "loss": round(mean, 4)})
            print(f"{args.kind} {step} {now - began:.0f}s loss {mean:.4f} {speed:.0f} tok/s")
    if recent:
        log.append({"step": step, "tokens": tokens, "loss": torch.stack(recent).mean().item()})
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
        "long_length": args.long_length,
        "long_share": args.long_share,
        "synthetic_share": args.synthetic,
        "peak_rate": args.rate,
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
    parser.add_argument("--long-length", type=int, default=8192)
    parser.add_argument("--long-share", type=float, default=0.0, help="of the budget, at the end")
    parser.add_argument("--batch-tokens", type=int, default=32768)
    parser.add_argument("--rate", type=float, default=2.5e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--synthetic", type=float, default=0.14, help="share of synthetic rows")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--log-every", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="compile the small parts")
    parser.add_argument("--data", type=Path, default=Path("data/tokens"))
    parser.add_argument("--books", type=Path, default=Path("src/lazystate/assets/books"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="continue from this saved model")
    parser.add_argument("--no-evaluation", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    """Train, save, evaluate and record."""
    args = parse()
    budget = Budget(args.steps, args.minutes, args.rate)
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
    if not args.no_evaluation:
        saved, tokenizer = measure.load(args.out, args.device)
        result["evaluation"] = measure.evaluate(saved, tokenizer, args.books)
        (args.out / "run.json").write_text(json.dumps(result, indent=2) + "\n", "utf8")
    print(json.dumps({k: v for k, v in result.items() if k != "losses"}))


if __name__ == "__main__":
    main()
