"""The commands of the command line: their options, the checks of these, and the calls of the library."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from ostinato import __version__
from ostinato._optional import require
from ostinato.cli.output import answer, show, show_error, write_page
from ostinato.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    KindError,
    OptionError,
    OstinatoError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import typer

    from ostinato.viz import Position
    from ostinato.viz.sources import TrajectorySource
else:
    typer = require("typer", "cli")

__all__ = ["app", "run"]


def _option_name(name: str) -> str:
    """Return the name of an option: RLinf's `--replay_dir` is `--replay-dir`, its `--num-chunks` `--num-samples`."""
    name = name.replace("_", "-")
    return "num-samples" if name == "num-chunks" else name


app = typer.Typer(
    name="ostinato",
    help="Ostinato: fast and exact replay buffers.",
    epilog="Exit status of every command: 0 success, 1 failure, 2 wrong usage, 130 interrupted (Ctrl-C).\n\n"
    "Examples:\n\n- `ostinato demo`\n- `ostinato inspect ostinato-demo/checkpoint`",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _option_name},
)


def run() -> None:
    """Parse the arguments and run the command. Errors of the library and the system are printed as one line.

    Raises:
        SystemExit: Always; 0 success, 1 failure, 2 wrong usage, 130 interrupted.
    """
    try:
        app()
    except (OstinatoError, OSError) as error:
        show_error(str(error))
        raise SystemExit(1) from None


# -- options of several commands ----------------------------------------------------------------------------------

_AllowPickle: TypeAlias = Annotated[
    bool, typer.Option("--allow-pickle", help="Allow unpickling: reading a .pkl file executes the code in it.")
]
_Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Overwrite: TypeAlias = Annotated[
    bool, typer.Option("--overwrite", help="Replace what exists; without it, that is an error.")
]
_Copy: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--copy", help="Copy the files. The default is hard links, which use no disk space and keep the source."
    ),
]
_Move: TypeAlias = Annotated[bool, typer.Option("--move", help="Move the files out of the source.")]
_Source: TypeAlias = Annotated[
    Path | None, typer.Option("--source-path", help="RLinf's name of PATH.", show_default=False)
]
_Save: TypeAlias = Annotated[
    Path | None, typer.Option("--save-path", help="RLinf's name of OUTPUT.", show_default=False)
]
_SAVED_DATA = "Checkpoint that dumps() wrote, directory of trajectories, or folder of a GroupBuffer."
_ANY_DATA = (
    "Dataset (LeRobot, Minari, D4RL, robomimic, Zarr, RLinf), checkpoint that dumps() wrote, directory of "
    "trajectories, or folder of a GroupBuffer."
)
_DataPath: TypeAlias = Annotated[Path, typer.Argument(metavar="PATH", help=_ANY_DATA)]
_OptionalDataPath: TypeAlias = Annotated[
    Path | None, typer.Argument(metavar="PATH", help=_ANY_DATA, show_default=False)
]


def _examples(*lines: str) -> str:
    """Return the end of a help text: examples, one below the other."""
    return "\n".join(["Examples:" if len(lines) > 1 else "Example:", "", *(f"- `{line}`" for line in lines)])


def _one_path(metavar: str, argument: Path | None, name: str, option: Path | None) -> Path:
    """Return a path that can be given as an argument or as an option.

    Args:
        metavar: The argument.
        argument: Its value.
        name: The option.
        option: Its value.

    Raises:
        BadParameter: Neither or both were given.
    """
    if argument is not None and option is not None:
        msg = f"the path was given twice, as {metavar} {argument} and as {name} {option}: give one of them"
        raise typer.BadParameter(msg)
    path = option if argument is None else argument
    if path is None:
        msg = f"a path is missing: give {metavar}, or {name}"
        raise typer.BadParameter(msg)
    return path


def _path_and_output(
    path: Path | None, source_path: Path | None, output: Path | None, save_path: Path | None
) -> tuple[Path, Path]:
    """Return the paths of a command that reads one directory and writes another."""
    return _one_path("PATH", path, "--source-path", source_path), _one_path("OUTPUT", output, "--save-path", save_path)


