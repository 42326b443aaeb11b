"""Small changes of Python code, each of which at least one test should notice: where they are possible, and a choice.

Only code inside of functions is changed, since one process tries all changes, and modules are imported once. Messages,
annotations and assertions for type checkers are left alone.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Change", "Key", "changes_of", "choose", "switched"]

SWITCH = "_mutant_"
"""What modules call the switch in the copy: `mutant_switch.py`."""
WEIGHTS = {
    "comparison": 20,
    "statement": 20,
    "constant": 12,
    "index": 10,
    "arithmetic": 10,
    "logic": 10,
    "check": 6,
    "swap": 6,
    "lock": 4,
    "sync": 4,
}
"""How often each kind of change is chosen, where a package has it."""
COMPARED: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
CALCULATED: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitAnd: "|",
    ast.BitOr: "&",
}
LOCK = re.compile(r"(?i)lock|condition|mutex|guard")
SYNC = re.compile(r"(?i)\b\w*(fsync|flush|msync)\w*\(")


@dataclass(frozen=True)
class Key:
    """What finds a change again after other lines have moved."""

    file: str
    function: str
    kind: str
    before: str
    after: str
    nth: int = 0
    """Number of the same change in this function, in the order of the text."""


@dataclass(frozen=True)
class Change:
    """One change: the bytes `start:end` of a file become `after`, as a statement or as an expression."""

    key: Key
    line: int
    end_line: int
    start: int
    end: int
    statement: bool

    def overlaps(self, other: Change) -> bool:
        return self.key.file == other.key.file and self.start < other.end and other.start < self.end

    def place(self, number: int, source: bytes) -> bytes:
        """Return the source in which the switch turns this change on."""
        before = source[self.start : self.end].decode()
        if self.statement:
            text = f"if not {SWITCH}.on({number}): {before}"
        else:
            text = f"({self.key.after} if {SWITCH}.on({number}) else ({before}))"
        return source[: self.start] + text.encode() + source[self.end :]


class _Finder:
    """Walks the functions of a module and notes each possible change."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.names: list[str] = []
        self.seen: Counter[Key] = Counter()
        self.found: list[Change] = []

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.source[start:end].decode()

    def note(self, node: ast.expr | ast.stmt, kind: str, after: str, *, statement: bool = False) -> None:
        start, end = self.span(node)
        if statement and self.source[self.source.rfind(b"\n", 0, start) + 1 : start].strip():
            return  # something else stands before it on its line
        before = " ".join(self.text(node).split())
        key = Key(self.file, ".".join(self.names), kind, before, " ".join(after.split()))
        nth = self.seen[key]
        self.seen[key] += 1
        key = Key(**(asdict(key) | {"nth": nth}))
        self.found.append(Change(key, node.lineno, node.end_lineno or node.lineno, start, end, statement))

    def module(self, tree: ast.Module) -> list[Change]:
        for node in tree.body:
            self.definition(node)
        return self.found

    def definition(self, node: ast.AST) -> None:
        """Walk a class or a function; other statements of modules and classes run once, at import."""
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            return
        if any("overload" in self.text(decorator) for decorator in node.decorator_list):
            return
        self.names.append(node.name)
        for inner in node.body:
            if isinstance(node, ast.ClassDef):
                self.definition(inner)
            else:
                self.visit(inner)
        self.names.pop()

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            self.definition(node)
            return
        if isinstance(node, ast.Assert | ast.JoinedStr | ast.AsyncFunctionDef | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.stmt):
            self.statements(node)
        if isinstance(node, ast.expr):
            self.expressions(node)
        for child in self.children(node):
            self.visit(child)

    def children(self, node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            return
        if isinstance(node, ast.Assign) and self.text(node.targets[0]) in {"msg", "message", "text", "told"}:
            return
        for child in ast.iter_child_nodes(node):
            annotation = isinstance(node, ast.AnnAssign) and child is node.annotation
            if not annotation and not isinstance(child, ast.pattern):
                yield child

    def statements(self, node: ast.stmt) -> None:
        if isinstance(node, ast.With):
            for item in node.items:
                if LOCK.search(self.text(item.context_expr)):
                    self.note(item.context_expr, "lock", f"{SWITCH}.no_lock()")
        if isinstance(node, ast.Raise):
            self.note(node, "check", "pass", statement=True)
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        written = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute | ast.Subscript)
        if call or written or isinstance(node, ast.AugAssign | ast.Delete | ast.Continue | ast.Break):
            self.note(node, "sync" if SYNC.search(self.text(node)) else "statement", "pass", statement=True)

    def expressions(self, node: ast.expr) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            operator = COMPARED[type(node.ops[0])]
            self.note(node, "comparison", f"(({self.text(node.left)}) {operator} ({self.text(node.comparators[0])}))")
        elif isinstance(node, ast.BoolOp):
            word = " or " if isinstance(node.op, ast.And) else " and "
            self.note(node, "logic", f"({word.join(f'({self.text(value)})' for value in node.values)})")
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.note(node, "logic", f"({self.text(node.operand)})")
        elif isinstance(node, ast.Constant) and isinstance(node.value, int):
            after = str(not node.value if isinstance(node.value, bool) else node.value + 1)
            self.note(node, "constant", after)
        elif isinstance(node, ast.BinOp):
            self.arithmetic(node)
        elif isinstance(node, ast.Slice):
            for bound in filter(None, (node.lower, node.upper)):
                self.note(bound, "index", f"(({self.text(bound)}) + 1)")
        elif isinstance(node, ast.Call):
            self.swap(node)

    def arithmetic(self, node: ast.BinOp) -> None:
        texts = [part for part in (node.left, node.right) if isinstance(part, ast.JoinedStr) or self.is_text(part)]
        if type(node.op) in CALCULATED and not texts:
            operator = CALCULATED[type(node.op)]
            self.note(node, "arithmetic", f"(({self.text(node.left)}) {operator} ({self.text(node.right)}))")

    def swap(self, node: ast.Call) -> None:
        """Exchange the first two arguments of a call."""
        function, texts = self.text(node.func), [self.text(arg) for arg in node.args]
        plain = not any(isinstance(arg, ast.Starred) for arg in node.args[:2])
        if len(texts) < 2 or texts[0] == texts[1] or not plain or function in {"isinstance", "issubclass", "cast"}:
            return
        words = [f"{word.arg}=" if word.arg else "**" for word in node.keywords]
        given = [f"{word}{self.text(part.value)}" for word, part in zip(words, node.keywords, strict=True)]
        self.note(node, "swap", f"{function}({', '.join([texts[1], texts[0], *texts[2:], *given])})")

    @staticmethod
    def is_text(node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)


