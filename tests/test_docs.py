"""Every code block of README and docs runs, and so does every example in a docstring."""

from __future__ import annotations

import doctest
import importlib
import os
import pkgutil
import re
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import ostinato

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / name
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "examples/README.md")
] + sorted((ROOT / "docs").rglob("*.md"))
TUTORIAL = [page for page in PAGES if page.is_relative_to(ROOT / "docs" / "tutorial")]
"""Pages that are one program: each goes on where the one before it ended."""
BLOCK = re.compile(r"^```(\w*(?: ray| torchrl)?)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]*)#?([^)]*)\)")
"""Path and anchor of each link; one of them may be empty."""
OPTIONAL = {"ostinato.compat.sb3": "stable_baselines3", "ostinato.compat.transferqueue": "transfer_queue"}
"""Modules that import a package which may be missing."""
ELSEWHERE = {"python ray": "tests/distributed", "python torchrl": "tests/parity"}
"""Languages of blocks that need another library, and the folder whose `test_docs.py` runs them."""
SHOWN = {"text", "json", "toml", "mermaid", *ELSEWHERE}
"""Languages of blocks that show something, or cannot be run here."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each fenced block of a page."""
    return [(match[1], match[2]) for match in BLOCK.finditer(page.read_text())]


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    """Restore the number of threads, which pages set for small networks."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def pages_of(language: str) -> list[Any]:
    """Parameters: the pages with blocks of a language."""
    found = [page for page in PAGES if any(name == language for name, _ in blocks(page))]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in found]


def run_blocks(page: Path, language: str) -> None:
    """Run the blocks of a language of a page, in order, in one namespace."""
    namespace: dict[str, object] = {"__name__": "__page__"}
    for number, (name, text) in enumerate(blocks(page)):
        if name == language:
            run_block("python", text, f"{page.name}:block{number}", namespace)


def run_block(language: str, text: str, name: str, namespace: dict[str, object]) -> None:
    """Run a block of Python, or one of a Python session, whose output is compared."""
    if language == "python":
        exec(compile(text, name, "exec"), namespace)
    else:
        test = doctest.DocTestParser().get_doctest(text, namespace, name, name, 0)
        test.globs = namespace  # the parser copies them: blocks of one page go on where the last one ended
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        runner.run(test, clear_globs=False)
        assert runner.summarize(verbose=False).failed == 0


@pytest.mark.filterwarnings("error:Got conflicting batch_sizes")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in TUTORIAL], ids=lambda p: str(p.relative_to(ROOT))
)
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    if page.name == "sb3.md":
        pytest.importorskip("stable_baselines3")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for number, (language, text) in enumerate(blocks(page)):
        assert language, f"block {number} of {page.name} names no language"
        if language in {"python", "pycon"}:
            run_block(language, text, f"{page.name}:block{number}", namespace)
        else:
            assert language in SHOWN | {"sh"}, f"{page.name}: a block of {language} would not be tested"


def front_blocks() -> list[Any]:
    """Parameters: the blocks of Python that a newcomer copies first."""
    pages = [ROOT / "README.md", ROOT / "docs" / "README.md"]
    found = [(page, text) for page in pages for language, text in blocks(page) if language == "python"]
    return [pytest.param(text, id=f"{page.relative_to(ROOT)}:{i}") for i, (page, text) in enumerate(found)]


@pytest.mark.parametrize("text", front_blocks())
def test_blocks_of_the_front_pages_run_alone(text, tmp_path, monkeypatch):
    """Each is a program: it imports what it uses, and needs no files."""
    monkeypatch.chdir(tmp_path)
    run_block("python", text, "block", {"__name__": "__page__"})


def test_the_tutorial_is_one_program(tmp_path, monkeypatch, capsys):
    """Its pages run in order; a `text` block is what the block before it prints, except for the numbers."""
    for extra in ("gymnasium", "matplotlib", "typer"):
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    namespace: dict[str, object] = {"__name__": "__tutorial__"}
    for page in TUTORIAL:
        printed = ""
        for number, (language, text) in enumerate(blocks(page)):
            name = f"{page.name}:block{number}"
            if language == "text":
                assert without_numbers(printed) == without_numbers(text), name
            elif language == "sh":
                printed = "".join(run_command(line.split("#")[0]) for line in text.splitlines())
            else:
                run_block(language, text, name, namespace)
                printed = capsys.readouterr().out


def without_numbers(text: str) -> str:
    """The words of an output; spaces and rules of tables count as one space."""
    return re.sub(r"[\s\u2500]+", " ", re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "0", text)).strip()


def run_command(line: str) -> str:
    """Output of an `ostinato` command that ends by itself; other commands are not run."""
    from typer.testing import CliRunner

    from ostinato.cli.commands import app

    words = line.split()
    if words[:1] != ["ostinato"] or "--web" in words:
        return ""
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for line in "\n".join(text for language, text in blocks(page) if language == "sh").splitlines():
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= set(targets), line
        elif words[:1] == ["ostinato"]:
            from ostinato.cli.commands import app

            assert words[1] in command_names(app), f"{page.name}: no command {words[1]}"
        else:
            tools = {"git", "cd", "export", "python", "python3", "pip"}
            assert not words or Path(words[0]).name in tools, line


def command_names(app: object) -> set[str]:
    """Names of the commands of a typer app."""
    import typer

    group = typer.main.get_command(app)  # type: ignore[arg-type]
    return set(group.commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.name} links to {target}"
            if anchor and there.suffix == ".py":
                assert f"def {anchor}(" in there.read_text(), f"{page.name} links to {target}#{anchor}"
            if anchor and there.suffix == ".md":
                assert anchor in anchors(there), f"{page.name} links to {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    linked = {(index.parent / target).resolve() for target, _ in LINK.findall(index.read_text())}
    assert not [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page != index and page not in linked]


def test_readme_is_short_and_in_order():
    text = (ROOT / "README.md").read_text()
    headings = ["Why", "Install", "Use", "Robot and offline datasets", "Coming from another library", "View the data"]
    headings += ["Benchmarks", "Documentation"]
    assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == headings
    before, table = text.split("\n## Benchmarks\n")
    assert len(before.splitlines()) <= 100
    assert sum(line.startswith("| ") for line in table.split("\n## ")[0].splitlines()) <= 11  # the head and ten rows
    assert text.count("![") == 1


def test_numbers_in_words_are_those_of_the_table_of_benchmarks():
    """README and the recipe of TorchRL say how many times faster Ostinato is, rounded."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in page.split("<!-- ")[1].splitlines() if line.startswith("| ")]
    torchrl = rows[0].index("TorchRL")
    times = {row[0]: float(row[torchrl].split("(")[1].rstrip("x)")) for row in rows[1:] if "(" in row[torchrl]}

    def faster(work: str) -> list[int]:
        return [round(times[title]) for title in times if re.match(work, title)]

    readme = " ".join((ROOT / "README.md").read_text().split())
    for words, work in {
        "{} to {} times faster at uniform sampling": r"uniform sample\(256\) of 1,000,000 rows,",
        "{} to {} times at writing 256": r"extend of 256 rows",
        "{} to {} times at prioritized replay": r"prioritized sample",
        "{} to {} times at slices of a growing buffer": r"extend\(256\) \+ 64 slices",
    }.items():
        said = words.format(min(faster(work)), max(faster(work)))
        assert said in readme, f"the table says: {said}"
    recipe = (ROOT / "docs" / "recipes" / "torchrl.md").read_text()
    works = ("uniform sample.*dict", "extend of.*, dict", "prioritized.*, dict", "64 slices.*TensorDict$", "import")
    words = "`sample(256)` {} times faster, `extend` {} times, prioritized sampling {} times, slices {} times"
    said = (words + "; import {} times").format(*(faster(work)[0] for work in works))
    assert said in recipe, f"the table says: {said}"


def modules() -> list[str]:
    """Modules of the package that can be imported without extras."""
    names = [m.name for m in pkgutil.walk_packages(ostinato.__path__, "ostinato.")]
    return [n for n in names if not re.match(r"ostinato\.(cli|viz|_native)", n)]


@pytest.mark.parametrize("name", modules())
def test_docstring_examples_run(name, tmp_path, monkeypatch):
    pytest.importorskip(OPTIONAL.get(name, "ostinato"))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0


def test_no_machine_paths_in_the_tree():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    home = re.compile(rb"/(?:home|root|Users)/[a-z]")
    for name in tracked:
        path = ROOT / name
        if path.suffix in {".md", ".py", ".toml", ".cpp", ".hpp", ".txt", ""} and path.is_file():
            assert not home.search(path.read_bytes()), f"{name} holds a path of some machine"
    assert tracked or not (ROOT / ".git").exists() or os.environ.get("GIT_DIR")
