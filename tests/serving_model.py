"""An engine that serves from pages as vLLM does, without vLLM, and a list of tokens a request.

It owns what vLLM does: which page a request's sequence is in, prefill of a page's two first parts,
copies of whole pages at block boundaries, acceptance that is told by nothing but the next lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import samples
import tolerance
from lazystate.engines.vllm.batch import divide, spans_of
from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import Page, page_of
from lazystate.engines.vllm.support import Kind
from lazystate.ops.triton.conv import convolve_ring, turn
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.positions import Spans
from lazystate.ops.triton.settle import settle
from lazystate.reference import recurrence
from lazystate.reference.tokens import Slot, Token

HEADS, GROUPS, V, K, WIDTH = 2, 1, 5, 16, 4
CHANNELS = HEADS * V + 2 * GROUPS * K


def page(kind: Kind, window: int, drafts: int, **options: Any) -> Page:
    """The page of a small layer in FP32."""
    groups = HEADS if kind == "kda" else GROUPS
    value_dim = K if kind == "kda" else V
    channels = HEADS * value_dim + 2 * groups * K
    shapes = ((WIDTH - 1 + drafts, channels), (HEADS, value_dim, K))
    given = Options(window=window, **options)
    return page_of(kind, shapes, (torch.float32,) * 2, torch.float32, given, tokens=1 + drafts)


def bound(page: Page, blocks: int, device: str) -> list[Tensor]:
    """Pages of noise, NaN among it, and their parts as vLLM binds them."""
    size = sum(part.nbytes for part in page.stated)
    raw = torch.full((blocks, size + 64), -1, dtype=torch.int8, device=device)
    parts, offset = [], 0
    for part in page.stated:
        piece = raw[:, offset : offset + part.nbytes].view(part.dtype)
        parts.append(piece.unflatten(1, part.shape))
        offset += part.nbytes
    return parts


class Layer:
    """As much of a layer of vLLM's as decides and keeps: pages, and no model."""

    def __init__(self, page: Page, blocks: int, device: str) -> None:
        self.page, self.kv_cache = page, bound(page, blocks, device)
        self.named = page.named(self.kv_cache)

    def parts(self) -> dict[str, Tensor]:
        """As `Paged.parts`."""
        return self.named

    def pool(self) -> None:
        """The test's own."""


@dataclass
class Request:
    """A sequence: its page in every block of tokens that has one, and what it should hold.

    Attributes:
        length: tokens kept. column: the block of tokens whose page it is in.
    """

    slot: Slot
    length: int = 0
    column: int | None = None
    pages: dict[int, int] = field(default_factory=dict)


