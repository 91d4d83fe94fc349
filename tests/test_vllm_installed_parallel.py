"""Pages of tensor-parallel devices, from the shapes that an installed vLLM divides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: these ask it for shapes")

from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.page import Page, page_of
from lazystate.engines.vllm.support import Kind
from lazystate.sketch.calibration_file import Calibration, Origin

HEADS, KEY_HEADS = 32, 8
BF16, FP32 = torch.bfloat16, torch.float32


def shapes_of(kind: Kind, devices: int) -> tuple[tuple[int, ...], ...]:
    """What vLLM keeps on one of so many devices."""
    if kind == "mamba2":
        return Shapes.mamba2_state_shape(devices, HEADS * 64, KEY_HEADS, HEADS, 64, 128, 4)
    if kind == "gdn":
        return Shapes.gated_delta_net_state_shape(devices, KEY_HEADS, HEADS, 128, 128, 4)
    return Shapes.kda_state_shape(devices, HEADS, 128, conv_kernel_size=4)


def page(kind: Kind, devices: int, **options: object) -> Page:
    """Of a large layer."""
    given = Options(**options)  # type: ignore[arg-type]
    return page_of(kind, shapes_of(kind, devices), (BF16, FP32), BF16, given, devices)


@pytest.mark.parametrize("view", [None, "nvfp4"])
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("kind", ["mamba2", "gdn", "kda"])
def test_heads_and_groups_divide(kind: Kind, devices: int, view: str | None) -> None:
    """A device has its share of everything, to the byte but for what aligns."""
    whole, part = page(kind, 1, view=view), page(kind, devices, view=view)
    assert part.spec.heads * devices == whole.spec.heads
    assert part.spec.key_heads * devices == whole.spec.key_heads
    for one, other in zip(whole.parts, part.parts, strict=True):
        assert one.name == other.name
        if one.name not in ("cursor", "pad"):
            assert one.nbytes == devices * other.nbytes


def test_groups_that_do_not_divide_are_on_every_device() -> None:
    """Mamba-2's groups, fewer than devices: each keeps the one that its heads share."""
    shapes = Shapes.mamba2_state_shape(4, HEADS * 64, 1, HEADS, 64, 128, 4)
    spec = page_of("mamba2", shapes, (BF16, FP32), BF16, Options()).spec
    assert (spec.heads, spec.key_heads) == (HEADS // 4, 1)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_a_sketchs_page_is_that_of_the_largest_share(devices: int, tmp_path: Path) -> None:
    """Pages of all devices are equally large, whichever has the heads of large ranks."""
    omega = torch.eye(128)[:, :8].expand(1, HEADS, 128, 8)
    paired = torch.linspace(0.1, 0.9, HEADS).view(1, HEADS, 1) ** torch.arange(9.0)
    path = tmp_path / "c.safetensors"
    Calibration(Origin("m", (0,), 128, 16, True), omega.contiguous(), paired).save(path)
    made = page("gdn", devices, view="sketch", calibration=str(path), mean_rank=3)
    counts = {part.name: part.shape for part in made.parts if part.name.startswith("view.")}
    (most,) = counts["view.sketch"]
    assert most % (HEADS // devices * 128) == 0
    assert most // (HEADS // devices * 128) <= 8
