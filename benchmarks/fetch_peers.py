"""Fetch the kernels that benchmarks/peers.py compares with, by package name, into data/peers/.

    python benchmarks/fetch_peers.py
    PYTHONPATH=src:data/peers python benchmarks/run.py --only peers

Of the wheel (some 340 MB) only the Python files of its decode kernels and their settings are
unpacked, under 1 MB: nothing else of it is imported. They keep their licence, Apache-2.0.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from page import ROOT

PACKAGE = "vllm==0.33.0"
OPS = "vllm/model_executor/layers/mamba/ops"
WANTED = (
    f"{OPS}/mamba_ssm.py",
    f"{OPS}/triton_helpers.py",
    f"{OPS}/replayssm_config.py",
    f"{OPS}/selective_state_update_replayssm_output_only.py",
    f"{OPS}/configs/selective_state_update/*device_name=NVIDIA_H*.json",
    "vllm/third_party/flash_linear_attention/ops/fused_recurrent.py",
    "vllm/third_party/flash_linear_attention/ops/fused_sigmoid_gating.py",
    "vllm/third_party/flash_linear_attention/ops/op.py",
    "vllm/third_party/flash_linear_attention/ops/utils.py",
    "vllm/models/kimi_k3/nvidia/ops/third_party/kda/fused_recurrent.py",
    "vllm/utils/math_utils.py",
    "*.dist-info/METADATA",
    "*.dist-info/licenses/LICENSE",
)


def unpack(wheel: Path, target: Path) -> int:
    """Write the wanted files of a wheel; how many they are."""
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if any(fnmatch(n, each) for each in WANTED)]
        archive.extractall(target, names)
    (target / "vllm" / "__init__.py").touch()  # so that it is found as a package; never executed
    return len(names)


def main() -> None:
    """Download and unpack."""
    target = ROOT / "data" / "peers"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", PACKAGE, "--no-deps", "-d", folder]
        platform = ["--only-binary=:all:", "--python-version", "3.12"]
        platform += ["--platform", "manylinux_2_28_x86_64"]
        subprocess.run([*command, *platform], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        print(f"{unpack(wheel, target)} files of {PACKAGE} in {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
