"""The source installs without a compiler, says so when it is imported, and works through torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "native", "src")

# Runs where only the fresh install can be found: -S leaves out the .pth files of editable installs.
PROBE = """
import json, sys, warnings
sys.path[:0] = sys.argv[1:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    del caught[:]
    import ostinato
    from ostinato._backend import backend
    ours = [(w.category.__name__, str(w.message)) for w in caught]
rb = ostinato.ReplayBuffer(storage=ostinato.LazyTensorStorage(50), batch_size=64)
rb.extend({"row": torch.arange(70).unsqueeze(-1).expand(70, 3), "square": torch.arange(70) ** 2})
batch = rb.sample()
right = bool((batch["row"] ** 2 == batch["square"].unsqueeze(-1)).all()) and int(batch["row"].min()) >= 20
print(json.dumps({"file": ostinato.__file__, "native": backend.native is not None, "warnings": ours,
                  "right": right, "rows": len(rb), "shape": list(batch["row"].shape)}))
"""


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run with nothing on PATH but what `variables` give, and no hint at a compiler."""
    keep = {name: value for name, value in os.environ.items() if name not in {"CC", "CXX", "CXXFLAGS", "CMAKE_ARGS"}}
    keep.pop("OSTINATO_NATIVE", None)
    done = subprocess.run(command, env=keep | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the source was installed with only python on PATH."""
    place = tmp_path_factory.mktemp("no_compiler")
    for name in SOURCE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, place / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            (place / "source").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, place / "source" / name)
    tools = place / "path"
    tools.mkdir()
    (tools / "python").symlink_to(sys.executable)
    pip = [sys.executable, "-m", "pip", "install", "--verbose", "--no-deps", "--no-build-isolation", "--no-index"]
    said = run([*pip, "--target", str(place / "site"), str(place / "source")], PATH=str(tools))
    assert "installed WITHOUT its native extension" in said.stdout + said.stderr
    return place / "site"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("no_compiler"),  # one worker: the install is shared
    pytest.mark.skipif(sys.platform == "win32", reason="makes a PATH of symlinks"),
    pytest.mark.skipif(
        os.environ.get("OSTINATO_NATIVE") == "0", reason="does not depend on OSTINATO_NATIVE: runs once"
    ),
]


def test_it_installs_warns_once_and_works_through_torch(site):
    names = {path.name for path in (site / "ostinato").iterdir()}
    assert {"__init__.py", "py.typed", "_native.pyi"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyd"))]
    (metadata,) = site.glob("ostinato-*.dist-info/WHEEL")
    assert "Tag: py3-none-any" in metadata.read_text(encoding="utf-8")
    packages = [str(site), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    probe = run([sys.executable, "-S", "-c", PROBE, *packages], PATH=os.environ["PATH"])
    found: dict[str, Any] = json.loads(probe.stdout)
    assert Path(found.pop("file")).is_relative_to(site)
    ((category, message),) = found.pop("warnings")
    assert category == "RuntimeWarning"
    assert re.search("runs without its native extension.*several times slower.*wheel.*compiler", message, re.DOTALL)
    assert found == {"native": False, "right": True, "rows": 50, "shape": [64, 3]}
