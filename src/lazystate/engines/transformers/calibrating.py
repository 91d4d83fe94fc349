"""Calibration of a transformers model: greedy continuations, statistics, bases, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lazystate.engines.transformers.observing import (
    fingerprint,
    layer_spec,
    observed,
    recurrent_modules,
)
from lazystate.sketch.calibration_file import Calibration, Origin
from lazystate.sketch.resuming import Kept, Sums
from lazystate.sketch.scores import Scores
from lazystate.sketch.statistics import Statistics
from lazystate.sketch.windows import Run
from lazystate.spec import LayerSpec

# Called with what is being done, and how much of how much is.
Progress = Callable[[str, int, int], None]
Seen = TypeVar("Seen", Statistics, Scores)


@dataclass(frozen=True)
class Options:
    """How a model is calibrated.

    Attributes:
        window: L of the effective queries.
        new_tokens: greedy tokens for a prompt; its first window is left out.
        warmup: tokens of a text before the first that scores.
        rank: columns of a basis, None for as many as keys or values have.
        groups: bases of a layer, None for one a value head. ridge: as of `Statistics.basis`.
        batch: texts at once.
    """

    window: int = 16
    new_tokens: int = 256
    warmup: int = 128
    rank: int | None = None
    groups: int | None = None
    ridge: float = 0.0
    batch: int = 8


def calibrate(
    model: Any,
    prompts: Tensor,
    texts: Tensor,
    options: Options,
    *,
    name: str,
    text: str = "",
    share: tuple[int, int] = (0, 1),
    keep: Path | None = None,
    save_seconds: float = 30.0,
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Fit bases on continuations of prompts, then score every rank on other texts.

    With torch.distributed initialised, every process takes its share of the batches, the sums are
    added up, and all return the same.

    Args:
        model: a causal language model of transformers, not patched; no weight is changed.
        prompts: int64 [N, P] token ids, for bases. texts: int64 [M, T], for scores; not the same.
        name: of the model, for the file. text: fingerprint of what the tokens were cut from.
        share: this process's number, and how many there are.
        keep: file of the sums so far, from which an interrupted run goes on to the same result.
        save_seconds: between two writings of it.
        progress: told of every batch.

    Raises:
        ValueError: for recurrent layers of several shapes or none, a patched model, texts too short
            for one window, or a `keep` of something else.
    """
    modules, spec = recurrent_modules(model), layer_spec(model)
    _check(options, texts)
    rank = min(spec.key_dim, spec.value_dim) if options.rank is None else options.rank
    groups = spec.heads if options.groups is None else options.groups
    device = next(model.parameters()).device
    bases = [Statistics.empty(spec.heads, spec.key_dim, device) for _ in modules]
    scores = [Scores.empty(spec.heads, rank, device) for _ in modules]
    weights = fingerprint(model)
    identity = repr((name, weights, text, options, share, prompts.shape, texts.shape))
    kept = None if keep is None else Kept(keep, identity, save_seconds)
    work = _Work(kept, {"bases": _named(bases), "scores": _named(scores)}, share, progress)

    def fit(part: Tensor) -> None:
        window, new = options.window, options.new_tokens
        gather(model, part.to(device), bases, window=window, new_tokens=new)

    work.run("bases", prompts.split(options.batch), fit)
    grouped = [layer.grouped(groups) for layer in _total(bases)]
    omega = torch.stack([layer.basis(rank, ridge=options.ridge).omega for layer in grouped])
    heads = omega.repeat_interleave(spec.heads // groups, 1)

    def judge(part: Tensor) -> None:
        window, warmup = options.window, options.warmup
        score(model, part.to(device), heads, scores, window=window, warmup=warmup)

    work.run("scores", texts.split(options.batch), judge)
    about = {"name": name, "text": text, "weights": weights}
    found = _calibration(modules, spec, options, about, omega, grouped, _total(scores))
    if kept is not None:
        kept.remove()
    return found


def _calibration(
    modules: list[Any],
    spec: LayerSpec,
    options: Options,
    about: dict[str, str],
    omega: Tensor,
    bases: list[Statistics],
    scores: list[Scores],
) -> Calibration:
    """The means of all sums, and where they come from."""
    tokens = scores[0].tokens

    def mean(name: str) -> Tensor:
        return torch.stack([layer.tensors()[name] / tokens for layer in scores]).float().cpu()

    origin = Origin(
        model=about["name"],
        layers=tuple(module.layer_idx for module in modules),
        value_dim=spec.value_dim,
        window=options.window,
        erase=spec.erase,
        text=about["text"],
        weights=about["weights"],
        versions={package: version(package) for package in ("torch", "transformers")},
        notes={
            "states": int(bases[0].windows),
            "scored tokens": int(tokens),
            "ridge": options.ridge,
        },
    )
    metric = torch.stack([layer.metric for layer in bases]).float().cpu()
    omega = omega.float().cpu()
    return Calibration(origin, omega, mean("paired"), mean("missed"), mean("slopes"), metric)


def _check(options: Options, texts: Tensor) -> None:
    least, shortest = 2 * options.window, options.warmup + options.window
    if options.new_tokens < least or texts.shape[1] < shortest:
        raise ValueError(
            f"new_tokens must be at least {least} and texts {shortest} tokens long, "
            f"got {options.new_tokens} and {texts.shape[1]}"
        )


def _named(layers: Sequence[Statistics | Scores]) -> Sums:
    return {f"{i}.{name}": x for i, each in enumerate(layers) for name, x in each.tensors().items()}


def _total(layers: list[Seen]) -> list[Seen]:
    """The sums of all processes; this one's own stay as they are, to go on from."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return layers
    everyone = deepcopy(layers)
    for tensor in _named(everyone).values():
        torch.distributed.all_reduce(tensor)
    return everyone


class _Work:
    """The two parts of a calibration, batch by batch, from where it was interrupted."""

    def __init__(
        self,
        kept: Kept | None,
        parts: dict[str, Sums],
        share: tuple[int, int],
        progress: Progress,
    ) -> None:
        self.kept, self.parts, self.share, self.progress = kept, parts, share, progress
        self.sums = {f"{part}.{n}": x for part, sums in parts.items() for n, x in sums.items()}
        self.part, self.done = ("", 0) if kept is None else kept.restore(self.sums)

    def run(self, part: str, batches: Sequence[Tensor], work: Callable[[Tensor], None]) -> None:
        """This process's batches of one part that are not done yet."""
        number, processes = self.share
        mine = batches[number::processes]
        names = list(self.parts)
        if self.part in names[names.index(part) + 1 :]:
            return  # whole before the interruption
        start = self.done if self.part == part else 0
        for done, batch in enumerate(mine[start:], start + 1):
            work(batch)
            if self.kept is not None:
                self.kept.save(part, done, self.sums, now=done == len(mine))
            self.progress(part, done, len(mine))


@torch.no_grad()
def gather(
    model: Any, prompts: Tensor, sums: list[Statistics], *, window: int, new_tokens: int
) -> None:
    """Continue prompts [B, P] greedily and add what the layers saw meanwhile to `sums`.

    The continuation is generated first and read again in one go, in which the windows begin where
    decoding began.
    """
    tokens = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
    )
    start = prompts.shape[1]

    def look(layer: int, found: Run) -> None:
        for part in found.windows:
            if part.start >= start + window:
                sums[layer].add(part.state, part.queries)

    with observed(model, look, window=window, first=start):
        model(input_ids=tokens, use_cache=False)


def score(
    model: Any, texts: Tensor, omega: Tensor, scores: list[Scores], *, window: int, warmup: int
) -> None:
    """Read texts [B, T], and add what ranks cost to `scores`.

    The loss is each text's mean cross-entropy of its next tokens, summed over the batch, so that a
    score does not depend on the batch.

    Args:
        omega: [layers, HV, K, G].
    """
    runs: dict[int, Run] = {}

    def look(layer: int, found: Run) -> None:
        found.out.retain_grad()
        runs[layer] = found

    with _frozen(model), torch.enable_grad(), observed(model, look, window=window, first=warmup):
        logits = model(input_ids=texts, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), texts[:, 1:].flatten())
        (losses * len(texts)).backward()
    for layer, found in runs.items():
        slopes = found.out.grad
        assert slopes is not None
        for part in found.windows:
            gradients = slopes[:, part.start : part.stop]
            scores[layer].add(part.state, omega[layer], part.queries, gradients)


@contextmanager
def _frozen(model: Any) -> Iterator[None]:
    """Gradients by activations only: weights need none, embeddings do."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    embeddings = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda *args: args[-1].requires_grad_(True))
    try:
        yield
    finally:
        hook.remove()
        for parameter in wanted:
            parameter.requires_grad_(True)
