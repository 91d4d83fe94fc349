"""Sketches as views: products with them, and their construction from a folded state (Eq. 17-22).

A read first turns a vector x of K into coefficients C x of the head's rank, which then weight the
columns of U. Ranks differ from head to head, so loops over blocks of 16 columns end at a head's
own; a head of rank 0 reads a copy of its state instead. Omega is the same for every request and
stays in L2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.arguments import Sketched
from lazystate.ops.triton.block import load_tile
from lazystate.ops.triton.device import SIZE, dot_k, joined, load_f32, load_rows, narrowed
from lazystate.ops.triton.formats import stored_at

SKETCH = tl.constexpr("sketch")
PIVOT = tl.constexpr("pivot")
EXACT = tl.constexpr("exact")


@triton.jit
def view_at(states, slot, storing: tl.constexpr):
    """One slot's parts of whichever view there is."""
    if storing.view.KIND == SKETCH:
        view = _sketch_at(states.view, states.view_slot, slot)
    else:
        view = stored_at(states.view, states.view_slot, slot)
    return view


@triton.jit
def _sketch_at(view, strides, slot):
    """One slot's parts; Omega, ranks and places are the same for all, a map perhaps."""
    return Sketched(
        view.sketch + slot * strides.sketch,
        view.keep + slot * strides.keep,
        view.mix + slot * strides.mix,
        view.keys + slot * strides.keys,
        view.copy + slot * strides.copy,
        view.map + slot * strides.map,
        view.omega,
        view.ranks,
        view.places,
    )


@triton.jit
def read_sketch(view, head, channel, there, qs, ks, form: tl.constexpr, shape: tl.constexpr):
    """Products of value channels [BV] with q and k, as pieces, not yet summed -> two [BV, 16].

    there: [BV]. Without ERASE the second are zeros.
    """
    q_sum = tl.zeros([channel.shape[0], SIZE], tl.float32)
    k_sum = tl.zeros([channel.shape[0], SIZE], tl.float32)
    rank = tl.load(view.ranks + head).to(tl.int32)
    if form.COPY and rank == 0:
        row = tl.load(view.places + head) * shape.V + channel
        tile = load_rows(view.copy, row * shape.K, there, shape)
        for c in tl.static_range(shape.KC):
            q_sum += tile[c] * qs[c]
            if shape.ERASE:
                k_sum += tile[c] * ks[c]
    else:
        q_near = 0.0
        k_near = 0.0
        if form.MAP == PIVOT:
            j = tl.arange(0, form.PP)
            keys = _load_keys(view, head, j, form, shape)
            q_near = tl.sum(keys * tl.reshape(joined(qs, shape), [shape.KP])[:, None], 0)
            if shape.ERASE:
                k_near = tl.sum(keys * tl.reshape(joined(ks, shape), [shape.KP])[:, None], 0)
        for first in tl.range(0, rank, SIZE):
            g = first + tl.arange(0, SIZE)
            inside = g < rank
            at = head * form.G + g
            columns = load_f32(
                view.sketch + channel[:, None] + at[None, :] * shape.V,
                there[:, None] & inside[None, :],
            )
            rows = load_rows(view.map, at * shape.K, inside, shape)
            keep = 1.0
            mix = 0.0
            if form.MAP == PIVOT:
                keep = load_f32(view.keep + at, inside)
                mix = _load_mix(view, at, inside, tl.arange(0, form.PP), form)
            q_sum += columns * _coefficients(rows, keep, mix, q_near, qs, form)[None, :]
            if shape.ERASE:
                k_sum += columns * _coefficients(rows, keep, mix, k_near, ks, form)[None, :]
    return q_sum, k_sum


@triton.jit
def _coefficients(rows, keep, mix, near, x, form: tl.constexpr):
    """C x [16] of one vector in pieces (Eq. 22); near: B^T x [PP]."""
    coefficients = dot_k(rows, x) * keep
    if form.MAP == PIVOT:
        coefficients += tl.sum(mix * near[None, :], 1)
    return coefficients


