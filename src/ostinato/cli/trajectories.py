"""The commands for directories of trajectories (sample, merge, split, verify, convert) and checkpoints (compact)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

from ostinato._optional import require
from ostinato.cli import output, tables
from ostinato.errors import OstinatoError, StorageMemoryError

if TYPE_CHECKING:
    import typer

    from ostinato import TrajectoryReplayBuffer
else:
    typer = require("typer", "cli")

__all__ = ["ALLOW_PICKLE", "register"]

ALLOW_PICKLE = typer.Option(
    "--allow-pickle", help="Consent to unpickle: reading a .pkl file runs whatever code it brings."
)
_JSON = typer.Option("--json", help="Print JSON for machines.")
_COPY = typer.Option("--copy", help="Copy the files and leave the source as it is; otherwise they are moved.")


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one batch held."""

    path: str
    trajectories: int
    total_samples: int
    num_chunks: int
    sample_ms: float
    keys: tuple[tuple[str, str, tuple[int, ...]], ...]


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    app.command(
        epilog="Example:  ostinato sample --load-path runs/rollouts --num-chunks 1024 --cache-size 10 --enable-cache"
    )(sample)
    app.command(epilog="Example:  ostinato merge --source-path runs/replay_buffer --save-path runs/merged --copy")(
        merge
    )
    app.command(
        epilog="Example:  ostinato split --source-path runs/merged --save-path runs/first --split-count 30 --copy"
    )(split)
    app.command(epilog="Example:  ostinato verify runs/rollouts")(verify)
    app.command(epilog="Example:  ostinato compact runs/checkpoint")(compact)
    app.command(
        epilog="Example:  ostinato convert --source-path runs/rollouts --save-path runs/fast --format safetensors"
    )(convert)


