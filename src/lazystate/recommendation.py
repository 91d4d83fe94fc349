"""Which checkpoint, view and rounding a layer should have, by recorded evidence.

A pure function of the layer's kind, the error or the bytes that are wanted, window and length. The
evidence is `recommendation.json`: KL divergences from FP32 states of the shipped models, drawn by
`benchmarks/low_precision.py` from what was measured (docs/low_precision.md). What it expects of a
state is the sum of two parts, which no measured pair of them exceeds:

    expected = KL(view of FP32) + KL(checkpoint alone) * max(1, tokens / N) * max(1, 16 / L)

A view is read and forgotten: its part stays. A checkpoint's rounding stays in the state; rounded
stochastically its variance grows at most in proportion to the number of folds, which is the law's
limit for slow decays (ReplaySSM App. C.6). A bias may grow faster, so that rounding to nearest is
recommended for no more tokens than were measured.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import Any, Literal

from lazystate.formats import Rounding
from lazystate.planner import traffic
from lazystate.spec import LayerSpec

Kind = Literal["mamba2", "gdn", "kda"]
Error = Literal["exact", "close", "loose"]

# An error class as a multiple of the KL that bfloat16 activations make by themselves.
CLASSES: dict[Error, float] = {"exact": 0.0, "close": 1.0, "loose": 10.0}
LONGEST = 131_072  # tokens, the longest text of the paper's experiments

_KINDS: dict[tuple[str, bool, bool], Kind] = {
    ("scalar", False, True): "mamba2",
    ("scalar", True, True): "gdn",
    ("channel", True, True): "kda",
}


@dataclass(frozen=True)
class Measured:
    """A recorded KL in nats, mean over streams, and the standard error of that mean."""

    kl: float
    error: float

    def __str__(self) -> str:
        return f"{self.kl:.1e} ± {self.error:.0e}"


@dataclass(frozen=True)
class Evidence:
    """What was recorded for one kind of layer.

    Attributes:
        kind: of the layers of the shipped model of that name.
        tokens: N, at which `states` and `bfloat16` were measured. window: of `states`.
        states: KL by what `lazystate evaluate kl` calls the state.
        bfloat16: KL of the model with bfloat16 weights and activations and FP32 states.
        windows: KL of a view of an FP32 checkpoint, by view and window, all at one N.
    """

    kind: Kind
    tokens: int
    window: int
    states: dict[str, Measured]
    bfloat16: Measured
    windows: dict[str, dict[int, float]]

    @classmethod
    @lru_cache
    def of(cls, kind: Kind) -> Evidence:
        """The record of the package."""
        record = json.loads(files("lazystate").joinpath("recommendation.json").read_text("utf8"))
        own: dict[str, Any] = record["layers"][kind]
        return cls(
            kind,
            record["tokens"],
            record["window"],
            {state: Measured(*each) for state, each in own["states"].items()},
            Measured(*own["bfloat16"]),
            {
                view: {int(window): kl for window, kl in each.items()}
                for view, each in own["windows"].items()
            },
        )


@dataclass(frozen=True)
class Recommendation:
    """How to keep a layer's states, and why; `str` says it in a sentence.

    Attributes:
        checkpoint, view, rounding: as of `StateCache`; see `options`.
        window, tokens: what it was asked for.
        expected: KL in nats after so many tokens, by the module's formula. allowed: most that was
            wanted, inf if only bytes were. most: bytes that were wanted at most.
        nbytes: state and record bytes for a committed token of the layer; of_plain: as a part of
            those of conventional decoding with FP32 states.
        evidence: of the layer's kind.
    """

    checkpoint: str
    view: str | None
    rounding: Rounding
    window: int
    tokens: int
    expected: float
    allowed: float
    most: float
    nbytes: float
    of_plain: float
    evidence: Evidence

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `StateCache` and `lazystate.patch`."""
        names = ("checkpoint", "view", "rounding", "window")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def state(self) -> str:
        """What `lazystate evaluate kl` calls it."""
        nearest = ":nearest" if _rounds(self.checkpoint) and self.rounding == "nearest" else ""
        return self.checkpoint + (f",{self.view}" if self.view else "") + nearest

    def __str__(self) -> str:
        what = f"checkpoint {self.checkpoint}"
        what += f", view {self.view}" if self.view else ""
        what += f", rounding {self.rounding}" if _rounds(self.checkpoint) else ""
        activations = f"(bfloat16 activations make {_nats(self.evidence.bfloat16.kl)})"
        asked = f"the fewest for an error of at most {_nats(self.allowed)} nats {activations}"
        if math.isinf(self.allowed):
            asked = f"the least error within {self.most:,.0f} bytes a token"
        seen = self.evidence.states.get(self.state)
        measured = (
            "" if seen is None else f"{seen} measured after {self.evidence.tokens:,} tokens, "
        )
        return (
            f"{what}: {self.of_plain:.3f} of the bytes that conventional FP32 states move (window "
            f"{self.window}), {asked}; KL from FP32 states on the shipped {self.evidence.kind} "
            f"model: {measured}{_nats(self.expected)} expected after {self.tokens:,}"
        )


