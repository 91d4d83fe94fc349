"""Pages with views: what they hold, and steps that give a cache's numbers bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lazystate import StateCache, gates
from lazystate.engines.vllm.group import Group
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import ALIGN, Page, page_of
from lazystate.engines.vllm.sketches import Sketches, sketches_of
from lazystate.engines.vllm.support import Kind
from lazystate.engines.vllm.widened import widened
from lazystate.formats import FORMATS
from lazystate.ops.states import States
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.positions import Spans
from lazystate.ops.triton.settle import settle
from lazystate.philox import state_bits
from lazystate.shipped import model_folder
from lazystate.sketch.calibration_file import Calibration, Origin
from samples import slots
from test_sketch_view import basis
from test_vllm_page import BLOCKS, DEVICE, HEADS, K, V, group_of, raw_inputs, small, spans
from tolerance import error
from tolerance import outputs as output_bound
from tolerance import state as state_bound

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
LAYER = 2  # the number of the layer under test
PROMPT = 5  # tokens
SLOW = pytest.mark.slow


def calibration(kind: Kind, heads: int = HEADS) -> Calibration:
    """Of two layers; a basis for each head, and heads that differ in what a rank is worth."""
    origin = Origin("tiny", (0, LAYER), V, 16, kind != "mamba2")
    worth = torch.linspace(0.1, 0.95, 2 * heads).view(2, heads, 1)
    paired = 10 * worth ** torch.arange(7.0)
    return Calibration(origin, omega=basis(2, heads, K, 6).float(), paired=paired)


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """The file of a Gated DeltaNet's calibration."""
    path = tmp_path / "calibration.safetensors"
    calibration("gdn").save(path)
    return str(path)


def options_of(view: str, kind: Kind, folder: Path) -> dict[str, Any]:
    """Options for a view; for a sketch with a calibration of the layer."""
    if view != "sketch":
        return {"view": view}
    path = folder / f"{kind}.safetensors"
    calibration(kind).save(path)
    return {"view": view, "calibration": str(path), "mean_rank": 4}


def prologue_of(kind: Kind) -> gates.Prologue:
    """Random weights of a layer's gates."""
    biases = torch.randn(HEADS * (K if kind == "kda" else 1), device=DEVICE)
    named = "kda_softplus" if kind == "kda" else kind
    return gates.Prologue(named, torch.randn(HEADS, device=DEVICE), biases)


@pytest.mark.parametrize("view", ["fp16", "fp8", "nvfp4", "int4", "int2", "sketch"])
def test_a_view_lies_in_the_page_aligned_and_at_its_size(view: str, tmp_path: Path) -> None:
    """The parts are those of the format, each at a vector load's address."""
    page = small(kind="gdn", **options_of(view, "gdn", tmp_path))
    held = [part for part in page.parts if part.name.startswith("view.")]
    assert [part.name for part in page.parts][:2] == ["conv", "state"]
    if view != "sketch":
        assert sum(part.nbytes for part in held) == HEADS * FORMATS[view].nbytes(V, K)
    offset = 0
    for part in page.parts:
        assert part.name == "pad" or offset % ALIGN == 0
        offset += part.nbytes


PROGRAMS = [
    ("gdn", "nvfp4", "fp8"),
    ("mamba2", "sketch", "fp16"),
    ("gdn", "sketch", "fp32"),
    pytest.param("mamba2", "nvfp4", "fp32", marks=SLOW),
    pytest.param("gdn", "int2", "bf16", marks=SLOW),
    pytest.param("gdn", "fp16", "nvfp4", marks=SLOW),
    pytest.param("mamba2", "fp8", "fp8", marks=SLOW),
    pytest.param("kda", "fp8", "fp32", marks=SLOW),
    pytest.param("kda", "sketch", "fp32", marks=SLOW),
    pytest.param("kda", "bf16", "fp16", marks=SLOW),
    pytest.param("gdn", "int8", "fp32", marks=SLOW),
]


