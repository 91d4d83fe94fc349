"""Retrieval of facts from a long context, in the style of RULER, read through the states.

A context of book text holds facts ("The code for the amber kettle is 4821."). Behind it a question
is decoded token by token, and its answer: the context is prefill, whose state is exact, so that
what differs between configurations is how states are read and carried on. Words are not those of
the facts that the shipped models were trained on.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from lazystate import shipped
from lazystate.evaluation.kl import Advance, Config, logits

Task = Literal["single", "multi-key", "multi-query", "multi-value"]
# Facts in a context, and how many of them are asked for.
TASKS: dict[Task, tuple[int, int]] = {
    "single": (1, 1),
    "multi-key": (4, 1),
    "multi-query": (4, 2),
    "multi-value": (4, 2),
}
COLOURS = "amber crimson plum ivory olive violet beige maroon tan azure coral"
THINGS = "shovel pillow bucket rocket helmet whistle trumpet sled mug kite rug"


@dataclass(frozen=True)
class Examples:
    """Contexts of one length with questions and answers behind them.

    Attributes:
        given: int64 [N, context + n], right-padded. context: tokens of prefill.
        answers: bool [N, n], which of the n tokens behind the context are to be found.
    """

    given: Tensor
    context: int
    answers: Tensor


def examples(
    tokenizer: PreTrainedTokenizerBase, task: Task, count: int, context: int, seed: int = 0
) -> Examples:
    """Draw examples of a task.

    Raises:
        ValueError: for an unknown task, or a context too short for its facts.
    """
    if task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(TASKS)}, got {task!r}")
    draw = random.Random(f"{task} {seed}")
    filler = _ids(tokenizer, shipped.book(shipped.books()[seed % len(shipped.books())]))
    rows = [_example(tokenizer, task, context, filler, draw) for _ in range(count)]
    longest = max(len(tail) for _, tail, _ in rows)
    given = torch.zeros(count, context + longest, dtype=torch.int64)
    answers = torch.zeros(count, longest, dtype=torch.bool)
    for i, (head, tail, wanted) in enumerate(rows):
        given[i, : context + len(tail)] = torch.tensor(head + tail)
        answers[i, : len(tail)] = torch.tensor(wanted)
    return Examples(given, context, answers)


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text).input_ids)


def _example(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    context: int,
    filler: list[int],
    draw: random.Random,
) -> tuple[list[int], list[int], list[bool]]:
    """(context, question and answer, which of them is the answer)."""
    number, asked = TASKS[task]
    every = [f"{colour} {thing}" for colour in COLOURS.split() for thing in THINGS.split()]
    names = draw.sample(every, number)
    order = draw.sample(range(number), asked)
    if task == "multi-value":  # two facts of each name, asked for in their order
        names = [name for name in names[: number // 2] for _ in range(2)]
        order = [2 * (order[0] // 2), 2 * (order[0] // 2) + 1]
    values = [str(draw.randrange(1000, 10_000)) for _ in names]
    blank = _ids(tokenizer, "\n\n")
    facts = [
        _ids(tokenizer, f"The code for the {name} is {value}. ") + blank
        for name, value in zip(names, values, strict=True)
    ]
    room = context - sum(map(len, facts)) - number * len(blank)
    if room < 2 * number:
        raise ValueError(f"context must be longer than its facts ({context - room}), got {context}")
    cuts = [0, *sorted(draw.sample(range(1, room), number - 1)), room]
    start = draw.randrange(len(filler) - room)
    head: list[int] = []
    for fact, low, high in zip(facts, cuts, cuts[1:], strict=False):
        head += fact + filler[start + low : start + high] + blank
    tail: list[int] = []
    wanted: list[bool] = []
    for i in order:
        question = _ids(tokenizer, f"What is the code for the {names[i]}?")
        answer = _ids(tokenizer, f" {values[i]}.")
        end = _ids(tokenizer, "\n")
        tail += question + answer + end
        wanted += [False] * len(question) + [True] * len(answer) + [False] * len(end)
    return head, tail, wanted


def _nothing(steps: int) -> None:
    del steps


@torch.no_grad()
def accuracy(
    model: nn.Module, drawn: Examples, config: Config, advance: Advance = _nothing
) -> list[bool]:
    """For every example whether greedy decoding gives all of its answer.

    Answers are fed as they should be, so that this is exactly what greedy decoding gives.
    """
    right = torch.ones(len(drawn.given), dtype=torch.bool)
    following = drawn.given[:, drawn.context + 1 :]
    given = drawn.given.to(next(model.parameters()).device)
    for i, row in enumerate(logits(model, given, drawn.context, config, advance)):
        if i < following.shape[1]:
            wanted = drawn.answers[:, i + 1]
            right &= ~wanted | (row.argmax(-1).cpu() == following[:, i])
    return right.tolist()