def switched(source: bytes, changes: dict[int, Change]) -> bytes:
    """Return a module in which the switch turns on the change of each number; lines keep their numbers."""
    for number, change in sorted(changes.items(), key=lambda pair: -pair[1].start):
        source = change.place(number, source)
    future = b"from __future__ import annotations"
    return source.replace(future, future + f"; import mutant_switch as {SWITCH}".encode(), 1)


def changes_of(root: Path, file: Path) -> list[Change]:
    """Return all changes that are possible in a module, of those that Python compiles."""
    source = file.read_bytes()
    if b"from __future__ import annotations\n" not in source:
        return []
    return _Finder(str(file.relative_to(root)), source).module(ast.parse(source))


def choose(root: Path, count: int, seed: int) -> list[Change]:
    """Choose changes in all packages: some of each, the rest by their sizes, none inside of another."""
    package = root / "src" / "ostinato"
    possible: dict[str, list[Change]] = {}
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).parts[0]
        possible.setdefault(name if "." not in name else "(root)", []).extend(changes_of(root, file))
    rng = random.Random(seed)
    total = sum(map(len, possible.values()))
    shares = {name: count * (0.25 / len(possible) + 0.75 * len(found) / total) for name, found in possible.items()}
    chosen: list[Change] = []
    owed = 0.0
    for name, found in sorted(possible.items()):
        owed += shares[name]
        kinds: dict[str, list[Change]] = {}
        for change in found:
            kinds.setdefault(change.key.kind, []).append(change)
        while owed >= 0.5 and kinds:
            kind = rng.choices(list(kinds), [WEIGHTS[kind] for kind in kinds])[0]
            change = kinds[kind].pop(rng.randrange(len(kinds[kind])))
            if not kinds[kind]:
                del kinds[kind]
            if _compiles(root, change) and not any(change.overlaps(other) for other in chosen):
                chosen.append(change)
                owed -= 1
    return chosen


def _compiles(root: Path, change: Change) -> bool:
    source = (root / change.key.file).read_bytes()
    try:
        compile(switched(source, {0: change}), change.key.file, "exec")
    except SyntaxError:
        return False
    return True
