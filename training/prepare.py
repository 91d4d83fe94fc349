"""Train the tokenizer on the training texts and write token files.

Writes to `--out`: `tokenizer.json` with its configuration, `train.bin` and `valid.bin` (uint16
tokens, documents separated by the end-of-text token), and `prepare.json` with the counts. The
held-out books take no part in any of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

MANIFEST = Path(__file__).with_name("sources.json")
END = "<|endoftext|>"
VOCABULARY = 4096
BLOCK = 20_000  # characters of a document; long texts are cut at a paragraph near this size
VALID_EVERY = 200  # one block in this many is kept for validation


def blocks(text: str) -> Iterator[str]:
    """Cut a text into blocks of whole paragraphs."""
    kept: list[str] = []
    size = 0
    for paragraph in text.strip().split("\n\n"):
        kept.append(paragraph)
        size += len(paragraph) + 2
        if size >= BLOCK:
            yield "\n\n".join(kept)
            kept, size = [], 0
    if kept:
        yield "\n\n".join(kept)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE; every digit is its own token, so that numbers can be copied."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path, positions: int = 8192) -> None:
    """Write the files from which `AutoTokenizer` loads without a network."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "pad_token": END,
        "unk_token": END,
        "clean_up_tokenization_spaces": False,
        "model_max_length": positions,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf8")
    special = dict.fromkeys(("bos_token", "eos_token", "pad_token", "unk_token"), END)
    (folder / "special_tokens_map.json").write_text(json.dumps(special, indent=2) + "\n", "utf8")


def write_tokens(tokenizer: Tokenizer, documents: list[str], path: Path) -> int:
    """Tokenize documents, append the end token to each, and write uint16."""
    end = tokenizer.token_to_id(END)
    parts = []
    for first in range(0, len(documents), 256):
        for encoding in tokenizer.encode_batch(documents[first : first + 256]):
            parts.append(np.asarray([*encoding.ids, end], dtype=np.uint16))
    tokens = np.concatenate(parts)
    tokens.tofile(path)
    return len(tokens)


def main() -> None:
    """Prepare the token files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=Path, default=Path("data/texts"))
    parser.add_argument("--out", type=Path, default=Path("data/tokens"))
    parser.add_argument("--seed", type=int, default=0, help="order of the blocks")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    sources = json.loads(MANIFEST.read_text("utf8"))["sources"]
    documents: list[str] = []
    for source in sources:
        if source["group"] == "train":
            documents += blocks((args.texts / f"{source['name']}.txt").read_text("utf8"))
    order = np.random.default_rng(args.seed).permutation(len(documents))
    valid = [documents[i] for i in order[::VALID_EVERY]]
    train = [documents[i] for n, i in enumerate(order) if n % VALID_EVERY]
    tokenizer = train_tokenizer(train)
    write_tokenizer(tokenizer, args.out)
    size = sum(len(document.encode("utf8")) for document in train)
    counts = {
        "train_tokens": write_tokens(tokenizer, train, args.out / "train.bin"),
        "valid_tokens": write_tokens(tokenizer, valid, args.out / "valid.bin"),
        "train_bytes": size,
        "vocabulary": tokenizer.get_vocab_size(),
    }
    (args.out / "prepare.json").write_text(json.dumps(counts, indent=2) + "\n", "utf8")
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
