"""Number formats of stored states: encode, decode, and bytes.

A *dense* format (FP64, FP32, FP16, BF16) stores every element as it is. A *scaled* format stores
small elements and, for every group of neighbours along K, what they are multiplied by; it is packed
for real, two FP4 or INT4 elements a byte and four INT2.

| name | element | scale |
|---|---|---|
| fp8 | E4M3 | one FP32 for 128 along K |
| nvfp4 | E2M1 | one E4M3 for 16 along K, and one FP32 for the state of a head |
| int8, int4, int2 | whole numbers, symmetric | one BF16 for 32 along K |

An encoding is a function of the FP32 value, and in stochastic rounding of 16 random bits for each
element, by elementary FP32 operations (maximum, division rounded to nearest, product with a power
of two), so that any backend can compute the same bytes. For a group with the largest magnitude A
and elements up to M:

    fp8   scale = A / 448                              element = round(x / scale)
    int   scale = BF16(A / M)                          element = round(x / scale)
    nvfp4 total = A_state / (448 * 6)
          scale = E4M3(A / 6 / total)                  element = round(x / (scale * total))

`round` is to nearest, ties to even, or stochastic. In stochastic rounding the scale of nvfp4 is
rounded up, since an element above 6 could not be rounded without a bias.

What happens at the edges, in every scaled format:
- A magnitude above the largest element (a scale was rounded down) is stored as the largest.
- A group of zeros, and one whose scale would be below 2^-126 (FP32's least normal number), is zero.
- A group with an infinity or a NaN decodes to NaN, in nvfp4 the whole state: what is broken shows.
Dense formats do what a cast does: magnitudes that would round to more than the largest number
become infinite, subnormals are kept, infinities and NaNs stay what they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Rounding = Literal["stochastic", "nearest"]

LEAST_NORMAL = 2.0**-126
FP8_LARGEST, FP4_LARGEST = 448.0, 6.0
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

Parts = dict[str, Tensor]


@dataclass(frozen=True)
class Format:
    """A number format of states [..., V, K].

    Attributes:
        name: what it is called, everywhere.
        bits: of one element.
        dtype: how elements are stored; uint8 where they are packed or have no dtype on every
            device.
        mantissa, lowest: a number x is a multiple of 2^(max(floor(log2 |x|), lowest) - mantissa).
        largest: largest magnitude of an element.
        group: neighbours along K that share a scale; 0 in a dense format.
        scale: how a scale is stored; uint8 holds E4M3.
    """

    name: str
    bits: int
    dtype: torch.dtype
    mantissa: int
    lowest: int
    largest: float
    group: int = 0
    scale: torch.dtype | None = None

    @property
    def dense(self) -> bool:
        """Whether elements are stored as they are, without a scale."""
        return self.group == 0

    @property
    def narrow(self) -> bool:
        """Whether it rounds an FP32 state, so that the way of rounding matters."""
        return self.bits < 32

    def shapes(
        self, value_dim: int, key_dim: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every stored part of one head's state [V, K], by name."""
        per_byte = 8 // self.bits if self.bits < 8 else 1
        parts: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "elements": ((value_dim, -(-key_dim // per_byte)), self.dtype)
        }
        if self.scale is not None:
            parts["scales"] = ((value_dim, -(-key_dim // self.group)), self.scale)
        if self.name == "nvfp4":
            parts["total"] = ((), torch.float32)
        return parts

    def nbytes(self, value_dim: int, key_dim: int) -> int:
        """Bytes of one head's state [V, K], scales included."""
        shapes = self.shapes(value_dim, key_dim).values()
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def encode(self, x: Tensor, bits: Tensor | None = None) -> Parts:
        """Store states.

        Args:
            x: [..., V, K], FP32 (FP64 is cast to FP32 first, unless the format is FP64).
            bits: integers 0 to 65,535 of the shape of x, for stochastic rounding: with a value a
                part p of the way between two neighbours, it goes up for p of all bits, to 2^-17.
                None rounds to nearest, ties to even. FP32 and FP64 do not round.

        Returns:
            The parts of `shapes`, each with the leading dimensions of x.
        """
        if self.name == "fp64":
            return {"elements": x.double()}
        x = x.float()
        if self.dense:
            return {"elements": _cast(self, x, bits)}
        scales, unit, total = _scales(self, x, up=bits is not None)
        dead = unit == 0
        units = _spread(torch.where(dead, 1, unit), self.group, x.shape[-1])
        scaled = (x / units).clamp(-self.largest, self.largest)
        scaled = scaled.masked_fill(_spread(dead, self.group, x.shape[-1]) | scaled.isnan(), 0)
        elements = _pack(_codes(self, _round(self, scaled, bits)), self.bits)
        parts = {"elements": elements.to(self.dtype), "scales": scales}
        return parts if total is None else {**parts, "total": total[..., 0, 0]}

    def decode(self, parts: Parts, key_dim: int) -> Tensor:
        """The stored states [..., V, K], FP32 (FP64 where the format is). key_dim: K."""
        elements = parts["elements"]
        if self.dense:
            return elements if self.name == "fp64" else elements.float()
        values = _values(self, _unpack(elements, self.bits)[..., :key_dim])
        unit = parts["scales"]
        unit = _e4m3(unit) if unit.dtype == torch.uint8 else unit.float()
        if "total" in parts:
            unit = unit * parts["total"][..., None, None]
        return values * _spread(unit, self.group, key_dim)


FORMATS = {
    each.name: each
    for each in (
        Format("fp64", 64, torch.float64, 52, -1022, torch.finfo(torch.float64).max),
        Format("fp32", 32, torch.float32, 23, -126, torch.finfo(torch.float32).max),
        Format("fp16", 16, torch.float16, 10, -14, 65504.0),
        Format("bf16", 16, torch.bfloat16, 7, -126, torch.finfo(torch.bfloat16).max),
        Format("fp8", 8, torch.uint8, 3, -6, FP8_LARGEST, 128, torch.float32),
        Format("nvfp4", 4, torch.uint8, 1, 0, FP4_LARGEST, 16, torch.uint8),
        Format("int8", 8, torch.uint8, 8, 8, 127.0, 32, torch.bfloat16),
        Format("int4", 4, torch.uint8, 4, 4, 7.0, 32, torch.bfloat16),
        Format("int2", 2, torch.uint8, 2, 2, 1.0, 32, torch.bfloat16),
    )
}
CHECKPOINTS = ("fp64", "fp32", "fp16", "bf16", "fp8", "nvfp4")
VIEWS = ("fp32", "fp16", "bf16", "fp8", "nvfp4", "int8", "int4", "int2")

_BY_DTYPE = {each.dtype: each for each in FORMATS.values() if each.dense}


def named(argument: str, given: object, allowed: tuple[str, ...]) -> Format:
    """The format of a name or of a dense dtype.

    Args:
        argument: what the caller calls it, for the error. allowed: names to choose from.

    Raises:
        ValueError: if it is none of them.
    """
    found = given
    if isinstance(given, str):
        found = FORMATS.get(given)
    elif isinstance(given, torch.dtype):
        found = _BY_DTYPE.get(given)
    if not isinstance(found, Format) or found.name not in allowed:
        raise ValueError(
            f"{argument} must be one of {', '.join(allowed)} (or the dtype of one), got {given!r}"
        )
    return found


def _scales(form: Format, x: Tensor, *, up: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    """(stored scales, what they decode to, total or None) of the groups of x [..., V, K].

    Groups run along K: [..., V, ceil(K / group)]; the last one may be short. total: [..., 1, 1].
    """
    groups = -(-x.shape[-1] // form.group)
    padded = torch.nn.functional.pad(x.abs(), (0, groups * form.group - x.shape[-1]))
    largest = padded.unflatten(-1, (groups, form.group)).amax(-1)  # a NaN goes through
    largest = torch.where(largest == math.inf, math.nan, largest)
    if form.name != "nvfp4":
        unit = largest / form.largest
        unit = torch.where(unit < LEAST_NORMAL, 0, unit)
        assert form.scale is not None
        stored = unit.clamp(max=torch.finfo(form.scale).max).to(form.scale)
        return stored, stored.float(), None
    total = largest.amax((-2, -1), keepdim=True) / (FP8_LARGEST * FP4_LARGEST)
    total = torch.where(total < LEAST_NORMAL, 0, total)
    wanted = largest / FP4_LARGEST / torch.where(total == 0, 1, total)
    wanted = torch.where(total == 0, 0, wanted).clamp(max=FP8_LARGEST)
    stored = wanted.to(torch.float8_e4m3fn).view(torch.uint8)
    if up:
        stored = stored + (_e4m3(stored) < wanted).to(torch.uint8)
    unit = _e4m3(stored) * total
    return stored, torch.where(unit < LEAST_NORMAL, 0, unit), total


def _spread(scales: Tensor, group: int, key_dim: int) -> Tensor:
    """[..., V, K] from one number a group."""
    return scales.repeat_interleave(group, -1)[..., :key_dim]


def _round(form: Format, x: Tensor, bits: Tensor | None) -> Tensor:
    """Finite FP32 numbers to the format's multiples; the largest magnitude is not looked at."""
    exponent = (torch.frexp(x).exponent - 1).clamp(min=form.lowest)
    quantum = torch.ldexp(torch.ones_like(x), exponent - form.mantissa)
    multiple = x / quantum  # exact: the quantum is a power of two
    if bits is None:
        return torch.round(multiple) * quantum
    below = multiple.abs().floor()
    part = (multiple.abs() - below) * 65536
    return torch.copysign((below + (bits + 0.5 < part)) * quantum, x)


def _cast(form: Format, x: Tensor, bits: Tensor | None) -> Tensor:
    """FP32 to a dense dtype; stochastic rounding where `bits` are given and it is narrower."""
    nearest = x.to(form.dtype)
    if bits is None or not form.narrow:
        return nearest
    kept = x.abs() <= form.largest  # others have no neighbour on one side: as a cast does
    return torch.where(kept, _round(form, torch.where(kept, x, 0), bits).to(form.dtype), nearest)


def _codes(form: Format, values: Tensor) -> Tensor:
    """uint8 codes of rounded elements."""
    if form.name == "fp8":
        return values.to(torch.float8_e4m3fn).view(torch.uint8)
    if form.name == "nvfp4":
        table = torch.tensor(FP4_VALUES, device=values.device)
        return (torch.bucketize(values.abs(), table) + 8 * values.signbit()).to(torch.uint8)
    return (values.to(torch.int16) & (2**form.bits - 1)).to(torch.uint8)


def _values(form: Format, codes: Tensor) -> Tensor:
    """FP32 elements of uint8 codes."""
    if form.name == "fp8":
        return _e4m3(codes)
    if form.name == "nvfp4":
        table = torch.tensor(FP4_VALUES, device=codes.device)
        return torch.cat([table, -table])[codes.int()]
    half = 2 ** (form.bits - 1)
    return (((codes.to(torch.int16) + half) & (2 * half - 1)) - half).float()


def _e4m3(codes: Tensor) -> Tensor:
    """FP32 values of E4M3 in uint8."""
    return codes.view(torch.float8_e4m3fn).float()


def _pack(codes: Tensor, bits: int) -> Tensor:
    """Several codes a byte, the first one lowest; zeros behind an odd end."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % per_byte))
    parts = codes.unflatten(-1, (-1, per_byte)).unbind(-1)
    packed = parts[0]
    for i, part in enumerate(parts[1:], 1):
        packed = packed | (part << (bits * i))
    return packed


def _unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of `_pack`, those behind an odd end included."""
    if bits == 8:
        return packed
    shifts = range(0, 8, bits)
    return torch.stack([(packed >> i) & (2**bits - 1) for i in shifts], -1).flatten(-2)