@pytest.mark.parametrize(("kind", "view", "checkpoint"), PROGRAMS)
def test_blocks_decode_as_a_cache_with_the_same_view(
    kind: Kind, view: str, checkpoint: str, tmp_path: Path
) -> None:
    """A window and a fold, padded rows among others: the same bits, seeds included."""
    options = options_of(view, kind, tmp_path) | {"checkpoint": checkpoint, "seed": 3}
    page = small(kind=kind, **options)
    group, parts = group_of(page)
    pool = page.pool(parts, LAYER)
    cache = cache_of(page, "triton", LAYER)
    exact = cache_of(page, "torch", LAYER)
    prologue = prologue_of(kind)
    skip = torch.randn(HEADS, device=DEVICE) if kind == "mamba2" else None
    start = torch.randn(2, *page.spec.state_shape)
    prefill(page, parts, group, start, (3, 1))
    for each in (cache, exact):
        load(each, start, (3, 1))
    for number in range(page.window + 3):  # the view is made, read, made again and read
        blocks = [3, 0, 1] if number % 3 else [1, 3, 0]
        inputs = raw_inputs(3, kind)
        rows = group.decode(spans(blocks, [PROMPT + number + 1 if b else 0 for b in blocks]), 1)
        out = torch.zeros(1, 3, HEADS, V, device=DEVICE)
        step(pool, rows, *inputs, skip, prologue, out=out)
        out, inputs = out.transpose(0, 1), [x if x is None else x.transpose(0, 1) for x in inputs]
        at = slots(*(b if b else -1 for b in blocks)).to(DEVICE)
        cache._cursors.writes.fill_(PROMPT + number)  # a page rounds by position
        ticket = cache.begin(at)
        want = cache.step(ticket, 0, *inputs, skip=skip, prologue=prologue)
        cache.commit(ticket)
        assert torch.equal(out, want)
        if number == 0:  # reads what prefill has left
            want = exact.step(exact.begin(at), 0, *inputs, skip=skip, prologue=prologue)
            assert error(out, want) <= output_bound(page.spec, page.window, torch.float32, 0)
    stored = cache.export(slots(1, 3).to(DEVICE))
    for name, part in (pool.view.tensors() | pool.states.tensors("checkpoint")).items():
        kept, want = part[[1, 3]], stored[f"0.{name}"]
        written = kept == kept  # nothing is behind a head's rank, where a cache has zeros
        assert torch.equal(kept[written], want[written]) and not want[~written].any(), name


@pytest.mark.parametrize(
    ("kind", "view"), [("gdn", "nvfp4"), pytest.param("mamba2", "sketch", marks=SLOW)]
)
def test_drafts_are_verified_by_a_view_as_a_cache_does(
    kind: Kind, view: str, tmp_path: Path
) -> None:
    """Ragged drafts, some kept, from the first step after a prefill over a fold: the same bits."""
    drafts, options = 2, options_of(view, kind, tmp_path)
    shapes = ((3 + drafts, HEADS * V + 2 * 2 * K), (HEADS, V, K))
    given = Options(window=5, checkpoint="fp16", **options)
    page = page_of(kind, shapes, (torch.float32,) * 2, torch.float32, given, tokens=1 + drafts)
    group, parts = group_of(page)
    pool, cache = page.pool(parts, LAYER), cache_of(page, "triton", LAYER)
    start = torch.randn(2, *page.spec.state_shape)
    prefill(page, parts, group, start, (3, 1))
    load(cache, start, (3, 1))
    length, prologue = [PROMPT, PROMPT], prologue_of(kind)
    for number in range(4):
        taken = [1 + (number + row) % 3 for row in range(2)]
        kept = [1 + number % taken[row] for row in range(2)]
        flat = raw_inputs(sum(taken), kind)
        ends = torch.tensor(taken).cumsum(0).int().to(DEVICE)
        starts = torch.cat([ends.new_zeros(1), ends[:-1]])
        blocks = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE)
        after = torch.tensor(length, device=DEVICE).int() + (ends - starts)
        rows = group.decode(Spans(blocks, starts, ends, after), 1 + drafts)
        out = step(pool, rows, *flat, None, prologue)[0]
        padded = [None if x is None else _padded(x[0], taken, 1 + drafts) for x in flat]
        for row, slot in enumerate((3, 1)):
            cache._cursors.writes[slot] = length[row]  # a page rounds by position
        counted = torch.tensor(taken, device=DEVICE)
        ticket = cache.begin(slots(3, 1).to(DEVICE), 1 + drafts, counted)
        want = cache.step(ticket, 0, *padded, prologue=prologue)
        cache.commit(ticket, torch.tensor(kept, device=DEVICE))
        assert torch.equal(out, torch.cat([want[row, :n] for row, n in enumerate(taken)]))
        length = [n + more for n, more in zip(length, kept, strict=True)]