def _check_free_paths(*paths: Path | None, overwrite: bool) -> None:
    """Check before any work that the paths to be written do not exist, unless they may be replaced.

    Empty directories may be there; None is no path.

    Raises:
        CheckpointError: A file exists; the message names the first one.
    """
    for path in filter(None, paths):
        empty = path.is_dir() and not any(path.iterdir())
        if not overwrite and os.path.lexists(path) and not empty:
            msg = f"{path} exists: give --overwrite to replace it, or choose another path"
            raise CheckpointError(msg)


def _check_copy_or_move(*, copy: bool, move: bool) -> None:
    if copy and move:
        msg = "--copy and --move exclude each other: give one of them, or neither for hard links"
        raise typer.BadParameter(msg)


def _check_no_pickle(path: Path, *, allow_pickle: bool) -> None:
    if allow_pickle:
        msg = f"--allow-pickle applies to directories of trajectories, which {path} is not"
        raise typer.BadParameter(msg)


def _show_written(path: Path) -> None:
    show([f"written: {path}"])


def _print_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        typer.echo(f"ostinato {__version__}")
        raise typer.Exit


_DATASET_ROWS = 64
"""Rows of a batch of `sample`: few enough for video."""


@app.callback()
def _root(
    *,
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Fast and exact replay buffers."""


# -- demo ---------------------------------------------------------------------------------------------------------

_DEMO = (
    Path(__file__).parents[1] / "demo" / "cartpole.py",
    Path(__file__).parents[3] / "examples" / "demo" / "cartpole.py",
)
"""The program of the demo: in an installed package, and in a checkout."""


@app.command(epilog=_examples("ostinato demo runs/demo --seed 3"))
def demo(
    output: Annotated[
        Path, typer.Argument(metavar="OUTPUT", help="Directory for the checkpoint, the figure and the report.")
    ] = Path("ostinato-demo"),
    *,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the run.")] = 0,
    steps: Annotated[
        int, typer.Option(min=10, help="Maximum number of environment steps; below 10,000 all phases are shortened.")
    ] = 30_000,
    overwrite: _Overwrite = False,
    prioritized: Annotated[
        bool, typer.Option("--prioritized", help="Sample in proportion to temporal-difference errors, not uniformly.")
    ] = False,
    n_step: Annotated[int, typer.Option(min=1, help="Number of steps of the n-step return.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Number of threads for torch.")] = 1,
) -> None:
    """Train a small agent on CartPole; then save, reload and plot its buffer.

    Runs double DQN on Gymnasium's CartPole-v1 for about half a minute, with the public API: collect, extend, sample,
    learn. Writes a checkpoint of the buffer, demo.png and report.json to the output directory.

    Reports two agents on the same new episodes: the final one, and the one that is kept, the best in validation.

    Exit status: 0 success, 1 failure, 2 wrong usage.
    """
    for module, extra in (("gymnasium", "demo"), ("matplotlib", "viz")):
        require(module, extra)  # before the training, not after it
    _check_free_paths(*(output / name for name in ("checkpoint", "demo.png", "report.json")), overwrite=overwrite)
    example = runpy.run_path(str(next(filter(Path.exists, _DEMO))))
    config = example["DqnConfig"](seed=seed, threads=threads, prioritized=prioritized, n_step=n_step).over(steps)
    example["run"](output, config)


# -- contents of a directory --------------------------------------------------------------------------------------


@app.command(
    epilog=_examples(
        "ostinato inspect runs/checkpoint",
        "ostinato inspect --json runs/rollouts | jq .total_samples",
        "ostinato inspect data/pusht",
        "ostinato inspect --quick halfcheetah-medium-v2.hdf5",
    )
)
def inspect(
    path: _DataPath,
    *,
    as_json: _Json = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Read only the manifest, index or metadata: no checksums, statistics or keys."),
    ] = False,
    allow_pickle: _AllowPickle = False,
) -> None:
    """Show the contents of a dataset, a checkpoint or a directory of trajectories: rows, episodes, fields, bytes.

    For a dataset, also shows the format, the lengths of episodes, cameras, tasks, and what the format does not say and
    was assumed; reads all numbers for their statistics, but no pictures. For a checkpoint, reads all files and verifies
    their checksums. For trajectories, checks the size and reads the header and the flags of each file (`ostinato
    verify` reads everything). With --quick, reads none of these.

    Exit status: 0 success, 1 missing or damaged, 2 wrong usage.
    """
    from ostinato import tools
    from ostinato.tools.datasets import data_kind

    kind = data_kind(path)
    report: Any
    if kind == "trajectories":
        report = tools.inspect_store(path, read_headers=not quick, allow_pickle=allow_pickle, progress=not as_json)
    else:
        _check_no_pickle(path, allow_pickle=allow_pickle)
        readers: dict[str, Any] = {"dataset": tools.inspect_dataset, "groups": tools.inspect_groups}
        read = readers.get(kind, tools.inspect_checkpoint)
        report = read(path, read_data=not quick, progress=not as_json)
    answer(report, as_json=as_json)


@app.command(epilog=_examples("ostinato verify runs/rollouts"))
def verify(
    path: Annotated[Path, typer.Argument(metavar="PATH", help=_SAVED_DATA)],
    *,
    allow_pickle: _AllowPickle = False,
    as_json: _Json = False,
) -> None:
    """Read all files, verify counts, shapes and available checksums, and list the damaged files. Repairs nothing.

    Also lists the files that could not be checked: those that only a damaged manifest or index describes, and pickles
    without a checksum.

    Exit status: 0 no damage, 1 damaged, missing or not checked, 2 wrong usage.
    """
    from ostinato import tools
    from ostinato.cli.conversions import kind_or_advice

    kind_or_advice(path, "examine it with ostinato doctor, or convert it first (ostinato convert)")
    report = tools.verify(path, allow_pickle=allow_pickle, progress=not as_json)
    answer(report, as_json=as_json)
    if not report.ok:
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "ostinato doctor data/pusht",
        "ostinato doctor data/pusht --full --output doctor.png",
        "ostinato doctor --json demo.hdf5 | jq '.findings[].check'",
    )
)
def doctor(
    path: _DataPath,
    *,
    full: Annotated[
        bool, typer.Option("--full", help="Decode all frames; otherwise 12 of each episode, of at most 200 episodes.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if there are warnings, too.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Draw a page of plots: a .png file, or a directory for doctor.png.", show_default=False),
    ] = None,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Look for faults in a dataset, and say where they are and what to do.

    Compares metadata with tables and videos, and looks for unreadable files, wrong times, NaN, jumps, copies of
    episodes, and cameras that are black or frozen. Changes nothing. Errors are rows that cannot be read or are wrong,
    warnings are probably faults of the recording, notes are good to know.

    Exit status: 0 no errors, 1 errors (with --strict: or warnings), 2 not a dataset, or wrong usage.
    """
    from ostinato import tools

    target = None if output is None else _plots_path(output)
    _check_free_paths(target, overwrite=overwrite)
    try:
        report = tools.examine(path, full=full, progress=not as_json)
    except (CheckpointNotFoundError, KindError) as error:
        show_error(str(error))
        raise typer.Exit(2) from None
    if target is not None:
        from ostinato.viz.doctor_page import doctor_page
        from ostinato.viz.figures import draw, size_of

        page = doctor_page(report)
        draw(page, target, size=size_of(page))
    answer(report, as_json=as_json)
    if target is not None and not as_json:
        _show_written(target)
    if not report.ok or (strict and report.counts["warning"]):
        raise typer.Exit(1)


@app.command(
    epilog=_examples(
        "ostinato audit ostinato:ReplayBuffer",
        "ostinato audit stable_baselines3.common.buffers:ReplayBuffer --page audit.html",
        "ostinato audit buffer.py:Buffer --adapter adapter.py:BufferAdapter --json",
    )
)
def audit(
    buffer: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="Replay buffer; also file.py:Class.")],
    *,
    adapter: Annotated[
        str | None, typer.Option(help="Subclass of ostinato.testing.audit.Adapter: module:Name or file.py:Name.")
    ] = None,
    page: Annotated[Path | None, typer.Option(help="Write the report as an HTML page, too.")] = None,
    overwrite: _Overwrite = False,
    as_json: _Json = False,
) -> None:
    """Feed tagged rows through any replay buffer, and report what comes back wrong and what it does to learning.

    Runs the code of the buffer and of the adapter. Known buffers need no adapter; docs/audit.md lists them.

    Exit status: 0 no errors, 1 errors, 2 no such class, or wrong usage.
    """
    from ostinato.testing.audit.examine import examine, load

    _check_free_paths(page, overwrite=overwrite)
    try:
        report = examine(load(buffer), None if adapter is None else load(adapter))
    except (AttributeError, ImportError, OptionError) as error:
        raise typer.BadParameter(str(error)) from None
    answer(report, as_json=as_json)
    if page is not None:
        write_page(report, page)
    if not report.ok:
        raise typer.Exit(1)


