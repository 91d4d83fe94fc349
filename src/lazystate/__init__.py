"""Decode hybrid language models without touching the state."""

from lazystate.cache import StateCache, StepError, Ticket
from lazystate.ops import Traffic, count_traffic
from lazystate.spec import LayerSpec

__version__ = "0.1.0"

__all__ = ["LayerSpec", "StateCache", "StepError", "Ticket", "Traffic", "count_traffic"]
