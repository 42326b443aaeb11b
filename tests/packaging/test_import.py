"""What `import ostinato` and its public names load: each test runs in a process of its own, and counts no time."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ostinato

ROOT_MODULE = Path(ostinato.__file__)


def run(code: str, **environment: str) -> str:
    """Run Python code in a process of its own and return what it prints."""
    command = [sys.executable, "-c", code]
    env = {**os.environ, **environment}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def loaded(first: str, then: str) -> set[str]:
    """Names of the modules that `then` loads in a process that has run `first`."""
    code = f"import sys, json\n{first}\nbefore = set(sys.modules)\n{then}\n"
    return set(json.loads(run(f"{code}print(json.dumps([*set(sys.modules) - before]))")))


def test_import_loads_no_other_package():
    """Neither torch nor NumPy; of the standard library, only what torch imports as well."""
    modules = loaded("", "import ostinato")
    assert {name for name in modules if name.startswith("ostinato.")} <= {
        "ostinato._backend",
        "ostinato._native",
        "ostinato.errors",
    }
    others = {name.partition(".")[0] for name in modules} - {"ostinato"}
    assert others <= sys.stdlib_module_names
    assert loaded("import torch", "import ostinato") <= {name for name in modules if name.startswith("ostinato")}


def test_all_names_load_no_further_package():
    """No part of torch that `import torch` leaves out, and of other packages only the one for checksums."""
    resolve = (
        "import ostinato\n"
        "for name in ostinato.__all__:\n"
        "    assert name in dir(ostinato) and name not in vars(ostinato), name\n"
        "    value = getattr(ostinato, name)\n"
        "    assert vars(ostinato)[name] is value, name\n"
        "assert ostinato.samplers.RandomSampler is ostinato.RandomSampler"
    )
    modules = loaded("import torch, numpy", resolve)
    standard = {"secrets", "hmac", "resource", "fractions", "decimal", "_decimal"}
    assert {name.partition(".")[0] for name in modules} <= {"ostinato", "xxhash"} | standard


def test_a_buffer_loads_only_its_own_parts():
    modules = loaded("import torch", "from ostinato import LazyTensorStorage, ReplayBuffer")
    assert len(modules) < len(loaded("", "import torch")) / 5
    packages = {name.split(".")[1] for name in modules if name.startswith("ostinato.")}
    assert not {"pytest", "hypothesis"} & loaded("import torch", "import ostinato.testing")
    assert not packages & {"collect", "compat", "distributed", "testing", "tools", "trajectories", "viz", "cli"}


@pytest.mark.parametrize("arguments", [["--version"], ["inspect", "--help"]])
def test_help_of_the_command_does_not_load_torch(arguments):
    pytest.importorskip("typer")
    code = (
        f"import sys; sys.argv = ['ostinato', *{arguments}]\n"
        "from ostinato.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    assert run(code).splitlines()[-1] == "[]"


def test_editors_and_the_interpreter_see_the_same_names():
    """The imports for type checkers, the table of modules and `__all__` agree."""
    tree = ast.parse(ROOT_MODULE.read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            typed[alias.asname or alias.name] = (node.module, alias.name)
    table = {
        name: (f"ostinato.{module}", ostinato._RENAMED.get(name, name))
        for module, names in ostinato._MODULES.items()
        for name in names
    }
    assert typed == table
    assert set(table) == {*ostinato.__all__, "Sequence"}
    assert set(ostinato._RENAMED) <= set(table)


def test_a_name_that_does_not_exist_raises():
    with pytest.raises(AttributeError, match="module 'ostinato' has no attribute 'ReplayBufer'"):
        ostinato.ReplayBufer  # type: ignore[attr-defined]  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'ReplayBufer' from 'ostinato'"):
        from ostinato import ReplayBufer  # type: ignore[attr-defined]  # noqa: F401


LOADED = """
import sys, torch
from ostinato import LazyTensorStorage, ReplayBuffer
rb = ReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
rb.loads(sys.argv[1])
assert "tensordict" not in sys.modules
print(type(rb.sample()).__name__)
"""


def test_a_loaded_buffer_imports_tensordict_for_its_first_batch(tmp_path):
    import torch
    from tensordict import TensorDict

    rb = ostinato.ReplayBuffer(storage=ostinato.LazyTensorStorage(10), batch_size=4)
    rb.extend(TensorDict({"x": torch.rand(5)}, [5]))
    rb.dumps(tmp_path / "saved")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, str(tmp_path / "saved")], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "TensorDict"
