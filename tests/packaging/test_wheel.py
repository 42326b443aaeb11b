"""The pure-Python wheel built from this tree: contents, metadata, size; and that the checks find what is wrong."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    import wheels
else:
    sys.path.append(str(Path(__file__).parents[2] / ".ci"))
    wheels = importlib.import_module("wheels")

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


def test_a_wheel_from_the_sdist_passes_the_checks(wheel):
    wheels.check(wheel)
    assert wheel.name == f"ostinato-{wheels.version_of_tree()}-py3-none-any.whl"


def test_what_is_wrong_with_a_wheel_is_found(wheel, tmp_path, monkeypatch):
    def rewrite(change: Callable[[str, bytes], bytes | None], extra: str = "") -> Path:
        """Copy the wheel with each file changed or left out, and one more."""
        made: Path = tmp_path / wheel.name
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
