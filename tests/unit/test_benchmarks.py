"""The benchmarks' own tests: the harness runs, its JSON holds together, its tables and verdicts are right."""

from __future__ import annotations

import importlib
import io
import json
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # other packages install a folder of this name: ours must come first

from benchmarks import calls, compression, data, recordings  # noqa: E402
from benchmarks.__main__ import main  # noqa: E402
from benchmarks.adapter import Seconds, Setup  # noqa: E402
from benchmarks.coordinator import SEATS, Table  # noqa: E402
from benchmarks.peers import _datasets  # noqa: E402
from benchmarks.peers._limits import Table as LimitTable  # noqa: E402
from benchmarks.peers._start import importing, program  # noqa: E402
from benchmarks.peers._threads import together  # noqa: E402
from benchmarks.peers.isaacgymenvs import AmpRing  # noqa: E402
from benchmarks.published import (  # noqa: E402
    BEGIN,
    END,
    README_PEERS,
    README_WORKS,
    Published,
    markdown,
    publish,
    ratio,
    tables,
    with_table,
)
from benchmarks.records import FORMAT, Library, Report, Result, Round, Section  # noqa: E402
from benchmarks.report import markdown_targets, print_report  # noqa: E402
from benchmarks.targets import (  # noqa: E402
    AheadOfAll,
    AtMost,
    AtMostAbove,
    GrowthWithinLimit,
    Seen,
    TailWithin,
    Target,
    TimesPeer,
    WithinLimit,
    WorstWithin,
    human,
    is_peer,
)
from benchmarks.worker import Worker, loaded, measure  # noqa: E402
from benchmarks.workloads import WORKLOADS, select  # noqa: E402

if TYPE_CHECKING:
    from benchmarks.adapter import Adapter


def result(*medians_us: float, worst_cpu_us: float = 0.0) -> Result:
    """Return a result with one round per median; its 99th percentile is twice the median."""
    return Result(tuple(Round(m * 1e-6, m * 1e-6, m * 2e-6, 1e-3, worst_cpu_us * 1e-6, 9) for m in medians_us))


RESULTS = {
    "ostinato": result(20, 10, 30, worst_cpu_us=80),
    "ostinato-torch": result(15),
    "limit-packed": result(10),
    "limit-torch": result(18, 16, 17),
    "torchrl": result(200),
    "cpprb": result(50),
    "sb3": Result(missing="no such thing"),
}


SMALLER = {"ostinato": result(16), "limit-packed": result(4)}


def seen(results: dict[str, Result] = RESULTS) -> Seen:
    """Return results as targets judge them, beside those of a smaller workload."""
    return Seen("uniform.dict", {"uniform.dict": results, "smaller": SMALLER, "gone": {"ostinato": Result()}})


def report() -> Report:
    """Return a report of one workload that some libraries lack and one is missing for."""
    libraries = tuple(Library(name, name.upper(), "1") for name in RESULTS)
    gone = Library("tianshou", "TIANSHOU", "", "ModuleNotFoundError: No module named 'tianshou'")
    targets = (AtMost(30e-6), AtMost(1e-6), TimesPeer("tianshou", 2))
    results = RESULTS | {"tianshou": Result(missing=gone.missing)}
    section = Section("uniform.dict", "sample", "C", results, tuple(t.judge(seen(results)) for t in targets))
    machine = {"cpu": "a CPU", "cores": "2", "system": "Linux", "python": "3.11"}
    return Report(machine, {"rounds": 3, "quick": False}, (*libraries, gone), (section,))


def printed(shown: Report) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_report(shown, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(1.234e-6, "1.23 us"), (123.4e-6, "123 us"), (0.9996e-3, "1 ms"), (12.34e-3, "12.3 ms"), (2.5, "2.5 s")],
)
def test_human(seconds: float, text: str) -> None:
    assert human(seconds) == text


