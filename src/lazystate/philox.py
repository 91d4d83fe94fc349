"""Philox 4x32-10: random words that are a function of a key and a counter, and of nothing else.

The generator of Salmon, Moraes, Dror and Shaw (Parallel random numbers: as easy as 1, 2, 3; 2011),
here in int64 arithmetic, which every PyTorch device has. `triton.language.philox(seed, c0, c1, c2,
c3)` computes the same words from seed = key[0] + 2^32 key[1].
"""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
WORD = 0xFFFFFFFF

PIECE = 16  # neighbours along K that take the same bits of different calls


def philox(key: tuple[int, int], counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> list[Tensor]:
    """Four random words for every counter.

    Args:
        key: two words, 0 to 2^32 - 1.
        counter: four int64 tensors of words, which broadcast.

    Returns:
        Four int64 tensors of the common shape, each uniform in 0 to 2^32 - 1.
    """
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        # int64 products wrap, and bits 32 to 63 are those of the unsigned product all the same.
        even, odd = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0 = ((odd >> 32) & WORD) ^ c1 ^ k0
        c2 = ((even >> 32) & WORD) ^ c3 ^ k1
        c1, c3 = odd & WORD, even & WORD
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return list(torch.broadcast_tensors(c0, c1, c2, c3))


def state_bits(
    key: tuple[int, int], slots: Tensor, counts: Tensor, shape: tuple[int, int, int]
) -> Tensor:
    """16 random bits for every element of the states of some slots.

    Element (v, k) of a head takes half a word of the call with counter
    c0 = (v ceil(K / 128) + k // 128) 16 + k % 16, c1 = head, c2 = slot, c3 = count: with
    i = (k // 16) % 8, the low half of word i for i < 4 and the high half of word i - 4 otherwise. A
    kernel whose tile is pieces of 16 along K so needs no exchange between its threads, and one call
    serves eight elements.

    Args:
        key: (seed, layer), two words.
        slots, counts: int64 [n], slot and number of the draw, taken modulo 2^32.
        shape: (HV, V, K).

    Returns:
        int64 [n, HV, V, K], each 0 to 65,535.
    """
    heads, value_dim, key_dim = shape
    calls = -(-key_dim // (8 * PIECE))

    def word(numbers: Tensor, dim: int) -> Tensor:
        return numbers.view(-1, *[1] * (2 - dim)) & WORD

    device = slots.device
    words = philox(
        key,
        (
            word(torch.arange(value_dim * calls * PIECE, device=device), 2),
            word(torch.arange(heads, device=device), 1),
            word(slots, 0),
            word(counts.to(device), 0),
        ),
    )
    lanes = [w & 0xFFFF for w in words] + [w >> 16 for w in words]
    bits = torch.stack([x.view(-1, heads, value_dim, calls, PIECE) for x in lanes], 4)
    return bits.flatten(3)[..., :key_dim]
