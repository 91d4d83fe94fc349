"""Write what docs/serving.md and the README say of the vLLM engine, from the engine's own data.

With `--check`, only say whether they are up to date.
"""

from __future__ import annotations

import sys

from lazystate.engines.vllm import guide
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import VERSIONS
from page import ROOT, write
from tables import NOTHING, Row, markdown, newest, source


def command() -> str:
    """The command for the newest version, as a block."""
    return f"```sh\n{guide.serve(VERSIONS[0], './my-model', Options())}\n```\n"


def speed() -> str:
    """Decode steps of whole models over batches, and how many requests a cache holds."""
    record = newest("serving_step", None)
    if record is None:
        return NOTHING
    cases: dict[tuple[str, ...], dict[int, Row]] = {}
    for row in record["rows"]:
        case = row["model"], row["vllm"], str(row["tokens"]), row["method"]
        cases.setdefault(case, {})[row["batch"]] = row
    batches = sorted({row["batch"] for row in record["rows"]})
    lines = []
    for case, rows in cases.items():
        fits = min(row["fits"] for row in rows.values())
        lines.append((*case, *(_step(rows.get(batch)) for batch in batches), f"{fits:.0f}"))
    head = ("model", "vLLM", "T", "method", *(f"B = {batch}" for batch in batches), "fit")
    return markdown(head, lines) + source(record["meta"])


def _step(row: Row | None) -> str:
    """Milliseconds of a step, and how many times the tokens of the stock engine a second."""
    if row is None:
        return "-"
    text = f"{row['us'] / 1e3:.2f}"
    base = row["conventional_tokens_per_s"]
    return (
        f"{text} ({row['tokens_per_s'] / base:.2f}x)" if base and row["method"] != "stock" else text
    )


def parts() -> dict[str, str]:
    """Text by the name of its markers."""
    tables = "\n".join(guide.supported(version) for version in VERSIONS)
    refused = guide.refused(VERSIONS[0])
    return {
        "serve": command(),
        "options": guide.options(),
        "supported": tables,
        "refused": refused,
        "speed": speed(),
    }


def main() -> None:
    """Write or check."""
    check = "--check" in sys.argv[1:]
    for name, text in parts().items():
        write(ROOT / "docs" / "serving.md", name, text, check=check)
    write(ROOT / "README.md", "serve", command(), check=check)


if __name__ == "__main__":
    main()