def _plots_path(given: Path) -> Path:
    """Return the file of the plots: the given one, or `doctor.png` in a directory.

    Raises:
        BadParameter: It is neither a directory nor a .png file.
    """
    if given.is_dir():
        return given / "doctor.png"
    if given.suffix.lower() != ".png":
        msg = f"--output must be a file that ends in .png, or a directory that exists, got {given}"
        raise typer.BadParameter(msg)
    return given


@app.command(
    epilog=_examples(
        "ostinato sample runs/rollouts --num-samples 1024 --cache-size 10 --enable-cache",
        "ostinato sample data/pusht --num-samples 32",
    )
)
def sample(
    path: _OptionalDataPath = None,
    *,
    num_samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=2**31 - 1,
            help="Number of transitions to sample; default 1024, of a dataset 64; RLinf's --num-chunks, too.",
            show_default=False,
        ),
    ] = None,
    cache_size: Annotated[
        int | None, typer.Option(min=1, help="Number of trajectories to cache with --enable-cache; default 5.")
    ] = None,
    enable_cache: Annotated[
        bool,
        typer.Option("--enable-cache", help="Cache trajectories that can only be read completely (.pkl)."),
    ] = False,
    sample_window_size: Annotated[
        int | None,
        typer.Option(min=0, help="Sample from this number of most recent trajectories; 0, the default: from all."),
    ] = None,
    load_path: Annotated[
        Path | None, typer.Option("--load-path", help="RLinf's name of PATH.", show_default=False)
    ] = None,
    allow_pickle: _AllowPickle = False,
    as_json: _Json = False,
) -> None:
    """Load a directory of trajectories or open a dataset, sample one batch, and print its keys, shapes and dtypes.

    For a dataset, also prints statistics of the batch and its first rows. The time includes reading the rows, not
    comparing checksums, as `ostinato verify` does.

    Exit status: 0 success, 1 missing or damaged, 2 wrong usage.
    """
    from ostinato import tools
    from ostinato.tools.datasets import data_kind

    directory = _one_path("PATH", path, "--load-path", load_path)
    if cache_size is not None and not enable_cache:
        msg = "--cache-size needs --enable-cache"
        raise typer.BadParameter(msg)
    report: Any
    if data_kind(directory) == "trajectories":
        report = tools.sample_store(
            directory,
            num_samples or 1024,
            enable_cache=enable_cache,
            cache_size=cache_size or 5,
            sample_window_size=sample_window_size or 0,
            allow_pickle=allow_pickle,
        )
    elif enable_cache or sample_window_size is not None or allow_pickle:
        msg = (
            "--enable-cache, --cache-size, --sample-window-size and --allow-pickle apply to directories of "
            f"trajectories, which {directory} is not"
        )
        raise typer.BadParameter(msg)
    else:
        report = tools.sample_dataset(directory, num_samples or _DATASET_ROWS)
    answer(report, as_json=as_json)


