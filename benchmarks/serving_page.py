"""Write what docs/serving.md and the README say of the vLLM engine, from the engine's own data.

With `--check`, only say whether they are up to date.
"""

from __future__ import annotations

import sys

from lazystate.engines.vllm import guide
from lazystate.engines.vllm.options import Options
from lazystate.engines.vllm.support import VERSIONS
from page import ROOT, write


def command() -> str:
    """The command for the newest version, as a block."""
    return f"```sh\n{guide.serve(VERSIONS[0], './my-model', Options())}\n```\n"


def parts() -> dict[str, str]:
    """Text by the name of its markers."""
    tables = "\n".join(guide.supported(version) for version in VERSIONS)
    refused = guide.refused(VERSIONS[0])
    return {
        "serve": command(),
        "options": guide.options(),
        "supported": tables,
        "refused": refused,
    }


def main() -> None:
    """Write or check."""
    check = "--check" in sys.argv[1:]
    for name, text in parts().items():
        write(ROOT / "docs" / "serving.md", name, text, check=check)
    write(ROOT / "README.md", "serve", command(), check=check)


if __name__ == "__main__":
    main()