def sample(
    *,
    load_path: Annotated[Path, typer.Option(help="Directory of trajectories, ours or RLinf's.")],
    num_chunks: Annotated[int, typer.Option(min=1, max=2**31 - 1, help="Transitions to draw.")] = 1024,
    cache_size: Annotated[
        int | None, typer.Option(min=1, help="Trajectories kept in memory, with --enable-cache: 5 unless given.")
    ] = None,
    enable_cache: Annotated[
        bool,
        typer.Option("--enable-cache", help="Keep trajectories that can only be read whole (.pkl) in memory."),
    ] = False,
    sample_window_size: Annotated[int, typer.Option(min=0, help="Draw from the most recent ones only; 0: all.")] = 0,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Load a directory of trajectories, sample once, and print keys, shapes and dtypes.

    Exit status: 0 fine, 1 missing or damaged, 2 wrong usage.
    """
    import time

    from ostinato.durable.trees import flatten, show
    from ostinato.trajectories import TrajectoryReplayBuffer

    if cache_size is not None and not enable_cache:
        msg = "--cache-size needs --enable-cache"
        raise typer.BadParameter(msg)
    buffer = TrajectoryReplayBuffer(
        enable_cache=enable_cache,
        cache_size=cache_size or 5,
        sample_window_size=sample_window_size,
        allow_pickle=allow_pickle,
    )
    buffer.load_checkpoint(load_path)
    before = time.perf_counter()
    batch = _draw(buffer, num_chunks)
    passed = time.perf_counter() - before
    keys = tuple(
        (show(path), str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for path, value in flatten(batch, where="batch").items()
    )
    report = Sampled(str(load_path), len(buffer), buffer.total_samples, num_chunks, passed * 1000, keys)
    output.answer(report, tables.batch, as_json=as_json)


def _draw(buffer: TrajectoryReplayBuffer, num_chunks: int) -> dict[str, Any]:
    try:
        return buffer.sample(num_chunks)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, OstinatoError):
            raise
        msg = f"no memory for a batch of {num_chunks} transitions, choose fewer --num-chunks: {error}"
        raise StorageMemoryError(msg) from error


def merge(
    *,
    source_path: Annotated[Path, typer.Option(help="Directory that holds rank_0, rank_1 and so on.")],
    save_path: Annotated[Path, typer.Option(help="New directory.")],
    copy: Annotated[bool, _COPY] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Join the rank_* directories of a directory, interleaved by original id and renumbered.

    Moving stopped half-way goes on when the same command runs again; each trajectory is in one place at any moment.
    Exit status: 0 fine, 1 refused or stopped, 2 wrong usage.
    """
    from ostinato.tools import merge as work

    with tables.progress_bar("merge") as on_progress:
        report = work(source_path, save_path, copy=copy, on_progress=on_progress)
    output.answer(report, tables.moved, as_json=as_json)


def split(
    *,
    source_path: Annotated[Path, typer.Option(help="Directory of trajectories.")],
    save_path: Annotated[Path, typer.Option(help="New directory for the first trajectories.")],
    split_count: Annotated[int, typer.Option(min=1, help="How many trajectories go there.")],
    copy: Annotated[bool, _COPY] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Take the first trajectories of a directory into a new one; they keep their ids.

    Moving stopped half-way goes on when the same command runs again; each trajectory is in one place at any moment.
    Exit status: 0 fine, 1 refused or stopped, 2 wrong usage.
    """
    from ostinato.tools import split as work

    with tables.progress_bar("split") as on_progress:
        report = work(source_path, save_path, split_count, copy=copy, on_progress=on_progress)
    output.answer(report, tables.moved, as_json=as_json)


def verify(
    path: Annotated[Path, typer.Argument(help="Directory of trajectories, or one that dumps() wrote.")],
    *,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Read everything: compare counts, shapes, and checksums where kept, and name each damaged file.

    Exit status: 0 all whole, 1 damaged or missing, 2 wrong usage.
    """
    from ostinato.tools import verify as work

    with tables.progress_bar("verify") as on_progress:
        report = work(path, allow_pickle=allow_pickle, on_progress=on_progress)
    output.answer(report, tables.verified, as_json=as_json)
    if report.damage:
        raise typer.Exit(1)


def compact(
    path: Annotated[Path, typer.Argument(help="Directory that dumps(path, incremental=True) wrote.")],
    *,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Fold the patches of an incremental checkpoint into one file for each array; what it holds stays the same.

    Needs room on the disk for the arrays that have patches. Whenever it is stopped, the checkpoint is whole, as it was
    or as it will be.
    Exit status: 0 fine, 1 missing, damaged or no room, 2 wrong usage.
    """
    from ostinato.tools import compact as work

    with tables.progress_bar("compact") as on_progress:
        report = work(path, on_progress=on_progress)
    output.answer(report, tables.compacted, as_json=as_json)


def convert(
    *,
    source_path: Annotated[
        Path, typer.Option(help="Directory of trajectories, ours or RLinf's; or a checkpoint that TorchRL wrote.")
    ],
    save_path: Annotated[Path, typer.Option(help="New directory.")],
    to: Annotated[
        str | None, typer.Option("--format", help="Of trajectories: safetensors (unless given), pt or pkl.")
    ] = None,
    ndim: Annotated[
        int | None, typer.Option(min=1, max=2, help="Of a TorchRL checkpoint, where its files do not tell.")
    ] = None,
    max_size: Annotated[
        int | None, typer.Option(min=1, help="Rows that fit into the ListStorage of a TorchRL state_dict.")
    ] = None,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
    as_json: Annotated[bool, _JSON] = False,
) -> None:
    """Write a directory of trajectories anew in another format, or a checkpoint of TorchRL as one of ours.

    Of trajectories ids, seed and generator stay. Of a TorchRL checkpoint (a directory that rb.dumps wrote, or the file
    of torch.save(rb.state_dict(), file) of a ListStorage) what cannot be carried over is named.
    Exit status: 0 fine, 1 refused or damaged, 2 wrong usage.
    """
    from ostinato.compat import torchrl
    from ostinato.durable.tensorfile import FORMATS
    from ostinato.tools import convert as work

    if torchrl.is_checkpoint(source_path) or source_path.is_file():
        if to is not None:
            msg = f"--format is for directories of trajectories, {source_path} is none"
            raise typer.BadParameter(msg)
        found = torchrl.convert_checkpoint(
            source_path, save_path, ndim=ndim, max_size=max_size, allow_pickle=allow_pickle
        )
        output.answer(found, tables.imported, as_json=as_json)
        return
    if to is not None and to not in FORMATS:
        msg = f"--format must be one of {', '.join(FORMATS)}, got {to!r}"
        raise typer.BadParameter(msg)
    if ndim is not None or max_size is not None:
        msg = f"--ndim and --max-size are for checkpoints of TorchRL, {source_path} is none"
        raise typer.BadParameter(msg)
    with tables.progress_bar("convert") as on_progress:
        report: Any = work(
            source_path, save_path, to or "safetensors", allow_pickle=allow_pickle, on_progress=on_progress
        )
    output.answer(report, tables.converted, as_json=as_json)
