"""Synthetic rows that teach copying and key-value recall, and the test sets that measure them.

A row is a fixed number of tokens, filled with examples of three tasks. *Noise* examples hold a
passage of random tokens and copies of it: there only copying lowers the loss. *Repeat* examples
hold a passage of the training text, some filler, and the same passage again. *Recall* examples
state facts ("The code for the red lantern is 4821."), with or without filler between them, and
ask for them later ("What is the code for the red lantern? 4821."). Every token has a tag that
says what it is, so that the loss can weigh it. Everything is drawn from a seeded generator, so no
row is ever stored.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

import numpy as np

Encode = Callable[[str], list[int]]
Tokens = np.ndarray

TAGS = ("text", "noise", "copied noise", "copied text", "answer", "task")
TEXT, NOISE, COPIED_NOISE, COPIED_TEXT, ANSWER, TASK = range(len(TAGS))
PIECES = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z0-9\s]+|\s+|[0-9]")


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


def piecewise(encode: Encode) -> Encode:
    """The same encoding, from remembered pieces that the tokenizer never joins."""
    known = cache(encode)
    return lambda text: [token for piece in PIECES.findall(text) for token in known(piece)]


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


class Row:
    """A growing row: tokens and their tags."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.tags: list[int] = []

    def add(self, tokens: list[int], tag: int) -> None:
        """Append tokens that have one tag."""
        self.tokens += tokens
        self.tags += [tag] * len(tokens)


class Synthetic:
    """Generator of synthetic rows over a stream of text tokens."""

    def __init__(self, text: Tokens, encode: Encode, eos: int, seed: int, size: int = 4096) -> None:
        self.text, self.encode, self.eos, self.size = text, encode, eos, size
        self.rng = np.random.default_rng(seed)
        self.facts = Facts(self.rng)
        self.blank = encode("\n\n")

    def passage(self, length: int) -> list[int]:
        """A window of the text without document borders."""
        start = self.rng.integers(len(self.text) - length)
        window = self.text[start : start + length]
        return window[window != self.eos].tolist()

    def random_tokens(self, length: int) -> list[int]:
        """Tokens of the whole vocabulary, of a small part of it, or of a shuffled passage."""
        form = self.rng.integers(3)
        if form == 0:
            return self.rng.integers(1, self.size, length).tolist()
        if form == 1:
            few = self.rng.integers(1, self.size, self.log_uniform(8, 256))
            return few[self.rng.integers(len(few), size=length)].tolist()
        return self.rng.permutation(self.passage(length)).tolist()

    def log_uniform(self, low: int, high: int) -> int:
        """An integer drawn log-uniformly."""
        return int(np.exp(self.rng.uniform(np.log(low), np.log(max(high, low + 1)))))

    def noise(self, row: Row, room: int) -> None:
        """Random tokens and one to three copies of them, at once or behind some text."""
        length = self.log_uniform(8, max(room // 2, 9))
        passage = self.random_tokens(length)
        row.add(passage, NOISE)
        room -= length
        for _ in range(self.rng.integers(1, 4)):
            if room < length:
                return
            gap = self.log_uniform(1, room - length) if room - length > 8 else 0
            if gap > 4 and self.rng.random() < 0.5:
                row.add(self.passage(gap), TEXT)
                room -= gap
            row.add(passage[:1], NOISE)
            row.add(passage[1:], COPIED_NOISE)
            room -= length

    def repeat(self, row: Row, room: int) -> None:
        """A passage, filler of any length, and the passage again."""
        length = self.log_uniform(16, max(room // 3, 17))
        gap = self.log_uniform(1, max(room - 2 * length, 2))
        passage = self.passage(length)
        row.add(passage + self.blank, TEXT)
        if gap > 8:
            row.add(self.passage(gap) + self.blank, TEXT)
        row.add(passage[:4], TEXT)
        row.add(passage[4:], COPIED_TEXT)
        row.add(self.blank, TEXT)

    def recall(self, row: Row, room: int) -> None:
        """Facts, then questions about some of them in another order."""
        facts = self.facts.distinct(self.log_uniform(1, max(room // 40, 2)))
        filler = self.log_uniform(1, max((room - 40 * len(facts)) // len(facts), 2))
        filler = filler if self.rng.random() < 0.6 else 0
        for statement, _, answer in facts:
            row.add(self.encode(f"{statement} {answer}. "), TASK)
            if filler > 12:
                row.add(self.blank + self.passage(filler) + self.blank, TEXT)
        row.add(self.blank, TASK)
        asked = self.rng.permutation(len(facts))
        if self.rng.random() < 0.3:
            asked = asked[: self.rng.integers(1, len(facts) + 1)]
        restate = self.rng.random() < 0.25
        for index in asked:
            statement, question, answer = facts[index]
            row.add(self.encode(statement if restate else question), TASK)
            row.add(self.encode(f" {answer}."), ANSWER)
            row.add(self.encode("\n"), TASK)
        row.add(self.blank, TASK)

    def row(self, length: int, shares: tuple[float, float, float]) -> tuple[Tokens, Tokens]:
        """Tokens and tags of one row: examples of one or several sizes until the row is full.

        `shares` are those of noise, repeat and recall examples, and sum to one.
        """
        tasks = (self.noise, self.repeat, self.recall)
        row = Row()
        while (room := length - len(row.tokens)) > 64:
            room = room if self.rng.random() < 0.5 else self.rng.integers(64, room + 1)
            tasks[self.rng.choice(3, p=shares)](row, room)
            row.add([self.eos], TEXT)
        row.add(self.passage(length), TEXT)
        return np.asarray(row.tokens[:length]), np.asarray(row.tags[:length])


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
