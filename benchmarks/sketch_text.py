"""What the text of a calibration changes: prose alone, and with facts that are asked for.

    python benchmarks/sketch_text.py               # all shipped models, on a CPU
    python benchmarks/sketch_text.py gdn           # one; the others' numbers stay
    python benchmarks/sketch_text.py --device cuda

Two calibrations by the same options: of Pride and Prejudice, and of the same pages with facts
stated and asked for between the paragraphs, in the form of the retrieval tasks and of other names.
Retrieval and KL are of Moby-Dick. Writes benchmarks/results/<device>/sketch_text.json.
"""

from __future__ import annotations

import argparse
import json
import random
from typing import Any

import torch

from lazystate import shipped
from lazystate.commands.calibrate import cut_pages
from lazystate.commands.decoding import Loaded, load
from lazystate.engines.transformers.calibrating import Options, calibrate
from lazystate.evaluation import kl, retrieval
from lazystate.sketch.calibration_file import Calibration, text_fingerprint
from page import ROOT

RESULTS = ROOT / "benchmarks" / "results"
RANKS = (4, 8)
PROMPTS, TEXTS = (64, 256), (32, 512)  # pages and tokens
OPTIONS = Options(new_tokens=32)
EXAMPLES, CONTEXT, STREAMS, PROMPT, TOKENS = 64, 256, 4, 512, 512
COLOURS = "red blue green yellow black white silver golden purple brown pink grey"
THINGS = "box door book lamp ship chair table bottle coat ring clock drum"

Row = dict[str, Any]


def prose() -> list[str]:
    """The paragraphs of the book, none long."""
    text = shipped.book("pride-and-prejudice")
    return [each[:500] for each in text.split("\n\n") if len(each) > 100]


def with_facts(paragraphs: list[str], seed: int = 0) -> list[str]:
    """The same with one, two or four facts stated, one before each, and up to two asked for."""
    draw = random.Random(seed)
    names = [f"{colour} {thing}" for colour in COLOURS.split() for thing in THINGS.split()]
    out, rest = [], iter(paragraphs)
    while True:
        facts = {
            name: draw.randrange(1000, 10_000)
            for name in draw.sample(names, draw.choice((1, 2, 4)))
        }
        for name, value in facts.items():
            between = next(rest, None)
            if between is None:
                return out
            out += [f"The code for the {name} is {value}. ", between]
        for name in draw.sample(list(facts), min(len(facts), 2)):
            out.append(f"What is the code for the {name}? {facts[name]}.")


def calibrated(loaded: Loaded, paragraphs: list[str]) -> Calibration:
    """By the same options."""
    text = ["\n\n".join(paragraphs)]
    parts = cut_pages(loaded, text, PROMPTS, TEXTS)
    name = loaded.name
    return calibrate(loaded.model, *parts, OPTIONS, name=name, text=text_fingerprint(text))


def measure(name: str, device: Any) -> list[Row]:
    """One model: FP32 states, and sketches of both calibrations."""
    loaded = load(name, device=device)
    model, tokenizer = loaded.model, loaded.tokenizer
    tasks = {t: retrieval.examples(tokenizer, t, EXAMPLES, CONTEXT) for t in retrieval.TASKS}
    given = kl.streams(tokenizer, STREAMS, PROMPT + TOKENS, ["moby-dick"]).to(model.device)
    reference = kl.Reference.of(model, given, PROMPT)
    configs = {("-", "fp32"): kl.Config(kl.States(), 16, backend="torch")}
    for label, text in (("prose", prose()), ("prose and facts", with_facts(prose()))):
        found = calibrated(loaded, text)
        for rank in RANKS:
            view = found.sketch(rank)
            configs[label, f"sketch {rank}"] = kl.Config(
                kl.States("fp32", "sketch"), 16, sketch=view, backend="torch"
            )
    rows = []
    for (label, states), config in configs.items():
        right = {task: retrieval.accuracy(model, each, config) for task, each in tasks.items()}
        point = reference.measure(model, config)[-1]
        row: Row = {"model": name, "text": label, "config": states}
        row |= {"recall": {task: sum(each) / len(each) for task, each in right.items()}}
        rows.append(row | {"kl": point.kl, "standard_error": point.standard_error})
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure some models, and put their rows into the record of the device."""
    parser = argparse.ArgumentParser(description="What the text of a calibration changes.")
    parser.add_argument("models", nargs="*", default=shipped.models(), help="default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False
    for name in options.models:
        _keep(name, measure(name, options.device), options.device)


def _keep(name: str, rows: list[Row], device: str) -> None:
    kind = "cpu" if device == "cpu" else torch.cuda.get_device_name()
    path = RESULTS / kind.lower().removeprefix("nvidia ").split()[0] / "sketch_text.json"
    kept = json.loads(path.read_text("utf8"))["rows"] if path.exists() else []
    about = {"torch": torch.__version__, "device": kind, "examples": EXAMPLES, "context": CONTEXT}
    about |= {"streams": STREAMS, "prompt": PROMPT, "tokens": TOKENS}
    rows = [row for row in kept if row["model"] != name] + rows
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