def recommend(
    layer: LayerSpec,
    *,
    error: Error | float | None = None,
    nbytes: float | None = None,
    window: int = 16,
    tokens: int = LONGEST,
) -> Recommendation:
    """Recommend a checkpoint, a view and a rounding: `StateCache(layer, 4, **found.options)`.

    With an error, the fewest bytes that are expected to keep it; with bytes alone, the least
    expected error that they allow.

    Args:
        layer: of Mamba-2, Gated DeltaNet or Kimi Delta Attention.
        error: KL from FP32 states, in nats: a number, or a class of error. "exact": FP32 states.
            "close": no more than bfloat16 activations make by themselves. "loose": ten times that.
            None: "close", or any if bytes are given.
        nbytes: most state and record bytes for a token of this layer, as `planner.traffic` counts
            them; None: any.
        window: L, 1 or more. tokens: most tokens that a request decodes.

    Raises:
        ValueError: for a layer of which there is no evidence, an argument out of range, or if no
            recorded state keeps both bounds.
    """
    evidence = Evidence.of(_kind(layer))
    for name, given in (("window", window), ("tokens", tokens)):
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ValueError(f"{name} must be an int of at least 1, got {given!r}")
    if nbytes is not None and not nbytes > 0:
        raise ValueError(f"nbytes must be above 0, got {nbytes}")
    allowed = _allowed(error, nbytes, evidence)
    most = math.inf if nbytes is None else nbytes
    plain = traffic(layer, "plain").total
    found = []
    for checkpoint, view, rounding in _candidates(evidence, window, tokens):
        moved = traffic(layer, "replay", window=window, checkpoint=checkpoint, view=view).total
        kl = _expected(evidence, checkpoint, view, rounding, window, tokens)
        kept = checkpoint, view, rounding, window, tokens
        found.append(Recommendation(*kept, kl, allowed, most, moved, moved / plain, evidence))
    fit = [one for one in found if one.expected <= allowed and one.nbytes <= most]
    if not fit:
        cheapest = min(found, key=lambda one: (one.expected > allowed, one.nbytes))
        raise ValueError(
            f"no recorded state keeps error ({_nats(allowed)}) and nbytes ({nbytes}) at window "
            f"{window}: with this error {cheapest.state} takes the fewest bytes, "
            f"{cheapest.nbytes:,.0f}; allow more of one"
        )
    if nbytes is not None and error is None:
        return min(fit, key=lambda one: (one.expected, one.nbytes))
    return min(fit, key=lambda one: (one.nbytes, one.expected))


def _kind(layer: LayerSpec) -> Kind:
    known = _KINDS.get((layer.decay, layer.erase, layer.beta))
    if known is None:
        raise ValueError(
            "layer must be of Mamba-2, Gated DeltaNet or Kimi Delta Attention, got decay "
            f"{layer.decay!r}, erase {layer.erase}, beta {layer.beta}: no error was measured for "
            "such a layer; choose checkpoint and view yourself"
        )
    return known


def _allowed(error: Error | float | None, nbytes: float | None, evidence: Evidence) -> float:
    """Most KL in nats."""
    if error is None:
        if nbytes is not None:
            return math.inf
        error = "close"
    if isinstance(error, str):
        if error not in CLASSES:
            raise ValueError(
                f"error must be one of {', '.join(CLASSES)}, or nats of KL, got {error!r}"
            )
        return CLASSES[error] * evidence.bfloat16.kl
    if not error >= 0:
        raise ValueError(f"error must be nats of KL, 0 or more, got {error}")
    return float(error)


def _candidates(evidence: Evidence, window: int, tokens: int) -> list[tuple[str, str | None, Any]]:
    """(checkpoint, view, rounding) of everything that was measured, at this window and length."""
    alone = [state.partition(":") for state in evidence.states if "," not in state]
    checkpoints = [("fp32", "stochastic")] + [
        (form, rounding or "stochastic")
        for form, _, rounding in alone
        if form != "fp32" and not (rounding and tokens > evidence.tokens)
    ]
    views: list[str | None] = [None]
    views += [name for name, by in evidence.windows.items() if window >= min(by)]
    return [(form, view, rounding) for form, rounding in checkpoints for view in views]


def _expected(
    evidence: Evidence,
    checkpoint: str,
    view: str | None,
    rounding: Rounding,
    window: int,
    tokens: int,
) -> float:
    """KL in nats by the module's formula; exact states have none, whatever additions round."""
    kl = 0.0
    if view is not None:
        by = evidence.windows[view]
        near = max(known for known in by if known <= min(window, evidence.window))
        kl += evidence.states[f"fp32,{view}"].kl * by[near] / by[evidence.window]
    if _rounds(checkpoint):
        state = checkpoint if rounding == "stochastic" else f"{checkpoint}:nearest"
        longer = max(1.0, tokens / evidence.tokens) * max(1.0, evidence.window / window)
        kl += evidence.states[state].kl * longer
    return kl


def _rounds(checkpoint: str) -> bool:
    return checkpoint != "fp32"


def _nats(kl: float) -> str:
    if math.isinf(kl):
        return "any"
    return f"{kl:.1e}" if kl else "0"