# -- changes of directories ---------------------------------------------------------------------------------------


@app.command(epilog=_examples("ostinato merge runs/replay_buffer runs/merged"))
def merge(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="PATH", help="Directory with rank_0, rank_1 and so on.", show_default=False),
    ] = None,
    output: Annotated[Path | None, typer.Argument(metavar="OUTPUT", help="New directory.", show_default=False)] = None,
    *,
    source_path: _Source = None,
    save_path: _Save = None,
    copy: _Copy = False,
    move: _Move = False,
    as_json: _Json = False,
) -> None:
    """Merge the rank_* directories of a directory into a new one, interleaved by original id and renumbered.

    The new directory has hard links to the files of the ranks, which are never modified in place. If the file system
    has no hard links, or the new directory is on another file system, the files are copied. With --move the files
    leave the ranks; running an interrupted move again resumes it, and each trajectory is in exactly one place at any
    time.

    Exit status: 0 success, 1 nothing done or interrupted move, 2 wrong usage.
    """
    from ostinato import tools

    source, target = _path_and_output(path, source_path, output, save_path)
    _check_copy_or_move(copy=copy, move=move)
    report = tools.merge(source, target, copy=copy, move=move, progress=not as_json)
    answer(report, as_json=as_json)


@app.command(epilog=_examples("ostinato split runs/merged runs/first --split-count 30"))
def split(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Directory of trajectories.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None,
        typer.Argument(metavar="OUTPUT", help="New directory for the first trajectories.", show_default=False),
    ] = None,
    *,
    source_path: _Source = None,
    save_path: _Save = None,
    split_count: Annotated[int, typer.Option(min=1, help="Number of trajectories to take.", show_default=False)],
    copy: _Copy = False,
    move: _Move = False,
    as_json: _Json = False,
) -> None:
    """Make a new directory with the first trajectories of a directory; ids stay the same.

    The new directory has hard links or copies, as with `ostinato merge`. With --move the files leave the source;
    running an interrupted move again resumes it, and each trajectory is in exactly one place at any time.

    Exit status: 0 success, 1 nothing done or interrupted move, 2 wrong usage.
    """
    from ostinato import tools

    source, target = _path_and_output(path, source_path, output, save_path)
    _check_copy_or_move(copy=copy, move=move)
    report = tools.split(source, target, split_count, copy=copy, move=move, progress=not as_json)
    answer(report, as_json=as_json)