def _padded(x: Tensor, lengths: list[int], tokens: int) -> Tensor:
    """Rows of a flat tensor as [B, T, ...], NaN behind their lengths."""
    out = x.new_full((len(lengths), tokens, *x.shape[1:]), float("nan"))
    for row, part in enumerate(x.split(lengths)):
        out[row, : len(part)] = part
    return out


def cache_of(page: Page, backend: str, layer: int) -> StateCache:
    """A cache that stores what a page stores, its one layer under a model's number."""
    storage = page.storage
    view = storage.view
    if isinstance(view, Sketches):
        origin = replace(view.calibration.origin, layers=(0,))
        cut = {name: x[1:] for name, x in view.calibration.tensors().items()}
        sketch = replace(view.sketch, omega=view.sketch.omega[1:], ranks=view.sketch.ranks[1:])
        view = Sketches(replace(view.calibration, origin=origin, **cut), sketch, 1)
    else:
        view = None if view is None else view.name
    cache = StateCache(
        page.spec,
        BLOCKS,
        window=page.window,
        max_tokens=page.tokens,
        checkpoint=storage.checkpoint.name,
        view=view,
        rounding=storage.rounding,
        seed=storage.seed,
        device=DEVICE,
        backend=backend,
    )
    states = cache._pools[0].states
    if states.key is not None:
        cache._pools[0].states = replace(states, key=(storage.seed, layer))
    return cache


def prefill(
    page: Page, parts: dict[str, Tensor], group: Group, states: Tensor, blocks: tuple[int, ...]
) -> None:
    """What vLLM's prefill does to blocks: their rings are empty, and it writes their states."""
    rows = group.prefill(spans(list(blocks), [PROMPT] * len(blocks), PROMPT))
    pool = page.pool(parts, LAYER)
    if page.widened:
        with widened(parts["conv"], pool.states, rows, page.state) as (conv, wide):
            assert conv.shape[0] == wide.shape[0] == len(blocks) + 1
            wide[1:] = states.to(DEVICE)
    else:
        pool.checkpoint[list(blocks)] = states.to(DEVICE)


def load(cache: StateCache, states: Tensor, at: tuple[int, ...]) -> None:
    """The same states in a cache, which reads them, and makes the views, in its first step."""
    cache._cursors.writes.fill_(PROMPT)
    cache.load(slots(*at).to(DEVICE), [states.to(DEVICE)])
    cache._cursors.limit[slots(*at).to(DEVICE)] = 0


def test_a_prompt_that_goes_on_finds_the_exact_state_and_gets_a_new_view(tmp_path: Path) -> None:
    """Records are folded into the checkpoint before prefill, and the step after it reads that."""
    page = small(kind="gdn", view="int2")
    group, parts = group_of(page)
    pool, prologue = page.pool(parts, LAYER), prologue_of("gdn")
    exact = StateCache(page.spec, BLOCKS, window=page.window, device=DEVICE, backend="torch")
    start = torch.randn(1, *page.spec.state_shape)
    prefill(page, parts, group, start, (2,))
    exact.load(slots(2).to(DEVICE), [start])
    for number in range(3):
        inputs = raw_inputs(1, "gdn")
        rows = group.decode(spans([2], [PROMPT + number + 1]), 1)
        step(pool, rows, *inputs, None, prologue)
        ticket = exact.begin(slots(2).to(DEVICE))
        exact.step(ticket, 0, *inputs, prologue=prologue)
        exact.commit(ticket)
    settle(pool, group.prefill(spans([2], [PROMPT + 3 + 4], 4)))
    (want,) = exact.materialize(slots(2).to(DEVICE))
    assert error(pool.checkpoint[[2]], want) <= state_bound(
        page.spec, page.window, torch.float32, 1
    )
    written = torch.randn(page.spec.state_shape, device=DEVICE)  # by prefill, from that
    pool.checkpoint[2] = written
    settle(pool, group.prefill(spans([2], [PROMPT + 9], 2)))  # another chunk: nothing is held
    assert torch.equal(pool.checkpoint[2], written)
    fresh = StateCache(page.spec, BLOCKS, window=page.window, device=DEVICE, backend="torch")
    fresh.load(slots(2).to(DEVICE), [written[None]])
    inputs = raw_inputs(1, "gdn")
    out = step(pool, group.decode(spans([2], [PROMPT + 10]), 1), *inputs, None, prologue)
    want = fresh.step(fresh.begin(slots(2).to(DEVICE)), 0, *inputs, prologue=prologue)
    assert error(out, want) <= output_bound(page.spec, page.window, torch.float32, 0)
    kept = FORMATS["int2"].encode(written[None])
    for name, part in kept.items():
        assert torch.equal(pool.view.states.parts[name][[2]], part)


