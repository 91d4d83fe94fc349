"""Counting the bytes of state that decoding moves, by the code that moves them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes of checkpoint, view and records moved so far (inputs and outputs of a step excluded).

    Attributes:
        read: bytes read.
        written: bytes written.
        tokens: tokens committed, summed over the rows of every model step.
    """

    read: int = 0
    written: int = 0
    tokens: int = 0

    @property
    def bytes_per_token(self) -> float:
        """Bytes moved for each committed token, over all layers; 0 before any token."""
        return (self.read + self.written) / self.tokens if self.tokens else 0.0


_active: ContextVar[Traffic | None] = ContextVar("lazystate_traffic", default=None)


def active() -> Traffic | None:
    """The counter of the innermost `count_traffic`, or None."""
    return _active.get()


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count the state bytes that every cache moves inside the `with` block.

    Counting reads cursors back to the host: use it to measure bytes, not time.
    """
    traffic = Traffic()
    token = _active.set(traffic)
    try:
        yield traffic
    finally:
        _active.reset(token)