@app.command(epilog=_examples("ostinato compact runs/checkpoint"))
def compact(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint that dumps(path, incremental=True) wrote.")],
    *,
    as_json: _Json = False,
) -> None:
    """Merge the patches of an incremental checkpoint into one file per array; the contents stay the same.

    Needs disk space for the arrays that have patches. If it is interrupted, the checkpoint is complete, in its old or
    its new form.

    Exit status: 0 success, 1 missing, damaged or no disk space, 2 wrong usage.
    """
    from ostinato import tools

    if tools.kind_of(path) == "trajectories":
        msg = f"{path} is a directory of trajectories, which has no patches; compact needs the checkpoint of a buffer"
        raise CheckpointError(msg)
    report = tools.compact(path, progress=not as_json)
    answer(report, as_json=as_json)


@app.command(
    epilog=_examples(
        "ostinato convert runs/rollouts runs/fast --format safetensors",
        "ostinato convert demo.hdf5 data/demo --format lerobot --fps 20 --task 'lift the cube'",
        "ostinato convert data/pusht pusht-v0 --format minari --episodes 0:50",
        "ostinato convert runs/checkpoint data.hdf5 --format hdf5 --layout d4rl --fields obs=observation",
    )
)
def convert(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="Directory of trajectories, written by Ostinato or RLinf; a checkpoint that TorchRL wrote; for the "
            "formats lerobot, minari and hdf5, any dataset, checkpoint or directory of trajectories.",
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New directory or file.")],
    *,
    to: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="Format of trajectories: safetensors (the default), pt or pkl; or a dataset: lerobot, minari or hdf5 "
            "(the default if OUTPUT ends in .hdf5).",
        ),
    ] = None,
    fields: Annotated[
        str | None,
        typer.Option(
            help="Fields of a dataset: NAME keeps one, OLD=NEW renames one, as in obs=observation,action. If all are "
            "renamed, the other fields are kept, and fields below next are renamed as well.",
            show_default=False,
        ),
    ] = None,
    episodes: Annotated[
        str | None,
        typer.Option(help="Episodes of a dataset: 0,3,5 or the range 0:50; default all.", show_default=False),
    ] = None,
    fps: Annotated[
        float | None,
        typer.Option(help="Rows per second of lerobot; default those of the source.", show_default=False),
    ] = None,
    task: Annotated[
        str | None, typer.Option(help="Task of all episodes of lerobot; default the text task.", show_default=False)
    ] = None,
    images: Annotated[
        str | None,
        typer.Option(help="Images of lerobot: video (the default) or png, without loss.", show_default=False),
    ] = None,
    codec: Annotated[
        str | None, typer.Option(help="Videos of lerobot: h264 (the default), av1 or lossless.", show_default=False)
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Layout of hdf5: robomimic (the default) or d4rl.", show_default=False)
    ] = None,
    ndim: Annotated[
        int | None, typer.Option(min=1, max=2, help="ndim of the TorchRL storage, if the files do not determine it.")
    ] = None,
    max_size: Annotated[
        int | None, typer.Option(min=1, help="Capacity of the ListStorage in a TorchRL state_dict.")
    ] = None,
    overwrite: _Overwrite = False,
    allow_pickle: _AllowPickle = False,
    as_json: _Json = False,
) -> None:
    """Convert trajectories to another format, a checkpoint of TorchRL to one of Ostinato, or any data to a dataset.

    With --format lerobot, minari or hdf5, the source is whatever `ostinato inspect` reads; files with checksums are
    verified first. Fields that the new format cannot hold are an error before anything is written.

    Trajectories keep their ids, the seed and the generator. For a checkpoint of TorchRL (a directory that rb.dumps
    wrote, or the file of torch.save(rb.state_dict(), file) with a ListStorage), lists what could not be converted.
    The source stays unchanged; the output appears completely or not at all.

    Exit status: 0 success, 1 nothing done, 2 wrong usage.
    """
    from ostinato.cli import conversions

    conversions.check_output(path, output)
    _check_free_paths(output, overwrite=overwrite)
    given = {"fields": fields, "episodes": episodes, "fps": fps, "task": task, "images": images, "codec": codec}
    given |= {"layout": layout, "ndim": ndim, "max_size": max_size, "allow_pickle": allow_pickle or None}
    options = {name: value for name, value in given.items() if value is not None}
    report = conversions.convert(path, output, to, options, overwrite=overwrite, progress=not as_json)
    answer(report, as_json=as_json)


