"""Random programs: whatever a program does, the cache agrees with a list of tokens.

Every program runs on two caches of one layout, whose memory starts as NaN. Inputs hold NaN wherever
nothing may be read: in padded rows, and behind a row's length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from torch import Tensor

import samples
import tolerance
from lazystate import LayerSpec, StateCache
from lazystate.ops import Fold
from lazystate.reference.tokens import TokenCache

SLOTS = 4
DECAYS = (0.0, -1e-8, -0.01, -0.3, -2.0, -30.0, -float("inf"))
KINDS = ("mamba2", "gdn", "kda", "gla")
OPERATIONS_PER_TEST = 2_000
TESTS = 2 * (len(KINDS) + 1)

assert OPERATIONS_PER_TEST * TESTS >= 10_000

caches = st.integers(0, 1)
slot = st.integers(0, SLOTS - 1)
slot_lists = st.lists(slot, min_size=1, max_size=SLOTS, unique=True)
# (slot or -1, length, kept): the last two are taken modulo what the step allows.
row = st.tuples(st.integers(-1, SLOTS - 1), st.integers(0, 8), st.integers(0, 7))
row_lists = st.lists(row, min_size=1, max_size=SLOTS + 1, unique_by=lambda r: r[0])


class Programs(RuleBasedStateMachine):
    """Two caches and their models; every verb is a rule."""

    counts: Counter[str]

    def __init__(self, specs: list[LayerSpec], fold: Fold, salt: int) -> None:
        super().__init__()
        self.specs, self.fold, self.salt = specs, fold, salt
        self.weight = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4)
        self.bias = torch.linspace(0, 1, 3, dtype=torch.float64)

    @initialize(seed=st.integers(0, 2**32), window=st.integers(1, 8), most=st.integers(1, 8))
    def build(self, seed: int, window: int, most: int) -> None:
        """Fresh caches of a drawn size."""
        self.generator = torch.Generator().manual_seed(seed + self.salt)
        self.window, self.most = window, min(window, most)
        options: dict[str, Any] = {"window": window, "max_tokens": self.most, "fold": self.fold}
        self.pairs = [self.pair(options) for _ in range(2)]

    def pair(self, options: dict[str, Any]) -> tuple[StateCache, TokenCache]:
        """A cache of the given sizes, and its model."""
        return samples.pair(self.specs, SLOTS, **options, checkpoint=torch.float64)

    @rule(which=caches, numbers=slot_lists, phases=st.none() | st.integers(0, 7))
    def load(self, which: int, numbers: list[int], phases: int | None) -> None:
        """Prefill hands over a state and convolution inputs, with a fold phase."""
        cache, model = self.pairs[which]
        n = len(numbers)
        states = [self.normal(n, *spec.state_shape) for spec in self.specs]
        conv = [self.normal(n, 3, 3) if spec.conv_channels else None for spec in self.specs]
        phase = None
        if phases is not None:
            phase = torch.tensor([(phases + i) % (self.window - self.most + 1) for i in range(n)])
        cache.load(samples.slots(*numbers), states, conv, phase=phase)
        for i, number in enumerate(numbers):
            inputs = [None if x is None else x[i] for x in conv]
            early = 0 if phase is None else int(phase[i])
            model.load(number, [x[i] for x in states], inputs, early)
        self.count("load")

    @rule(which=caches, rows=row_lists, tokens=st.integers(0, 7), discard=st.booleans())
    def step(
        self, which: int, rows: list[tuple[int, int, int]], tokens: int, discard: bool
    ) -> None:
        """A model step of ragged rows, some padded or empty; some of it is committed, or none."""
        tokens = tokens % self.most + 1
        numbers = [r[0] for r in rows]
        lengths = [min(r[1], tokens) for r in rows]
        kept = [r[2] % n + 1 if n else 0 for r, n in zip(rows, lengths, strict=True)]
        self.advance(which, numbers, tokens, lengths, None if discard else kept)

    @rule(which=caches, numbers=slot_lists, steps=st.integers(1, 12))
    def decode(self, which: int, numbers: list[int], steps: int) -> None:
        """Standard decoding: one token a step, always kept."""
        for _ in range(steps):
            ones = [1] * len(numbers)
            self.advance(which, numbers, 1, ones, ones)

    @rule(which=caches, numbers=slot_lists, steps=st.integers(1, 12))
    def speculate(self, which: int, numbers: list[int], steps: int) -> None:
        """Speculative decoding: other drafts, other acceptance and other rows in each step."""
        for _ in range(steps):
            order = [numbers[self.below(len(numbers))], *numbers, -1]
            order = list(dict.fromkeys(order))
            tokens = self.below(self.most) + 1
            lengths = [self.below(tokens + 1) for _ in order]
            kept = [self.below(n) + 1 if n else 0 for n in lengths]
            self.advance(which, order, tokens, lengths, kept)

    def advance(
        self,
        which: int,
        numbers: list[int],
        tokens: int,
        lengths: list[int],
        kept: list[int] | None,
    ) -> None:
        """One model step and its commit (kept None: its discard), in the cache and in the model."""
        cache, model = self.pairs[which]
        even = all(n == tokens for n in lengths)
        ticket = cache.begin(
            samples.slots(*numbers), tokens, None if even else torch.tensor(lengths)
        )
        drafts = model.begin(numbers, lengths)
        for index, spec in enumerate(self.specs):
            if spec.conv_channels:
                x = self.hide(self.normal(len(numbers), tokens, 3), numbers, lengths)
                arguments = index, x, self.weight, self.bias
                self.same(cache.convolve(ticket, *arguments), model.convolve(drafts, *arguments))
            inputs = samples.draw(
                spec, len(numbers), tokens, decays=DECAYS, generator=self.generator
            )
            parts = [None if x is None else self.hide(x, numbers, lengths) for x in inputs[:5]]
            parts.append(self.normal(spec.heads))
            self.same(
                cache.step(ticket, index, *parts),
                model.step(drafts, index, *parts),
            )
        self.count("fold", len(ticket._rows.folding))
        self.count("step")
        if kept is None:
            cache.discard(ticket)
            model.discard(drafts)
            self.count("discard")
        else:
            cache.commit(ticket, None if kept == lengths else torch.tensor(kept))
            model.commit(drafts, kept)
            self.count("commit")

    @rule(which=caches, numbers=st.lists(slot, min_size=1, max_size=SLOTS))
    def read(self, which: int, numbers: list[int]) -> None:
        """The exact state and the convolution's last inputs, at any moment, of any slots."""
        cache, model = self.pairs[which]
        for layer, states in enumerate(cache.materialize(samples.slots(*numbers))):
            self.same(states, torch.stack([model.materialize(n)[layer] for n in numbers]))
        for layer, inputs in enumerate(cache.conv_history(samples.slots(*numbers))):
            expected = [model.conv_history(n)[layer] for n in numbers]
            if inputs is not None:
                assert torch.equal(inputs, torch.stack([x for x in expected if x is not None]))
        self.count("materialize")
        self.count("conv_history")

    @rule(which=caches, numbers=st.lists(slot, min_size=SLOTS, max_size=SLOTS), onto=slot_lists)
    def copy(self, which: int, numbers: list[int], onto: list[int]) -> None:
        """Any slots onto any distinct ones: fan-out, permutation, overlap."""
        cache, model = self.pairs[which]
        numbers = numbers[: len(onto)]
        cache.copy(samples.slots(*numbers), samples.slots(*onto))
        model.copy(numbers, onto)
        self.count("copy")

    @rule(which=caches, numbers=slot_lists)
    def reset(self, which: int, numbers: list[int]) -> None:
        """Slots are fresh again."""
        cache, model = self.pairs[which]
        cache.reset(samples.slots(*numbers))
        for number in numbers:
            model.reset(number)
        self.count("reset")

    @rule(which=caches, onto=caches, numbers=slot_lists, shift=st.integers(0, SLOTS - 1))
    def move(self, which: int, onto: int, numbers: list[int], shift: int) -> None:
        """Export mid-window; import into other slots, of the same cache or of the other."""
        others = [(n + shift) % SLOTS for n in numbers]
        exported = self.pairs[which][0].export(samples.slots(*numbers))
        layers = [self.pairs[which][1].export(n) for n in numbers]
        self.pairs[onto][0].import_(samples.slots(*others), exported)
        for number, listed in zip(others, layers, strict=True):
            self.pairs[onto][1].import_(number, listed)
        self.count("export")
        self.count("import")

    def teardown(self) -> None:
        """At the end every slot of both caches is what its list says."""
        if hasattr(self, "pairs"):
            for which in range(2):
                if self.pairs[which][0]._open is not None:  # the program has failed in a step
                    continue
                self.read(which, list(range(SLOTS)))

    def normal(self, *shape: int) -> Tensor:
        """Normal numbers of the program's own generator."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)

    def below(self, limit: int) -> int:
        """A number in [0, limit) of the program's own generator."""
        return int(torch.randint(limit, (), generator=self.generator))

    def hide(self, x: Tensor, numbers: list[int], lengths: list[int]) -> Tensor:
        """The same [B, T, ...] with NaN in padded rows and behind each row's length."""
        x = x.clone()
        for i, (number, length) in enumerate(zip(numbers, lengths, strict=True)):
            x[i, length if number >= 0 else 0 :] = float("nan")
        return x

    def same(self, actual: Tensor, expected: Tensor) -> None:
        """Equal to 1e-9."""
        assert actual.shape == expected.shape
        assert tolerance.error(actual, expected) <= tolerance.EXACT

    def count(self, verb: str, times: int = 1) -> None:
        """Remember what was done."""
        self.counts[verb] += times


