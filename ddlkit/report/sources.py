"""Code of the package beside the equation that it computes: the very lines that run, so they cannot drift."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import ddlkit
from ddlkit.core.errors import UserError

if TYPE_CHECKING:
    from IPython.display import Markdown

PACKAGE = Path(ddlkit.__file__).parent
Defined = ast.FunctionDef | ast.ClassDef


def source_of(*names: str) -> Markdown:
    """The code of functions, classes and methods, named as "core.plan.exact", to show in a notebook."""
    from IPython.display import Markdown

    shown = (f"`ddlkit.{name}`\n\n```python\n{text_of(name)}\n```" for name in names)
    return Markdown("\n\n".join(shown))


def text_of(name: str) -> str:
    """The lines of one definition, without decorators, docstring and indentation.

    It is read from its file: no module is imported, so code that needs torch can be shown without it.
    Raises UserError where there is no such definition.

    >>> print(text_of("core.iteration.group_ends"))
    def group_ends(ready_s: Floats, communication_s: Floats) -> Floats:
        total = np.cumsum(communication_s, axis=-1)
        return total + np.maximum.accumulate(ready_s - (total - communication_s), axis=-1)
    """
    path, inner = _file_of(name)
    text = path.read_text(encoding="utf-8")
    found: ast.Module | Defined = ast.parse(text)
    for part in inner:
        defined = [one for one in found.body if isinstance(one, Defined) and one.name == part]
        if not defined:
            raise UserError(f"no code of ddlkit.{name}: {path} defines no {part!r}")
        found = defined[-1]
    assert isinstance(found, Defined)
    lines = text.splitlines()[found.lineno - 1 : found.end_lineno]
    if ast.get_docstring(found) is not None:
        told = found.body[0]
        assert told.end_lineno is not None
        del lines[told.lineno - found.lineno : told.end_lineno - found.lineno + 1]
    return textwrap.dedent("\n".join(lines)).strip("\n")


def _file_of(name: str) -> tuple[Path, list[str]]:
    """The module's file, and the names within it, of a dotted name."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        module = PACKAGE.joinpath(*parts[:count])
        for path in (module.with_suffix(".py"), module / "__init__.py"):
            if all(part.isidentifier() for part in parts) and path.is_file():
                return path, parts[count:]
    raise UserError(f"no code of ddlkit.{name}: name it as in core.plan.exact")