class Engine:
    """Requests of one layer, served from pages.

    Args:
        blocks: pages, the first of which is nobody's.
        block_size: tokens after which a request goes on in another page; None: never.
    """

    def __init__(
        self, page: Page, blocks: int, block_size: int | None, seed: int, device: str = "cpu"
    ) -> None:
        self.page, self.block_size, self.device = page, block_size, device
        self.generator = torch.Generator().manual_seed(seed)
        layer: Any = Layer(page, blocks, device)
        self.pages, self.parts = layer.kv_cache, layer.named
        self.pool = page.pool(self.parts, 0)
        self.group = Group([layer], 16, torch.device(device))
        channels = self.parts["conv"].shape[-1]
        self.spec = replace(page.spec, conv_channels=channels, conv_width=WIDTH)
        self.weight = torch.randn(channels, WIDTH, generator=self.generator)
        self.free = list(range(1, blocks))
        self.requests: dict[int, Request] = {}
        self.cached: list[tuple[int, int, Slot]] = []  # page, its position, and the sequence there

    def fresh(self) -> Slot:
        """A sequence without tokens."""
        inputs = torch.zeros(WIDTH - 1, self.spec.conv_channels, dtype=torch.float64)
        zeros = torch.zeros(self.spec.state_shape, dtype=torch.float64)
        return Slot(self.spec, zeros, inputs=inputs)

    def begin(self, name: int, hit: int | None = None) -> None:
        """A request, from nothing or from a cached prefix."""
        request = self.requests[name] = Request(self.fresh())
        if hit is not None and self.cached:
            number, position, slot = self.cached[hit % len(self.cached)]
            assert self.block_size is not None
            request.slot, request.length = slot, position
            request.column = position // self.block_size - 1
            request.pages[request.column] = number

    def end(self, name: int) -> None:
        """A request that is finished, or preempted: its pages are anybody's."""
        kept = {number for number, _, _ in self.cached}
        self.free += [n for n in self.requests.pop(name).pages.values() if n not in kept]

    def step(self, rows: list[tuple[int, int, int]]) -> None:
        """One model step. rows: name of a request (-1: padded), tokens, and how many are kept."""
        lengths = [n for _, n, _ in rows]
        self.enter([(name, n) for name, n, _ in rows if name >= 0])
        common = self._common(rows)
        short, long = divide(
            common.query_start_loc_cpu, self.page.tokens, torch.device(self.device)
        )
        total = sum(lengths)
        x = torch.randn(total, self.spec.conv_channels, generator=self.generator)
        inputs = samples.draw(self.spec, 1, total, generator=self.generator)
        convolved = out = None
        if long is not None:
            done = self.group.prefill(spans_of(long, common, common.blocks))
            settle(self.pool, done)
            turn(self.parts["conv"], done, WIDTH)
        if short is not None:
            longest = int(short.lengths.max())
            convolved, out = self.decode(spans_of(short, common, common.blocks), longest, x, inputs)
        starts, advanced = common.query_start_loc_cpu.tolist(), []
        for (name, n, kept), first in zip(rows, starts, strict=False):
            if name < 0:
                continue
            request, tokens = self.requests[name], _tokens(inputs, first, n)
            if n > self.page.tokens:
                kept = n
                self._prefill(request, tokens, x[first : first + n])
            else:
                assert convolved is not None and out is not None
                at = slice(first, first + n)
                self._check(request, tokens, x[at], convolved[at], out[at])
            request.slot = request.slot.append(tokens[:kept], x[first : first + kept].double())
            request.length += kept
            advanced.append((name, kept))
        self.leave(advanced)

    def decode(
        self, spans: Spans, longest: int, x: Tensor, inputs: samples.Inputs
    ) -> tuple[Tensor, Tensor]:
        """Convolution and recurrence of rows of at most `longest` tokens.

        Args:
            x: [tokens, C]. inputs: [1, tokens, ...].

        Returns:
            [tokens, C] and [tokens, HV, V], NaN where no row has a token.
        """
        decided = self.group.decode(spans, 1 if longest <= 1 else self.page.tokens)
        on = [y if y is None else y.to(self.device) for y in inputs]
        shape = (*on[0].shape[:2], *self.spec.state_shape[:2])
        out = torch.full(shape, float("nan"), device=self.device)
        ring, weight = self.parts["conv"], self.weight.to(self.device)
        given = x.to(self.device).unsqueeze(0)
        convolved = convolve_ring(ring, decided, given, weight, None, True)
        step(self.pool, decided, *on, out=out)
        return convolved[0].cpu(), out[0].cpu()

    def settle(self, name: int) -> None:
        """Check a request's page as prefill finds it: exact, and its ring empty."""
        request = self.requests[name]
        assert request.column is not None
        number = request.pages[request.column]
        length = torch.tensor([request.length + 1], dtype=torch.int32)
        common = self._metadata([1], length, torch.tensor([number], dtype=torch.int32))
        part, _ = divide(common.query_start_loc_cpu, 1, torch.device(self.device))
        assert part is not None
        done = self.group.prefill(spans_of(part, common, common.blocks))
        settle(self.pool, done)
        turn(self.parts["conv"], done, WIDTH)
        window, state = (x[number].cpu() for x in self.page.prefilled(self.parts))
        folds = request.length
        limit = tolerance.state(self.spec, self.page.window, torch.float32, folds)
        assert tolerance.error(state, request.slot.state()) <= limit
        assert torch.equal(window.double(), request.slot.history().T)
        cursor = self.parts["cursor"]
        cursor[number] = request.length  # what was settled is a prefill of no token

    def enter(self, rows: list[tuple[int, int]]) -> None:
        """The page of the block that a row's last token is in; vLLM copies to it. rows: name and
        tokens.
        """
        for name, tokens in rows:
            request, size = self.requests[name], self.block_size
            column = 0 if size is None else (request.length + tokens - 1) // size
            self._own(request, column)
            if request.column is not None and request.column != column:
                self._copy(request.pages[request.column], request.pages[column])
            request.column = column

    def leave(self, rows: list[tuple[int, int]]) -> None:
        """Keep the pages of blocks of tokens that are full. rows: name and tokens kept."""
        for name, kept in rows:
            request = self.requests[name]
            if (column := self._completed(request, kept)) is None:
                continue
            assert request.column is not None
            if column != request.column:
                self._copy(request.pages[request.column], request.pages[column])
            self._cache(request, column)

    def _own(self, request: Request, column: int) -> None:
        """See that a block of tokens has a page."""
        if column not in request.pages:
            request.pages[column] = self._page()

    def _completed(self, request: Request, kept: int) -> int | None:
        """The block that the last tokens have filled and that has a page of its own."""
        size = self.block_size
        if size is None:
            return None
        boundary = request.length // size * size
        column = boundary // size - 1
        prefilled = kept > self.page.tokens and boundary < request.length
        if boundary <= request.length - kept or prefilled or column not in request.pages:
            return None
        return column

    def _cache(self, request: Request, column: int) -> None:
        """Note what the page of a full block holds."""
        assert self.block_size is not None
        slot, boundary = request.slot, (column + 1) * self.block_size
        if behind := request.length - boundary:
            assert slot.inputs is not None
            slot = replace(
                slot, tokens=slot.tokens[:-behind], inputs=slot.inputs[:-behind], known=None
            )
        self.cached.append((request.pages[column], boundary, slot))

    def _prefill(self, request: Request, tokens: list[Token], x: Tensor) -> None:
        """As vLLM's kernels do: the state and the last inputs, from what is in the page."""
        assert request.column is not None
        number = request.pages[request.column]
        window, state = self.page.prefilled(self.parts)
        if request.length:
            found = replace(
                request.slot, tokens=(), known=None, initial=state[number].cpu().double()
            )
            history = window[number].cpu()
        else:
            found, history = self.fresh(), torch.zeros(WIDTH - 1, x.shape[1])
        state[number] = found.append(tokens, None).state().float().to(self.device)
        window[number] = torch.cat([history, x])[1 - WIDTH :].to(self.device)

    def _check(
        self, request: Request, tokens: list[Token], x: Tensor, convolved: Tensor, out: Tensor
    ) -> None:
        """Outputs of a short row against those of the list of tokens."""
        want = torch.stack(request.slot.outputs(tokens, None))
        folds = request.length + 1
        limit = tolerance.outputs(self.spec, self.page.window, torch.float32, folds)
        assert tolerance.error(out, want) <= limit
        want = recurrence.convolve(request.slot.history(), x, self.weight)
        limit = (WIDTH + 4) * tolerance.eps(torch.float32)
        assert tolerance.error(convolved, want) <= limit

    def _common(self, rows: list[tuple[int, int, int]]) -> Any:
        ends, pages = [], []
        for name, n, _ in rows:
            request = self.requests.get(name)
            ends.append(0 if request is None else request.length + n)
            pages.append(0 if request is None else request.pages[request.column or 0])
        end, blocks = (torch.tensor(x, dtype=torch.int32) for x in (ends, pages))
        return self._metadata([n for _, n, _ in rows], end, blocks)

    def _metadata(self, lengths: list[int], ends: Tensor, blocks: Tensor) -> Any:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        return SimpleNamespace(
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=ends.to(self.device),
            blocks=blocks.to(self.device),
        )

    def _page(self) -> int:
        if not self.free:  # vLLM evicts what is cached
            in_use = {n for request in self.requests.values() for n in request.pages.values()}
            out = [number for number, _, _ in self.cached if number not in in_use]
            self.cached = [entry for entry in self.cached if entry[0] not in out]
            self.free = list(dict.fromkeys(out))
        return self.free.pop(0)

    def _copy(self, source: int, target: int) -> None:
        for part in self.pages:
            part[target] = part[source]


def _tokens(inputs: samples.Inputs, first: int, n: int) -> list[Token]:
    q, k, v, log_decay, beta, _ = (None if x is None else x[0] for x in inputs)
    assert q is not None and k is not None and v is not None and log_decay is not None
    at = range(first, first + n)
    return [Token(q[t], k[t], v[t], log_decay[t], None if beta is None else beta[t]) for t in at]
