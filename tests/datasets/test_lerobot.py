"""LeRobot datasets: every number and frame is that of the files, and damage is named, never read."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

pytest.importorskip("av")
pytest.importorskip("pyarrow")

import pyarrow as pa
import pyarrow.parquet as pq

from ostinato import open_dataset
from ostinato.errors import DamagedFileError, KindError, MissingFileError, SchemaError

from .builders import EVERY_KIND, STATE, Model, lerobot_v3, lerobot_v21
from .samples import check_processes, check_rows, not_opened

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WRITERS: dict[str, Callable[..., Model]] = {"v3": lerobot_v3, "v2.1": lerobot_v21}
KINDS = {**EVERY_KIND, "observation.bytes": ("uint8", (3,)), "observation.one": ("int32", (1,))}
TOP, WRIST, DEPTH = "observation.images.top", "observation.images.wrist", "observation.images.still"
CAMERAS = {TOP: (32, 48), WRIST: (48, 32)}


@pytest.fixture(scope="module", params=WRITERS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A dataset with every kind of field; not to be changed."""
    return WRITERS[request.param](
        tmp_path_factory.mktemp("whole") / "data",
        features=KINDS,
        cameras=CAMERAS,
        images={DEPTH: (16, 24)},
        keyframes=3,
        b_frames=2,
    )


