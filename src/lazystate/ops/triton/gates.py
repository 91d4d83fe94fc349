"""Gates as inputs are loaded: what `lazystate.gates` does to raw inputs, or prepared ones as given.

Log-decay and beta stay in FP32. A normalised q or k is rounded once, to the activation dtype, and
everything that uses it uses the rounded one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lazystate.ops.triton.device import columns, dot_k, load_f32, load_row, narrowed

NONE = tl.constexpr("none")
MAMBA2 = tl.constexpr("mamba2")
GDN = tl.constexpr("gdn")
BOUNDED = tl.constexpr("kda_bounded")


@triton.jit
def softplus(x):
    """log(1 + exp(x)) in FP32; x itself above 20, as PyTorch has it."""
    large = x > 20.0
    power = tl.exp(tl.where(large, 0.0, x))
    one_more = 1.0 + power
    lost = one_more == 1.0
    # the quotient undoes the rounding of 1 + exp(x), which a small time step would not survive
    exact = power / tl.where(lost, 1.0, one_more - 1.0)
    return tl.where(large, x, tl.where(lost, power, tl.log(one_more) * exact))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in FP32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_gates(inputs, strides, head, at_decay, at_beta, there, shape: tl.constexpr):
    """(log_decay, beta) of tokens of a value head, FP32, zeros where not there.

    With CHANNEL log_decay is 0 here: see `channel_decay`; without BETA beta is 1.

    at_decay, at_beta: offsets of the tokens behind the head, scalars or [n].
    """
    log_decay = 0.0
    beta = 1.0
    if shape.BETA:
        beta = load_f32(inputs.beta + head * strides.beta + at_beta, there)
    if not shape.CHANNEL:
        log_decay = load_f32(inputs.log_decay + head * strides.log_decay + at_decay, there)
    if shape.gate.KIND == MAMBA2 or shape.gate.KIND == GDN:
        rate = -tl.exp(tl.load(inputs.A_log + head).to(tl.float32))
        if shape.gate.BIAS:
            log_decay += tl.load(inputs.dt_bias + head).to(tl.float32)
        step = softplus(log_decay)
        if shape.gate.KIND == MAMBA2:
            if shape.gate.LIMITED:
                step = tl.where(step < shape.gate.LEAST, shape.gate.LEAST, step)
                step = tl.where(step > shape.gate.MOST, shape.gate.MOST, step)
            beta = tl.where(there, step, 0.0)
        log_decay = tl.where(there, step * rate, 0.0)
    if shape.gate.NORM:
        beta = tl.where(there, sigmoid(beta) * shape.gate.BETA_SCALE, 0.0)
    return log_decay, beta


@triton.jit
def channel_decay(raw, head, k, inputs, shape: tl.constexpr):
    """FP32 log-decays of raw gates [n or none, k] of channels k (Eq. 6, 7); channels below K."""
    x = raw
    if shape.gate.KIND != NONE:
        rate = tl.exp(tl.load(inputs.A_log + head).to(tl.float32))
        if shape.gate.BIAS:
            x += load_f32(inputs.dt_bias + head * shape.K + k, k < shape.K)
        if shape.gate.KIND == BOUNDED:
            x = shape.gate.BOUND * sigmoid(rate * x)
        else:
            x = -rate * softplus(x)
    return x


@triton.jit
def load_channel_gates(inputs, strides, head, at, shape: tl.constexpr):
    """Log-decays of a value head and the token at `at` behind it, as pieces [1, SIZE]."""
    raw = load_row(inputs.log_decay + head * strides.log_decay + at, True, shape)
    row = ()
    for c in tl.static_range(shape.KC):
        row = row + (channel_decay(raw[c], head, columns(c, shape)[None, :], inputs, shape),)
    return row


@triton.jit
def unit(squares, scale, shape: tl.constexpr):
    """What vectors with these squared norms are multiplied by, 1 where they are prepared."""
    factor = tl.full(squares.shape, 1.0, tl.float32)
    if shape.gate.NORM:
        factor = tl.rsqrt(squares + shape.gate.EPS) * scale
    return factor


@triton.jit
def normalised(x, factor, dtype: tl.constexpr, shape: tl.constexpr):
    """x times its factor, rounded to a dtype; x itself where it is prepared."""
    if shape.gate.NORM:
        x = narrowed(x * factor, dtype)
    return x


@triton.jit
def load_vector(base, scale, shape: tl.constexpr):
    """One q or k as pieces [1, SIZE], normalised, and the factor [1] that this took."""
    raw = load_row(base, True, shape)
    factor = unit(dot_k(raw, raw), scale, shape)
    row = ()
    for c in tl.static_range(shape.KC):
        row = row + (normalised(raw[c], factor[:, None], base.dtype.element_ty, shape),)
    return row, factor


@triton.jit
def normalise_rows(tile, scale, dtype: tl.constexpr, shape: tl.constexpr):
    """Rows [n, KP] of q or k normalised, and the factors [n] that this took."""
    factor = unit(tl.sum(tile * tile, 1), scale, shape)
    return normalised(tile, factor[:, None], dtype, shape), factor
