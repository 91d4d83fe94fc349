"""Number formats of states: reading them, and rounding a folded state into them.

The same bytes as `lazystate.formats` makes of the same FP32 values, by the same elementary
operations. Reads come in two shapes: pieces [n, 16] of K, ORDER of them from the same words, so
that of packed elements a piece has every ORDER-th; and whole tiles [n, KP] in order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.arguments import Stored
from lazystate.ops.triton.device import SIZE, bf16_nearest, columns, load_f32

LEAST_NORMAL = tl.constexpr(2.0**-126)
DENSE = tl.constexpr("dense")
FP8 = tl.constexpr("fp8")
NVFP4 = tl.constexpr("nvfp4")
INT = tl.constexpr("int")


@triton.jit
def stored_at(states, strides, slot):
    """One slot's parts."""
    return Stored(
        states.elements + slot * strides.elements,
        states.scales + slot * strides.scales,
        states.total + slot * strides.total,
    )


@triton.jit
def read_pieces(state, row, there, form: tl.constexpr, shape: tl.constexpr):
    """Rows [n] of a state as pieces in FP32, and what every ORDER of them are multiplied by.

    Zeros where not there [n]. A dense state's are multiplied by nothing: there are no units.
    """
    pieces = ()
    units = ()
    if form.KIND == DENSE:
        for c in tl.static_range(shape.KC):
            k = columns(c, shape)[None, :]
            mask = there[:, None] if shape.K == shape.KC * SIZE else there[:, None] & (k < shape.K)
            x = load_f32(state.elements + row[:, None] * shape.K + k, mask)
            pieces = pieces + (x,)
    else:
        wide: tl.constexpr = tl.uint32 if form.WORD == 32 else tl.uint16
        kind: tl.constexpr = tl.uint8 if form.WORD == 8 else wide
        words = state.elements.to(tl.pointer_type(kind), bitcast=True)
        for part in tl.static_range(shape.KC // form.ORDER):
            j = part * SIZE + tl.arange(0, SIZE)[None, :]
            mask = there[:, None]
            if form.WORDS < shape.KC // form.ORDER * SIZE:
                mask &= j < form.WORDS
            word = tl.load(words + row[:, None] * form.WORDS + j, mask=mask, other=0)
            word = word.to(tl.uint32)
            for c in tl.static_range(form.ORDER):
                pieces = pieces + (_element(word, c, form),)
            if form.GROUPS == 1:
                j = tl.zeros([1, 1], tl.int32)
                mask = there[:, None]
            units = units + (_unit(state, row, there, j * form.ORDER, mask, form, shape),)
    return pieces, units


@triton.jit
def read_rows(state, row, there, form: tl.constexpr, shape: tl.constexpr):
    """Rows [n] of a state as pieces in FP32; zeros where not there [n]."""
    rows, units = read_pieces(state, row, there, form, shape)
    if form.KIND != DENSE:
        multiplied = ()
        for c in tl.static_range(shape.KC):
            multiplied = multiplied + (rows[c] * form.STEP * units[c // form.ORDER],)
        rows = multiplied
    return rows


@triton.jit
def _element(word, c: tl.constexpr, form: tl.constexpr):
    """FP32 element c of words, over STEP. No element of FP8 is NaN: a group's scale says so.

    Of E4M3 and E2M1, element c of a 32-bit word and the one 16 bits on become the two FP16 in it
    at once: sign, exponent and mantissa moved to where FP16 has them, a power of two too small.
    """
    code = word >> (form.BITS * (c % form.HALF))
    if form.KIND == FP8:
        code = ((code & 0x007F007F) << 7) | ((code & 0x00800080) << 8)
    elif form.KIND == NVFP4:
        code = ((code & 0x00070007) << 9) | ((code & 0x00080008) << 12)
    if c >= form.HALF:
        code = code >> 16
    if form.KIND == INT:  # 2^23 and a number below 2^8 are the bits of their sum
        sign: tl.constexpr = 1 << (form.BITS - 1)
        code = (code & (2 * sign - 1)) ^ sign | 0x4B000000
        value = code.to(tl.float32, bitcast=True) - (8388608.0 + sign)
    else:
        value = (code & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def read_tile(state, row, there, form: tl.constexpr, shape: tl.constexpr):
    """Rows [n] of a state in order, FP32 [n, KP]; zeros where not there [n]."""
    k = tl.arange(0, shape.KP)[None, :]
    mask = there[:, None] if shape.K == shape.KP else there[:, None] & (k < shape.K)
    if form.KIND == DENSE:
        tile = load_f32(state.elements + row[:, None] * shape.K + k, mask)
    else:
        wide: tl.constexpr = shape.KP // form.PER_BYTE
        j = tl.arange(0, wide)[None, :]
        inside = there[:, None] & (j < form.BYTES)
        byte = tl.load(state.elements + row[:, None] * form.BYTES + j, mask=inside, other=0)
        code = _unpacked(byte.to(tl.int32), form)
        tile = _value(code, form) * _unit(state, row, there, k, mask, form, shape)
    return tile


@triton.jit
def _unit(state, row, there, k, mask, form: tl.constexpr, shape: tl.constexpr):
    """What elements [n, k] are multiplied by, zeros where masked: it may be anything there."""
    at = state.scales + row[:, None] * form.GROUPS + k // form.GROUP
    if form.KIND == NVFP4:
        unit = _e4m3_size(tl.load(at, mask=mask, other=0).to(tl.int32))
        unit *= load_f32(state.total + row // shape.V, there)[:, None]
    else:
        unit = load_f32(at, mask)
    return unit


@triton.jit
def _e4m3_size(code):
    """FP32 of E4M3 without a sign: its bits, moved to where FP32 has them, by a power of two."""
    value = (code << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where(code == 0x7F, float("nan"), value)


@triton.jit
def _e4m3(code):
    """FP32 value of E4M3."""
    value = _e4m3_size(code & 0x7F)
    return tl.where(code >= 128, -value, value)


@triton.jit
def _value(code, form: tl.constexpr):
    """FP32 element of a code, int32."""
    if form.KIND == FP8:
        value = _e4m3(code)
    elif form.KIND == NVFP4:
        bits = (code & 7) << 22
        value = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
        value = tl.where(code >= 8, -value, value)
    else:
        half: tl.constexpr = 1 << (form.BITS - 1)
        value = ((code ^ half) - half).to(tl.float32)
    return value


@triton.jit
def _unpacked(byte, form: tl.constexpr):
    """Codes [n, KP] in order of bytes [n, KP / PER_BYTE]."""
    last: tl.constexpr = (1 << form.BITS) - 1
    if form.PER_BYTE == 1:
        code = byte
    elif form.PER_BYTE == 2:
        code = tl.interleave(byte & last, (byte >> 4) & last)
    else:
        even = tl.interleave(byte & last, (byte >> 4) & last)
        odd = tl.interleave((byte >> 2) & last, (byte >> 6) & last)
        code = tl.interleave(even, odd)
    return code


@triton.jit
def largest(tile):
    """Largest magnitude along the last axis, NaN where there is an infinity or a NaN."""
    broken = (tile != tile) | (tl.abs(tile) == float("inf"))
    axis: tl.constexpr = len(tile.shape) - 1
    found = tl.max(tl.where(broken, 0.0, tl.abs(tile)), axis)
    bad = tl.max(broken.to(tl.int32), axis)
    return tl.where(bad > 0, float("nan"), found)


@triton.jit
def write_tile(state, tile, row, there, total, bits, form: tl.constexpr, shape: tl.constexpr):
    """Round a folded tile [n, KP] and store it as rows [n] where there [n].

    total: of nvfp4, FP32: the state's largest magnitude over 448 * 6. bits: int32 [n, KP], 0 to
    65,535, for stochastic rounding; None rounds to nearest.
    """
    k = tl.arange(0, shape.KP)[None, :]
    if form.KIND == DENSE:
        at = state.elements + row[:, None] * shape.K + k
        value = tile
        if bits is not None:
            value = _stochastic_cast(tile, bits, form)
        if form.LOWEST == -126 and form.BITS == 16:  # BF16, for the interpreter, whose cast cuts
            value = bf16_nearest(value)
        tl.store(at, value.to(state.elements.dtype.element_ty), mask=there[:, None] & (k < shape.K))
    else:
        n: tl.constexpr = tile.shape[0]
        span: tl.constexpr = form.GROUP if form.GROUP < shape.KP else shape.KP
        groups: tl.constexpr = shape.KP // span
        x = tl.reshape(tl.where(k < shape.K, tile, 0.0), [n, groups, span])
        unit = _stored_unit(state, largest(x), row, there, total, bits is not None, form)
        dead = unit == 0
        scaled = tl.math.div_rn(x, tl.where(dead, 1.0, unit)[:, :, None] + tl.zeros_like(x))
        scaled = tl.minimum(tl.maximum(scaled, -form.LARGEST), form.LARGEST)
        scaled = tl.where(dead[:, :, None] | (x != x) | (unit != unit)[:, :, None], 0.0, scaled)
        scaled = tl.reshape(scaled, [n, shape.KP])
        size = _rounded(tl.abs(scaled), bits, form)
        negative = scaled.to(tl.int32, bitcast=True) < 0
        packed = _packed(_code(size, negative, form), form)
        j = tl.arange(0, shape.KP // form.PER_BYTE)[None, :]
        at = state.elements + row[:, None] * form.BYTES + j
        tl.store(at, packed.to(tl.uint8), mask=there[:, None] & (j < form.BYTES))


@triton.jit
def _stored_unit(state, most, row, there, total, UP: tl.constexpr, form: tl.constexpr):
    """Store the scales of groups with these largest magnitudes [n, groups]; what they decode to."""
    g = tl.arange(0, most.shape[1])[None, :]
    at = state.scales + row[:, None] * form.GROUPS + g
    mask = there[:, None] & (g < form.GROUPS)
    if form.KIND == NVFP4:
        wanted = tl.math.div_rn(most, tl.full(most.shape, 6.0, tl.float32))
        divisor = tl.zeros_like(most) + tl.where(total == 0, 1.0, total)
        wanted = tl.where(total == 0, 0.0, tl.math.div_rn(wanted, divisor))
        wanted = tl.where(wanted > 448.0, 448.0, wanted)
        code = _e4m3_code(_nearest(wanted, 3, -6))
        code = tl.where(wanted != wanted, 0x7F, code)
        if UP:
            code += (_e4m3_size(code) < wanted).to(tl.int32)
        tl.store(at, code.to(tl.uint8), mask=mask)
        unit = _e4m3_size(code) * total
    else:
        unit = tl.math.div_rn(most, tl.full(most.shape, form.LARGEST, tl.float32))
        unit = tl.where(unit < LEAST_NORMAL, 0.0, unit)
        if form.KIND != FP8:
            unit = tl.where(
                unit > 3.3895313892515355e38, 3.3895313892515355e38, unit
            )  # BF16's largest
            unit = bf16_nearest(unit)
        tl.store(at, unit.to(state.scales.dtype.element_ty), mask=mask)
    return tl.where(unit < LEAST_NORMAL, 0.0, unit)


@triton.jit
def _power(exponent):
    """2^exponent, FP32, of int32 -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _nearest(size, MANTISSA: tl.constexpr, LOWEST: tl.constexpr):
    """Magnitudes to the nearest multiple of their quantum, ties to even."""
    exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, LOWEST)
    multiple = size * _power(MANTISSA - exponent)  # exact: a power of two
    return ((multiple + 12582912.0) - 12582912.0) * _power(exponent - MANTISSA)  # 1.5 2^23


@triton.jit
def _rounded(size, bits, form: tl.constexpr):
    """Magnitudes to multiples of their quantum, by `bits` or to nearest."""
    if bits is None:
        value = _nearest(size, form.MANTISSA, form.LOWEST)
    else:
        exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, form.LOWEST)
        multiple = size * _power(form.MANTISSA - exponent)
        below = tl.floor(multiple)
        up = bits.to(tl.float32) + 0.5 < (multiple - below) * 65536.0
        value = (below + up.to(tl.float32)) * _power(exponent - form.MANTISSA)
    return value


@triton.jit
def _stochastic_cast(x, bits, form: tl.constexpr):
    """FP32 to a neighbour that a 16-bit dtype has; what is beyond its largest stays for a cast."""
    if form.LOWEST == -126:  # BF16: the lower half of FP32's bits is the part between neighbours
        whole = x.to(tl.uint32, bitcast=True)
        up = (bits.to(tl.uint32) < (whole & 0xFFFF)).to(tl.uint32)
        value = ((whole & 0xFFFF0000) + (up << 16)).to(tl.float32, bitcast=True)
    else:
        value = _rounded(tl.abs(x), bits, form)
        value = tl.where(x.to(tl.int32, bitcast=True) < 0, -value, value)
    return tl.where(tl.abs(x) <= form.LARGEST, value, x)


@triton.jit
def _e4m3_code(size):
    """int32 code of magnitudes that E4M3 has."""
    return (size * 7.52316384526264e-37).to(tl.int32, bitcast=True) >> 20  # 2^-120


@triton.jit
def _code(size, negative, form: tl.constexpr):
    """int32 codes of rounded magnitudes and signs."""
    if form.KIND == FP8:
        code = _e4m3_code(size) | (negative.to(tl.int32) << 7)
    elif form.KIND == NVFP4:
        scaled = size * 1.1754943508222875e-38  # 2^-126
        code = (scaled.to(tl.int32, bitcast=True) >> 22) | (negative.to(tl.int32) << 3)
    else:
        whole = size.to(tl.int32)
        code = tl.where(negative, -whole, whole) & ((1 << form.BITS) - 1)
    return code


@triton.jit
def _packed(code, form: tl.constexpr):
    """Bytes [n, KP / PER_BYTE] of codes [n, KP], the first code lowest."""
    n: tl.constexpr = code.shape[0]
    if form.PER_BYTE == 1:
        byte = code
    elif form.PER_BYTE == 2:
        low, high = tl.split(tl.reshape(code, [n, code.shape[1] // 2, 2]))
        byte = low | (high << 4)
    else:
        even, odd = tl.split(tl.reshape(code, [n, code.shape[1] // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        byte = first | (second << 2) | (third << 4) | (fourth << 6)
    return byte


@triton.jit
def random_bits(seed, row, head, slot, count, shape: tl.constexpr):
    """16 random bits for every element of rows [n] of one head, int32 [n, KP] (`state_bits`).

    row: within the head. One call serves eight elements that are 16 apart.
    """
    n: tl.constexpr = row.shape[0]
    calls: tl.constexpr = (shape.K + 8 * SIZE - 1) // (8 * SIZE)
    lanes: tl.constexpr = triton.next_power_of_2(calls) * SIZE
    i = tl.arange(0, lanes)[None, :]
    counter = (row[:, None] * (calls * SIZE) + i).to(tl.uint32)
    zero = tl.zeros_like(counter)
    words = tl.philox(
        seed,
        counter,
        (zero + head).to(tl.uint32),
        (zero + slot).to(tl.uint32),
        (zero + count).to(tl.uint32),
    )
    eighth = tl.arange(0, 8)[None, None, :, None]
    bits = tl.zeros([n, lanes // SIZE, 8, SIZE], tl.uint32)
    for w in tl.static_range(4):
        word = tl.reshape(words[w], [n, lanes // SIZE, 1, SIZE])
        bits = tl.where(eighth == w, word & 0xFFFF, bits)
        bits = tl.where(eighth == w + 4, word >> 16, bits)
    whole = tl.reshape(bits.to(tl.int32), [n, lanes * 8])
    if lanes * 8 > shape.KP:  # K below 128: the first part of each call's eight
        parts: tl.constexpr = lanes * 8 // shape.KP
        half = tl.reshape(whole, [n, parts, shape.KP])
        first = tl.arange(0, parts)[None, :, None] == 0
        whole = tl.sum(tl.where(first, half, 0), 1)
    return whole