# -- view and plot ------------------------------------------------------------------------------------------------

_VIEW_OUTPUT, _RECORDING = Path("viz.png"), Path("viz.rrd")


@app.command(
    epilog=_examples(
        "ostinato view runs/rollouts",
        "ostinato view runs/rollouts --headless --output viz.png",
        "ostinato view runs/rollouts --save-image --no-display --episode 7 --step 20",
        "ostinato view runs/rollouts --web",
        "ostinato view runs/rollouts --rerun --output seven.rrd --episode 7",
        "ostinato view runs/checkpoint",
        "ostinato view data/pusht",
    )
)
def view(
    path: _OptionalDataPath = None,
    *,
    camera: Annotated[
        str | None,
        typer.Option(
            help="Observation to show: main_images, wrist_images, extra_view_images, states, ...; '*' for all "
            "cameras. Default: main_images, otherwise the first camera, otherwise the vectors as lines; of a dataset "
            "all cameras.",
            show_default=False,
        ),
    ] = None,
    headless: Annotated[
        bool, typer.Option("--headless", help="No window: read commands from the terminal, write an image file.")
    ] = False,
    save_image: Annotated[bool, typer.Option("--save-image", help="Write the image file at each move.")] = False,
    no_display: Annotated[
        bool, typer.Option("--no-display", help="With --save-image: write one image file and exit.")
    ] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve a page for a browser on this machine.")] = False,
    rerun: Annotated[bool, typer.Option("--rerun", help="Write one episode as a file for the Rerun viewer.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The file to write: the image, default viz.png (the key s writes next to it), or with --rerun the "
            "recording, default viz.rrd.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of --web; 0, the default, selects a free port.")
    ] = None,
    episode: Annotated[
        int | None,
        typer.Option(min=0, help="Id of the first episode, or trajectory, to show.", show_default=False),
    ] = None,
    step: Annotated[int | None, typer.Option(min=0, help="First step to show.", show_default=False)] = None,
    batch: Annotated[
        int | None, typer.Option(min=0, help="First batch index (environment) to show.", show_default=False)
    ] = None,
    replay_dir: Annotated[
        Path | None, typer.Option("--replay-dir", help="RLinf's name of PATH.", show_default=False)
    ] = None,
    overwrite: _Overwrite = False,
    allow_pickle: _AllowPickle = False,
) -> None:
    """Show trajectories or episodes of a dataset step by step: in a window, in a terminal, in a browser, or in Rerun.

    Keys of the window: left/right or p/n previous and next step (also across trajectories), up/down next and previous
    trajectory, b/v next and previous batch index, Home/End first and last step, s saves the image, q or Esc quits;
    enter an id in the text box to jump to it.

    Commands of --headless: n/next, p/prev, nt/nexttraj, pt/prevtraj, j ID, info, q/quit.

    Exit status: 0 success, 1 missing or damaged, 2 wrong usage.
    """
    directory = _one_path("PATH", path, "--replay-dir", replay_dir)
    modes = [
        name
        for name, given in (("--headless", headless), ("--no-display", no_display), ("--web", web), ("--rerun", rerun))
        if given
    ]
    _check_view_options(modes, save_image=save_image, output=output, port=port, camera=camera, start=(step, batch))
    target = output or (_RECORDING if rerun else _VIEW_OUTPUT)
    _check_free_paths(*([target] if headless or save_image or rerun else []), overwrite=overwrite)
    from ostinato.viz import Navigator, Position
    from ostinato.viz.datasets import DatasetSource
    from ostinato.viz.frames import ALL_CAMERAS

    source = _open_source(directory, allow_pickle=allow_pickle)
    start = Position(_index_of(source, episode), step or 0, batch or 0)
    navigator = Navigator(source, start)
    _check_start(source, start, navigator.position, camera)
    camera = ALL_CAMERAS if camera is None and isinstance(source, DatasetSource) and not web else camera
    if web:
        from ostinato.viz.web import serve

        serve(source, start, port or 0, typer.echo)
    elif rerun:
        from ostinato.viz.rerun_export import export

        _show_written(export(source, start.trajectory, target, camera=camera))
    elif headless:
        from ostinato.viz.viewer import run_prompt

        run_prompt(source, navigator, target, _input_lines(), typer.echo, camera=camera)
    elif no_display:
        from ostinato.viz.viewer import write_frame

        _show_written(write_frame(source, start, camera, target))
    else:
        from ostinato.viz.viewer import open_window

        open_window(source, navigator, camera=camera, output=target, autosave=save_image)