def test_result_takes_medians_over_rounds() -> None:
    ours = RESULTS["ostinato"]
    assert ours.median_s == pytest.approx(20e-6)
    assert ours.spread == pytest.approx(3)


def test_ratio_is_time_divided_by_ours() -> None:
    ours_s = RESULTS["ostinato"].median_s
    assert ratio(RESULTS["torchrl"].median_s, ours_s) == "10x"
    assert ratio(RESULTS["cpprb"].median_s, ours_s) == "2.50x"


@pytest.mark.parametrize(
    ("target", "measured", "met"),
    [
        (AtMost(20e-6), "20 us", True),
        (AtMost(19e-6), "20 us", False),
        (TimesPeer("torchrl", 10), "10x", True),
        (TimesPeer("cpprb", 3), "2.5x", False),
        (TimesPeer("torchrl", 0.5), "0.1x torchrl", True),
        (TimesPeer("limit-packed", 0.4), "2x limit-packed", True),
        (TimesPeer("limit-packed", 0.6), "2x limit-packed", False),
        (TimesPeer("sb3", 1), "not measured: sb3", None),
        (AheadOfAll(), "2.5x cpprb", True),
        (WithinLimit(2), "2x the limit", True),
        (WithinLimit(1.5), "2x the limit", False),
        (WorstWithin(5), "4x (80 us of processor time)", True),
        (WorstWithin(3), "4x (80 us of processor time)", False),
        (TailWithin(2.5), "2x (40 us)", True),
        (TailWithin(1.5), "2x (40 us)", False),
        (AtMostAbove("smaller", 5e-6), "4 us above", True),
        (AtMostAbove("smaller", 3e-6), "4 us above", False),
        (AtMostAbove("gone", 1), "not measured: ostinato", None),
        (AtMostAbove("nothing", 1), "not measured: nothing", None),
        (GrowthWithinLimit("smaller"), "1.25x, the limit 2.5x", True),
        (GrowthWithinLimit("smaller", 0.4), "1.25x, the limit 2.5x", False),
        (GrowthWithinLimit("gone"), "not measured: ostinato", None),
    ],
)
def test_targets(target: Target, measured: str, met: bool | None) -> None:
    verdict = target.judge(seen())
    assert (verdict.measured, verdict.met) == (measured, met)


def test_targets_are_undecided_without_what_they_need() -> None:
    ours = {"ostinato": RESULTS["ostinato"]}
    targets = (AheadOfAll(), WithinLimit(1), TimesPeer("torchrl", 1))
    assert [target.judge(seen(ours)).met for target in targets] == [None] * 3
    assert AtMost(1).judge(seen({"ostinato": Result(missing="gone")})).met is None


def test_own_rows_and_limits_are_no_peers() -> None:
    assert [name for name in RESULTS if is_peer(name)] == ["torchrl", "cpprb", "sb3"]


def test_report_survives_json() -> None:
    values = json.loads(json.dumps(report().to_json()))
    assert values["format"] == FORMAT
    summary = values["sections"][0]["results"]["cpprb"]["summary"]
    assert summary["median_s"] == pytest.approx(50e-6)
    assert summary["vs_limit"] == pytest.approx(5)
    assert Report.from_json(values) == report()


@pytest.mark.parametrize("change", [{"format": 0}, {"machine": None}, {"libraries": [{"name": "x"}]}])
def test_report_refuses_other_json(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="the report"):
        Report.from_json(report().to_json() | change)


def test_printed_table_lists_everyone() -> None:
    text = printed(report())
    assert text.index("LIMIT-PACKED") < text.index("OSTINATO ") < text.index("CPPRB") < text.index("TORCHRL")
    assert "not here: SB3 (no such thing)" in text
    assert "not here: TIANSHOU (missing, see below)" in text
    assert "Missing: TIANSHOU: ModuleNotFoundError" in text
    assert "met  at most 30 us: 20 us" in text
    assert "missed  at most 1 us: 20 us" in text
    assert "not judged  >= 2x tianshou: not measured: tianshou" in text


