"""Number formats: round trips, rounding, packing, and what happens at the edges."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lazystate.formats import CHECKPOINTS, FORMATS, VIEWS, Format, named
from lazystate.philox import state_bits

NARROW = [name for name, form in FORMATS.items() if form.narrow]
DENSE = [name for name in NARROW if FORMATS[name].dense]
SCALED = [name for name in NARROW if not FORMATS[name].dense]
INF, NAN = math.inf, math.nan


def table(name: str) -> Tensor:
    """All finite non-negative elements of a format, ascending, FP64, from their bits alone.

    Also which of them have an even last bit: entry i is code i.
    """
    form = FORMATS[name]
    if name.startswith("int"):
        return torch.arange(form.largest + 1, dtype=torch.float64)
    fraction = {"fp16": 10, "bf16": 7, "fp8": 3, "nvfp4": 1}[name]
    codes = torch.arange(2 ** (form.bits - 1), dtype=torch.float64)
    exponent, rest = codes // 2**fraction, codes % 2**fraction
    bias = {"fp16": 15, "bf16": 127, "fp8": 7, "nvfp4": 1}[name]
    power = 2.0 ** (exponent.clamp(min=1) - bias - fraction)
    values = torch.where(exponent == 0, rest, rest + 2**fraction) * power
    return values[values <= form.largest]


def nearest(values: Tensor, x: Tensor) -> Tensor:
    """The nearest of ascending values to each |x|, ties to the even code, with the sign of x."""
    size = x.double().abs().clamp(max=float(values[-1]))
    above = torch.searchsorted(values, size).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - size, size - values[below]
    even = above % 2 == 0
    index = torch.where((up < down) | ((up == down) & even), above, below)
    return torch.copysign(values[index], x.double())


def anchored(form: Format, x: Tensor) -> Tensor:
    """x [V, K] with every group's first element at the largest magnitude: all scales are 1."""
    x = x.clone()
    if not form.dense:
        x[:, :: form.group] = form.largest
    if form.name == "nvfp4":
        x[0, 0] = 448 * 6.0
        x[0, 1 : form.group] = 0
    return x


def there_and_back(form: Format, x: Tensor, bits: Tensor | None = None) -> Tensor:
    """decode(encode(x))."""
    return form.decode(form.encode(x, bits), x.shape[-1])


def some_bits(x: Tensor, count: int = 0) -> Tensor:
    """Random bits for x [n, HV, V, K]."""
    n = x.shape[0]
    return state_bits((3, 0), torch.arange(n), torch.full((n,), count), tuple(x.shape[1:]))


@pytest.mark.parametrize("name", NARROW)
def test_every_element_comes_back(name: str) -> None:
    """Each representable value, of both signs, is stored as itself, however it is rounded."""
    form = FORMATS[name]
    values = table(name).float()
    both = torch.cat([values, -values])
    rows = torch.nn.functional.pad(both, (0, -len(both) % 15)).view(-1, 15)
    x = torch.zeros(len(rows) + 1, 33)  # no multiple of any group
    x[1:, 1:16] = rows  # behind the place of a group's largest element
    x = anchored(form, x)
    assert torch.equal(there_and_back(form, x), x)
    bits = some_bits(x[None, None])[0, 0]
    assert torch.equal(there_and_back(form, x, bits), x)


@pytest.mark.parametrize("name", NARROW)
def test_nearest_is_nearest_even(name: str) -> None:
    """Rounding to nearest equals a search through all values of the format, ties to even."""
    form, values = FORMATS[name], table(name)
    span = min(float(values[-1]), 1e4)
    x = torch.empty(64, 160).uniform_(-1, 1) * span
    x[1::2] *= 2.0 ** torch.randint(-24, 1, (32, 160))
    middles = ((values[1:] + values[:-1]) / 2).float()  # ties
    count = min(len(middles), 1000)
    x[3, : min(count, 160)] = middles[torch.linspace(0, len(middles) - 1, count).long()][:160]
    x = anchored(form, x)
    expected = nearest(values, x[1:]).float()
    assert torch.equal(there_and_back(form, x)[1:], expected)


