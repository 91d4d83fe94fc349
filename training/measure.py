"""Held-out perplexity, bits per byte, and recall accuracy of a saved model.

On a GPU everything runs under bfloat16 autocast, as in training; on a CPU in float32.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

import operators
import synthetic

BOOKS = ("pride-and-prejudice", "moby-dick")
TESTS = 200


def read_book(folder: Path, name: str) -> str:
    """The text of a compressed book."""
    return lzma.decompress((folder / f"{name}.txt.xz").read_bytes()).decode("utf8")


def forward(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Logits in float32, without a cache."""
    kind = model.device.type
    with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
        return model(input_ids=rows, use_cache=False).logits.float()


@torch.no_grad()
def token_losses(model: PreTrainedModel, rows: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of every token but the first, in nats, float32."""
    logits = forward(model, rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none").view(
        rows.shape[0], -1
    )


def perplexity(
    model: PreTrainedModel, tokens: np.ndarray, sizes: np.ndarray, window: int, context: int
) -> dict[str, float]:
    """Score the tokens of overlapping windows that have at least `context` tokens before them."""
    device = model.device
    starts = range(0, len(tokens) - window, window - context)
    total, count, size = 0.0, 0, 0
    per_batch = max(1, 32768 // window)
    for first in range(0, len(starts), per_batch):
        rows = np.stack([tokens[s : s + window + 1] for s in starts[first : first + per_batch]])
        losses = token_losses(model, torch.from_numpy(rows).to(device))[:, context:]
        total += losses.double().sum().item()
        count += losses.numel()
        size += int(sizes[rows[:, context + 1 :]].sum())
    return {
        "perplexity": round(math.exp(total / count), 4),
        "bits_per_byte": round(total / math.log(2) / size, 4),
        "tokens": count,
    }


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, tests: list[tuple[list[int], list[int]]]
) -> tuple[float, float]:
    """Share of targets that greedy decoding gets wholly right, and share of target tokens.

    Targets are fed to the model, so that the first number is exactly that of greedy decoding.
    """
    whole, right, count = 0, 0, 0
    for first in range(0, len(tests), 20):
        group = tests[first : first + 20]
        longest = max(len(prompt) + len(target) for prompt, target in group)
        rows = torch.zeros(len(group), longest, dtype=torch.long)
        for row, (prompt, target) in zip(rows, group, strict=True):
            row[: len(prompt) + len(target)] = torch.tensor(prompt + target)
        best = forward(model, rows.to(model.device)).argmax(-1).cpu()
        for row, (prompt, target) in zip(best, group, strict=True):
            guess = row[len(prompt) - 1 : len(prompt) + len(target) - 1]
            hits = int((guess == torch.tensor(target)).sum())
            whole += hits == len(target)
            right += hits
            count += len(target)
    return round(whole / len(tests), 4), round(right / count, 4)


def book_scores(model: PreTrainedModel, tokenizer: Tokenizer, books: Path) -> dict:
    """Perplexity and bits per byte of the held-out books, with a short and a long context."""
    alphabet = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    sizes = np.array([len(token) for token in alphabet])  # byte-level: one character, one byte
    result: dict = {"books": {}, "books_8192": {}}
    for name in BOOKS:
        tokens = np.array(tokenizer.encode(read_book(books, name)).ids)
        result["books"][name] = perplexity(model, tokens, sizes, 1024, 512)
        result["books_8192"][name] = perplexity(model, tokens, sizes, 8192, 4096)
    return result


def task_scores(
    model: PreTrainedModel, tokenizer: Tokenizer, books: Path, longest: int, seed: int = 1
) -> dict:
    """Recall and copy over at most `longest` tokens, and copy without the first copy."""

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text).ids

    result: dict = {}
    filler = np.array(encode(read_book(books, "moby-dick")))
    for facts, length in ((4, 120), (16, 600), (8, 1024), (8, 4096)):
        if length <= longest:
            tests = synthetic.recall_test(filler, encode, 0, TESTS, facts, length, seed)
            result[f"recall_{facts}_facts_{length}_tokens"] = accuracy(model, tests)[0]
    for length, gap in ((64, 256), (256, 1024)):
        tests = synthetic.copy_test(filler, 0, TESTS, length, gap, seed, encode("\n\n"))
        if gap <= longest:
            result[f"copy_{length}_tokens_gap_{gap}"] = accuracy(model, tests)[1]
        if length == 64:
            alone = [(prompt[-8:], target) for prompt, target in tests]
            result["copy_64_tokens_without_first"] = accuracy(model, alone)[1]
    return result


def load(folder: Path, device: str) -> tuple[PreTrainedModel, Tokenizer]:
    """A saved model in float32, and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--books", type=Path, default=Path("src/lazystate/assets/books"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("books", "tasks"))
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a task's example")
    parser.add_argument("--slice", type=int, help="only perplexity, on so many tokens per book")
    parser.add_argument("--record", action="store_true", help="add to the folder's run.json")
    return parser.parse_args()


def main() -> None:
    """Evaluate a folder, or only the first tokens of the two books (`--slice`)."""
    args = parse()
    operators.use_chunked(False) if args.device == "cuda" else operators.use_reference()
    model, tokenizer = load(args.model, args.device)
    if args.slice is not None:
        alphabet = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
        sizes = np.array([len(token) for token in alphabet])
        for name in BOOKS:
            tokens = np.array(tokenizer.encode(read_book(args.books, name)).ids)[: args.slice]
            print(name, perplexity(model, tokens, sizes, 1024, 512))
        return
    found = book_scores(model, tokenizer, args.books) if args.only != "tasks" else {}
    if args.only != "books":
        found |= task_scores(model, tokenizer, args.books, args.longest)
    print(json.dumps(found, indent=2))
    if args.record:
        path = args.model / "run.json"
        run = json.loads(path.read_text("utf8")) | {"evaluation": found}
        path.write_text(json.dumps(run, indent=2) + "\n", "utf8")


if __name__ == "__main__":
    main()