def _check_view_options(
    modes: list[str],
    *,
    save_image: bool,
    output: Path | None,
    port: int | None,
    camera: str | None,
    start: tuple[int | None, int | None],
) -> None:
    """Check that no options exclude each other or have no effect.

    Raises:
        BadParameter: They do.
    """
    problem = None
    if len(modes) > 1:
        problem = f"{' and '.join(modes)} exclude each other"
    elif "--no-display" in modes and not save_image:
        problem = "--no-display needs --save-image: otherwise nothing would be shown or written"
    elif save_image and modes not in ([], ["--no-display"]):
        problem = f"--save-image has no effect with {modes[0]}"
    elif output is not None and "--web" in modes:
        problem = "--output has no effect with --web"
    elif port is not None and "--web" not in modes:
        problem = "--port needs --web"
    elif camera is not None and "--web" in modes:
        problem = "--camera has no effect with --web: the page shows every camera"
    elif start != (None, None) and "--rerun" in modes:
        problem = "--step and --batch have no effect with --rerun: all steps of the whole batch are written"
    if problem:
        raise typer.BadParameter(problem)


def _check_start(source: TrajectorySource, wanted: Position, found: Position, camera: str | None) -> None:
    """Check that the step, the batch index and the camera exist, unless the trajectory is damaged.

    Raises:
        BadParameter: One of them does not exist.
    """
    from ostinato.viz.frames import ALL_CAMERAS

    opened = source.open(wanted.trajectory)
    if opened.problem:
        return
    if found != wanted:
        msg = f"--step and --batch must be below {opened.steps} and {opened.envs}, got {wanted.step} and {wanted.env}"
        raise typer.BadParameter(msg)
    cameras = {**opened.roles.current, **opened.roles.following}
    if camera not in {None, ALL_CAMERAS, *cameras}:
        msg = f"{opened.name} has no observation {camera!r}: --camera must be one of {', '.join(cameras)}, '*'"
        raise typer.BadParameter(msg)


