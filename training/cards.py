"""Write the model cards and `results.json` from the records of the runs.

Every model folder given holds `run.json`, as `train.py` writes it. The card replaces it in the
shipped folder; the numbers go to `results.json`.
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
    "gdn": "Qwen3NextForCausalLM",
    "kda": "KimiLinearForCausalLM",
}
CARD = """# {kind}: a small hybrid language model for tests and demonstrations

`{name}` of transformers: {layers}.
{parameters:,} parameters, vocabulary 4096, positions up to 8192.

It exists so that decoding of recurrent states can be tried on trained weights without a download.
It writes plausible English in the style of its training texts; it knows nothing, and it is no use
as an assistant. It does not copy from its context or recall facts stated there: the last table
shows it. Measure nothing that depends on retrieval with it.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
```

Weights are bfloat16, the state's own parameters (`A_log`, `dt_bias`, `D`) float32. Load with
`dtype=torch.float32` where numbers are compared.

## Training

| | |
| --- | --- |
| data | {share:.0%} of the rows synthetic copy and recall tasks, the others windows of 58 MB of \
English (16.4 M tokens), listed in `training/sources.json` |
| steps | {steps:,} of {batch_tokens:,} tokens |
| tokens | {tokens:,}, so about {epochs:.0f} passes over the texts |
| row length | {rows} |
| loss at the end, nats per token | {loss:.3f} (mean of the last {averaged} steps, \
synthetic rows included) |
| optimiser | AdamW, peak rate {peak_rate}, linear fall to zero over the last 40 % |
| hardware | one H200, {seconds:.0f} s, shared with two other runs |
| versions | torch {torch}, transformers {transformers} |
| date, seed | {date}, {seed} |
| command | `{command}` |

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
passage behind its first eight, the right ones being given before each. The last row was measured
on a CPU in float32.
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


def card(run: dict) -> str:
    """The text of one model card."""
    evaluation, losses = run["evaluation"], run["losses"]
    averaged = losses[-1]["step"] - losses[-2]["step"]
    rows = f"{run['length']} tokens"
    if run["long_share"]:
        rows += f", {run['long_length']} in the last {run['long_share']:.0%} of the budget"
    values = {key: value for key, value in run.items() if key not in ("evaluation", "losses")}
    return CARD.format(
        **values,
        name=CLASSES[run["kind"]],
        layers=LAYERS[run["kind"]],
        share=run["synthetic_share"],
        rows=rows,
        epochs=run["tokens"] * (1 - run["synthetic_share"]) / 16.4e6,
        loss=losses[-1]["loss"],
        averaged=averaged,
        books=book_rows(evaluation),
        tasks="\n".join(f"| {label} | {evaluation[key]:.3f} |" for key, label in TASKS.items()),
    )


def main() -> None:
    """Write cards and results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+", help="output folders of train.py")
    parser.add_argument("--assets", type=Path, default=Path("src/lazystate/assets/models"))
    args = parser.parse_args()
    results = []
    for folder in args.folders:
        run = json.loads((folder / "run.json").read_text("utf8"))
        target = args.assets / run["kind"]
        target.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            if path.suffix in (".json", ".safetensors") and path.name != "run.json":
                shutil.copy(path, target / path.name)
                (target / path.name).chmod(0o644)
        (target / "README.md").write_text(card(run), "utf8")
        results.append(run)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf8")


if __name__ == "__main__":
    main()
