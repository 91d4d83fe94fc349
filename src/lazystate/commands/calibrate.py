"""`lazystate calibrate`: the sketches of a model, fitted on texts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lazystate.commands.options import Device, usage_errors

if TYPE_CHECKING:
    from torch import Tensor

    from lazystate.commands.decoding import Loaded


def calibrate(
    model: Annotated[
        str, typer.Argument(help="Shipped model (gdn, kda, mamba2), or a folder of transformers.")
    ],
    text: Annotated[
        list[Path],
        typer.Option(
            exists=True, dir_okay=False, help="UTF-8 text to calibrate on; repeat it for more."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write, *.safetensors.")],
    window: Annotated[int, typer.Option(min=1, help="Tokens between two sketches.")] = 16,
    rank: Annotated[
        int | None, typer.Option(min=1, help="Largest rank.  [default: that of a state]")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts that are continued.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens a prompt is continued by.")] = 256,
    texts: Annotated[int, typer.Option(min=1, help="Other pages, which score the ranks.")] = 64,
    text_tokens: Annotated[int, typer.Option(min=2, help="Tokens of such a page.")] = 512,
    warmup: Annotated[int, typer.Option(min=0, help="Tokens of it before the first score.")] = 128,
    batch: Annotated[int, typer.Option(min=1, help="Pages at once.")] = 8,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Number format of the model.")
    ] = "float32",
    device: Device = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="CPU threads; small models are fastest on one.")
    ] = 1,
) -> None:
    """Calibrate sketches of a model's recurrent states on texts.

    Half of the pages are continued greedily: what the layers store and ask for meanwhile gives each
    head its basis. The others are read with gradients: they say what each rank of each head costs.
    Pages are spread evenly over the texts, and no page is in both halves. Ranks are not in the
    file: they are found when it is used, for any budget.

    A run that is interrupted goes on where it was when the same command is given again. Under
    torchrun every process does its share.

    **Examples**

    ```text
    lazystate calibrate gdn --text book.txt --out gdn.safetensors
    lazystate calibrate ./my-model --text a.txt --text b.txt --out mine.safetensors --device cuda
    torchrun --nproc-per-node 8 -m lazystate calibrate ./my-model --text a.txt --out mine.safetensors --device cuda
    lazystate inspect mine.safetensors --plot mine.png
    ```
    """  # noqa: E501 (an example to copy)
    import torch

    from lazystate.commands import decoding
    from lazystate.engines.transformers.calibrating import Options
    from lazystate.engines.transformers.calibrating import calibrate as run
    from lazystate.sketch.calibration_file import text_fingerprint

    torch.set_num_threads(threads)
    with usage_errors(), _processes(device) as (number, of):
        if out.exists():
            raise ValueError(f"--out must be a new file, got {out}, which is there: remove it")
        if not out.parent.is_dir():
            raise ValueError(f"--out must lie in a folder that is there, got {out}")
        written = [_read(path) for path in text]
        loaded = decoding.load(model, dtype, device)
        parts = cut_pages(loaded, written, (prompts, prompt_tokens), (texts, text_tokens))
        with _progress(quiet=number > 0) as told:
            found = run(
                loaded.model,
                *parts,
                Options(window, new_tokens, warmup, rank, batch=batch),
                name=Path(model).name,
                text=text_fingerprint(written),
                share=(number, of),
                keep=out.with_name(f"{out.name}.{number}.part"),
                progress=told,
            )
        if number == 0:
            found.save(out)
    if number == 0:
        Console(stderr=True).print(f"{out}: ranks up to {found.largest_rank}; see it with inspect")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text must be a UTF-8 text, got {path}: {error}") from error


def cut_pages(
    loaded: Loaded, texts: list[str], prompts: tuple[int, int], others: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Prompts [N, P] and scored texts [M, T], evenly spread and apart: in turn along the texts."""
    import torch

    ids = torch.cat([loaded.encode(text)[0] for text in texts])
    (count, length), (other_count, other_length) = prompts, others
    needed = count * length + other_count * other_length
    if len(ids) < needed:
        raise ValueError(
            f"--text must have at least {needed:,} tokens for these pages, got {len(ids):,}: give "
            "more text, or ask for fewer or shorter pages"
        )
    pairs = max(count, other_count)
    stride = len(ids) // pairs
    starts = torch.arange(count) * stride, torch.arange(other_count) * stride + length
    if stride < length + other_length:  # many more of one kind: one kind behind the other
        behind = count * length + torch.arange(other_count) * other_length
        starts = torch.arange(count) * length, behind
    return tuple(
        torch.stack([ids[int(start) : int(start) + size] for start in each])
        for each, size in zip(starts, (length, other_length), strict=True)
    )  # pyright: ignore (a pair)


@contextmanager
def _processes(device: str) -> Iterator[tuple[int, int]]:
    """This process's number and how many torchrun has started; (0, 1) without it."""
    import torch
    from torch import distributed

    if not distributed.is_available() or not distributed.is_torchelastic_launched():
        yield 0, 1
        return
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
    try:
        yield distributed.get_rank(), distributed.get_world_size()
    finally:
        distributed.destroy_process_group()


@contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """A bar for each part, told as `calibrate` tells."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), disable=quiet
    ) as bars:
        tasks: dict[str, Any] = {}

        def told(part: str, done: int, of: int) -> None:
            if part not in tasks:
                tasks[part] = bars.add_task(part, total=of)
            bars.update(tasks[part], completed=done)

        yield told
