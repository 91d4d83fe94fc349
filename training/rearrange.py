"""Rearrange saved weights into the names and classes that inference engines load; exact.

A Qwen3-Next model whose layers are all dense is a Qwen3.5 text model with the rows of two input
projections in another order. Qwen3-Next stores them key head by key head, q, k, v, z of a group
and b, a of a group; Qwen3.5 has all q, all k, all v in one matrix, and z, b, a in one each. The
convolution's channels and all other weights are the same. vLLM refuses a Qwen3-Next model without
experts; a Qwen3.5 model needs none.

Dense layers of Kimi Linear are called `mlp` in published weights, layers of experts
`block_sparse_moe`; transformers reads both names for either, but writes the latter for both, and
vLLM does not find it. `--names` calls them `mlp` again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, PreTrainedConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

WEIGHTS = "model.safetensors"
CHANGED = {"architectures", "model_type", "rope_parameters", "transformers_version"}
Tensors = dict[str, torch.Tensor]


def text_config(old: PreTrainedConfig) -> Qwen3_5TextConfig:
    """The Qwen3.5 configuration of a dense Qwen3-Next model, all sizes kept.

    Positions of text are the same in the three sections that Qwen3.5 splits rotary pairs into, so
    the sections do not matter; they sum to the number of pairs.

    Raises:
        ValueError: if the model is another, or has experts.
    """
    layers = range(old.num_hidden_layers)
    if old.model_type != "qwen3_next" or set(old.mlp_only_layers) != set(layers):
        raise ValueError(f"not a Qwen3-Next model of dense layers only: {old.model_type}")
    shared = Qwen3_5TextConfig().to_dict().keys() & old.to_dict().keys()
    rope = old.rope_parameters
    return Qwen3_5TextConfig(
        **{key: getattr(old, key) for key in shared - CHANGED},
        architectures=[Qwen3_5ForCausalLM.__name__],
        **rope_options(old.head_dim, rope["rope_theta"], rope["partial_rotary_factor"]),
    )


def rope_options(head_dim: int, theta: float, part: float) -> dict:
    """Rotary positions on a part of each head, in sections of nearly equal size.

    The part is given twice, for some versions write a default of their own beside the parameters.
    """
    pairs = int(head_dim * part) // 2
    return {
        "partial_rotary_factor": part,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": part,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            "mrope_interleaved": True,
        },
    }


def split_groups(weight: torch.Tensor, groups: int, sizes: list[int]) -> list[torch.Tensor]:
    """Rows that lie group by group, as one matrix for each of a group's parts."""
    parts = weight.unflatten(0, (groups, -1)).split(sizes, dim=1)
    return [part.flatten(0, 1) for part in parts]


def qwen3_5_weights(weights: Tensors, config: Qwen3_5TextConfig) -> Tensors:
    """The same weights under the names of Qwen3.5."""
    groups = config.linear_num_key_heads
    per_group = config.linear_num_value_heads // groups
    key, value = config.linear_key_head_dim, config.linear_value_head_dim * per_group
    result = {}
    for name, weight in weights.items():
        stem = name.removesuffix("_qkvz.weight").removesuffix("_ba.weight")
        if name.endswith("in_proj_qkvz.weight"):
            *qkv, z = split_groups(weight, groups, [key, key, value, value])
            result |= {f"{stem}_qkv.weight": torch.cat(qkv), f"{stem}_z.weight": z}
        elif name.endswith("in_proj_ba.weight"):
            b, a = split_groups(weight, groups, [per_group, per_group])
            result |= {f"{stem}_b.weight": b, f"{stem}_a.weight": a}
        else:
            result[name] = weight
    return {name: weight.contiguous() for name, weight in result.items()}


def rearrange(source: Path, target: Path) -> None:
    """Write a dense Qwen3-Next folder as a Qwen3.5 folder, its other files as they are.

    A record of the training, `run.json`, gets the entry `rearranged_from`.
    """
    old = AutoConfig.from_pretrained(source)
    config = text_config(old)
    weights = qwen3_5_weights(load_file(source / WEIGHTS), config)
    target.mkdir(parents=True, exist_ok=True)
    for path in source.glob("*.json"):
        if path.name == "run.json":
            record = json.loads(path.read_text("utf8")) | {"rearranged_from": old.architectures[0]}
            (target / path.name).write_text(json.dumps(record, indent=2) + "\n", "utf8")
        elif path.name != "config.json":
            shutil.copyfile(path, target / path.name)
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    config.save_pretrained(target)


def name_dense_layers(folder: Path) -> None:
    """Call the MLPs of a Kimi Linear model without experts `mlp`, in place."""
    weights = load_file(folder / WEIGHTS)
    if any(".experts." in name for name in weights):
        raise ValueError(f"{folder} has experts")
    renamed = {name.replace(".block_sparse_moe.", ".mlp."): w for name, w in weights.items()}
    save_file(renamed, folder / WEIGHTS, {"format": "pt"})


def main() -> None:
    """Rearrange one folder, or rename in place."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path, nargs="?", help="a dense Qwen3-Next becomes Qwen3.5")
    parser.add_argument("--names", action="store_true", help="rename MLPs of Kimi Linear instead")
    args = parser.parse_args()
    if args.names == (args.target is not None):
        raise SystemExit("give either a target folder or --names")
    if args.names:
        name_dense_layers(args.source)
    else:
        rearrange(args.source, args.target)


if __name__ == "__main__":
    main()
