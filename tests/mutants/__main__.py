"""Put faults into a copy of the code and report which ones no test notices.

python -m tests.mutants                         # 50 faults, chosen by seed 0
python -m tests.mutants --count 400 --seed 7
python -m tests.mutants --floor                 # those of floor.json: each must be noticed
python -m tests.mutants --count 440 --write-floor

The report goes to the terminal and, as JSON, to build/mutants/report.json. The status is 1 where a fault of the floor
went unnoticed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutants.changes import Change, Key, changes_of, choose
from tests.mutants.native import native_changes
from tests.mutants.trial_copy import ROOT, make_copy, python_of

FOLDER = ROOT / "build" / "mutants"
FLOOR = Path(__file__).with_name("floor.json")
MARKERS = "not slow and not ray and not parity and not house"
SECONDS = 120.0
"""Most seconds of tests that one fault is tried with: half of them with tests of its package, half with others."""


def find(keys: list[Key]) -> tuple[dict[int, Change], list[Key]]:
    """Return the changes of these keys by number, and the keys whose code is gone."""
    files = {key.file for key in keys if key.file.endswith(".py") and (ROOT / key.file).exists()}
    known = {change.key: change for file in files for change in changes_of(ROOT, ROOT / file)}
    found = {number: known[key] for number, key in enumerate(keys) if key in known}
    found |= {number: change for number, change in native_changes().items() if change.key in keys}
    kept = {change.key for change in found.values()}
    return found, [key for key in keys if key not in kept]


def chosen(count: int, seed: int) -> dict[int, Change]:
    """Choose changes of Python by a seed, and a tenth of the count from the table of C++."""
    table = native_changes()
    numbers = random.Random(seed).sample(sorted(table), min(len(table), count // 10))
    python = choose(ROOT, count - len(numbers), seed)
    return dict(enumerate(python)) | {number: table[number] for number in sorted(numbers)}


def pytest_run(copy: Path, *options: str, **settings: str) -> None:
    """Run pytest in the copy; tests may fail, since some read the code that was changed."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OSTINATO_MUTANTS": str(FOLDER), **settings}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    options = ("-q", "-p", "no:cacheprovider", "-p", "tests.mutants.plugin", "-m", MARKERS, *options)
    subprocess.run([python_of(copy), "-m", "pytest", *options], cwd=copy, env=environment, check=False)


def plan_of(changes: dict[int, Change]) -> dict[str, list[str]]:
    """Choose for each change tests that met it, up to SECONDS, but none that failed without a change."""
    tests: dict[str, dict[str, Any]] = {}
    for file in FOLDER.glob("met-*.json"):
        tests |= json.loads(file.read_text())
    if not tests:
        sys.exit("mutants: no test ran; see what pytest printed above")
    meeting: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for name, test in tests.items():
        for number in [] if test["failed"] else test["met"]:
            meeting[number][name] = test["seconds"]
    plan = {}
    for number, change in changes.items():
        seconds = meeting[number]
        package = change.key.file.removeprefix("src/ostinato/").split("/")[0].removesuffix(".py")
        quickest = sorted(seconds, key=lambda name: (seconds[name], name))
        names = _within(SECONDS / 2, [name for name in quickest if f"/{package}/" in name], seconds)
        plan[str(number)] = names + _within(SECONDS / 2, [name for name in quickest if name not in names], seconds)
    return plan


def _within(limit: float, names: list[str], seconds: dict[str, float]) -> list[str]:
    """Return the first names whose times fit into a limit, and at least one."""
    ends = itertools.accumulate(seconds[name] for name in names)
    return [name for number, (name, end) in enumerate(zip(names, ends, strict=True)) if not number or end <= limit]


def report(changes: dict[int, Change], plan: dict[str, list[str]]) -> list[Change]:
    """Print a table by package and what was not noticed; return that."""
    results = json.loads((FOLDER / "results.json").read_text())
    rows: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    unnoticed = []
    for number, change in changes.items():
        part = change.key.file.removeprefix("src/ostinato/").split("/")[0]
        caught = bool(results.get(str(number)))
        for row in (rows[part], rows["total"]):
            row[0] += 1
            row[1] += caught
        if not caught:
            unnoticed.append(change)
            met = f"{len(plan[str(number)])} tests" if plan[str(number)] else "no test meets it"
            place = f"{change.key.file}:{change.line}"
            print(f"NOT NOTICED {place} {change.key.kind}: {change.key.before} -> {change.key.after} ({met})")
    total = rows.pop("total")
    print(f"\n{'package':24} {'faults':>8} {'noticed':>8}")
    for name, (count, found) in [*sorted(rows.items()), ("total", total)]:
        print(f"{name:24} {count:8} {found:8} {found / count:7.0%}")
    entries = [asdict(c.key) | {"noticed_by": results.get(str(n), "")} for n, c in changes.items()]
    (FOLDER / "report.json").write_text(json.dumps(entries, indent=1))
    return unnoticed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="how many faults (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the faults (default: 0)")
    parser.add_argument("--floor", action="store_true", help="try the faults of floor.json")
    parser.add_argument("--write-floor", action="store_true", help="write those that were noticed to floor.json")
    options = parser.parse_args()
    gone: list[Key] = []
    if options.floor:
        changes, gone = find([Key(**entry) for entry in json.loads(FLOOR.read_text())])
    else:
        changes = chosen(options.count, options.seed)
    copy = FOLDER / "tree"
    make_copy(copy, changes)
    pytest_run(copy, "-p", "xdist", "-n", "2", "--dist", "loadgroup")
    plan = plan_of(changes)
    (FOLDER / "plan.json").write_text(json.dumps({"tests": plan, "seconds": 2 * SECONDS}))
    files = sorted({name.split("::")[0] for names in plan.values() for name in names})
    pytest_run(copy, "-s", *files, OSTINATO_MUTANTS_RUN="try")
    unnoticed = report(changes, plan)
    for key in gone:
        print(f"GONE {key.file} {key.function}: {key.before} -> {key.after}")
    if options.write_floor:
        kept = [asdict(change.key) for change in changes.values() if change not in unnoticed]
        FLOOR.write_text("[\n" + ",\n".join(json.dumps(entry) for entry in kept) + "\n]\n")
    return int(options.floor and bool(unnoticed or gone))


if __name__ == "__main__":
    sys.exit(main())
