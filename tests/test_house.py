"""The house: imports go down only, parts of one floor do not meet, functions stay small; exceptions have reasons."""

from __future__ import annotations

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "ostinato"

FLOORS = (
    ("errors", "_optional", "_backend", "_native"),
    ("core",),
    ("durable", "protocols"),
    ("storages", "samplers", "writers", "units", "transforms", "groups"),
    ("trajectories",),
    ("datasets",),
    ("buffers",),
    ("collect", "compat", "distributed", "testing", "tools", "viz"),
    ("cli",),
    ("__main__",),
)
"""From the ground up. A part imports lower floors only; parts on one floor are strangers."""

NEIGHBOURS = {
    ("_backend", "errors"): "the switch of the native part raises the tree's errors",
    ("_optional", "errors"): "the importer of extras raises the tree's errors",
    ("viz", "tools"): "figures show the report of the doctor; viewers open what the tools recognize",
}
"""Pairs on one floor that may meet, and why."""

LONG_FUNCTIONS: dict[str, str] = {}
"""Functions of more than 40 lines of code, and why (`file:function`)."""

FIELDS_AS_ATTRIBUTES = {
    "compat/torchrl/__init__.py": "the tensorclass Trajectory is imported when it is first used: it needs tensordict",
    "__init__.py": "a public name imports its module when it is first used",
    "buffers/trajectory_view.py": "trajectory.reward is TorchRL's syntax; for type checkers, see _with_fields",
    "buffers/queries.py": "traj.reward is TorchRL's syntax: an attribute makes an expression of the field of that name",
}
"""Files that define `__getattr__`, and why."""

TENSORDICT = {
    "core/kinds.py": "the only module that reads and makes TensorDicts",
    "buffers/trajectory_view.py": "TorchRL's Trajectory is a tensorclass, so that lazy_stack takes it; imported late",
}
"""Files that import tensordict, and why."""

TORCH_PRIVATE = {
    "core/kinds.py": "TensorDict._new_unsafe, _set_str: the public ways check again what was checked (9 us)",
    "buffers/checkpoint/state.py": "torch.utils._pytree: torch's own tree walker has no public name",
    "datasets/torchrl_rows.py": "no private name: 'is_pytree' is a key in the files that TorchRL writes",
    "transforms.py": "torch.utils._pytree: torch's own tree walker has no public name",
}
"""Files that use a private name of a library, and why."""


HEAVY = {"torchrl", "matplotlib", "ray", "gymnasium", "starlette", "uvicorn", "rerun", "PIL"}
HEAVY |= {"av", "h5py", "minari", "pyarrow", "zarr"}
"""Packages that are imported in functions only."""