@pytest.fixture(scope="module", params=WRITERS)
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A dataset of numbers; not to be changed."""
    return WRITERS[request.param](tmp_path_factory.mktemp("small") / "data", lengths=(4, 3, 5, 2))


def tables_of(model: Model) -> list[Path]:
    return sorted((model.path / "data").rglob("*.parquet"))


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **options: Any) -> None:
    """Write a Parquet file anew."""
    pq.write_table(change(pq.read_table(path)), path, **options)


def changed(name: str, change: Callable[[list[Any]], Any]) -> Callable[[pa.Table], pa.Table]:
    """Return what changes one column of a table."""

    def apply(table: pa.Table) -> pa.Table:
        at, values = table.column_names.index(name), table.column(name).to_pylist()
        change(values)
        return table.set_column(at, name, pa.array(values, table.schema.field(name).type))

    return apply


def copied(model: Model, folder: Path) -> Path:
    """Return a copy of a dataset, to be damaged."""
    return shutil.copytree(model.path, folder / "copy")


# -- every number and frame ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [1 << 30, 1])
def test_every_field_of_every_row(whole, max_bytes):
    dataset = open_dataset(whole.path, max_bytes=max_bytes)
    check_rows(dataset, whole.columns, whole.lengths)
    assert {path[0] for path in dataset.schema.paths} == {*whole.columns, "task"}
    assert dataset["task"] == whole.tasks
    assert dataset[[20, 3]]["task"] == [whole.tasks[20], whole.tasks[3]]
    assert dataset.fps == whole.fps
    picked = open_dataset(whole.path, episodes=[2, 0], fields={"image": TOP, "state": "observation.state"})
    rows = [*range(whole.starts[2], whole.ends[2]), *range(whole.ends[0])]
    check_rows(picked, {"image": whole.columns[TOP][rows], "state": whole.columns["observation.state"][rows]}, [9, 7])
    assert picked.schema.paths == [("image",), ("state",)]
    known = dict(dataset.metadata)
    json.dumps(known)
    assert known["cameras"] == [TOP, WRIST, DEPTH]
    assert (known["robot_type"], known["splits"]) == ("builder", {"train": "0:3"})
    assert list(known["tasks"].values()) == list(dict.fromkeys(whole.tasks))
    actions = whole.columns["action"].astype(np.float64)
    for kind in ("min", "max", "mean", "std"):
        np.testing.assert_allclose(known["stats"]["action"][kind], getattr(actions, kind)(0))
    assert known["stats"]["action"]["count"] == [len(actions)]
    assert np.shape(known["stats"][TOP]["mean"]) == (3, 1, 1)
    assert "terminated from truncated" in dataset.assumptions[0]


def test_threads_and_other_processes_read_the_same_rows(whole):
    columns = {name: whole.columns[name] for name in ("action", TOP, DEPTH, "timestamp")}
    dataset = open_dataset(whole.path, fields=list(columns), max_bytes=20_000)
    check_processes(dataset, columns)
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(check_rows, dataset, columns, whole.lengths) for _ in range(4)]:
            done.result()


@pytest.mark.parametrize(
    ("group", "layout"),
    [
        (None, {"episodes_per_file": 1, "episodes_per_video": 1, "files_per_chunk": 1}),
        (2, {"episodes_per_file": 9, "episodes_per_video": {TOP: 3, WRIST: 2}, "skipped_frames": {WRIST: 2}}),
        (3, {"episodes_per_file": 2, "fixed_lists": False, "files_per_chunk": 1, "tasks": 1}),
    ],
)
def test_any_layout_of_files_and_row_groups(tmp_path, group, layout):
    model = lerobot_v3(
        tmp_path / "data", lengths=(4, 3, 1, 5), features=KINDS, cameras=CAMERAS, images={DEPTH: (16, 24)}, **layout
    )
    for path in tables_of(model) if group else ():
        rewrite(path, lambda table: table, row_group_size=group)
    check_rows(open_dataset(model.path, max_bytes=1 if group == 3 else 1 << 30), model.columns, model.lengths)


@pytest.mark.parametrize("max_bytes", [4000, 1 << 30])
def test_the_columns_of_an_episode_are_read_together(small, monkeypatch, max_bytes):
    reads: list[list[str]] = []
    read = pq.ParquetFile.read_row_group

    def counted(file: Any, group: int, **options: Any) -> Any:
        reads.append(sorted(options["columns"]))
        return read(file, group, **options)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    dataset = open_dataset(small.path, max_bytes=max_bytes)
    assert dataset.field_at(torch.tensor([0]), ("action",)).shape == (1, 2)  # type: ignore[union-attr]
    assert reads.pop() == ["action", "episode_index", "index"]
    check_rows(dataset, small.columns, small.lengths)
    assert len(reads) == len(small.lengths)


def test_only_files_of_the_rows_are_read(whole, tmp_path):
    path = copied(whole, tmp_path)
    shutil.rmtree(path / "videos")
    for table in sorted((path / "data").rglob("*.parquet"))[1:]:
        table.unlink()
    dataset = open_dataset(path, fields=["action"])  # no table and no video is opened
    np.testing.assert_array_equal(dataset[:7]["action"].numpy(), whole.columns["action"][:7])
    with pytest.raises(MissingFileError, match=r"is missing: it holds episode 2"):
        dataset[20]


# -- what is known of a dataset --------------------------------------------------------------------------------------


def test_version_2_0_and_missing_episodes(tmp_path):
    model = lerobot_v21(tmp_path / "data", lengths=(4, 3, 5))
    edit_info(model.path, codebase_version="v2.0", total_episodes=2, total_frames=9)
    (model.path / "meta/episodes_stats.jsonl").unlink()
    (model.path / "meta/stats.json").write_text('{"action": {"mean": [1.0, 2.0]}}')
    lines = (model.path / "meta/episodes.jsonl").read_text().splitlines()
    (model.path / "meta/episodes.jsonl").write_text("\n".join([lines[2], lines[0]]))
    dataset = open_dataset(model.path)
    rows = [*range(4), *range(7, 12)]
    check_rows(dataset, {name: values[rows] for name, values in model.columns.items()}, [4, 5])
    assert dataset.metadata["episode_index"] == [0, 2]
    assert dataset.metadata["stats"] == {"action": {"mean": [1.0, 2.0]}}
    path = lerobot_v21(tmp_path / "subset").path
    for table in (path / "data").rglob("*.parquet"):
        rewrite(table, changed("index", lambda values: values.__setitem__(slice(None), [v + 100 for v in values])))
    assert open_dataset(path)["index"].tolist() == list(range(100, 121)), "subsets of datasets keep it"


@pytest.mark.parametrize("kind", [pa.large_string(), pa.dictionary(pa.int8(), pa.string())])
def test_features_of_text_and_of_other_kinds(tmp_path, kind):
    model = lerobot_v3(tmp_path / "data", lengths=(4, 3, 5), features={**STATE, "done": ("bool", (1,))})
    del model.columns["done"]
    features = json.loads((model.path / "meta/info.json").read_text())["features"]
    features |= {name: {"dtype": name, "shape": [1], "names": None} for name in ("string", "audio")}
    edit_info(model.path, features=features)
    texts = [f"row {'ä' * (row % 3)}" for row in range(12)]
    texts[5] = ""
    paths = tables_of(model)
    for path, values in zip(paths, (texts[:7], texts[7:]), strict=True):
        pq.write_table(pq.read_table(path).append_column("string", pa.array(values, kind)), path)
    dataset = open_dataset(model.path)
    assert "field of the dataset" in dataset.assumptions[0]
    assert dataset.assumptions[1:] == ("The feature 'audio' is not read: its dtype is audio.",)
    stored = np.concatenate([pq.read_table(path).column("done").to_numpy() for path in paths])
    assert dataset["done"].tolist() == stored.tolist(), "a field of this name stays as it is"
    assert dataset["string"] == texts
    assert dataset[[11, 2, 11]]["string"] == [texts[11], texts[2], texts[11]]
    check_rows(dataset, model.columns, model.lengths)
    rewrite(
        paths[1], lambda table: table.set_column(table.num_columns - 1, "string", pa.array(["x", None] + ["y"] * 3))
    )
    with pytest.raises(
        DamagedFileError, match=r"file-001.parquet, column 'string', episode 2, frame 1: the row has no"
    ):
        open_dataset(model.path)["string"]


# -- bad input -------------------------------------------------------------------------------------------------------


def edit_info(path: Path, **entries: Any) -> None:
    file = path / "meta" / "info.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_wrong_entries_of_the_info_are_named(small, tmp_path):
    path = copied(small, tmp_path)
    content = (path / "meta/info.json").read_text()
    table: list[Any] = [
        ({"fps": 0}, "fps must be a positive number, got 0"),
        ({"fps": None}, "fps must be a positive number"),
        ({"features": {}}, "features must name"),
        ({"features": {"a": {"dtype": "float32"}}}, "feature 'a' must have a dtype and a shape"),
        ({"features": {"a": {"dtype": "image", "shape": [3]}}}, r"feature 'a' must have a shape \[height"),
        ({"features": {"a": {"dtype": "video", "shape": [8, 8, 3]}}}, "videos|video_path"),
        ({"data_path": None}, "data_path must be the template"),
        ({"data_path": "/etc/passwd"}, "leads out of the folder"),
        ({"data_path": "data/../../x"}, "leads out of the folder"),
        ({"data_path": "data/{nothing}"}, "no template of paths"),
        ({"total_frames": 15}, "gives total_frames 15, but .*episodes.* gives 14"),
        ({"total_episodes": 3}, "gives total_episodes 3, but .*episodes.* gives 4"),
        *(({"codebase_version": v}, rf"codebase_version is {v!r}.*convert") for v in ("v1.6", "v4.0", "v2.2", None)),
    ]
    for entries, message in table:
        edit_info(path, **entries)
        not_opened(path, (DamagedFileError, KindError), message)
        (path / "meta/info.json").write_text(content)
    lines = path / "meta/tasks.jsonl"
    if lines.exists():
        lines.write_text('{"task_index": 1000000000000, "task": "pick"}')
    else:
        rewrite(path / "meta/tasks.parquet", changed("task_index", lambda values: values.__setitem__(0, 1 << 40)))
    not_opened(path, DamagedFileError, r"tasks.*line 1: task_index must be an integer of at least 0 and below")


def test_metadata_cut_short_is_named(small, tmp_path):
    for number, file in enumerate(sorted((small.path / "meta").rglob("*.*"))):
        path = copied(small, tmp_path / str(number))
        other = path / file.relative_to(small.path)
        other.write_bytes(file.read_bytes()[: file.stat().st_size * 2 // 3])
        with pytest.raises(DamagedFileError, match=other.name):
            open_dataset(path).metadata["stats"]
        other.unlink()
        if "stats" not in other.name:
            not_opened(path, (MissingFileError, KindError), r"is missing|has no Parquet file|not recognized")


def in_episodes(path: Path, name: str, values: dict[int, Any]) -> None:
    """Change a column of the table of episodes."""
    rewrite(
        path / "meta/episodes/chunk-000/file-000.parquet",
        changed(name, lambda column: [column.__setitem__(row, value) for row, value in values.items()]),
    )


def test_episodes_in_another_order_are_sorted(small, tmp_path):
    path = copied(small, tmp_path)
    if (path / "meta/episodes").is_dir():
        rewrite(path / "meta/episodes/chunk-000/file-000.parquet", lambda table: table.take([2, 0, 3, 1]))
    else:
        lines = (path / "meta/episodes.jsonl").read_text().splitlines()
        (path / "meta/episodes.jsonl").write_text("\n".join(lines[::-1]))
    check_rows(open_dataset(path), small.columns, small.lengths)


def test_wrong_episodes_of_version_3(tmp_path):
    model = lerobot_v3(tmp_path / "data", lengths=(4, 3, 5, 2), episodes_per_file=1)
    path = model.path / "meta/episodes/chunk-000/file-000.parquet"
    content = path.read_bytes()
    for name, row, value, message in (
        ("length", 0, 5, r"episode 0 of 5 rows is at the rows \[0, 4\)"),
        ("length", 0, 0, "episode 0 has 0 rows"),
        ("dataset_to_index", 0, 5, r"episode 0 of 4 rows is at the rows \[0, 5\), which are 5"),
        ("dataset_from_index", 0, 1, r"episode 0 of 4 rows is at the rows \[1, 4\)"),
        ("episode_index", 0, 1, "has episode 1 twice"),
        ("data/file_index", 2, 0, "apart from the episodes before it"),
    ):
        in_episodes(model.path, name, {row: value})
        not_opened(model.path, DamagedFileError, message)
        path.write_bytes(content)
    model = lerobot_v3(tmp_path / "rows", lengths=(4, 3), episodes_per_file=2)
    for name, values in (("length", {0: 3, 1: 4}), ("dataset_to_index", {0: 3}), ("dataset_from_index", {1: 3})):
        in_episodes(model.path, name, values)
    dataset = open_dataset(model.path)
    assert dataset[:3]["index"].tolist() == [0, 1, 2]
    with pytest.raises(DamagedFileError, match=r"file-000.parquet, episode 1, frame 0: episode_index is 0 where 1 is"):
        dataset[3]


def test_wrong_lines_of_version_2_1(tmp_path):
    model = lerobot_v21(tmp_path / "data", lengths=(4, 3))
    file = model.path / "meta/episodes.jsonl"
    first, second = file.read_text().splitlines()
    for lines, message in (
        ([first, first], "has episode 0 twice"),
        ([first, second.replace("3}", "2.5}")], "line 2: length must be an integer"),
        ([first, second.replace("3}", "-3}")], "line 2: length must be an integer"),
        ([first, "[]"], "line 2 is no JSON object"),
        ([first, second[:-3]], "line 2 of 2 cannot be read as JSON"),
        ([first], "total_episodes 2, but .*episodes.jsonl gives 1"),
    ):
        file.write_text("\n".join(lines) + "\n")
        not_opened(model.path, DamagedFileError, message)
    for size in (0, "1"):
        edit_info(model.path, chunks_size=size)
        not_opened(model.path, DamagedFileError, "chunks_size must be an integer of at least 1")
    edit_info(model.path, chunks_size=1000)
    file.write_text("")
    not_opened(model.path, SchemaError, "has no episode")
    file.write_text(f"{first}\n{second.replace('3}', '4}')}\n")
    edit_info(model.path, total_frames=8)
    dataset = open_dataset(model.path)
    with pytest.raises(DamagedFileError, match=r"episode_000001.parquet has 3 rows, but .* gives 4 rows to episode 1"):
        dataset[5]
    assert dataset[3]["index"] == 3


def stored_as(name: str, values: Callable[[pa.Table], Any]) -> Callable[[pa.Table], pa.Table]:
    """Return what replaces one column of a table, whatever its type."""
    return lambda table: table.set_column(table.column_names.index(name), name, values(table))


def test_wrong_tables_are_named(small, tmp_path):
    path = copied(small, tmp_path)
    first, last = min((path / "data").rglob("*.parquet")), max((path / "data").rglob("*.parquet"))
    content = first.read_bytes()
    changes: list[Any] = [
        (lambda table: table.drop_columns("action"), r"\(episode \d\) has no column 'action': it has"),
        (lambda table: table.slice(1), "rows, but .*episodes.* gives .* rows to"),
        (
            lambda table: table.take([0, 2, 1, *range(3, len(table))]),
            "episode 0, frame 1: index is 2 where 1 is expected",
        ),
        (
            changed("episode_index", lambda v: v.__setitem__(1, 2)),
            "episode 0, frame 1: episode_index is 2 where 0 is expected",
        ),
        (changed("action", lambda v: v.__setitem__(1, None)), r"'action', episode 0, frame 1: there is no value"),
        (changed("task_index", lambda v: v.__setitem__(2, 7)), "'task_index', episode 0, frame 2: 7 is not the number"),
        (
            stored_as("action", lambda table: pa.array([[1.0]] * len(table), pa.list_(pa.float32()))),
            r"'action', episode 0, frame 0: a list of 1 values, where the shape \[2\] asks for 2",
        ),
        (
            stored_as("action", lambda table: pa.array([["a", "b"]] * len(table))),
            "'action', episode 0, frame 0: values are of type string",
        ),
        (
            stored_as("index", lambda table: table.column("index").cast(pa.float64())),
            "'index', episode 0, frame 0: values are float64, where int64",
        ),
    ]
    for change, message in changes:
        rewrite(first, change)
        with pytest.raises(DamagedFileError, match=rf"{first.name}.*{message}"):
            open_dataset(path)[:]
        first.write_bytes(content)
    dataset = open_dataset(path)
    for share in (0.0, 0.3, 0.9):
        last.write_bytes(last.read_bytes()[: int(last.stat().st_size * share)])
        with pytest.raises(DamagedFileError, match=rf"{last.name} cannot be read \(episode 3, frames \[0, 2\)\)"):
            dataset[-1]
    assert dataset[0]["index"] == 0


def test_numbers_may_be_stored_in_wider_types(tmp_path):
    model = lerobot_v21(tmp_path / "data", lengths=(4, 3), features={**STATE, "step": ("uint8", (1,))})
    wide = {"action": pa.list_(pa.float64()), "task_index": pa.int32(), "timestamp": pa.float64()}
    for path in tables_of(model):
        for name, kind in wide.items():
            rewrite(path, stored_as(name, lambda table, n=name, k=kind: table.column(n).cast(k)))  # type: ignore[misc]
    check_rows(open_dataset(model.path), model.columns, model.lengths)
    rewrite(tables_of(model)[1], stored_as("step", lambda _: pa.array([1, 2, 256], pa.int64())))
    with pytest.raises(DamagedFileError, match=r"'step', episode 1, frame 2: 256 does not fit uint8"):
        open_dataset(model.path)[4]


def test_damaged_pictures_are_named(tmp_path):
    model = lerobot_v3(tmp_path / "data", images={DEPTH: (16, 24)})
    path = tables_of(model)[0]
    for value, message in (
        (b"no picture", "cannot be decoded"),
        (None, "no picture"),
        (b"\x89PNG\r\n\x1a\n", "decoded"),
    ):
        rewrite(path, changed(DEPTH, lambda v, new=value: v.__setitem__(1, {"bytes": new, "path": "x.png"})))  # type: ignore[misc]
        with pytest.raises(DamagedFileError, match=rf"{path.name}, column '{DEPTH}', episode 0, frame 1: .*{message}"):
            open_dataset(model.path)[1]
    features = json.loads((model.path / "meta/info.json").read_text())["features"]
    features[DEPTH]["shape"] = [8, 24, 3]
    edit_info(model.path, features=features)
    with pytest.raises(DamagedFileError, match=r"frame 4: the picture is uint8 \[16, 24, 3\].*\[3, 8, 24\]"):
        open_dataset(model.path)[4]


def test_frames_are_found_by_the_times_of_their_rows(tmp_path):
    model = lerobot_v3(tmp_path / "data", lengths=(6, 5), cameras={TOP: (32, 48)})
    begin, late = f"videos/{TOP}/from_timestamp", 9000.0
    in_episodes(model.path, begin, {1: 60.0})
    dataset = open_dataset(model.path)
    np.testing.assert_array_equal(dataset[:6][TOP].numpy(), model.columns[TOP][:6])
    with pytest.raises(DamagedFileError, match="episode 1, frame 4"):
        dataset[10]
    in_episodes(model.path, begin, {0: -late, 1: 0.6 - late})  # exact late in a long episode, too
    table = tables_of(model)[0]
    times = [late + round(step / 10, 3) for length in (6, 5) for step in range(length)]
    rewrite(table, changed("timestamp", lambda values: values.__setitem__(slice(None), times)))
    stored = pq.read_table(table).column("timestamp").to_numpy()
    assert np.abs(stored - np.round(stored.astype(np.float64), 1)).max() > 1e-4, "float32 is off by too much"
    np.testing.assert_array_equal(open_dataset(model.path)[:][TOP].numpy(), model.columns[TOP])
