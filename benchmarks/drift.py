"""Does folding drift? The state's error against FP64, window after window, raw and cached fold.

    python benchmarks/drift.py                  # measure, keep the numbers, write docs/measured.md
    python benchmarks/drift.py --check          # only say whether docs/measured.md is up to date
    python benchmarks/drift.py --device cuda    # the GPU's kernels, see kernels/folding.py

One request of 16 independent heads decodes 4,096 tokens with BF16 inputs, an FP32 checkpoint and a
window of 16. After every window the state is materialised and compared with the FP64 recurrence on
the same inputs, head by head, so that the 16 heads are 16 repetitions of the experiment. Gates are
drawn as models initialise them: slow decays, so that an error would stay.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from typing import NamedTuple

import torch
from torch import Tensor

import lazystate
from lazystate import LayerSpec, StateCache, gates
from lazystate.gates import Inputs
from lazystate.ops import Fold
from lazystate.reference import recurrence
from page import ROOT, write

RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "drift.json"
PAGE = ROOT / "docs" / "measured.md"

TOKENS, WINDOW, HEADS, KEY_DIM, VALUE_DIM = 4096, 16, 16, 32, 32
LAYERS = ("Mamba-2", "GDN", "KDA, softplus", "KDA, bounded", "GLA")


class Trend(NamedTuple):
    """How an error behaves over the windows.

    Attributes:
        worst: largest relative error of any head after any window.
        mean: mean over heads and settled windows.
        growth: mean over heads of the fitted growth over all settled windows, in units of `mean`.
        t: that growth over its standard error (15 degrees of freedom; above 3.7 is significant at
            0.1%).
    """

    worst: float
    mean: float
    growth: float
    t: float


def layer(name: str, activation: torch.dtype = torch.bfloat16) -> LayerSpec:
    """The layer of a name."""
    channel, erase = name.startswith(("KDA", "GLA")), name.startswith(("KDA", "GDN"))
    return LayerSpec(
        heads=HEADS,
        key_heads=HEADS,
        key_dim=KEY_DIM,
        value_dim=VALUE_DIM,
        decay="channel" if channel else "scalar",
        erase=erase,
        beta=name != "GLA",
        activation=activation,
    )


def inputs(
    name: str, seed: int = 0, activation: torch.dtype = torch.bfloat16, tokens: int = TOKENS
) -> Inputs:
    """One request's inputs [1, T, ...], gated as a freshly initialised model gates."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, HEADS, *shape, generator=generator).to(activation)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    q, k, v, b = normal(KEY_DIM), normal(KEY_DIM), normal(VALUE_DIM), normal()
    A_log = uniform(1, 16, HEADS).log()
    # The bias whose softplus is a time step between 0.001 and 0.1.
    steps = uniform(math.log(1e-3), math.log(1e-1), HEADS, KEY_DIM).exp()
    bias = steps.expm1().log()
    gate = normal(KEY_DIM)
    if name == "Mamba-2":
        return gates.mamba2(v, k, q, gate[..., 0], A_log=A_log, dt_bias=bias[:, 0])
    if name == "GDN":
        return gates.gdn(q, k, v, gate[..., 0], b, A_log=A_log, dt_bias=bias[:, 0])
    if name == "KDA, softplus":
        return gates.kda_softplus(q, k, v, gate, b, A_log=A_log, dt_bias=bias.flatten())
    if name == "KDA, bounded":
        zero = torch.zeros(HEADS)
        return gates.kda_bounded(
            q, k, v, gate, b, A_log=zero, dt_bias=bias.flatten(), lower_bound=-5.0
        )
    log_decay = torch.nn.functional.logsigmoid(gate.float()) / 16
    return gates.gla(q, torch.nn.functional.normalize(k, dim=-1), v, log_decay)