@triton.jit
def _load_keys(view, head, j, form: tl.constexpr, shape: tl.constexpr):
    """B of a head, columns j [n] -> [KP, n]."""
    k = tl.arange(0, shape.KP)
    at = (head * shape.K + k)[:, None] * form.P + j[None, :]
    return load_f32(view.keys + at, (k < shape.K)[:, None] & (j < form.P)[None, :])


@triton.jit
def _load_mix(view, at, inside, j, form: tl.constexpr):
    """F of the columns `at` [16], pivots j [n] -> [16, n]."""
    there = inside[:, None] & (j < form.P)[None, :]
    return load_f32(view.mix + at[:, None] * form.P + j[None, :], there)


@triton.jit
def multiply_sketch(view, head, channel, there, x, form: tl.constexpr, shape: tl.constexpr):
    """Products of value channels [BV] with the rows of x [TX, KP], on tensor cores -> [BV, TX]."""
    out = tl.zeros([channel.shape[0], x.shape[0]], tl.float32)
    rank = tl.load(view.ranks + head).to(tl.int32)
    if form.COPY and rank == 0:
        row = tl.load(view.places + head) * shape.V + channel
        tile = load_tile(view.copy, row * shape.K, there, shape)
        out += tl.dot(tile, tl.trans(x), input_precision="tf32x3")
    else:
        j = tl.arange(0, SIZE)
        near = tl.zeros([x.shape[0], SIZE], tl.float32)
        if form.MAP == PIVOT:
            keys = _load_keys(view, head, j, form, shape)
            near = tl.dot(x, keys, input_precision="tf32x3")
        for first in tl.range(0, rank, SIZE):
            g = first + j
            inside = g < rank
            at = head * form.G + g
            columns = load_f32(
                view.sketch + channel[:, None] + at[None, :] * shape.V,
                there[:, None] & inside[None, :],
            )
            rows = load_tile(view.map, at * shape.K, inside, shape)
            coefficients = tl.dot(rows, tl.trans(x), input_precision="tf32x3")
            if form.MAP == PIVOT:
                coefficients *= load_f32(view.keep + at, inside)[:, None]
                mix = _load_mix(view, at, inside, j, form)
                coefficients += tl.dot(mix, tl.trans(near), input_precision="tf32x3")
            out += tl.dot(columns, coefficients, input_precision="tf32x3")
    return out