def _open_source(path: Path, *, allow_pickle: bool) -> TrajectorySource:
    from ostinato.viz import TrajectoryFolder
    from ostinato.viz.datasets import open_source

    source = open_source(path, allow_pickle=allow_pickle)
    if not isinstance(source, TrajectoryFolder):
        _check_no_pickle(path, allow_pickle=allow_pickle)
    return source


def _index_of(source: TrajectorySource, trajectory_id: int | None) -> int:
    index = 0 if trajectory_id is None else source.find(trajectory_id)
    if index is None:
        from ostinato.viz.sources import id_range

        msg = f"there is no {source.unit} {trajectory_id}: {id_range(source)}"
        raise typer.BadParameter(msg)
    return index


def _input_lines() -> Iterator[str]:
    """Yield the lines of standard input, with a prompt if it is a terminal."""
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line


@app.command(
    epilog=_examples(
        "ostinato plot runs/checkpoint --output report.png",
        "ostinato plot runs/rollouts",
        "ostinato plot data/pusht --episode 3",
    )
)
def plot(
    path: _DataPath,
    *,
    episode: Annotated[
        int | None,
        typer.Option(min=0, help="Id of the episode of a dataset to plot; default the first."),
    ] = None,
    output: Annotated[Path, typer.Option(help="The image file to write.")] = Path("report.png"),
    overwrite: _Overwrite = False,
    allow_pickle: _AllowPickle = False,
) -> None:
    """Plot a summary of a buffer: returns, lengths, priorities, ages of rows, bytes per field.

    For a dataset: pictures and curves of one episode, lengths of all episodes, the distribution of actions, returns.

    Exit status: 0 success, 1 missing or damaged, 2 wrong usage.
    """
    from ostinato.viz.datasets import DatasetSource
    from ostinato.viz.figures import draw, output_path, size_of
    from ostinato.viz.report import report

    target = output_path(output)
    _check_free_paths(target, overwrite=overwrite)
    source = _open_source(path, allow_pickle=allow_pickle)
    if episode is not None and not isinstance(source, DatasetSource):
        msg = f"--episode applies to datasets, which {path} is not: use view to see one {source.unit}"
        raise typer.BadParameter(msg)
    figure = report(source, _index_of(source, episode))
    _show_written(draw(figure, target, size=size_of(figure)))


@app.command(
    epilog=_examples(
        "ostinato top replay",
        "ostinato top replay --address 10.0.0.1:6379",
        "ostinato top replay --once --json",
    )
)
def top(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The `name` of the ShardedReplayBuffer.")],
    *,
    namespace: Annotated[str | None, typer.Option(help="Namespace of the name, if it was given one.")] = None,
    address: Annotated[str | None, typer.Option(help="Address of the cluster; default this machine.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two refreshes.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; needs --once.")] = False,
) -> None:
    """Show the shards of a named buffer in a Ray cluster: rows, writes, draws, checkpoints, missing shards.

    `written` counts rows since the buffer was made or emptied, `saved` those of them that the last checkpoint holds,
    `failures` the checkpoints in a row that could not be written. Refreshes until Ctrl-C.

    Exit status: 0 success, 1 no such buffer or no cluster, 2 wrong usage, 130 interrupted.
    """
    from ostinato.cli import fleets

    if as_json and not once:
        msg = "--json needs --once"
        raise typer.BadParameter(msg)
    fleets.top(name, namespace, address, interval_s=interval, once=once, as_json=as_json)
