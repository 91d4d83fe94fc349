"""Write the model cards and `results.json` from the records of the runs.

Every model folder given holds `run.json`, as `train.py` writes it; `--before` names the folders
of the stages that came before, each with one such folder a kind. The card replaces the record in
the shipped folder; the numbers go to `results.json`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

RESULTS = Path(__file__).with_name("results.json")
LAYERS = {
    "mamba2": "six Mamba-2 layers (4 heads of 64, state 64, 2 groups), two attention layers "
    "without position encoding, five MLPs",
    "gdn": "six Gated DeltaNet layers (2 key heads and 4 value heads of 64), two gated attention "
    "layers with rotary positions on half of each head, an MLP behind every one",
    "kda": "six Kimi Delta Attention layers (4 heads of 64), two latent attention layers without "
    "position encoding, an MLP behind every one",
}
CLASSES = {
    "mamba2": "NemotronHForCausalLM",
    "gdn": "Qwen3_5ForCausalLM",
    "kda": "KimiLinearForCausalLM",
}
CARD = """# {kind}: a small hybrid language model for tests and demonstrations

`{name}` of transformers: {layers}.
{parameters:,} parameters, vocabulary 4096, positions up to 8192.

It exists so that decoding of recurrent states can be tried on trained weights without a download.
It writes plausible English in the style of its training texts; it knows nothing, and it is no use
as an assistant. It does copy passages from its context and recalls facts stated there in the
forms it was trained on; the last table says how well. Greedy decoding soon repeats itself.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

Weights are bfloat16, the state's own parameters (`A_log`, `dt_bias`, `D`) float32. Load with
`dtype=torch.float32` where numbers are compared.

## Training
{origin}
| | |
| --- | --- |
| data | windows of 58 MB of English (16.4 M tokens), listed in `training/sources.json`, and \
synthetic rows of copy and recall tasks |
| tokens | {tokens:,}, so about {epochs:.0f} passes over the texts |
| loss at the end, nats per token | {loss:.3f} on text (mean of the last {averaged} steps) |
| optimiser | AdamW, linear fall of the rate at the end of a stage |
| hardware | one H200, {seconds:.0f} s, shared with two other runs |
| versions | torch {torch}, transformers {transformers} |
| date, seed | {date}, {seed} |

| stage | steps | tokens a step | row length | synthetic rows | peak rate | command |
| --- | --- | --- | --- | --- | --- | --- |
{stages}

## Measurements

Books that no part of the training or of the tokenizer has seen. Perplexity is per token of this
model's own tokenizer and says little against other models; bits per byte compares. On the GPU
under bfloat16 autocast.

| book | scored with | perplexity | bits per byte | tokens |
| --- | --- | --- | --- | --- |
{books}

| task (200 examples, filler from Moby-Dick) | accuracy |
| --- | --- |
{tasks}

Recall counts an example when greedy decoding gives the whole answer; copy counts tokens of the
passage behind its first eight, the right ones being given before each. The last row is what the
model guesses without the passage before it.
"""
ORIGIN = """
The weights were trained as a `{old}` of the same shapes and then rearranged by
`training/rearrange.py`: rows of the input projections change places, all values stay, and both
models give the same logits.
"""
TASKS = {
    "recall_4_facts_120_tokens": "recall one of 4 facts, about 120 tokens",
    "recall_16_facts_600_tokens": "recall one of 16 facts, about 600 tokens",
    "recall_8_facts_1024_tokens": "recall one of 8 facts, about 1024 tokens",
    "recall_8_facts_4096_tokens": "recall one of 8 facts, about 4096 tokens",
    "copy_64_tokens_gap_256": "copy 64 tokens over a gap of 256",
    "copy_256_tokens_gap_1024": "copy 256 tokens over a gap of 1024",
    "copy_64_tokens_without_first": "the same 64 tokens without the first copy before them",
}


def book_rows(evaluation: dict) -> str:
    """Rows of the table of books."""
    rows = []
    for key, label in (
        ("books", "512 to 1024 tokens before"),
        ("books_8192", "4096 to 8192 before"),
    ):
        for name, found in evaluation[key].items():
            title = name.replace("-", " ").title().replace(" And ", " and ")
            rows.append(
                f"| {title} | {label} | {found['perplexity']:.2f} | "
                f"{found['bits_per_byte']:.3f} | {found['tokens']:,} |"
            )
    return "\n".join(rows)


def share(run: dict) -> float:
    """The share of synthetic rows; the first stage recorded it as one number."""
    return run.get("synthetic_share", sum(run.get("shares", {}).values()))


def card(stages: list[dict]) -> str:
    """The text of one model card, from the records of all stages."""
    run = stages[-1]
    losses = run["losses"]
    rows = [
        f"| {number} | {stage['steps']:,} | {stage['batch_tokens']:,} | {stage['length']} | "
        f"{share(stage):.0%} | {stage['peak_rate']} | `{stage['command']}` |"
        for number, stage in enumerate(stages)
    ]
    facts = ("kind", "parameters", "torch", "transformers", "date", "seed")
    return CARD.format(
        **{key: run[key] for key in facts},
        name=CLASSES[run["kind"]],
        layers=LAYERS[run["kind"]],
        origin=ORIGIN.format(old=run["rearranged_from"]) if "rearranged_from" in run else "",
        tokens=sum(stage["tokens"] for stage in stages),
        epochs=sum(stage["tokens"] * (1 - share(stage)) for stage in stages) / 16.4e6,
        seconds=sum(stage["seconds"] for stage in stages),
        loss=losses[-1]["text"]["loss"],
        averaged=losses[-1]["step"] - losses[-2]["step"],
        stages="\n".join(rows),
        books=book_rows(run["evaluation"]),
        tasks="\n".join(
            f"| {label} | {run['evaluation'][key]:.3f} |" for key, label in TASKS.items()
        ),
    )


def brief(run: dict, points: int = 12) -> dict:
    """A record with few points of its losses: loss on text, accuracy on what was seen before."""
    losses = run["losses"]
    chosen = {round(i * (len(losses) - 1) / (points - 1)) for i in range(points)}
    kept = []
    for index in sorted(chosen):
        entry = losses[index]
        if "text" in entry:
            short = {"step": entry["step"], "text_loss": entry["text"]["loss"]}
            for name in ("copied noise", "copied text", "answer"):
                if name in entry:
                    short[f"{name.replace(' ', '_')}_accuracy"] = entry[name]["accuracy"]
            entry = short
        kept.append(entry)
    return run | {"losses": kept}


def main() -> None:
    """Write cards and results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of the last stage")
    parser.add_argument("--before", type=Path, nargs="*", default=[], help="earlier stages")
    parser.add_argument("--assets", type=Path, default=Path("src/lazystate/assets/models"))
    args = parser.parse_args()
    results = []
    for folder in args.folders:
        run = json.loads((folder / "run.json").read_text("utf8"))
        kind = run["kind"]
        earlier = [json.loads((s / kind / "run.json").read_text("utf8")) for s in args.before]
        target = args.assets / kind
        target.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.suffix in (".json", ".safetensors") and path.name != "run.json":
                shutil.copy(path, target / path.name)
                (target / path.name).chmod(0o644)
        (target / "README.md").write_text(card([*earlier, run]), "utf8")
        results.append(brief(run) | {"before": [brief(stage) for stage in earlier]})
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
