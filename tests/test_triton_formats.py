"""Kernels that read and write states in small formats: the same bytes as `lazystate.formats`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from lazystate import StateCache
from lazystate.formats import FORMATS, Rounding
from lazystate.ops.states import States
from lazystate.ops.triton.arguments import Stored, form_of, gate_of, order_of, shape_of
from lazystate.ops.triton.device import columns, joined
from lazystate.ops.triton.formats import largest, random_bits, read_rows, read_tile, write_tile
from lazystate.philox import state_bits
from samples import draw, layer, slots
from tolerance import error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
NARROW = ("fp16", "bf16", "fp8", "nvfp4", "int8", "int4", "int2")
SEED, SLOT, COUNT = (7, 3), 5, 11


@triton.jit
def _write(source, state, seed, slot, count, N: tl.constexpr, BITS: tl.constexpr,
           form: tl.constexpr, shape: tl.constexpr):  # fmt: skip
    """All rows of one head of a state [HV, V, K]."""
    head = tl.program_id(0)
    channel = tl.arange(0, N)
    k = tl.arange(0, shape.KP)
    there = channel < shape.V
    row = head * shape.V + channel
    inside = there[:, None] & (k < shape.K)[None, :]
    tile = tl.load(source + row[:, None] * shape.K + k[None, :], mask=inside, other=0.0)
    most = largest(tile)
    bad = tl.max((most != most).to(tl.int32), 0)
    total = tl.math.div_rn(tl.max(tl.where(most == most, most, 0.0), 0), 2688.0)
    total = tl.where(bad > 0, float("nan"), tl.where(total < 2.0**-126, 0.0, total))
    bits = None
    if BITS:
        bits = random_bits(seed, channel, head, slot, count, shape)
    write_tile(state, tile, row, there, total, bits, form, shape)
    if form.KIND == "nvfp4":
        tl.store(state.total + head, total)


@triton.jit
def _read(out, state, N: tl.constexpr, form: tl.constexpr, shape: tl.constexpr):
    """A state [HV, V, K] by whole tiles, by pieces, and by pieces that are joined."""
    head = tl.program_id(0)
    channel = tl.arange(0, N)
    k = tl.arange(0, shape.KP)[None, :]
    there = channel < shape.V
    row = head * shape.V + channel
    tile = read_tile(state, row, there, form, shape)
    mask = there[:, None] & (k < shape.K)
    tl.store(out + row[:, None] * shape.K + k, tile, mask=mask)
    rows = read_rows(state, row, there, form, shape)
    size = tl.num_programs(0) * shape.V * shape.K
    for c in tl.static_range(len(rows)):
        i = columns(c, shape)[None, :]
        at = size + row[:, None] * shape.K + i
        tl.store(out + at, rows[c], mask=there[:, None] & (i < shape.K))
    tl.store(out + 2 * size + row[:, None] * shape.K + k, joined(rows, shape), mask=mask)


def stored(states: States) -> Stored:
    """Pointers to the only slot's parts."""
    elements = states.parts["elements"]
    return Stored(*(states.parts.get(name, elements) for name in Stored._fields))


