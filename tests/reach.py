"""Which lines of ddlkit only CUDA reaches, found in the source, and whether a run has reached them.

A line counts if its statement

* stands under a condition that says that the device is CUDA (`truth`), after a way out for all others, or
  in a loop over GPUs; or
* belongs to a function or class that is mentioned in such places only, or in others of its kind: found
  again and again until nothing is added. A kind of points is mentioned in suites: see `kinds_of_cuda`.

A statement goes by its first line. What a run without any GPU executes is never among them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUITES = Path("run/sessions/suites")
_YES = {"cuda", "nccl", "d2d"}  # constants that something is compared with
_NO = {"cpu"}
_TRUE = {"on_gpu", "gpu", "_gpu", "gpus", "nccl", "cuda", "_cuda", "device_count"}
_TRUE |= {"is_initialized", "is_nccl_available", "_events", "_clusters"}

Lines = dict[Path, set[int]]


@dataclass(frozen=True)
class Statement:
    """One that only CUDA reaches: its file, its first line and the lines that belong to it alone."""

    file: Path
    line: int
    lines: frozenset[int]
    text: str
    raises: bool


def truth(test: ast.expr) -> int:
    """1 if the test holds on CUDA only, -1 if it fails on CUDA only, 0 if neither is known.

    >>> [truth(ast.parse(text, mode="eval").body) for text in ("x.type == 'cuda'", "not on_gpu", "a")]
    [1, -1, 0]
    """
    match test:
        case ast.UnaryOp(ast.Not(), operand):
            return -truth(operand)
        case ast.BoolOp(operator, values):
            decisive = 1 if isinstance(operator, ast.And) else -1
            found = [truth(value) for value in values]
            alike = found[0] if len(set(found)) == 1 else 0
            return decisive if decisive in found else alike
        case ast.Compare(left, [operator], [right]):
            return _compared(left, operator, right)
        case ast.NamedExpr(_, value):
            return truth(value)
        case ast.Call(ast.Attribute(ast.Attribute(_, "cuda"), "is_available")):
            return 1
        case ast.Call(called):
            return truth(called)
        case ast.Name(name) | ast.Attribute(_, name):
            return int(name in _TRUE)
    return 0


def _compared(left: ast.expr, operator: ast.cmpop, right: ast.expr) -> int:
    if isinstance(operator, ast.Gt):
        return truth(left)
    if not isinstance(right, ast.Constant):
        return 0
    side = (right.value in _YES) - (right.value in _NO)
    return side if isinstance(operator, ast.Eq) else -side if isinstance(operator, ast.NotEq) else 0


def _for_gpu(keyword: ast.keyword) -> bool:
    """Of a check that is for GPUs only."""
    return keyword.arg == "gpu" and ast.unparse(keyword.value) == "True"


def _leaves(body: list[ast.stmt]) -> bool:
    return isinstance(body[-1], ast.Return | ast.Raise | ast.Continue)


class _Module:
    """One file: its statements, and which of them and of its expressions only CUDA reaches."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.source = file.read_text()
        self.tree = ast.parse(self.source)
        self.only: set[ast.AST] = set()
        self.definitions = {
            node.name: node
            for node in self.tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }

    def look(self, definitions: set[ast.AST]) -> None:
        """Find what only CUDA reaches, if it alone reaches those definitions."""
        self.only = set()
        self._look(self.tree.body, False, definitions)

    def _look(self, body: list[ast.stmt], only: bool, definitions: set[ast.AST]) -> None:
        for statement in body:
            here = only or statement in definitions
            if here:
                self.only.add(statement)
            self._expressions(statement, here)
            value = truth(statement.test) if isinstance(statement, ast.If | ast.While) else 0
            if isinstance(statement, ast.For):
                value = int("device_count" in ast.unparse(statement.iter))
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, [])
                side = {"body": value == 1, "orelse": value == -1}.get(name, False)
                if inner and isinstance(inner[0], ast.stmt):
                    self._look(inner, here or side, definitions)
            for handler in getattr(statement, "handlers", []):
                self._look(handler.body, here, definitions)
            only = only or (value == -1 and _leaves(getattr(statement, "body", [])))

    def _expressions(self, statement: ast.stmt, only: bool) -> None:
        """Note the expressions of a statement alone that only CUDA evaluates."""
        for node in _own(statement):
            chosen: list[ast.AST] = [node] if only else []
            if isinstance(node, ast.IfExp) and truth(node.test):
                chosen.append(node.body if truth(node.test) > 0 else node.orelse)
            if isinstance(node, ast.Call) and any(map(_for_gpu, node.keywords)):
                chosen.append(node)
            self.only.update(inner for one in chosen for inner in ast.walk(one))

    def mentions(self) -> Iterator[tuple[str, ast.AST]]:
        """Each name that is used to do something, and where."""
        types = self._types()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Name | ast.Attribute) and node not in types:
                yield (node.id if isinstance(node, ast.Name) else node.attr), node

    def _types(self) -> set[ast.AST]:
        """Names in annotations, and in unions, which do nothing."""
        parts: list[ast.AST] = []
        for node in ast.walk(self.tree):
            parts += [getattr(node, "annotation", None) or node] if _annotated(node) else []
            parts += [node.returns] if getattr(node, "returns", None) else []  # type: ignore[attr-defined]
            parts += [node] if isinstance(node, ast.BinOp) and _is_union(node) else []
        return {inner for part in parts for inner in ast.walk(part)}

    def statements(self) -> Iterator[Statement]:
        """Those that only CUDA reaches, by line."""
        lines = self.source.splitlines()
        every = [node for node in ast.walk(self.tree) if isinstance(node, ast.stmt)]
        only = self.only
        for node in filter(only.__contains__, every):
            if _says_nothing(node):
                continue
            first, inner = node.lineno, getattr(node, "body", [])
            last = inner[0].lineno - 1 if inner else node.end_lineno or first
            own = frozenset(range(first, max(first, last) + 1))
            text = lines[first - 1].strip()
            yield Statement(self.file, first, own, text, isinstance(node, ast.Raise))