@pytest.mark.parametrize("checkpoint", ["fp8", "nvfp4", "fp16"])
def test_a_prefill_in_chunks_finds_what_it_has_left(checkpoint: str) -> None:
    """Wide copies are of the pages' states and inputs; what is written is rounded once."""
    page = small(kind="gdn", checkpoint=checkpoint, seed=5)
    group, parts = group_of(page)
    pool = page.pool(parts, LAYER)
    states, conv = torch.randn(2, *page.spec.state_shape), parts["conv"]
    exact = States(pool.states.form, pool.states.shape, pool.states.parts, (5, LAYER))
    for end in (PROMPT, 2 * PROMPT):
        rows = group.prefill(spans([2, 4], [end] * 2, PROMPT))
        with widened(conv, pool.states, rows, page.state) as (inputs, wide):
            assert wide.dtype == torch.float32
            if end > PROMPT:
                kept = exact.read(torch.tensor([2, 4], device=DEVICE))
                assert torch.equal(wide[1:], kept) and bool((inputs[1:] == PROMPT).all())
            wide[1:], inputs[1:] = end * states.to(DEVICE), end
        assert bool((conv[[2, 4]] == end).all())
        bits = state_bits((5, LAYER), torch.tensor([2, 4]), torch.tensor([end] * 2), exact.shape)
        want = exact.form.encode(end * states, bits)
        for name, part in want.items():
            assert torch.equal(exact.parts[name][[2, 4]].cpu(), part)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_sketches_divide_with_the_heads_and_pages_stay_alike(devices: int, tmp_path: Path) -> None:
    """Every device reads its own heads' bases and ranks, and all pages have one size."""
    heads = 8
    path = tmp_path / "c.safetensors"
    calibration("gdn", heads).save(path)
    own = heads // devices
    shapes = ((3, own * V + 2 * own * K), (own, V, K))
    options = Options(view="sketch", calibration=str(path), mean_rank=4)
    page = page_of("gdn", shapes, (torch.float32,) * 2, torch.float32, options, devices)
    whole = sketches_of(str(path), 4.0, devices).sketch
    for row, layer in enumerate((0, LAYER)):
        for device in range(devices):
            view = page.pool(group_of(page)[1], layer, device).view
            first = device * own
            assert torch.equal(view.ranks.cpu(), whole.ranks[row, first : first + own])
            got, want = view.omega.cpu(), whole.omega[row, first : first + own]
            for head, rank in enumerate(view.ranks.tolist()):
                assert torch.equal(got[head, :, :rank], want[head, :, :rank])
                assert not got[head, :, rank:].any()


def test_calibrations_of_another_model_are_refused(saved: str) -> None:
    """The sizes at once, the numbers of its layers when there are layers."""
    options: dict[str, Any] = {"view": "sketch", "calibration": saved, "mean_rank": 4}
    with pytest.raises(ValueError, match=r"another model \(tiny\).*erase True and not False"):
        small(kind="mamba2", **options)
    shapes = ((3, 4 * V + 2 * 2 * K), (4, V, K))
    with pytest.raises(ValueError, match="heads 4 and not 8"):
        page_of("gdn", shapes, (torch.float32,) * 2, torch.float32, Options(**options), 2)
    page = small(kind="gdn", **options)
    with pytest.raises(ValueError, match="recurrent layer 1 is none of its layers 0, 2"):
        page.pool(group_of(page)[1], 1)


def test_calibrations_of_other_weights_are_refused() -> None:
    """Two shipped models are alike in all but their weights; a part of a model tells nothing."""
    sketches = {name: sketches_of(name, 8.0, 1) for name in ("gdn", "kda")}
    origin = sketches["gdn"].calibration.origin
    weights = load_file(model_folder("gdn") / "model.safetensors")
    named = {
        layer: next(x for n, x in weights.items() if f".{layer}." in n and n.endswith("A_log"))
        for layer in origin.layers
    }
    sketches["gdn"].check_weights({layer: x.float() for layer, x in named.items()})
    with pytest.raises(ValueError, match=r"of this model's weights .* calibrate the model"):
        sketches["kda"].check_weights(named)
    del named[origin.layers[0]]
    sketches["kda"].check_weights(named)
