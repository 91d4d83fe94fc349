"""Synthetic rows that teach copying and key-value recall, and the test sets that measure them.

A row is a fixed number of tokens. *Repeat* rows hold a passage of the training text, some filler,
and the same passage again. *Recall* rows state facts ("The code for the red lantern is 4821."),
with or without filler between them, and ask for them later ("What is the code for the red
lantern? 4821."). Everything is drawn from a seeded generator, so no row is ever stored.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Encode = Callable[[str], list[int]]
Tokens = np.ndarray


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


ADJECTIVES = words(
    "red blue green old small large broken silver golden wooden quiet bright dark heavy light "
    "round square narrow wide empty full northern southern eastern western first second last "
    "hidden lost new painted iron copper paper cold warm dusty polished crooked tall short grey "
    "white black secret upper lower inner outer ancient modern simple famous borrowed"
)
NOUNS = words(
    "lantern box door garden letter ship wagon bridge tower mirror clock engine barrel drawer key "
    "ladder basket window chair table carriage candle book map coin ring hammer bell boat cabin "
    "station library kitchen cellar stable orchard field mill harbour market chapel school office "
    "cupboard trunk blanket kettle bottle piano violin painting statue fountain gate lock shelf "
    "ticket parcel journal ledger compass anchor saddle lamp needle thread button jar"
)
NAMES = words(
    "Alice Martin Clara Henry Ruth Oscar Helen Victor Nora Peter Agnes Walter Edith Simon Laura "
    "Hugo Irene Felix Martha Arthur Julia Conrad Sylvia Edmund Flora Gilbert Hannah Leonard Mabel "
    "Nathan Olive Philip Rosa Samuel Theresa Ulrich Vera Wilfred Yvonne Daniel Esther George Lydia"
)
WORDS = words(
    "river mountain apple thunder meadow velvet copper falcon winter harvest marble shadow ribbon "
    "canyon pepper walnut ember island raven cotton bramble saffron glacier timber willow feather "
    "granite lemon comet barley orchid pebble copper lilac otter maple anvil cedar prairie lagoon"
)
CITIES = words(
    "London Paris Vienna Lisbon Dublin Boston Cairo Prague Geneva Madrid Naples Oslo Athens Berlin "
    "Delhi Quebec Havana Turin Bristol Hamburg Milan Bergen Seville Krakow York Bath"
)


class Facts:
    """Draws facts with distinct keys; a fact is (statement, question, answer)."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def word(self, words: tuple[str, ...]) -> str:
        """One word of a list."""
        return words[self.rng.integers(len(words))]

    def number(self) -> str:
        """A number of three to six digits."""
        return str(self.rng.integers(100, 10 ** self.rng.integers(3, 7)))

    def fact(self) -> tuple[str, str, str]:
        """One random fact."""
        thing = f"{self.word(ADJECTIVES)} {self.word(NOUNS)}"
        name = self.word(NAMES)
        kind = self.rng.integers(6)
        if kind == 0:
            answer = self.number()
            return f"The code for the {thing} is", f"What is the code for the {thing}?", answer
        if kind == 1:
            answer = self.word(WORDS)
            return f"The password of {name} is", f"What is the password of {name}?", answer
        if kind == 2:
            answer = self.word(CITIES)
            return f"The {thing} was made in", f"Where was the {thing} made?", answer
        if kind == 3:
            answer = self.word(NAMES)
            return f"The owner of the {thing} is", f"Who is the owner of the {thing}?", answer
        if kind == 4:
            answer = f"{self.word(ADJECTIVES)} {self.word(NOUNS)}"
            return f"In the room of {name} there is a", f"What is in the room of {name}?", answer
        answer = self.number()
        return f"The number of {name} is", f"What is the number of {name}?", answer

    def distinct(self, count: int) -> list[tuple[str, str, str]]:
        """Facts with distinct keys."""
        facts: dict[str, tuple[str, str, str]] = {}
        for _ in range(4 * count):
            fact = self.fact()
            facts.setdefault(fact[1], fact)
            if len(facts) == count:
                break
        return list(facts.values())


