"""What holds for every test: one thread, fixed seeds, and NaN in all memory nobody has written."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# The same programs each time: a run says something about the change that it follows. For others:
# pytest --hypothesis-profile=default.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

if not torch.cuda.is_available():
    # Read when a kernel is decorated, so before anything imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # vLLM, where it is installed, then does so as well
    # Stock models run these packages' GPU kernels wherever they can be imported, and fail on a CPU.
    for package in ("fla", "mamba_ssm", "causal_conv1d"):
        sys.modules[package] = None


@pytest.fixture(autouse=True, scope="session")
def poison() -> Iterator[None]:
    """Fill whatever `torch.empty` returns with NaN: a read of invalid memory shows."""
    plain = torch.empty

    def poisoned(*args, **kwargs):
        tensor = plain(*args, **kwargs)
        if tensor.dtype == torch.uint8:  # packed elements, and E4M3 scales: NaN
            return tensor.fill_(255)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same random numbers whichever tests run before."""
    torch.manual_seed(0)
