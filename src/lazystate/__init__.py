"""Decode hybrid language models without touching the state."""

from typing import TYPE_CHECKING, Any

from lazystate.cache import StateCache, StepError, Ticket
from lazystate.ops import Traffic, count_traffic
from lazystate.recommendation import recommend
from lazystate.spec import LayerSpec

if TYPE_CHECKING:
    from lazystate.engines.transformers import patch, patched, unpatch

__version__ = "0.1.0"

__all__ = [
    "LayerSpec",
    "StateCache",
    "StepError",
    "Ticket",
    "Traffic",
    "count_traffic",
    "patch",
    "patched",
    "recommend",
    "unpatch",
]


def __getattr__(name: str) -> Any:
    """The transformers engine's functions, at first use: importing transformers takes seconds."""
    if name in ("patch", "patched", "unpatch"):
        from lazystate.engines import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
