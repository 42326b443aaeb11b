"""The commands for directories of trajectories (sample, merge, split, verify, convert) and checkpoints (compact)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any

from ostinato._optional import require
from ostinato.cli import output, tables
from ostinato.cli.arguments import ALLOW_PICKLE, JSON, one_path
from ostinato.errors import CheckpointError, OstinatoError, StorageMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable

    import typer

    from ostinato import TrajectoryReplayBuffer
else:
    typer = require("typer", "cli")

__all__ = ["register"]

_COPY = typer.Option(
    "--copy", help="Copy the files. Without --copy and --move they are hard links: no disk space, the source stays."
)
_MOVE = typer.Option("--move", help="Move the files: the source loses them.")
_SOURCE = typer.Option("--source-path", help="The same as the argument SOURCE_PATH.", show_default=False)
_SAVE = typer.Option("--save-path", help="The same as the argument SAVE_PATH.", show_default=False)


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
    commands: dict[Callable[..., None], str] = {
        sample: "ostinato sample runs/rollouts --num-chunks 1024 --cache-size 10 --enable-cache",
        merge: "ostinato merge runs/replay_buffer runs/merged",
        split: "ostinato split runs/merged runs/first --split-count 30",
        verify: "ostinato verify runs/rollouts",
        compact: "ostinato compact runs/checkpoint",
        convert: "ostinato convert runs/rollouts runs/fast --format safetensors",
    }
    for command, example in commands.items():
        app.command(epilog=f"Example:  {example}")(command)


def sample(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="Directory of trajectories, ours or RLinf's.", show_default=False),
    ] = None,
    *,
    load_path: Annotated[
        Path | None, typer.Option("--load-path", help="The same as the argument PATH.", show_default=False)
    ] = None,
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
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Load a directory of trajectories, sample once, and print keys, shapes and dtypes.

    Exit status: 0 fine, 1 missing or damaged, 2 wrong usage.
    """
    import time

    from ostinato.durable.trees import flatten, show
    from ostinato.tools import kind_of
    from ostinato.trajectories import TrajectoryReplayBuffer

    where = one_path(path, load_path, "--load-path", "PATH")
    if cache_size is not None and not enable_cache:
        msg = "--cache-size needs --enable-cache"
        raise typer.BadParameter(msg)
    if kind_of(where) == "buffer":
        msg = f"{where} is the checkpoint of a buffer, sample is for directories of trajectories: see ostinato inspect"
        raise CheckpointError(msg)
    buffer = TrajectoryReplayBuffer(
        enable_cache=enable_cache,
        cache_size=cache_size or 5,
        sample_window_size=sample_window_size,
        allow_pickle=allow_pickle,
    )
    buffer.load_checkpoint(where)
    before = time.perf_counter()
    batch = _draw(buffer, num_chunks)
    passed = time.perf_counter() - before
    keys = tuple(
        (show(path), str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for path, value in flatten(batch, where="batch").items()
    )
    report = Sampled(str(where), len(buffer), buffer.total_samples, num_chunks, passed * 1000, keys)
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
    source: Annotated[
        Path | None,
        typer.Argument(metavar="SOURCE_PATH", help="Directory of rank_0, rank_1 and so on.", show_default=False),
    ] = None,
    save: Annotated[Path | None, typer.Argument(metavar="SAVE_PATH", help="New directory.", show_default=False)] = None,
    *,
    source_path: Annotated[Path | None, _SOURCE] = None,
    save_path: Annotated[Path | None, _SAVE] = None,
    copy: Annotated[bool, _COPY] = False,
    move: Annotated[bool, _MOVE] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Join the rank_* directories of a directory, interleaved by original id and renumbered.

    The new directory gets hard links: the ranks keep their files, which are never edited in place, and no disk space
    is used. Where the file system has no links, or the new directory is on another one, the files are copied, if there
    is room. With --move the ranks lose their files; a move stopped half-way goes on when the same command runs again,
    and each trajectory is in one place at any moment.

    Exit status: 0 fine, 1 nothing done, or a move stopped half-way, 2 wrong usage.
    """
    from ostinato.tools import merge as work

    source, save = _source_and_save(source, source_path, save, save_path)
    _check_ways(copy=copy, move=move)
    with tables.progress_bar("merge") as on_progress:
        report = work(source, save, copy=copy, move=move, on_progress=on_progress)
    output.answer(report, tables.moved, as_json=as_json)


def split(
    source: Annotated[
        Path | None, typer.Argument(metavar="SOURCE_PATH", help="Directory of trajectories.", show_default=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Argument(metavar="SAVE_PATH", help="New directory for the first trajectories.", show_default=False),
    ] = None,
    *,
    source_path: Annotated[Path | None, _SOURCE] = None,
    save_path: Annotated[Path | None, _SAVE] = None,
    split_count: Annotated[int, typer.Option(min=1, help="How many trajectories go there.", show_default=False)],
    copy: Annotated[bool, _COPY] = False,
    move: Annotated[bool, _MOVE] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Make a new directory of the first trajectories of a directory; they keep their ids.

    The new directory gets hard links, or copies, as with `ostinato merge`, and the source keeps all of its
    trajectories. With --move the source lists the others alone; a move stopped half-way goes on when the same command
    runs again, and each trajectory is in one place at any moment.

    Exit status: 0 fine, 1 nothing done, or a move stopped half-way, 2 wrong usage.
    """
    from ostinato.tools import split as work

    source, save = _source_and_save(source, source_path, save, save_path)
    _check_ways(copy=copy, move=move)
    with tables.progress_bar("split") as on_progress:
        report = work(source, save, split_count, copy=copy, move=move, on_progress=on_progress)
    output.answer(report, tables.moved, as_json=as_json)


def _source_and_save(
    source: Path | None, source_path: Path | None, save: Path | None, save_path: Path | None
) -> tuple[Path, Path]:
    """Return the two paths of a command, each given by position or by name."""
    return one_path(source, source_path, "--source-path"), one_path(save, save_path, "--save-path")


def _check_ways(*, copy: bool, move: bool) -> None:
    if copy and move:
        msg = "--copy and --move exclude each other: give one of them, or neither for hard links"
        raise typer.BadParameter(msg)


def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Directory of trajectories, or one that dumps() wrote.")],
    *,
    allow_pickle: Annotated[bool, ALLOW_PICKLE] = False,
    as_json: Annotated[bool, JSON] = False,
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
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Directory that dumps(path, incremental=True) wrote.")],
    *,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Fold the patches of an incremental checkpoint into one file for each array; what it holds stays the same.

    Needs room on the disk for the arrays that have patches. Whenever it is stopped, the checkpoint is whole, as it was
    or as it will be.
    Exit status: 0 fine, 1 missing, damaged or no room, 2 wrong usage.
    """
    from ostinato.tools import compact as work
    from ostinato.tools import kind_of

    if kind_of(path) == "trajectories":
        msg = f"{path} is a directory of trajectories, compact is for checkpoints of buffers: it has no patches"
        raise CheckpointError(msg)
    with tables.progress_bar("compact") as on_progress:
        report = work(path, on_progress=on_progress)
    output.answer(report, tables.compacted, as_json=as_json)


def convert(
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SOURCE_PATH",
            help="Directory of trajectories, ours or RLinf's; or a checkpoint that TorchRL wrote.",
            show_default=False,
        ),
    ] = None,
    save: Annotated[Path | None, typer.Argument(metavar="SAVE_PATH", help="New directory.", show_default=False)] = None,
    *,
    source_path: Annotated[Path | None, _SOURCE] = None,
    save_path: Annotated[Path | None, _SAVE] = None,
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
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Write a directory of trajectories anew in another format, or a checkpoint of TorchRL as one of ours.

    Of trajectories ids, seed and generator stay. Of a TorchRL checkpoint (a directory that rb.dumps wrote, or the file
    of torch.save(rb.state_dict(), file) of a ListStorage) what cannot be carried over is named.
    The source stays as it is, and the new directory appears whole or not at all.
    Exit status: 0 fine, 1 nothing done, 2 wrong usage.
    """
    from ostinato.compat import torchrl
    from ostinato.durable.tensorfile import FORMATS
    from ostinato.tools import convert as work
    from ostinato.tools import kind_of

    source, save = _source_and_save(source, source_path, save, save_path)
    if torchrl.is_checkpoint(source) or source.is_file():
        if to is not None:
            msg = f"--format is for directories of trajectories, {source} is none"
            raise typer.BadParameter(msg)
        found = torchrl.convert_checkpoint(source, save, ndim=ndim, max_size=max_size, allow_pickle=allow_pickle)
        output.answer(found, tables.imported, as_json=as_json)
        return
    if to is not None and to not in FORMATS:
        msg = f"--format must be one of {', '.join(FORMATS)}, got {to!r}"
        raise typer.BadParameter(msg)
    if ndim is not None or max_size is not None:
        msg = f"--ndim and --max-size are for checkpoints of TorchRL, {source} is none"
        raise typer.BadParameter(msg)
    if kind_of(source) == "buffer":
        msg = f"{source} is the checkpoint of a buffer, in the format of this release: nothing to convert"
        raise CheckpointError(msg)
    with tables.progress_bar("convert") as on_progress:
        report: Any = work(source, save, to or "safetensors", allow_pickle=allow_pickle, on_progress=on_progress)
    output.answer(report, tables.converted, as_json=as_json)