def samples_of(shape: tuple[int, int, int]) -> Tensor:
    """Numbers of many magnitudes, zeros, subnormals, ties; a head with what is not finite."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-20, 20, (*shape[:2], 1), generator=generator).float()
    )
    x[0, 0] = 0
    x[0, 1, ::3] = 0
    x[0, 2] = torch.randint(-8, 9, shape[2:], generator=generator).float() / 2
    x[0, 3] = 1e-40
    x[1] *= 1e-30
    x[2, 0, 0], x[2, 1, -1] = float("nan"), -float("inf")
    return x


@pytest.mark.parametrize("key_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("name", NARROW)
def test_bytes_are_those_of_the_formats(name: str, rounding: Rounding, key_dim: int) -> None:
    """Elements, scales and totals, bit for bit; and reads give what they decode to."""
    form, shape = FORMATS[name], (3, 6, key_dim)
    x = samples_of(shape)
    if (name, DEVICE) == ("bf16", "cpu"):
        x[x.abs() < 2.0**-126] = 0  # the interpreter's cast has no subnormals
    one = torch.tensor([SLOT]), torch.tensor([COUNT])
    bits = state_bits(SEED, *one, shape)[0] if rounding == "stochastic" else None
    expected = form.encode(x, bits)
    states = States.allocate(form, 1, shape, torch.device(DEVICE))
    spec = layer("gdn", torch.float32, heads=3, key_heads=3, key_dim=key_dim, value_dim=6)
    seed = SEED[0] + (SEED[1] << 32)
    options: dict[str, Any] = {
        "form": form_of(form, key_dim),
        "shape": shape_of(spec, gate_of(None, key_dim)),
    }
    source = x.to(DEVICE)
    _write[(3,)](source, stored(states), seed, SLOT, COUNT, N=8, BITS=bits is not None, **options)
    for part, tensor in expected.items():
        got = states.parts[part][0].cpu()
        same = (got == tensor) | (got != got) & (tensor != tensor)
        assert bool(same.all()), part
    options["shape"] = shape_of(spec, gate_of(None, key_dim), order=order_of(form, key_dim))
    out = torch.zeros(3, *shape, device=DEVICE)
    _read[(3,)](out, stored(states), N=8, **options)
    decoded = form.decode(expected, key_dim)
    for found in out.cpu():
        assert bool(((found == decoded) | (found != found) & (decoded != decoded)).all())


# (layer, checkpoint, view, rounding)
STORAGE = [
    ("gdn", "fp16", None, "stochastic"),
    ("mamba2", "fp16", "nvfp4", "stochastic"),
    ("gdn", "fp8", "fp8", "nearest"),
    ("kda", "nvfp4", "int4", "stochastic"),
    ("gla", "fp32", "int2", "nearest"),
    ("kda", "fp32", "int8", "nearest"),
    ("gdn", "bf16", "fp16", "nearest"),
    ("mamba2", "nvfp4", None, "nearest"),
]
# One rounding step of a format, of the largest number around: what a last bit of FP32 can tip. Of
# FP32 itself: half a last bit for each of a sum's 64 terms, of the largest state, as a row can be
# what is left of larger terms.
STEP = {"fp32": 64 * 2.0**-24, "fp16": 1e-3, "bf16": 8e-3, "fp8": 0.13, "nvfp4": 0.34, "int8": 8e-3,
        "int4": 0.15, "int2": 1.0}  # fmt: skip


@pytest.mark.parametrize(("kind", "checkpoint", "view", "rounding"), STORAGE)
@pytest.mark.parametrize("tokens", [1, 3])
def test_backends_agree(
    kind: str, checkpoint: str, view: str | None, rounding: Rounding, tokens: int
) -> None:
    """Outputs and what folds store, on the same states, drafts and random bits.

    FP32 sums in another order may tip a rounding: few elements differ, and by one step.
    """
    spec = layer(kind, torch.float32, key_dim=64, value_dim=20)
    options: dict[str, Any] = {"checkpoint": checkpoint, "view": view, "rounding": rounding}
    caches = [
        StateCache(spec, 3, window=4, max_tokens=tokens, device=DEVICE, backend=name, **options)
        for name in ("triton", "torch")
    ]
    state = torch.randn(1, *spec.state_shape, device=DEVICE)
    rows = slots(2, -1, 0).to(DEVICE)
    for each in caches:
        each.load(slots(2).to(DEVICE), [state])
    for number in range(6):
        inputs = [None if x is None else x.to(DEVICE) for x in draw(spec, 3, tokens)[:5]]
        if number == 2:
            inputs[3][0, 0] = -float("inf")
        outputs, exported = [], []
        for each in caches:
            ticket = each.begin(rows, tokens)
            outputs.append(each.step(ticket, 0, *inputs))
            each.commit(ticket, slots(1, 0, tokens).to(DEVICE))
            exported.append(each.export(slots(2, 0).to(DEVICE)))
        assert error(*outputs) <= 1e-5
        _same_but_for_tips(*exported, checkpoint, view)
        caches[1].import_(slots(2, 0).to(DEVICE), exported[0])  # no tip goes on


def _same_but_for_tips(
    got: dict[str, Tensor], expected: dict[str, Tensor], checkpoint: str, view: str | None
) -> None:
    """Stored states of both backends: elements that differ are few, and differ by a step."""
    for copy, name in (("checkpoint", checkpoint), ("view", view)):
        if name is None:
            continue
        form = FORMATS[name]

        def parts(named: dict[str, Tensor], copy: str = copy) -> dict[str, Tensor]:
            found = {part: named.get(f"0.{copy}.{part}") for part in ("scales", "total")}
            found["elements"] = named[f"0.{copy}"]
            return {part: x.cpu() for part, x in found.items() if x is not None}

        one, other = (form.decode(parts(named), 64) for named in (got, expected))
        fresh = got["cursors.empty"].cpu()
        one, other = one[~fresh], other[~fresh]
        if not one.numel():
            continue
        axes = (-3, -2, -1) if name == "fp32" else -1
        scale = other.abs().amax(axes, keepdim=True).clamp_min(1e-30)
        assert bool(((one - other).abs() <= STEP[name] * scale * 1.01).all())
        tipped = ((one - other).abs() > 1e-5 * scale).float().mean()
        assert tipped <= 0.01, f"{copy}: {tipped:.1%} differ"