class Synthetic:
    """Generator of synthetic rows over a stream of text tokens."""

    def __init__(self, text: Tokens, encode: Encode, eos: int, seed: int) -> None:
        self.text, self.encode, self.eos = text, encode, eos
        self.rng = np.random.default_rng(seed)
        self.facts = Facts(self.rng)
        self.blank = encode("\n\n")

    def passage(self, length: int) -> list[int]:
        """A window of the text without document borders."""
        start = self.rng.integers(len(self.text) - length)
        window = self.text[start : start + length]
        return window[window != self.eos].tolist()

    def log_uniform(self, low: int, high: int) -> int:
        """An integer drawn log-uniformly."""
        return int(np.exp(self.rng.uniform(np.log(low), np.log(max(high, low + 1)))))

    def repeat(self, room: int) -> list[int]:
        """A passage, filler of any length, and the passage again."""
        length = self.log_uniform(16, max(room // 3, 17))
        gap = self.log_uniform(1, max(room - 2 * length, 2))
        passage = self.passage(length)
        middle = self.blank + self.passage(gap) + self.blank if gap > 8 else self.blank
        return passage + middle + passage + self.blank

    def recall(self, room: int) -> list[int]:
        """Facts, then questions about some of them in another order."""
        count = self.log_uniform(1, max(room // 40, 2))
        facts = self.facts.distinct(count)
        filler = self.log_uniform(1, max((room - 40 * count) // count, 2))
        filler = filler if self.rng.random() < 0.6 else 0
        out: list[int] = []
        for statement, _, answer in facts:
            out += self.encode(f"{statement} {answer}. ")
            if filler > 12:
                out += self.blank + self.passage(filler) + self.blank
        out += self.blank
        asked = self.rng.permutation(len(facts))[: self.rng.integers(1, len(facts) + 1)]
        restate = self.rng.random() < 0.25
        for index in asked:
            statement, question, answer = facts[index]
            out += self.encode(f"{statement if restate else question} {answer}.\n")
        return out + self.blank

    def row(self, length: int) -> Tokens:
        """One row: examples of one or several sizes until the row is full."""
        out: list[int] = []
        while length - len(out) > 64:
            room = length - len(out)
            room = room if self.rng.random() < 0.6 else self.rng.integers(64, room + 1)
            out += self.repeat(room) if self.rng.random() < 0.4 else self.recall(room)
            out.append(self.eos)
        out += self.passage(length)
        return np.asarray(out[:length], dtype=np.int64)


def recall_test(
    text: Tokens, encode: Encode, eos: int, count: int, facts: int, length: int, seed: int
) -> list[tuple[list[int], list[int]]]:
    """Prompts with `facts` facts spread over `length` tokens of filler, each with one question."""
    source = Synthetic(text, encode, eos, seed)
    tests = []
    for _ in range(count):
        drawn = source.facts.distinct(facts)
        stated = [encode(f"{statement} {answer}. ") for statement, _, answer in drawn]
        filler = max((length - sum(map(len, stated)) - 24) // facts - 2, 0)
        prompt: list[int] = []
        for tokens in stated:
            prompt += tokens
            prompt += source.blank + source.passage(filler) + source.blank if filler > 4 else []
        _, question, answer = drawn[source.rng.integers(facts)]
        full = encode(f"{question} {answer}.\n")
        tail = encode(question)
        tests.append((prompt + source.blank + tail, full[len(tail) : -1]))
    return tests


def copy_test(
    text: Tokens, eos: int, count: int, length: int, gap: int, seed: int, blank: list[int]
) -> list[tuple[list[int], list[int]]]:
    """A passage of unseen text, filler, the passage's first 8 tokens, and the rest as target."""
    rng = np.random.default_rng(seed)
    tests = []
    for _ in range(count):
        start, other = rng.integers(len(text) - length - gap, size=2)
        passage = [int(t) for t in text[start : start + length] if t != eos]
        filler = [int(t) for t in text[other : other + gap] if t != eos]
        prompt = passage + blank + filler + blank + passage[:8]
        tests.append((prompt, passage[8:]))
    return tests
