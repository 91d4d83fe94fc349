"""What sketches do to outputs: the shipped models with their calibrations, on held-out books.

    python benchmarks/sketch.py                            # on a CPU; hours on two cores
    python benchmarks/sketch.py --device cuda --minutes 8  # all models side by side on one GPU

KL as in `lazystate evaluate kl`, retrieval as in `recall`, copying as in `copy`. Each model and
part is a process of its own, which appends a line to a file in --parts for every configuration and
leaves out those that are there: a run that was cut short goes on. At its end it writes what there
is to benchmarks/results/. `--join` does so without measuring, also while a run goes on, and then
writes docs/sketch.md, as `python benchmarks/sketch_page.py` does.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import sketch_page
from lazystate.commands.decoding import Loaded, load
from lazystate.evaluation import copying, kl, read_error, retrieval
from lazystate.planner import Stored, traffic
from lazystate.sketch.allocation import budget_of, rank_actions, uniform
from lazystate.sketch.calibration_file import Calibration
from lazystate.sketch.files import open_calibration
from lazystate.sketch.view import DENSE, Sketch
from page import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("gdn", "kda", "mamba2")
# Tokens decoded behind the prompt: to the models' training length, and to their last position.
PARTS = {"main": 3584, "long": 7680}
PROMPT, CONTEXT = 512, 256
RANKS = (2, 4, 8, 16)
ABLATED = 4  # mean rank of the ablations
CASTS = ("int2", "int4", "nvfp4", "fp8")
LONG = (
    "fp32",
    "sketch 4",
    "sketch 8",
    "nvfp4 view",
    "nvfp4 recurrence",
    "sketch 8, fp16 checkpoint",
)
TASKS = ("fp32", *(f"sketch {rank}" for rank in RANKS), *(f"{name} view" for name in CASTS),
         "random basis", "offline map", "low-rank state 4", "nvfp4 recurrence")  # fmt: skip
PREDICTED = ("sketch 4", "sketch 8", "int2 view", "nvfp4 view")

Row = dict[str, Any]


def even_ranks(found: Calibration) -> Sketch:
    """Sketches of the calibrated bases with the same rank for every head, at the same budget."""
    actions = rank_actions(found.key_dim, found.origin.value_dim, found.largest_rank)
    heads = found.paired.shape[0] * found.heads
    choice = uniform(actions, heads, budget_of(actions, heads, ABLATED))
    ranks = torch.tensor([each.rank if each.view == "sketch" else DENSE for each in actions])
    return Sketch(found.sketch(ABLATED).omega, ranks[choice].view(-1, found.heads))


def random_basis(found: Calibration, seed: int) -> Sketch:
    """The calibrated ranks with random orthonormal bases."""
    plain = found.sketch(ABLATED)
    generator = torch.Generator().manual_seed(seed)
    columns = torch.randn(plain.omega.shape, generator=generator)
    return Sketch(torch.linalg.qr(columns).Q, plain.ranks)


def low_rank(found: Calibration, rank: int) -> Sketch:
    """States projected on the leading eigenvectors of their mean Gram matrix, by a fixed map.

    SketchSSM's Table 13 calls it low-rank state; the ranks are those of the sketch.
    """
    assert found.metric is not None
    share = found.heads // found.metric.shape[1]
    metric = found.metric.repeat_interleave(share, 1)
    vectors = torch.linalg.eigh(metric.double()).eigenvectors.flip(-1)
    omega = vectors[..., : found.largest_rank].float().contiguous()
    return Sketch(omega, found.sketch(rank).ranks, "offline", metric)


def configurations(found: Calibration, backend: kl.BackendName) -> dict[str, kl.Config]:
    """Everything that is measured, by name, most important first."""

    def sketched(view: Sketch, window: int = 16, checkpoint: str = "fp32") -> kl.Config:
        return kl.Config(kl.States(checkpoint, "sketch"), window, sketch=view, backend=backend)

    def stored(checkpoint: str, view: str | None = None) -> kl.Config:
        return kl.Config(kl.States(checkpoint, view), 16, backend=backend)

    named = {"fp32": stored("fp32")}
    named |= {f"sketch {rank}": sketched(found.sketch(rank)) for rank in RANKS}
    named |= {f"{name} view": stored("fp32", name) for name in CASTS}
    named["uniform ranks"] = sketched(even_ranks(found))
    named["random basis"] = sketched(random_basis(found, 0))
    named |= {
        f"{map} map": sketched(found.sketch(ABLATED, map=map)) for map in ("offline", "exact")
    }
    named |= {
        f"{criterion} only": sketched(found.sketch(ABLATED, criterion=criterion))
        for criterion in ("error", "gradient")
    }
    named |= {f"low-rank state {rank}": sketched(low_rank(found, rank)) for rank in (4, 8)}
    named |= {f"{name} recurrence": stored(name) for name in ("nvfp4", "fp8")}
    named["sketch 8, fp16 checkpoint"] = sketched(found.sketch(8), 16, "fp16")
    named |= {
        f"sketch 8, window {window}": sketched(found.sketch(8), window) for window in (32, 64)
    }
    return named


def moved(loaded: Loaded, config: kl.Config) -> tuple[float, float]:
    """Bytes of state that most steps read, and all state bytes a token as a part of plain's."""
    read = total = plain = 0.0
    for layer, spec in enumerate(loaded.specs):
        view = config.states.view
        if isinstance(config.sketch, Sketch):
            view = config.sketch.planned(layer, spec)
        stored = {"checkpoint": config.states.checkpoint, "view": view}
        total += traffic(spec, "replay", window=config.window or 1, **stored).total
        plain += traffic(spec, "plain").total
        read += Stored.of(spec, stored["checkpoint"], view).read
    return read, total / plain