def test_markdown_table() -> None:
    lines = markdown(Published.of(report())).splitlines()
    assert lines[0] == "| work | Ostinato | limit | vs limit | TORCHRL | CPPRB |"
    assert lines[1] == "|---|---:|---:|---:|---:|---:|"
    assert lines[2] == "| sample | **20 us** | 10 us | 2.00x | 200 us (10x) | 50 us (2.50x) |"
    assert "Not measured there: TIANSHOU." in lines[-1]


def test_pages_show_the_published_measurements() -> None:
    """Tables are not edited by hand: `python -m benchmarks --publish` writes them."""
    found = Published.read()
    assert found.to_text() == (ROOT / "benchmarks" / "published.json").read_text()
    for name, table in tables(found).items():
        text = (ROOT / name).read_text()
        assert with_table(text, table) == text, f"{name} is not what benchmarks/published.json says"


def test_readme_names_the_ratios_of_the_table() -> None:
    works = Published.read().works
    words = {
        "uniform.": "uniform sampling",
        "extend.": "writing",
        "prioritized.": "prioritized",
        "slices-writing.": "slices",
    }
    text = " ".join((ROOT / "README.md").read_text().split())
    for family, words_after in words.items():
        both = [work.times for work in works if work.name.startswith(family) and "torchrl" in work.times]
        times = [each["torchrl"].median_s / each["ostinato"].median_s for each in both]
        claim = f"{min(times):.0f} to {max(times):.0f} times"
        assert re.search(rf"{claim} (faster )?at {words_after}", text), f"README should say: {claim} at {words_after}"


def whole_report() -> Report:
    """Return a report of all workloads of README, with the libraries of its columns, in three rounds."""
    libraries = tuple(Library(name, name.upper(), "1") for name in ("ostinato", "limit-packed", *README_PEERS))
    results = {library.name: result(20, 10, 40) for library in libraries}
    sections = tuple(Section(name, f"work {name}", "C", results) for name in README_WORKS)
    return Report(report().machine, {"rounds": 3, "quick": False, "only": "all"}, libraries, sections)


def folder_to_publish(folder: Path) -> Path:
    """Return a folder with pages that have the marks of the tables."""
    for name in ("README.md", "docs/benchmarks.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"before\n\n{BEGIN}\n\nold\n{END}\n\nafter\n")
    (folder / "benchmarks").mkdir()
    return folder


def test_publish_writes_data_and_tables(tmp_path: Path) -> None:
    written = publish(whole_report(), folder_to_publish(tmp_path))
    assert sorted(path.name for path in written) == ["README.md", "benchmarks.md", "published.json"]
    found = Published.read(tmp_path / "benchmarks" / "published.json")
    assert found == Published.of(whole_report())
    times = found.works[0].times["torchrl"]
    assert (times.median_s, *times.range_s, *times.quartiles_s) == pytest.approx((20e-6, 10e-6, 40e-6, 15e-6, 30e-6))
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "old" not in page
    assert "| work uniform.dict | **20 us** | 20 us | 1.00x | 20 us (1.00x) |" in page


@pytest.mark.parametrize("lacking", ["quick", "only", "work", "peer"])
def test_publish_refuses_a_run_that_lacks_something(tmp_path: Path, lacking: str) -> None:
    given = whole_report()
    settings, sections, libraries = dict(given.settings), given.sections, given.libraries
    if lacking in {"quick", "only"}:
        settings[lacking] = True if lacking == "quick" else "uniform"
    elif lacking == "work":
        sections = sections[1:]
    else:
        libraries = (*libraries[:-1], Library("rlox", "rlox", "", "not installed"))
    root = folder_to_publish(tmp_path)
    with pytest.raises(ValueError, match=r"whole run|README's table needs"):
        publish(Report(given.machine, settings, libraries, sections), root)
    assert "old" in (root / "README.md").read_text()
    assert not (root / "benchmarks" / "published.json").exists()


def test_publish_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(report().to_json()))
    assert main(["--publish", str(path)]) == 2
    assert "README's table needs" in capsys.readouterr().err


