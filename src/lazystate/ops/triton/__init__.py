"""The GPU path: few kernels, specialised by constexpr, sharing device functions.

Nothing here reads back to the host, so that a model step can be captured in a CUDA graph.
"""

from __future__ import annotations

from lazystate.ops.triton.conv import convolve
from lazystate.ops.triton.cursors import begin, census, commit
from lazystate.ops.triton.launch import step
from lazystate.ops.triton.settle import settle

__all__ = ["begin", "census", "commit", "convolve", "settle", "step"]