def run(machine: Callable[[], Programs], examples: int) -> None:
    """Run that many programs, the same ones every time."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=50,
            derandomize=True,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("fold", ["raw", "cached"])
@pytest.mark.parametrize("kind", [*KINDS, "hybrid"])
def test_any_program_gives_what_a_list_of_tokens_gives(kind: str, fold: Fold) -> None:
    """A random program agrees with the list-of-tokens model to 1e-9, invalid memory being NaN."""
    kinds = KINDS if kind == "hybrid" else (kind,)
    sizes = {"heads": 2, "key_dim": 4, "value_dim": 3, "conv_channels": 3, "conv_width": 4}
    specs = [samples.layer(name, **sizes, key_heads=2 if name == "kda" else 1) for name in kinds]
    if kind == "hybrid":  # layers differ in having a convolution, too
        specs[0] = samples.layer("mamba2", heads=2, key_heads=2)
    salt = [*KINDS, "hybrid"].index(kind)
    Programs.counts = Counter()
    run(lambda: Programs(specs, fold, salt), examples=25)
    counts = Programs.counts
    operations = sum(counts.values()) - counts["fold"]
    assert operations >= OPERATIONS_PER_TEST, counts
    assert counts["fold"] >= OPERATIONS_PER_TEST // 4, counts