class Measuring:
    """One model in memory, with what conventional decoding says."""

    def __init__(self, name: str, part: str, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        torch.backends.cudnn.allow_tf32 = False  # the convolutions of prefill, too, are FP32
        self.loaded, self.found = load(name, device=options.device), open_calibration(name)
        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        tokens = options.tokens or PARTS[part]
        given = kl.streams(tokenizer, options.streams, PROMPT + tokens).to(model.device)
        self.reference = kl.Reference.of(model, given, PROMPT)
        self.tasks = {
            task: retrieval.examples(tokenizer, task, options.examples, CONTEXT)
            for task in retrieval.TASKS
        }
        self.passages = copying.passages(tokenizer, options.examples)

    def row(self, label: str, config: kl.Config, part: str) -> Row:
        """One configuration."""
        read, share = moved(self.loaded, config)
        points = self.reference.measure(self.loaded.model, config)
        row: Row = {"model": self.loaded.name, "part": part, "config": label}
        row |= {"window": config.window, "bytes": read, "share": share}
        row["points"] = [asdict(point) for point in points]
        if part == "main" and label in TASKS:
            row |= self._answers(config)
        if part == "main" and label in PREDICTED:
            assert self.found.slopes is not None
            layers = len(self.loaded.specs)
            predicted = read_error.predict(
                self.loaded.model, self.reference, config, self.found.slopes, layers
            )
            row["predicted"] = asdict(predicted)
        return row

    def _answers(self, config: kl.Config) -> Row:
        model = self.loaded.model
        found = {task: retrieval.accuracy(model, x, config) for task, x in self.tasks.items()}
        copies = copying.copy(model, self.passages, config)
        return {
            "recall": {task: sum(right) / len(right) for task, right in found.items()},
            "copied": float(copies.right.double().mean()),
            "tokens": copies.tokens.tolist(),
        }


def rounded(value: Any) -> Any:
    """Numbers to four digits: more is noise, and the file is read by people."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def work(name: str, part: str, options: argparse.Namespace) -> None:
    """Measure what is not in the file of this model and part yet."""
    start, path = time.time(), options.parts / f"{name}-{part}.jsonl"
    about = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": "cpu" if options.device == "cpu" else torch.cuda.get_device_name(),
        "commit": options.commit,
        "prompt": PROMPT,
        "streams": options.streams,
        "context": CONTEXT,
        "examples": options.examples,
        "tokens": options.tokens or PARTS[part],
    }
    lines = finished(path) if path.exists() else []
    if lines and {**lines[0], "commit": ""} != {**about, "commit": ""}:
        raise SystemExit(f"{path} is of other options: {lines[0]}; give another --parts")
    configs = configurations(open_calibration(name), "torch")
    done = {line["config"] for line in lines[1:]}
    wanted = [n for n in configs if n not in done and (part == "main" or n in LONG)]
    if not wanted:
        return
    measuring = Measuring(name, part, options)
    whole = path.with_suffix(".part")  # a line that was cut off goes
    whole.write_text("".join(json.dumps(line) + "\n" for line in lines or [about]), "utf8")
    whole.replace(path)
    with path.open("a", encoding="utf8") as file:
        for label in wanted:
            if time.time() > options.until:
                print(f"{name}, {part}: no time for {label} and what follows", file=sys.stderr)
                return
            row = measuring.row(label, configs[label], part)
            file.write(json.dumps(rounded(row)) + "\n")
            file.flush()
            print(f"{time.time() - start:5.0f} s {name}, {part}: {label}", flush=True)


def finished(path: Path) -> list[Row]:
    """The lines of a part; one that is being written, or was cut off, is left out."""
    text = path.read_text("utf8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def join(parts: Path, results: Path = RESULTS) -> None:
    """Write one file of all parts that have begun.

    Raises:
        SystemExit: if none has, or parts are of different runs.
    """
    files = [lines for path in sorted(parts.glob("*.jsonl")) if (lines := finished(path))]
    if not files:
        raise SystemExit(f"--parts must be a folder with parts of a run, got {parts}: none begun")
    abouts = [lines[0] for lines in files]
    tokens = {about.pop("tokens") for about in abouts}
    if any(about != abouts[0] for about in abouts):
        raise SystemExit(f"parts in {parts} are of different runs: {abouts}")
    rows = [line for lines in files for line in lines[1:]]
    slug = abouts[0]["device"].lower().removeprefix("nvidia ").split()[0]
    path = results / slug / "sketch.json"
    record = {**abouts[0], "tokens": sorted(tokens), "runs": rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", "utf8")
    print(f"{path}: {len(rows)} rows")


def main() -> None:
    """Measure all models and parts, side by side on a GPU."""
    parser = argparse.ArgumentParser(description="What sketches do to outputs.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", type=Path, default=ROOT / "data" / "sketch")
    parser.add_argument("--processes", type=int, help="default: 2, or all on a GPU")
    parser.add_argument("--minutes", type=float, default=math.inf, help="none begins after them")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--examples", type=int, default=128)
    parser.add_argument("--tokens", type=int, help="fewer, for a look")
    parser.add_argument("--commit", help="revision, where there is no git")
    parser.add_argument("--join", action="store_true", help="only join parts; write the page")
    parser.add_argument("--work", nargs=2, metavar=("MODEL", "PART"), help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=math.inf, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        model, part = options.work
        work(model, part, options)
        return
    if options.join:
        join(options.parts)
        sketch_page.write_all(check=False)
        return
    options.parts.mkdir(parents=True, exist_ok=True)
    _start(options)
    join(options.parts)


def _start(options: argparse.Namespace) -> None:
    """Start a process for each model and part."""
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.check_output(head, cwd=ROOT, text=True).strip()
    common = [
        *("--device", options.device, "--parts", str(options.parts), "--commit", commit),
        *("--streams", str(options.streams), "--examples", str(options.examples)),
        *("--until", str(time.time() + 60 * options.minutes)),
        *(("--tokens", str(options.tokens)) if options.tokens else ()),
    ]
    pairs = [(model, part) for part in PARTS for model in MODELS]
    with ThreadPoolExecutor(options.processes or (2 if options.device == "cpu" else 6)) as pool:
        codes = pool.map(
            lambda pair: subprocess.call([sys.executable, __file__, "--work", *pair, *common]),
            pairs,
        )
    if any(codes):
        raise SystemExit("a process failed: see above; the parts that are done are kept")


if __name__ == "__main__":
    main()
