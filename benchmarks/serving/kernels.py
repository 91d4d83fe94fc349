"""What a GPU kernel of a serving engine is for, by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import lazystate

GROUPS = ("GEMM", "linear attention", "attention", "rest")

# Looked for in this order. Names that the compiler of PyTorch makes list the operations fused, and
# would be taken for what they only feed.
_COMPILED = re.compile(r"^triton_(?!tem_)")
_LINEAR = re.compile(
    r"selective_scan|replayssm|causal_conv1d|gated_delta|gdn|kda|fused_post_conv|l2norm"
    r"|chunk_(scan|state|cumsum|fwd|local|scaled|gla)|state_passing|bmm_chunk|solve_tril"
    r"|recompute_w_u|merge_16x16|checkpoints?_kernel|(gather_initial|scatter)_states"
)
_ATTENTION = re.compile(r"flash|fmha|attention|attn|reshape_and_cache|mla_|paged", re.IGNORECASE)
_GEMM = re.compile(r"gemm|nvjet|cutlass|cublas|splitk|triton_tem_", re.IGNORECASE)


@cache
def own() -> frozenset[str]:
    """Names of lazystate's kernels; all belong to linear attention."""
    folder = Path(lazystate.__file__).parent / "ops" / "triton"
    text = "\n".join(path.read_text("utf8") for path in folder.glob("*.py"))
    return frozenset(re.findall(r"^def (\w+_kernel)\(", text, re.MULTILINE))


def group(name: str) -> str:
    """One of `GROUPS`; norms, activations, sampling and copies are the rest."""
    if _COMPILED.search(name):
        return "rest"
    if name in own() or _LINEAR.search(name):
        return "linear attention"
    if _ATTENTION.search(name):
        return "attention"
    return "GEMM" if _GEMM.search(name) else "rest"


def grouped(times: Mapping[str, float]) -> dict[str, float]:
    """Times of kernels summed by group; every group is there."""
    sums: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    for name, time in times.items():
        sums[group(name)] += time
    return sums


def largest(times: Mapping[str, float], share: float = 0.01) -> dict[str, float]:
    """The kernels that take at least a share of all time, longest first: what the groups hold."""
    total = sum(times.values())
    kept = [(name, time) for name, time in times.items() if time >= share * total]
    return dict(sorted(kept, key=lambda item: -item[1]))