@pytest.mark.parametrize(("name", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_dense_formats_are_casts(name: str, dtype: torch.dtype) -> None:
    """A dense format stores what torch's own cast gives, overflow and NaN included."""
    x = torch.randn(8, 33) * 10.0 ** torch.randint(-40, 39, (8, 33))
    x[0, :5] = torch.tensor([INF, -INF, NAN, 65520.0, 65519.0])
    elements = FORMATS[name].encode(x)["elements"]
    assert torch.equal(elements.view(torch.int16), x.to(dtype).view(torch.int16))


def test_fp8_elements_are_casts() -> None:
    """FP8 elements equal torch's cast to E4M3 of x over the scale, bit for bit."""
    x = torch.randn(5, 300) * 10.0 ** torch.randint(-3, 4, (5, 300))
    parts = FORMATS["fp8"].encode(x)
    groups = torch.nn.functional.pad(x, (0, 84)).view(5, 3, 128)
    scales = groups.abs().amax(-1) / 448
    assert torch.equal(parts["scales"], scales)
    expected = (groups / scales[..., None]).view(5, -1)[:, :300].to(torch.float8_e4m3fn)
    assert torch.equal(parts["elements"], expected.view(torch.uint8))


@pytest.mark.parametrize("name", SCALED)
def test_any_state_is_stored_as_its_scales_say(name: str) -> None:
    """Elements are the nearest to x over the unit, whatever scales came out."""
    form = FORMATS[name]
    x = torch.randn(3, 4, 5, 70) * 10.0 ** torch.randint(-6, 6, (3, 4, 5, 1))
    parts = form.encode(x)
    unit = parts["scales"]
    unit = unit.view(torch.float8_e4m3fn).float() if name == "nvfp4" else unit.float()
    if name == "nvfp4":
        assert torch.equal(parts["total"], x.abs().amax((-2, -1)) / 2688)
        unit = unit * parts["total"][..., None, None]
    unit = unit.repeat_interleave(form.group, -1)[..., :70]
    scaled = torch.where(unit == 0, 0, x / torch.where(unit == 0, 1, unit))
    expected = nearest(table(name), scaled).float() * unit
    assert torch.equal(form.decode(parts, 70), expected)


@pytest.mark.parametrize("name", NARROW)
def test_stochastic_rounding_picks_a_neighbour(name: str) -> None:
    """The result is one of the two representable neighbours, and x itself where it is one."""
    form, values = FORMATS[name], table(name)
    x = anchored(form, torch.empty(64, 64).uniform_(-1, 1) * min(float(values[-1]), 1e4))[
        None, None
    ]
    got = there_and_back(form, x, some_bits(x))[0, 0, 1:].double()
    exact = x[0, 0, 1:].double()
    above = torch.searchsorted(values, exact.abs()).clamp(max=len(values) - 1)
    low, high = values[(above - 1).clamp(min=0)], values[above]
    assert bool(((got.abs() == low) | (got.abs() == high)).all())
    assert bool((got * exact >= 0).all())


@pytest.mark.parametrize("name", NARROW)
def test_stochastic_rounding_has_no_bias(name: str) -> None:
    """Over many draws the mean error is 0 and the variance p (1 - p) d^2, within sampling error."""
    form, values, draws = FORMATS[name], table(name), 4096
    x = anchored(form, torch.linspace(-0.97, 0.97, 6 * 40).view(6, 40) * min(values[-1], 300))
    many = x.expand(draws, 1, 6, 40)
    numbers = torch.arange(draws)
    bits = state_bits((1, 2), torch.full_like(numbers, 3), numbers, (1, 6, 40))
    error = (there_and_back(form, many, bits) - many).double().squeeze(1)[:, 1:]
    size = x.double().abs()[1:]
    above = torch.searchsorted(values, size).clamp(min=1, max=len(values) - 1)
    gap = values[above] - values[above - 1]
    p = (size - values[above - 1]) / gap
    variance = p * (1 - p) * gap**2
    standard = (variance / draws).sqrt() + 1e-12
    z = error.mean(0) / standard
    assert float(z.abs().max()) < 4.5
    assert abs(float(z.mean())) < 4 / z.numel() ** 0.5
    ratio = (error.square().mean(0).sum() / variance.sum()).item()
    assert abs(ratio - 1) < 0.02


def test_nvfp4_rounds_scales_up_for_stochastic_rounding() -> None:
    """No element is above 6 before it is rounded, so that none is cut off with a bias."""
    form = FORMATS["nvfp4"]
    x = torch.randn(64, 1, 4, 64)
    for bits, most in ((None, 6.4), (some_bits(x), 6.0)):
        parts = form.encode(x, bits)
        unit = parts["scales"].view(torch.float8_e4m3fn).float() * parts["total"][..., None, None]
        scaled = x.abs() / unit.repeat_interleave(16, -1)
        assert float(scaled.max()) <= most * (1 + 1e-6)
    assert float((x.abs() / unit.repeat_interleave(16, -1)).max()) > 5.9


@pytest.mark.parametrize("name", NARROW)
def test_the_same_bits_give_the_same_bytes(name: str) -> None:
    """Stochastic rounding is a function of x and the bits."""
    x = torch.randn(2, 2, 3, 40)
    one, two = (FORMATS[name].encode(x, some_bits(x)) for _ in range(2))
    other = FORMATS[name].encode(x, some_bits(x, count=1))
    assert all(torch.equal(one[part], two[part]) for part in one)
    assert not torch.equal(one["elements"], other["elements"])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("key_dim", [1, 16, 33, 128, 130])
def test_bytes_are_those_stored(name: str, key_dim: int) -> None:
    """nbytes is what encode returns, for any K; elements are packed without a bit to spare."""
    form = FORMATS[name]
    x = torch.randn(2, 3, 5, key_dim)
    parts = form.encode(x)
    assert sum(part.nbytes for part in parts.values()) == 6 * form.nbytes(5, key_dim)
    assert parts["elements"].nbytes == 6 * 5 * -(-key_dim * form.bits // 8)
    for part, (shape, dtype) in form.shapes(5, key_dim).items():
        assert parts[part].shape == (2, 3, *shape) and parts[part].dtype == dtype
    assert form.decode(parts, key_dim).shape == x.shape


def test_bytes_by_hand() -> None:
    """A head of 64 x 128: what each format takes, counted by hand."""
    n = 64 * 128
    by_hand = {
        "fp64": 8 * n,
        "fp32": 4 * n,
        "fp16": 2 * n,
        "bf16": 2 * n,
        "fp8": n + 64 * 4,
        "nvfp4": n // 2 + n // 16 + 4,
        "int8": n + n // 32 * 2,
        "int4": n // 2 + n // 32 * 2,
        "int2": n // 4 + n // 32 * 2,
    }
    assert {name: form.nbytes(64, 128) for name, form in FORMATS.items()} == by_hand


def test_elements_are_packed_lowest_first() -> None:
    """Two FP4 or INT4 elements a byte and four INT2, the first one in the lowest bits."""
    fp4 = FORMATS["nvfp4"].encode(torch.tensor([[2688.0, 2688 / 6], [6.0, -3.0]]))
    assert fp4["elements"].tolist() == [[0x27], [0xD7]]
    assert FORMATS["int4"].encode(torch.tensor([[7.0, -1.0, 3.0]]))["elements"].tolist() == [
        [0xF7, 0x03]
    ]
    assert FORMATS["int2"].encode(torch.tensor([[1.0, -1.0, 0.0, 1.0]]))["elements"].tolist() == [
        [0b01_00_11_01]
    ]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_zero_is_zero(name: str, stochastic: bool) -> None:
    """A state of zeros is stored exactly, and so are a group of zeros and both signs of zero."""
    x = torch.zeros(1, 1, 4, 160)
    x[0, 0, 1] = -0.0
    bits = some_bits(x) if stochastic else None
    assert not there_and_back(FORMATS[name], x, bits).any()
    x[0, 0, 3, :32] = 5.0
    assert torch.equal(there_and_back(FORMATS[name], x, bits) != 0, x != 0)


@pytest.mark.parametrize("name", NARROW)
def test_subnormals(name: str) -> None:
    """Dense formats keep subnormals; a group whose scale would be subnormal is zero."""
    form = FORMATS[name]
    if form.dense:
        least = table(name)[1].item()
        x = torch.tensor([[least, 3 * least, 0.4 * least, 0.6 * least]])
        assert torch.equal(there_and_back(form, x), torch.tensor([[1.0, 3, 0, 1]]) * least)
        x = torch.full((4096, 1, 1, 4), 0.25 * least)
        bits = state_bits((0, 0), torch.arange(4096), torch.arange(4096), (1, 1, 4))
        assert abs(float((there_and_back(form, x, bits) / least).mean()) - 0.25) < 0.02
        return
    x = torch.full((2, 64), 2.0**-130)
    assert not there_and_back(form, x).any()


@pytest.mark.parametrize("stochastic", [False, True])
def test_dense_overflow(stochastic: bool) -> None:
    """What would round past the largest number is infinite; infinities and NaNs stay."""
    x = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, INF, -INF, NAN]).expand(1, 1, 9, 7)
    bits = some_bits(x) if stochastic else None
    got = there_and_back(FORMATS["fp16"], x, bits)[0, 0, 0].tolist()
    assert got[:6] == [65504.0, 65504.0, INF, INF, INF, -INF] and math.isnan(got[6])


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("stochastic", [False, True])
def test_what_is_broken_shows(name: str, value: float, stochastic: bool) -> None:
    """A group with an infinity or a NaN decodes to NaN (nvfp4: the head's state), others do not."""
    form = FORMATS[name]
    x = torch.randn(2, 2, 3, 160)
    x[1, 0, 2, 3] = value
    back = there_and_back(form, x, some_bits(x) if stochastic else None)
    expected = torch.zeros_like(x, dtype=torch.bool)
    if name == "nvfp4":
        expected[1, 0] = True
    else:
        expected[1, 0, 2, : form.group] = True
    assert torch.equal(back.isnan(), expected)


@pytest.mark.parametrize("name", NARROW)
def test_large_and_small_states_keep_their_precision(name: str) -> None:
    """Scaled formats have the same relative error at any size that FP32 holds."""
    form = FORMATS[name]
    x = torch.rand(8, 64) + 0.5
    error = (there_and_back(form, x) - x).abs().max()
    for power in (-100, -40, 40, 120):
        if form.dense and name == "fp16":
            continue
        scaled = there_and_back(form, x * 2.0**power) / 2.0**power
        assert float((scaled - x).abs().max()) <= float(error) * 1.01


def test_the_largest_numbers_stay_finite() -> None:
    """No scale overflows at FP32's end."""
    x = torch.full((2, 64), torch.finfo(torch.float32).max)
    for name in SCALED:
        assert there_and_back(FORMATS[name], x).isfinite().all(), name


def test_a_state_of_fp64_is_rounded_once_through_fp32() -> None:
    """FP64 input is cast to FP32 first, as every backend does; only FP64 keeps it."""
    x = torch.randn(4, 33, dtype=torch.float64)
    for name, form in FORMATS.items():
        expected = x if name == "fp64" else there_and_back(form, x.float())
        assert torch.equal(there_and_back(form, x), expected)


def test_names() -> None:
    """Formats go by name or by a dense dtype; others are one error that lists the choices."""
    assert named("view", "nvfp4", VIEWS) is FORMATS["nvfp4"]
    assert named("checkpoint", torch.float16, CHECKPOINTS) is FORMATS["fp16"]
    assert named("checkpoint", FORMATS["fp8"], CHECKPOINTS) is FORMATS["fp8"]
    for given in ("fp12", torch.int8, torch.uint8, None, 16):
        with pytest.raises(ValueError, match="checkpoint must be one of fp64, fp32"):
            named("checkpoint", given, CHECKPOINTS)
    with pytest.raises(ValueError, match="int4"):
        named("checkpoint", "int4", CHECKPOINTS)