def modules() -> list[Path]:
    """All files of the package."""
    return sorted(p for p in SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    """The part that a file belongs to: its top folder, or its own name."""
    relative = path.relative_to(SOURCE)
    return relative.parts[0].removesuffix(".py")


def floor_of(part: str) -> int:
    """Number of the floor of a part."""
    for number, parts in enumerate(FLOORS):
        if part in parts:
            return number
    pytest.fail(f"{part} stands on no floor: add it to FLOORS and to docs/architecture.md")


def imported_parts(path: Path) -> set[str]:
    """Parts of ostinato that a file imports, imports for typing included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
            if node.module == "ostinato":
                names = [f"ostinato.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("ostinato.")}
    return found


def test_imports_go_down_only():
    known = {name for floor in FLOORS for name in floor}
    for path in modules():
        part = part_of(path)
        for other in imported_parts(path) - {part} if part in known else ():
            if other not in known:
                assert floor_of(part) >= floor_of("compat"), f"{path} imports {other} from the root of the package"
            elif (part, other) not in NEIGHBOURS:
                assert floor_of(other) < floor_of(part), f"{path} imports {other}, which is not below it"


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its signature and docstring."""
    body = node.body
    if (
        isinstance(body[0], ast.Expr)
        and isinstance(body[0].value, ast.Constant)
        and isinstance(body[0].value.value, str)
    ):
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_small():
    lengths = []
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = body_lines(node)
                lengths.append(lines)
                name = f"{path.relative_to(SOURCE)}:{node.name}"
                assert lines <= 40 or name in LONG_FUNCTIONS, f"{name} has {lines} lines"
    lengths.sort()
    assert lengths[int(len(lengths) * 0.9)] <= 25


def test_exceptions_are_still_needed():
    pairs = {(part_of(p), other) for p in modules() for other in imported_parts(p)}
    for pair in NEIGHBOURS:
        exists = (SOURCE / pair[0]).is_dir() or (SOURCE / f"{pair[0]}.py").exists()
        assert pair in pairs or not exists, f"{pair} no longer meet"


def runtime_imports(path: Path, names: dict[str, Path]) -> set[str]:
    """Modules that a file imports at run time: not the imports in functions, nor those for typing."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ostinato":
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                found.add(module if module in names else node.module)
    return found


def test_runtime_imports_have_no_cycle():
    names = {
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in modules()
    }
    graph = {name: runtime_imports(path, names) - {name} for name, path in names.items()}
    assert sum(len(imports) for imports in graph.values()) > len(names)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the modules of a cycle


def check_habits(path: Path) -> None:
    """Fail where a file of the package has a habit that the design rules out."""
    tree = ast.parse(path.read_text())
    name = str(path.relative_to(SOURCE))
    for node in ast.walk(tree):
        assert not isinstance(node, ast.Assert) or part_of(path) == "testing", (
            f"{name}: errors, not assert, for user input"
        )
        assert not isinstance(node, (ast.Global, ast.Nonlocal)), f"{name}: no global state"
        if isinstance(node, ast.FunctionDef):
            forwards = node.name in {"__getattr__", "__getattribute__"}
            assert not forwards or name in FIELDS_AS_ATTRIBUTES, f"{name}: no attribute forwarding"
        if isinstance(node, ast.ClassDef):
            assert not any(keyword.arg == "metaclass" for keyword in node.keywords), f"{name}: no metaclass"
        if isinstance(node, ast.Attribute):
            seeds = node.attr in {"manual_seed", "seed"} and ast.unparse(node.value) in {"torch", "random", "np.random"}
            assert not seeds or part_of(path) == "testing", f"{name}: no global seeding"
        named = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        strangers = name not in TENSORDICT and part_of(path) not in {"testing", "compat"}
        assert not strangers or not any(each.startswith("tensordict") for each in named), f"{name}: see TENSORDICT"
        if isinstance(node, ast.Import):
            imported = {alias.name.split(".")[0] for alias in node.names}
            heavy = imported & HEAVY
            assert not heavy or node.col_offset > 0, f"{name}: {heavy} must be imported lazily"
    text = path.read_text()
    private = "._new_unsafe" in text or "_pytree" in text or "._tensordict" in text
    assert private == (name in TORCH_PRIVATE), f"{name}: private names of libraries are listed in TORCH_PRIVATE"


def test_no_forbidden_habits():
    for path in modules():
        check_habits(path)


WHOLE_NUMBERS = {"arange", "randint", "randperm", "range", "tril_indices", "triu_indices"}
"""Functions of torch whose dtype is int64 whatever torch's default dtype; the package gives `arange` integers alone."""
NEW_TENSORS = WHOLE_NUMBERS | {"as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace"}
NEW_TENSORS |= {"ones", "rand", "randn", "scalar_tensor", "tensor", "zeros"}
"""Functions of torch that follow its default device (`torch.set_default_device`)."""


def leaves_to_torch(call: ast.Call) -> list[str]:
    """What a call that makes a tensor leaves to the defaults of torch, which are the program's to change."""
    name, keywords = ast.unparse(call.func).removeprefix("torch."), {k.arg: k.value for k in call.keywords}
    if not ast.unparse(call.func).startswith("torch.") or name not in NEW_TENSORS:
        return []
    device = keywords.get("device")
    left = ["device"] if device is None or ast.unparse(device) == "None" else []
    given = ast.unparse(call.args[0]) if call.args else ""
    inferred = name in WHOLE_NUMBERS or given.startswith("np.asarray(")
    if name == "tensor":
        values = {type(node.value) for node in ast.walk(call.args[0]) if isinstance(node, ast.Constant)}
        inferred = not any(isinstance(node, ast.Name) for node in ast.walk(call.args[0])) and values <= {int, bool}
    return left if inferred or "dtype" in keywords else [*left, "dtype"]


def test_new_tensors_name_their_device_and_dtype():
    """Native code must not get addresses of another device, and results must not depend on a program's defaults."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                left = leaves_to_torch(node)
                assert not left, f"{path.relative_to(SOURCE)}:{node.lineno} does not name {left}: {ast.unparse(node)}"


@pytest.mark.parametrize(
    ("code", "left"),
    [
        ("torch.empty(3)", ["device", "dtype"]),
        ("torch.zeros(3, device=None, dtype=x)", ["device"]),
        ("torch.tensor([value], device=x)", ["dtype"]),
        ("torch.tensor([1, True, -2], device=x)", []),
        ("torch.as_tensor(np.asarray(value), device=x)", []),
        ("torch.arange(4)", ["device"]),
    ],
)
def test_the_check_of_new_tensors_finds_what_is_left_out(code, left):
    call = ast.parse(code, mode="eval").body
    assert isinstance(call, ast.Call)
    assert leaves_to_torch(call) == left


NATIVE_WITH_PYTHON = {
    "module.cpp": "the Python module",
    "bindings.hpp": "the declarations of its parts, bind_*.cpp",
    "gil.hpp": "when native work runs without the interpreter lock",
    "pointers.hpp": "typed pointers as arguments of Python functions",
    "exchange.hpp": "tensors of torch are Python objects, also for its C exchange API",
    "batches.hpp": "batches are tensors",
    "given_rows.hpp": "rows to be written are tensors, arrays and numbers",
    "direct.hpp": "holds the lock of a buffer, and reads and makes dicts",
    "direct_nexts.hpp": "the forms of fields are those of tensors",
    "direct_windows.hpp": "draws random numbers and makes batches, both tensors",
    "tensor_check.hpp": "the fast check of tensors reads Python attributes: torch has no stable C++ interface",
}
"""Native files that include Python headers besides the bindings (`bind_*.cpp`), and why."""


def test_the_rest_of_native_knows_no_python():
    for path in (ROOT / "native").glob("*.*pp"):
        knows = "nanobind/" in path.read_text() or "Python.h" in path.read_text()
        assert knows == (path.name in NATIVE_WITH_PYTHON or path.name.startswith("bind_")), path


def test_doors_for_other_libraries_are_strangers():
    doors = SOURCE / "compat"
    for path in doors.rglob("*.py"):
        mine = path.relative_to(doors).parts[0].removesuffix(".py")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ostinato.compat"):
                assert (node.module or "").split(".")[2:3] == [mine], f"{path} imports another door"


def test_root_exports_exactly_all():
    import ostinato

    public = {name for name in dir(ostinato) if not name.startswith("_")}
    submodules = {p.stem if p.is_file() else p.name for p in SOURCE.iterdir()}
    kept_for_torchrl = {"Sequence"}  # importable under TorchRL's name, but `import *` must not hide typing.Sequence
    assert set(ostinato.__all__) == public - submodules - kept_for_torchrl
    assert list(ostinato.__all__) == sorted(ostinato.__all__)


def test_architecture_page_lists_every_module():
    """Each module has one line under its package on the page, and the page names no module that is not there."""
    page = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Modules\n")[2]
    page, _, native = page.partition("\n## Tests\n")[0].partition("\n### `native`\n")
    assert set(re.findall(r"`(\w+\.[ch]pp)`", native)) == {path.name for path in (ROOT / "native").glob("*.*pp")}
    listed = set()
    for section in page.split("\n### ")[1:]:
        part = "" if section.startswith("Package root") else section.split("`")[1] + "/"
        listed |= {part + name for name in re.findall(r"^\| `(\S+)` \|", section, flags=re.MULTILINE)}
    there = {str(path.relative_to(SOURCE)) for path in modules() if path.name != "__init__.py"}
    assert listed == there | {"__init__.py", "_native.*"}, "one line for each module in docs/architecture.md"


def test_architecture_page_names_files_that_exist():
    prose = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Modules\n")[0]
    named = re.findall(r"`([a-z_]+(?:/\w+)+\.(?:py|cpp|hpp))`", prose)
    assert named
    assert not [name for name in named if not (ROOT / name).exists() and not (SOURCE / name).exists()]
