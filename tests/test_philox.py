"""The random bits: those of the published generator, and different wherever they should be."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from lazystate.philox import philox, state_bits

# Of the generator's authors (Random123, known answers of philox4x32-10).
KNOWN = [
    ((0, 0), (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0xA4093822, 0x299F31D0),
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("key", "counter", "words"), KNOWN)
def test_known_answers(key, counter, words) -> None:
    """The words are those that the generator's authors publish."""
    c0, c1, c2, c3 = (torch.tensor([c]) for c in counter)
    assert tuple(int(w) for w in philox(key, (c0, c1, c2, c3))) == words


@triton.jit
def _words(out, seed, head, slot, count, N: tl.constexpr):
    i = tl.arange(0, N)
    zero = i * 0
    c0, c1, c2, c3 = tl.philox(seed, i, zero + head, zero + slot, zero + count)
    tl.store(out + i, c0.to(tl.int64))
    tl.store(out + N + i, c1.to(tl.int64))
    tl.store(out + 2 * N + i, c2.to(tl.int64))
    tl.store(out + 3 * N + i, c3.to(tl.int64))


def test_triton_has_the_same_generator() -> None:
    """`tl.philox` gives these words for the same key and counter, so a kernel can draw them."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.zeros(4, 16, dtype=torch.int64, device=device)
    _words[(1,)](out, 7 + (3 << 32), 2, 5, 11, N=16)
    one = torch.ones(1, dtype=torch.int64)
    expected = philox((7, 3), (torch.arange(16), 2 * one, 5 * one, 11 * one))
    assert torch.equal(out.cpu(), torch.stack(expected))


def test_every_element_has_its_own_bits() -> None:
    """Every element takes the half word that `state_bits` documents."""
    heads, value_dim, key_dim = 2, 3, 200
    bits = state_bits((5, 1), torch.tensor([4]), torch.tensor([9]), (heads, value_dim, key_dim))
    assert bits.shape == (1, heads, value_dim, key_dim)
    one = torch.ones(1, dtype=torch.int64)
    for head, v, k in ((0, 0, 0), (1, 2, 199), (0, 1, 64), (1, 0, 127), (1, 1, 128)):
        call = (v * 2 + k // 128) * 16 + k % 16
        words = philox((5, 1), (call * one, head * one, 4 * one, 9 * one))
        lane = (k // 16) % 8
        word = int(words[lane % 4])
        assert int(bits[0, head, v, k]) == (word >> 16 if lane >= 4 else word & 0xFFFF)


def test_bits_depend_on_all_that_names_a_draw() -> None:
    """Another seed, layer, slot or count gives other bits; the same ones give the same."""

    def draw(seed=0, layer=0, slot=0, count=0):
        key, numbers = (seed, layer), (torch.tensor([slot]), torch.tensor([count]))
        return state_bits(key, *numbers, (2, 4, 16)).flatten()

    base = draw()
    assert torch.equal(base, draw())
    for changed in (draw(seed=1), draw(layer=1), draw(slot=1), draw(count=1)):
        assert (changed == base).float().mean() < 0.1
    assert (base[:64] == base[64:]).float().mean() < 0.1  # the two heads


def test_bits_are_uniform() -> None:
    """Mean and variance of a million draws are those of the uniform distribution."""
    bits = state_bits((0, 0), torch.arange(16), torch.arange(16), (16, 64, 64)).double()
    n, spread = bits.numel(), 65536 / 12**0.5
    assert abs(float(bits.mean()) - 65535 / 2) < 4 * spread / n**0.5
    assert abs(float(bits.var()) / spread**2 - 1) < 4 * (0.8 / n) ** 0.5
