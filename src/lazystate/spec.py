"""A recurrent layer as data: shapes, decay and erase (docs/maths.md, Eq. 1-3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Decay = Literal["scalar", "channel"]

ACTIVATIONS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class LayerSpec:
    """The recurrence of one layer (Eq. 1-3), without its weights.

    Attributes:
        heads: value heads HV; each keeps a state of shape [V, K].
        key_heads: key heads H; each serves `heads // key_heads` value heads with its q and k.
        key_dim: K, the length of a query or key (Mamba-2's `d_state`).
        value_dim: V, the length of a value (Mamba-2's `headdim`).
        decay: "scalar" for one log-decay per head and token, "channel" for K of them.
        erase: True for delta-rule layers (GDN, KDA), whose write first removes what the state
            returns for the key.
        beta: True if each token brings a write strength (GDN, KDA: sigmoid; Mamba-2: the time
            step), False for 1 (GLA, Lightning).
        activation: dtype of q, k, v and of the records kept of them.
        conv_channels: channels of the short convolution before the recurrence, 0 for none.
        conv_width: its kernel size, 0 for none.

    Raises:
        ValueError: for a size below 1, heads that do not divide, or an unknown decay or dtype.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    decay: Decay
    erase: bool
    beta: bool = True
    activation: torch.dtype = torch.bfloat16
    conv_channels: int = 0
    conv_width: int = 0

    def __post_init__(self) -> None:
        for name in ("heads", "key_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.key_heads:
            raise ValueError(
                f"heads must be a multiple of key_heads, got {self.heads} and {self.key_heads}"
            )
        if self.decay not in ("scalar", "channel"):
            raise ValueError(f"decay must be 'scalar' or 'channel', got {self.decay!r}")
        if self.erase and not self.beta:
            raise ValueError("beta must be True for a layer with erase: the write needs a strength")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {self.activation}")
        if (self.conv_channels > 0) != (self.conv_width > 1):
            raise ValueError(
                "conv_channels and conv_width belong together: give both (width at least 2) or "
                f"neither, got {self.conv_channels} and {self.conv_width}"
            )

    @property
    def group(self) -> int:
        """Value heads that share one key head."""
        return self.heads // self.key_heads

    @property
    def compute(self) -> torch.dtype:
        """Dtype of gates and of all accumulation: FP32, or FP64 for FP64 activations."""
        return torch.float64 if self.activation == torch.float64 else torch.float32

    @property
    def correction(self) -> torch.dtype:
        """Dtype of a cached correction u: FP16 keeps three more mantissa bits than BF16."""
        return torch.float16 if self.activation == torch.bfloat16 else self.activation

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """[HV, V, K]: the state of one request."""
        return self.heads, self.value_dim, self.key_dim

    @property
    def decay_shape(self) -> tuple[int, ...]:
        """Shape of one token's log-decay: [HV], or [HV, K] with a decay per channel."""
        return (self.heads, self.key_dim) if self.decay == "channel" else (self.heads,)
