"""Calibration of a transformers model: greedy continuations, statistics, bases, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lazystate.engines.transformers.observing import (
    gates_fingerprint,
    layer_spec,
    observed,
    recurrent_modules,
)
from lazystate.sketch.calibration_file import Calibration, Origin
from lazystate.sketch.scores import Scores
from lazystate.sketch.statistics import Statistics
from lazystate.sketch.windows import Run

# Called with what is being done, and how much of how much is.
Progress = Callable[[str, int, int], None]


def calibrate(
    model: Any,
    prompts: Tensor,
    texts: Tensor,
    *,
    name: str,
    window: int = 16,
    new_tokens: int = 256,
    warmup: int = 128,
    rank: int | None = None,
    groups: int | None = None,
    ridge: float = 0.0,
    batch: int = 8,
    text: str = "",
    progress: Progress = lambda *_: None,
) -> Calibration:
    """Fit bases on continuations of prompts, then score every rank on other texts.

    Args:
        model: a causal language model of transformers, not patched; no weight is changed.
        prompts: int64 [N, P] token ids, for bases. texts: int64 [M, T], for scores; not the same.
        name: of the model, for the file. window: L of the effective queries.
        new_tokens: greedy tokens for a prompt; its first window is left out.
        warmup: tokens of a text before the first that scores.
        rank: columns of a basis, None for as many as keys or values have.
        groups: bases of a layer, None for one a value head. ridge: as of `Statistics.basis`.
        batch: texts at once. text: fingerprint of what prompts and texts were cut from.
        progress: told of every batch.

    Raises:
        ValueError: for recurrent layers of several shapes or none, a patched model, or texts too
            short for one window.
    """
    modules, spec = recurrent_modules(model), layer_spec(model)
    if new_tokens < 2 * window or texts.shape[1] < warmup + window:
        raise ValueError(
            f"new_tokens must be at least {2 * window} and texts {warmup + window} tokens long, "
            f"got {new_tokens} and {texts.shape[1]}"
        )
    rank = min(spec.key_dim, spec.value_dim) if rank is None else rank
    groups = spec.heads if groups is None else groups
    device = next(model.parameters()).device
    sums = [Statistics.empty(spec.heads, spec.key_dim, device) for _ in modules]
    for done, part in enumerate(parts := prompts.split(batch)):
        gather(model, part.to(device), sums, window=window, new_tokens=new_tokens)
        progress("bases", done + 1, len(parts))
    grouped = [layer.grouped(groups) for layer in sums]
    omega = torch.stack([layer.basis(rank, ridge=ridge).omega for layer in grouped])
    heads = omega.repeat_interleave(spec.heads // groups, 1)
    scores = [Scores.empty(spec.heads, rank, device) for _ in modules]
    for done, part in enumerate(parts := texts.split(batch)):
        score(model, part.to(device), heads, scores, window=window, warmup=warmup)
        progress("scores", done + 1, len(parts))
    tokens = scores[0].tokens
    origin = Origin(
        model=name,
        layers=tuple(module.layer_idx for module in modules),
        value_dim=spec.value_dim,
        window=window,
        erase=spec.erase,
        text=text,
        weights=gates_fingerprint(model),
        versions={package: version(package) for package in ("torch", "transformers")},
        notes={"states": int(sums[0].windows), "scored tokens": int(tokens), "ridge": ridge},
    )
    return Calibration(
        origin,
        omega=omega.float().cpu(),
        paired=torch.stack([layer.paired / tokens for layer in scores]).float().cpu(),
        missed=torch.stack([layer.missed / tokens for layer in scores]).float().cpu(),
        slopes=torch.stack([layer.slopes / tokens for layer in scores]).float().cpu(),
        metric=torch.stack([layer.metric for layer in grouped]).float().cpu(),
    )


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
