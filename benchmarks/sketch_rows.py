"""What benchmarks/sketch.py has measured, by model and configuration, and ratios of it."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from page import ROOT

RESULTS = ROOT / "benchmarks" / "results"
MODELS = ("gdn", "kda", "mamba2")
ABSENT = "not measured"

Row = dict[str, Any]


@dataclass(frozen=True)
class Ratio:
    """KL of one configuration over another's, from the same streams.

    Attributes:
        value: of the means over streams. low, high: two standard errors of its logarithm around
            it, by the jackknife over streams; infinitely apart for one stream.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.3g}x"
        return f"{self.value:.3g}x ({self.low:.3g} to {self.high:.3g})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Of positive numbers, stream by stream."""

    def log(left_out: int | None) -> float:
        kept = [i for i in range(len(above)) if i != left_out]
        return math.log(sum(above[i] for i in kept) / sum(below[i] for i in kept))

    whole, count = log(None), len(above)
    if count < 2:
        return Ratio(math.exp(whole), 0.0, math.inf)
    without = [log(i) for i in range(count)]
    spread = 2 * math.sqrt((count - 1) * statistics.pvariance(without))
    return Ratio(math.exp(whole), math.exp(whole - spread), math.exp(whole + spread))


def verdict(ratios: Sequence[Ratio | None]) -> str:
    """Whether ratios are more than 1, by their errors, in all models that have one."""
    found = [each for each in ratios if each is not None]
    if not found:
        return ABSENT
    if all(each.low > 1 for each in found):
        return "yes"
    if all(each.high < 1 for each in found):
        return "the other way"
    return "in part" if any(each.low > 1 for each in found) else "not seen"


class Evidence:
    """One run's rows by (model, part, configuration); none where nothing has been measured."""

    def __init__(self, record: dict[str, Any] | None) -> None:
        self.record = record or {}
        rows = self.record.get("runs", [])
        self.rows: dict[tuple[str, str, str], Row] = {
            (row["model"], row["part"], row["config"]): row for row in rows
        }
        begun = {model for model, part, _ in self.rows if part == "main"}
        self.models = [model for model in MODELS if model in begun]

    def row(self, model: str, config: str, part: str = "main") -> Row | None:
        """One configuration of one model, if it was measured."""
        return self.rows.get((model, part, config))

    def end(self, model: str, config: str) -> Row | None:
        """What was found at the last N, if it is there and finite."""
        row = self.row(model, config)
        return None if row is None or row["points"][-1]["kl"] is None else row["points"][-1]

    def of(self, config: str) -> list[Row]:
        """A configuration's rows of all models that have it."""
        found = (self.row(model, config) for model in self.models)
        return [row for row in found if row is not None]

    def having(self, name: str) -> list[Row]:
        """All rows with an entry of that name, by model."""
        rows = [row for row in self.rows.values() if name in row]
        return sorted(rows, key=lambda row: MODELS.index(row["model"]))

    def cells(self, config: str) -> list[str]:
        """KL at the last N with its standard error, a cell a model."""
        rows = (self.row(model, config) for model in self.models)
        return [ABSENT if row is None else cell(row["points"][-1]) for row in rows]

    def span(self, config: str, name: str, form: str) -> str:
        """A number of a configuration, the smallest and the largest of the models."""
        return span([row[name] for row in self.of(config)], form)

    def ratio(self, model: str, above: str, below: str) -> Ratio | None:
        """KL of one configuration over that of another, where both are there."""
        ends = self.end(model, above), self.end(model, below)
        if ends[0] is None or ends[1] is None:
            return None
        return ratio(ends[0]["streams"], ends[1]["streams"])

    def made(self) -> str:
        """What was run, where, and what is lacking."""
        about = self.record
        where = "a CPU, one thread" if about["device"] == "cpu" else about["device"]
        ends = sorted({row["points"][-1]["n"] for model in self.models for row in self._of(model)})
        out = (
            f"\n{', '.join(self.models)}; N = {', '.join(f'{n:,}' for n in ends)}; "
            f"{about['streams']} pages behind prompts of {about['prompt']} tokens; torch "
            f"{about['torch']}, transformers {about['transformers']}, {where}, revision "
            f"{about['commit']}."
        )
        if lacking := [model for model in MODELS if model not in self.models]:
            out += f" Not measured yet: {', '.join(lacking)}."
        most = max((len(self._of(model)) for model in self.models), default=0)
        if short := [model for model in self.models if len(self._of(model)) < most]:
            out += f" Not all configurations yet: {', '.join(short)}."
        return out + "\n"

    def _of(self, model: str) -> list[Row]:
        return [row for key, row in self.rows.items() if key[:2] == (model, "main")]


def record(name: str) -> dict[str, Any] | None:
    """A file of results: a GPU's where there is one, else a CPU's."""
    paths = {path.parent.name: path for path in sorted(RESULTS.glob(f"*/{name}.json"))}
    gpus = [path for folder, path in paths.items() if folder != "cpu"]
    path = gpus[0] if gpus else paths.get("cpu")
    return None if path is None else json.loads(path.read_text("utf8"))


def kept() -> Evidence:
    """The run that the page is of."""
    return Evidence(record("sketch"))


def cell(point: Row) -> str:
    """KL and its standard error."""
    if point["kl"] is None:
        return "not finite"
    error = point["standard_error"]
    return f"{point['kl']:.1e}" + ("" if error is None else f" ± {error:.0e}")


def span(numbers: Sequence[float], form: str) -> str:
    """The smallest and the largest, or one where they read alike."""
    if not numbers:
        return ABSENT
    low, high = (format(pick(numbers), form) for pick in (min, max))
    return low if low == high else f"{low} to {high}"