def test_markdown_of_targets() -> None:
    lines = markdown_targets(report()).splitlines()
    assert lines[2] == "| sample | at most 30 us | 20 us | met |"
    assert lines[4] == "| sample | >= 2x tianshou | not measured: tianshou | not judged |"


def test_select() -> None:
    assert select(None, quick=False) == WORKLOADS
    names = [load.name for load in select("add,mmap.dict", quick=False)]
    assert names == ["add.dict", "add.tensordict", "add.tdbuffer", "add.numpy", "mmap.dict"]
    assert all(load.rows <= 500_000 for load in select(None, quick=True))
    with pytest.raises(ValueError, match=r"must be among .*; got nonsense"):
        select("add,nonsense", quick=False)


def test_every_library_answers_for_every_workload() -> None:
    """An adapter either does a workload or says why not, whether or not its library is installed."""
    for seat in SEATS:
        adapter = cast("Adapter", importlib.import_module(f"benchmarks.peers.{seat.adapter}"))
        for load in WORKLOADS:
            said = {load.name, load.family} & (adapter.WORKLOADS.keys() | adapter.LACKS.keys())
            assert said, f"{seat.name} says nothing about {load.name}"
        known = {load.family for load in WORKLOADS}
        assert {name.partition(".")[0] for name in adapter.WORKLOADS} <= known


def test_measure_counts_calls() -> None:
    calls: list[None] = []
    seen = measure(lambda: calls.append(None), seconds=0.0, min_calls=5, warmup_s=0.0)
    assert seen["calls"] == len(calls) == 5
    assert 0 <= seen["median_s"] <= seen["p99_s"] <= seen["worst_s"]


def test_measure_takes_the_word_of_a_call_that_times_itself() -> None:
    seen = measure(lambda: Seconds(0.25), seconds=0.0, min_calls=2, warmup_s=0.0)
    assert seen["median_s"] == pytest.approx(0.25)


def test_programs_say_why_they_fail() -> None:
    taken = importing("json", "dumps, loads")()
    assert isinstance(taken, Seconds)
    assert 0 < taken < 10
    with pytest.raises(RuntimeError, match="the program failed: ModuleNotFoundError: No module named 'nobody'"):
        program("import nobody")()


def test_work_of_another_thread_ends_with_the_round() -> None:
    worked = threading.Event()
    with loaded(worked.set):
        assert worked.wait(60)
    worked.clear()
    assert not worked.wait(0.01)
    with pytest.raises(ZeroDivisionError), loaded(lambda: 1 // 0):
        pass


def test_threads_share_their_time() -> None:
    done: list[None] = []
    taken = together(lambda: done.append(None), threads=3, times=7)()
    assert isinstance(taken, Seconds)
    assert len(done) == 21


@pytest.mark.skipif(shutil.which("g++") is None, reason="the limits are compiled")
@pytest.mark.parametrize("packed", [True, False])
def test_limits_move_the_bytes(packed: bool, tmp_path: Path) -> None:
    """What a limit writes is what it reads: the batches in turn, at a cursor that starts anew at the ring's end."""
    index = np.array([4, 1, 7, 2, 3, 0, 6, 5])
    batches = data.pool(data.transitions, 4)
    table = LimitTable(Setup("dict", 10, 4, tmp_path), data.transitions, packed=packed, reads=4, writes=4)
    write, read = table.along(index).call("limit_write"), table.call("limit_indexed")
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        write()
        write()
        for rows in index.reshape(2, 4):
            read()
            for key, found in table.target.items():
                assert np.array_equal(found, np.concatenate([first[key], second[key]])[rows])


def test_worker_turns_errors_into_reasons() -> None:
    assert Worker("benchmarks.peers.nobody").answer({"op": "hello"})["missing"].startswith("ModuleNotFoundError")
    order = {"op": "setup", "name": "add.dict", "kind": "dict", "rows": 8, "batch": 2}
    assert Worker("benchmarks.peers.isaacgymenvs").answer(order) == {"missing": "an AMP ring buffer only"}


def test_table_names_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match=r"libraries must be among .*; got nobody"):
        Table(["ostinato", "nobody"], sys.executable)
    with pytest.raises(ValueError, match="the peers' interpreter must be a program"):
        Table(["ostinato"], str(ROOT / "no" / "python"))