def _annotated(node: ast.AST) -> bool:
    return isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None


def _is_union(node: ast.BinOp) -> bool:
    names = [one for one in (node.left, node.right) if isinstance(one, ast.Name)]
    return isinstance(node.op, ast.BitOr) and bool(names) and names[0].id[0].isupper()


def _says_nothing(node: ast.stmt) -> bool:
    """A definition, whose statements count themselves, or a docstring."""
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Pass)


def _own(statement: ast.stmt) -> Iterator[ast.expr]:
    """Expressions of a statement, without those of the statements in it."""
    for field in ast.iter_child_nodes(statement):
        if isinstance(field, ast.expr | ast.withitem):
            yield from (node for node in ast.walk(field) if isinstance(node, ast.expr))


def kinds_of_cuda(suites: Path) -> set[str]:
    """What only suites for CUDA measure, and descriptions in others that are for CUDA."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for file in sorted(suites.glob("*.json")):
        suite = json.loads(file.read_text())
        for one in suite["points"]:
            device = one.get("device") or suite.get("device")
            names[device == "cuda"].add(one["measure"])
    return names[True] - names[False]


def cuda_only(package: Path) -> list[Statement]:
    """Every statement that only CUDA reaches, as far as the source shows it: of run/ and machine.py."""
    modules = [_Module(file) for file in (package / "machine.py", *package.glob("run/**/*.py"))]
    roots = kinds_of_cuda(package / SUITES)
    mentioned = _mentioned(modules)
    chosen: set[ast.AST] = set()
    while True:
        for module in modules:
            module.look(chosen)
        only = {node for module in modules for node in module.only}
        found = {
            definition
            for definition, (name, places) in mentioned.items()
            if name in roots or (places and only.issuperset(places))
        }
        if found <= chosen:
            break
        chosen |= found
    statements = (statement for module in modules for statement in module.statements())
    return sorted(statements, key=lambda one: (one.file, one.line))


def _mentioned(modules: list[_Module]) -> dict[ast.AST, tuple[str, list[ast.AST]]]:
    """Every definition's name, and where it is mentioned outside itself; a private one in its file only."""
    places: dict[str, list[tuple[_Module, ast.AST]]] = {}
    for module in modules:
        for name, node in module.mentions():
            places.setdefault(name, []).append((module, node))
    found: dict[ast.AST, tuple[str, list[ast.AST]]] = {}
    for module in modules:
        for name, definition in module.definitions.items():
            inside = set(ast.walk(definition))
            elsewhere = [
                node
                for other, node in places.get(name, [])
                if node not in inside and (not name.startswith("_") or other is module)
            ]
            found[definition] = name, elsewhere
    return found


def read_lines(file: Path) -> Lines:
    """What a run noted with PLAYED_LINES: the lines of each file that it has reached."""
    found: Lines = {}
    for place in file.read_text().splitlines():
        path, _, number = place.rpartition(":")
        found.setdefault(Path(path).resolve(), set()).add(int(number))
    return found