def truth(name: str, given: Inputs) -> Tensor:
    """FP64 states after every window: [windows, HV, V, K]."""
    states = []
    q, k, v, log_decay, beta, _ = given
    shape = v.shape[2], v.shape[3], k.shape[3]
    state = torch.zeros(shape, dtype=torch.float64, device=v.device)
    for t in range(v.shape[1]):
        strength = None if beta is None else beta[0, t]
        own = q[0, t], k[0, t], v[0, t], log_decay[0, t], strength
        _, state = recurrence.token(state, *own, erase=layer(name).erase)
        if (t + 1) % WINDOW == 0:
            states.append(state)
    return torch.stack(states)


def errors(name: str, fold: Fold, given: Inputs, expected: Tensor) -> Tensor:
    """Relative Frobenius error of each head's state after every window: [windows, HV]."""
    cache = StateCache(layer(name), 1, window=WINDOW, fold=fold)
    slot, found = torch.tensor([0]), []
    for t in range(TOKENS):
        ticket = cache.begin(slot)
        parts = [None if x is None else x[:, t : t + 1] for x in given[:5]]
        cache.step(ticket, 0, *parts)  # type: ignore[arg-type]
        cache.commit(ticket)
        if (t + 1) % WINDOW == 0:
            found.append(cache.materialize(slot)[0][0].double())
    return relative(torch.stack(found), expected)


def relative(found: Tensor, expected: Tensor) -> Tensor:
    """Relative Frobenius error of states [windows, HV, V, K]: [windows, HV]."""
    difference = found.double() - expected
    return difference.flatten(2).norm(dim=2) / expected.flatten(2).norm(dim=2)


def trend(error: Tensor) -> Trend:
    """Fit a line to each head's settled errors [windows, HV]; the heads give its uncertainty."""
    settled = error[len(error) // 4 :]  # in the first quarter a fresh state still grows
    window = torch.arange(len(settled), dtype=torch.float64)
    window = (window - window.mean()).unsqueeze(1)
    mean = settled.mean(0)
    slope = (window * (settled - mean)).sum(0) / window.square().sum()
    growth = slope * len(settled) / mean
    standard_error = growth.std() / len(growth) ** 0.5
    return Trend(
        worst=float(error.max()),
        mean=float(mean.mean()),
        growth=float(growth.mean()),
        t=float(growth.mean() / standard_error),
    )


def measure(name: str) -> dict[Fold, Trend]:
    """The trends of a layer's folds on the same inputs; without erase both folds are one."""
    given = inputs(name)
    expected = truth(name, given)
    folds: tuple[Fold, ...] = ("raw", "cached") if layer(name).erase else ("raw",)
    return {fold: trend(errors(name, fold, given, expected)) for fold in folds}


def table(record: dict) -> str:
    """The section's table in Markdown."""
    lines = [
        "| layer | fold | largest error | mean error | growth over the run | t |\n",
        "|---|---|---|---|---|---|\n",
    ]
    for row in record["results"]:
        lines.append(
            f"| {row['layer']} | {row['fold']} | {row['worst']:.1e} | {row['mean']:.1e} | "
            f"{row['growth']:+.1%} | {row['t']:+.1f} |\n"
        )
    lines.append(f"\ntorch {record['torch']}, {record['device']}.\n")
    return "".join(lines)


def main() -> None:
    """Measure and write, or check."""
    if "--device" in sys.argv[1:]:
        from kernels import folding

        folding.main()
        return
    if "--check" in sys.argv[1:]:
        write(PAGE, "drift", table(json.loads(RESULTS.read_text("utf8"))), check=True)
        return
    torch.set_num_threads(1)
    results = []
    for name in LAYERS:
        for fold, found in measure(name).items():
            results.append({"layer": name, "fold": fold, **found._asdict()})
            print(json.dumps(results[-1]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    record = {
        "torch": torch.__version__,
        "lazystate": lazystate.__version__,
        "commit": commit.stdout.strip(),
        "device": "cpu, 1 thread",
        "tokens": TOKENS,
        "window": WINDOW,
        "results": results,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", "utf8")
    write(PAGE, "drift", table(record), check=False)


if __name__ == "__main__":
    main()