def test_chunks_cover_all_rows() -> None:
    assert [len(rows["obs"]) for rows in data.chunks(data.transitions, 25, 10)] == [10, 10, 5]


def test_amp_ring_samples_each_row_once() -> None:
    ring = AmpRing(8)
    ring.store({"x": torch.arange(6)})
    ring.store({"x": torch.arange(6, 12)})
    drawn = torch.cat([ring.sample(4)["x"], ring.sample(4)["x"]])
    assert sorted(drawn.tolist()) == list(range(4, 12))


def test_quick_run_of_ostinato(tmp_path: Path) -> None:
    """The whole way, as `make bench` goes it, without peers and limits."""
    path = tmp_path / "bench.json"
    options = ["--quick", "--only", "extend", "--libraries", "ostinato", "--rounds", "1", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *options], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    measured = Report.from_json(json.loads(path.read_text()))
    assert [section.name for section in measured.sections] == [
        "extend.dict",
        "extend.tensordict",
        "extend.tdbuffer",
        "extend.numpy",
    ]
    for section in measured.sections:
        ours = section.results["ostinato"]
        assert len(ours.rounds) == 1, ours.missing
        assert ours.rounds[0].calls > 0
        assert 0 < ours.median_s <= ours.worst_s
    assert "dict (quick: 50,000 rows)" in done.stdout


def test_a_recording_of_a_quick_run_has_all_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer rows than an episode of the full size has."""
    pytest.importorskip("av")
    from ostinato import open_dataset

    monkeypatch.setattr(recordings, "_FOLDER", tmp_path)
    monkeypatch.setitem(recordings.SIZES, "480", (96, 96))
    (load,) = select("dataset.480", quick=True)
    batch = cast("Any", _datasets.windows(Setup(load.kind, load.rows, load.batch, tmp_path))())
    assert [len(batch[camera]) for camera in recordings.CAMERAS] == [load.batch] * 2
    assert len(open_dataset(recordings.recording(load.kind, load.rows))) == load.rows


def test_calls_are_counted_inside_a_library_alone() -> None:
    import ostinato

    home = Path(str(ostinato.__file__)).parent
    rows = torch.zeros(4)
    outside = calls.count(lambda: [rows.clone() for _ in range(3)], home)
    assert outside == calls.Count(0, 0)
    rb = ostinato.ReplayBuffer(storage=ostinato.LazyTensorStorage(8), batch_size=2)
    rb.extend({"x": rows})
    found = calls.count(rb.sample, home)
    assert 1 <= found.files <= found.calls
    assert calls.count(rb.sample, home / "nowhere").calls == 0


def test_compressed_transitions_are_those_of_single_frames() -> None:
    for content in ("game", "texture", "noise"):
        frames = compression.game(12, content)
        assert frames.dtype == torch.uint8
        assert frames.float().std() > 5
        assert not torch.equal(frames[3], frames[4])
    ways = compression.ways()
    chosen = ways[0], ways[-1]
    raw, single = (compression.buffer(way, compression.transitions(frames, stacked=way.stacked)) for way in chosen)
    index = torch.arange(4, 7)
    stacks = raw[index]["next_obs"].movedim(-1, 1)
    found = torch.stack([single["next_obs"][index - back] for back in (3, 2, 1, 0)], 1)
    assert torch.equal(found, stacks)
