"""One optimiser step: the weighted loss, and the whole step as one CUDA graph.

A step of models of this size is thousands of small kernels; a recorded step launches them at once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

import presets
from rows import TAG
from synthetic import TAGS

# text, noise, copied noise, copied text, answer, task; noise is not to be learnt
WEIGHTS = (1.0, 0.0, 1.0, 1.0, 3.0, 0.3)
WARMUP = 3  # steps before the recording
Tensor = torch.Tensor


def optimizer_of(model: PreTrainedModel, rate: Tensor, decay: float) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; the rate is a tensor that a graph can read."""
    groups: dict[bool, list[torch.nn.Parameter]] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[presets.is_decayed(name, parameter)].append(parameter)
    return torch.optim.AdamW(
        [
            {"params": groups[True], "weight_decay": decay, "lr": rate},
            {"params": groups[False], "weight_decay": 0.0, "lr": rate},
        ],
        betas=(0.9, 0.95),
        fused=True,
        capturable=rate.is_cuda,
    )


def head_loss(
    hidden: Tensor, head: Tensor, labels: Tensor, tags: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The weighted mean cross-entropy, and for every tag: tokens, loss, tokens predicted right."""
    logits = F.linear(hidden, head).float().flatten(0, 1)
    labels, tags = labels.flatten(), tags.flatten()
    losses = F.cross_entropy(logits, labels, reduction="none")
    hits = (logits.detach().argmax(-1) == labels).float()
    kinds = (tags[:, None] == torch.arange(len(TAGS), device=tags.device)).float()
    each = (kinds * weights).sum(-1)
    facts = torch.stack((torch.ones_like(hits), losses.detach(), hits))
    counts = (facts[:, :, None] * kinds).sum(1)
    return (losses * each).sum() / each.sum(), counts


class Step:
    """Trains a model on one batch a call; `counts` sums what `head_loss` counted."""

    def __init__(self, model: PreTrainedModel, decay: float, compiled: bool, graph: bool) -> None:
        self.model, device = model, model.device
        self.rate = torch.zeros((), device=device)
        self.optimizer = optimizer_of(model, self.rate, decay)
        self.head = torch.compile(head_loss, dynamic=False) if compiled else head_loss
        self.weights = torch.tensor(WEIGHTS, device=device)
        self.counts = torch.zeros(3, len(TAGS), device=device)
        self.use_graph, self.calls = graph, 0
        self.stream = torch.cuda.Stream() if graph else None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Tensor | None = None

    def run(self, batch: Tensor) -> None:
        """The step itself."""
        rows, tags = (batch & ((1 << TAG) - 1)).long(), batch >> TAG
        kind = batch.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            hidden = self.model.model(input_ids=rows[:, :-1], use_cache=False).last_hidden_state
            loss, counts = self.head(
                hidden, self.model.lm_head.weight, rows[:, 1:], tags[:, 1:], self.weights
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.counts += counts

    def __call__(self, batch: Tensor, rate: float) -> None:
        """Step, or replay the recorded step, at a learning rate."""
        self.rate.fill_(rate)
        if not self.use_graph:
            return self.run(batch)
        if self.graph is not None:
            self.batch.copy_(batch)
            return self.graph.replay()
        self.calls += 1
        self.stream.wait_stream(torch.cuda.current_stream())
        if self.calls <= WARMUP:
            with torch.cuda.stream(self.stream):
                self.run(batch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return None
        self.batch = batch.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.run(self.batch)
        self.graph = graph
        return self.graph.replay()

    def read(self) -> dict[str, dict[str, float]]:
        """Loss and accuracy by tag since the last reading; waits for the device."""
        counts = self.counts.cpu().clone()
        self.counts.zero_()
        return {
            name: {
                "tokens": int(tokens),
                "loss": round(float(loss / tokens), 4),
                "accuracy": round(float(right / tokens), 4),
            }
            for name, tokens, loss, right in zip(TAGS, *counts, strict=True)
            if tokens
        }
