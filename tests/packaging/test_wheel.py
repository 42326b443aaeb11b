"""The pure-Python wheel built from this tree: contents, metadata, size; and that the checks find what is wrong."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.packaging import wheels

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("wheel")]  # one worker: the wheel is shared


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as `make wheels` does, with the tools of this environment."""
    for tool in ("build", "zopfli"):
        if importlib.util.find_spec(tool) is None:
            pytest.skip(f"needs {tool}: pip install {tool}")
    place = tmp_path_factory.mktemp("wheel")
    sdist = wheels.build_sdist(place)
    wheels.check(sdist)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-build-isolation", "--no-deps", "--no-index"]
    env = {**os.environ, "OSTINATO_TORCH_ONLY": "1"}
    subprocess.run([*command, "-w", str(place), str(sdist)], env=env, check=True)
    (made,) = place.glob("*.whl")
    return wheels.compress(made)


def test_a_wheel_from_the_sdist_passes_the_checks(wheel: Path) -> None:
    wheels.check(wheel)
    assert wheel.name == f"ostinato-{wheels.version_of_tree()}-py3-none-any.whl"


def test_compressing_changes_the_size_alone(tmp_path: Path) -> None:
    pytest.importorskip("zopfli")
    files = [tmp_path / "first.whl", tmp_path / "second.whl"]
    for file in files:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(Path(__file__), "package/größe.py")
            archive.writestr("package/empty.py", "")
            archive.writestr("package/folder/", "")
            archive.writestr(
                zipfile.ZipInfo("package.dist-info/RECORD", (2026, 11, 23, 14, 58, 42)), "package/größe.py,,"
            )
        with zipfile.ZipFile(file) as archive:
            before = [(info, archive.read(info)) for info in archive.infolist() if not info.is_dir()]
        size = file.stat().st_size
        wheels.compress(file)
        assert file.stat().st_size < size
        with zipfile.ZipFile(file) as archive:
            after = [(info, archive.read(info)) for info in archive.infolist()]
        for (old, data), (new, same) in zip(before, after, strict=True):
            assert data == same
            for fact in ("filename", "date_time", "external_attr", "create_system", "CRC", "file_size"):
                assert getattr(old, fact) == getattr(new, fact), fact
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_wheel_fits_the_interpreters_of_its_tags() -> None:
    def versions(name: str) -> list[int]:
        return [minor for minor in range(10, 15) if wheels.fits(Path(name), wheels.Interpreter((3, minor), ""))]

    assert versions("ostinato-0.1.0-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl") == [11]
    assert versions("ostinato-0.1.0-cp312-abi3-manylinux_2_17_x86_64.whl") == [12, 13, 14]
    assert versions("ostinato-0.1.0-py3-none-any.whl") == [10, 11, 12, 13, 14]


def test_what_is_wrong_with_a_wheel_is_found(wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rewrite(change: Callable[[str, bytes], bytes | None], extra: str = "") -> Path:
        """Copy the wheel with each file changed or left out, and one more."""
        made = tmp_path / wheel.name
        with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
            for name in given.namelist():
                if (data := change(name, given.read(name))) is not None:
                    target.writestr(name, data)
            if extra:
                target.writestr(extra, "")
        return made

    for name in ("ostinato/py.typed", "ostinato/_native.pyi", "licenses/LICENSE", "storages/lazy.py"):
        with pytest.raises(wheels.FailedError, match="missing"):
            wheels.check(rewrite(lambda file, data: None if file.endswith(name) else data))  # noqa: B023
    with pytest.raises(wheels.FailedError, match=r"unexpected \['tests/test_smoke.py'\]"):
        wheels.check(rewrite(lambda _, data: data, "tests/test_smoke.py"))
    with pytest.raises(wheels.FailedError, match="Requires-Python"):
        wheels.check(rewrite(lambda _, data: data.replace(b"Requires-Python: >=3.11", b"X-Y: Z")))
    monkeypatch.setattr(wheels, "WHEEL_BYTES", wheel.stat().st_size - 1)
    with pytest.raises(wheels.FailedError, match="the limit is"):
        wheels.check(wheel)