@triton.jit
def write_sketch(view, tile, head, channel, in_v, form: tl.constexpr, shape: tl.constexpr):
    """Sketch a head's whole folded state [VP, KP], zeros where not in_v [VP] or behind K."""
    rank = tl.load(view.ranks + head).to(tl.int32)
    k = tl.arange(0, shape.KP)[None, :]
    if form.COPY and rank == 0:
        row = tl.load(view.places + head) * shape.V + channel
        _store(view.copy + row[:, None] * shape.K + k, tile, in_v[:, None] & (k < shape.K))
    elif form.MAP == PIVOT:
        _write_pivot(view, tile, head, channel, in_v, rank, form, shape)
    elif form.MAP == EXACT:
        for level in tl.static_range(3):  # ranks up to 64
            sized = (rank > (1 << level) // 2 * SIZE) & (rank <= SIZE << level)
            if (1 << level) // 2 * SIZE < form.G and sized:
                _write_exact(view, tile, head, channel, in_v, rank, SIZE << level, form, shape)
    else:
        for first in tl.range(0, rank, SIZE):
            g = first + tl.arange(0, SIZE)
            _, u = _columns(view, tile, head, g, rank, form, shape)
            _store_columns(view, u, head, channel, in_v, g, rank, form, shape)


@triton.jit
def _write_pivot(view, tile, head, channel, in_v, rank, form: tl.constexpr, shape: tl.constexpr):
    """U and the factors of the pivot map (Eq. 19-22), in two passes over blocks of its columns."""
    j = tl.arange(0, SIZE)
    unit = _unit(tile, shape)
    _, u = _columns(view, tile, head, j, rank, form, shape)
    ortho = _orthonormal(u, form.P, shape.V)
    keys = tl.dot(tl.trans(ortho), tile, input_precision="tf32x3") / unit
    gram = tl.where(j[:, None] == j[None, :], 1.0, 0.0)
    for first in tl.range(0, rank, SIZE):
        omega, u = _columns(view, tile, head, first + j, rank, form, shape)
        _store_columns(view, u, head, channel, in_v, first + j, rank, form, shape)
        low, rest = _low(u, ortho, unit)
        diagonal = rest + form.RIDGE
        keep = rest / diagonal
        _store(view.keep + head * form.G + first + j, keep, first + j < rank)
        gram += tl.dot(tl.trans(low), low / diagonal[:, None], input_precision="tf32x3")
        known = tl.trans(low * keep[:, None])
        keys -= tl.dot(known, tl.trans(omega), input_precision="tf32x3")
    for i in tl.static_range(form.P):
        gram = _eliminated(gram, i)
    for first in tl.range(0, rank, SIZE):
        _, u = _columns(view, tile, head, first + j, rank, form, shape)
        low, rest = _low(u, ortho, unit)
        low = low / (rest + form.RIDGE)[:, None]
        mix = tl.dot(low, gram, input_precision="tf32x3")
        at = (head * form.G + first + j)[:, None] * form.P + j[None, :]
        _store(view.mix + at, mix, (first + j < rank)[:, None] & (j < form.P)[None, :])
    k = tl.arange(0, shape.KP)
    at = (head * shape.K + k)[None, :] * form.P + j[:, None]
    _store(view.keys + at, keys, (k < shape.K)[None, :] & (j < form.P)[:, None])


@triton.jit
def _write_exact(
    view,
    tile,
    head,
    channel,
    in_v,
    rank,
    N: tl.constexpr,
    form: tl.constexpr,
    shape: tl.constexpr,
):
    """U and the least-squares map (Eq. 18) of a head of at most N columns, 16 of them at a time.

    C = (U (U^T U + lambda I)^-1)^T S, as the first factor is at most 1 / (2 sqrt(lambda)) and the
    inverse alone 1 / lambda. A product with `pick` takes 16 columns out, or puts them in.
    """
    n = tl.arange(0, N)[:, None]
    j = tl.arange(0, SIZE)
    k = tl.arange(0, shape.KP)
    unit = _unit(tile, shape)
    u = tl.zeros([tile.shape[0], N], tl.float32)
    for first in tl.range(0, rank, SIZE):
        _, block = _columns(view, tile, head, first + j, rank, form, shape)
        _store_columns(view, block, head, channel, in_v, first + j, rank, form, shape)
        pick = tl.where(n == first + j[None, :], 1.0, 0.0)
        u += tl.dot(block / unit, tl.trans(pick), input_precision="tf32x3")
    gram = tl.where(n == tl.trans(n), form.RIDGE, 0.0)
    for first in tl.range(0, rank, SIZE):
        pick = tl.where(n == first + j[None, :], 1.0, 0.0)
        block = tl.dot(u, pick, input_precision="tf32x3")
        block = tl.dot(tl.trans(u), block, input_precision="tf32x3")
        gram += tl.dot(block, tl.trans(pick), input_precision="tf32x3")
    for i in tl.range(0, rank):
        gram = _eliminated(gram, i)
    for first in tl.range(0, rank, SIZE):
        pick = tl.where(n == first + j[None, :], 1.0, 0.0)
        block = tl.dot(gram, pick, input_precision="tf32x3")
        block = tl.dot(u, block, input_precision="tf32x3")
        rows = tl.dot(tl.trans(block), tile, input_precision="tf32x3") / unit
        at = (head * form.G + first + j)[:, None] * shape.K + k[None, :]
        _store(view.map + at, rows, (first + j < rank)[:, None] & (k < shape.K)[None, :])


@triton.jit
def _unit(tile, shape: tl.constexpr):
    """sqrt(mu), mu = |S|_F^2 / K; 1 for a zero state."""
    energy = tl.sum(tl.sum(tile * tile, 1), 0) / shape.K
    return tl.where(energy > 0, tl.sqrt(energy), 1.0)


@triton.jit
def _columns(view, tile, head, g, rank, form: tl.constexpr, shape: tl.constexpr):
    """Columns g [n] of Omega [KP, n] and of U [VP, n]; zeros behind the rank."""
    k = tl.arange(0, shape.KP)
    at = (head * shape.K + k)[:, None] * form.G + g[None, :]
    omega = load_f32(view.omega + at, (k < shape.K)[:, None] & (g < rank)[None, :])
    return omega, tl.dot(tile, omega, input_precision="tf32x3")


@triton.jit
def _low(u, ortho, unit):
    """L [16, 16] of a block's columns and what the pivots leave of their energy, d [16]."""
    low = tl.dot(tl.trans(u), ortho, input_precision="tf32x3") / unit
    rest = tl.sum(u * u, 0) / (unit * unit) - tl.sum(low * low, 1)
    return low, tl.where(rest < 0, 0.0, rest)


@triton.jit
def _orthonormal(u, P: tl.constexpr, ROWS: tl.constexpr):
    """Gram-Schmidt of the first P columns of u [VP, 16], twice each; see `sketch.prefix`."""
    j = tl.arange(0, SIZE)[None, :]
    basis = tl.zeros_like(u)
    tolerance: tl.constexpr = 4 * max(ROWS, P) * 2.0**-23
    for i in tl.static_range(P):
        column = tl.sum(tl.where(j == i, u, 0.0), 1)
        rest = column
        for _ in tl.static_range(2):
            inside = tl.sum(basis * rest[:, None], 0)
            rest -= tl.sum(basis * inside[None, :], 1)
        length = tl.sqrt(tl.sum(rest * rest, 0))
        new = length > tolerance * tl.sqrt(tl.sum(column * column, 0))
        rest = tl.where(new, rest / tl.where(new, length, 1.0), 0.0)
        basis = tl.where(j == i, rest[:, None], basis)
    return basis


@triton.jit
def _eliminated(gram, i):
    """Step i of inverting gram [n, n], positive definite, in place: no choice of pivots is needed.

    A row that is zero but for its diagonal needs no step where only the others are used.
    """
    n = tl.arange(0, gram.shape[0])
    row, column = n[:, None], n[None, :]
    across = tl.sum(tl.where(row == i, gram, 0.0), 0)[None, :]
    down = tl.sum(tl.where(column == i, gram, 0.0), 1)[:, None]
    pivot = tl.sum(tl.sum(tl.where((row == i) & (column == i), gram, 0.0), 1), 0)
    rest = gram - down * across / pivot
    rest = tl.where(row == i, across / pivot, rest)
    rest = tl.where(column == i, -down / pivot, rest)
    return tl.where((row == i) & (column == i), 1.0 / pivot, rest)


@triton.jit
def _store_columns(view, u, head, channel, in_v, g, rank, form: tl.constexpr, shape: tl.constexpr):
    """Columns g [n] of U [VP, n]."""
    at = channel[:, None] + (head * form.G + g)[None, :] * shape.V
    _store(view.sketch + at, u, in_v[:, None] & (g < rank)[None, :])


@triton.jit
def _store(pointer, x, mask):
    """Store FP32 rounded to nearest."""
    dtype: tl.constexpr = pointer.dtype.element_ty
    tl.store(pointer, narrowed(x, dtype).to(dtype), mask=mask)
