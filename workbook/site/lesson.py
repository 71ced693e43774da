"""How a notebook is shown on the site, with folds and with solutions of its exercises.

`as_page` takes an executed notebook and returns another one, which myst-nb renders.
Nothing is run, written, or read from a network here.
"""

from __future__ import annotations

import ast
import copy
import re
import symtable
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import nbformat

from ddlkit.core.errors import UserError
from workbook.common.catalog import Entry
from workbook.course.exercises import Solution

ANSWER = "Your prediction is written down? What came out"
"""What a fold says that holds the answer to *Predict first*."""

NOT_RUN = "This notebook was not run when these pages were built: it is shown without results."

_FIGURE = re.compile(
    r'<figure[^>]*><img alt="(?P<alt>[^"]*)" width="(?P<width>\d+)" src="data:image/png;base64,'
    r'(?P<data>[^"]*)">(?P<caption><figcaption.*?</figcaption>)</figure>',
    re.DOTALL,
)
"""A figure as `workbook.plots.shown.figure_html` writes it."""

_NUMBERS = re.compile(r'href="[^"]*?figures/([a-z0-9_-]+)\.csv"')
"""A link to what was plotted, from wherever the notebook ran."""

_OBJECT = re.compile(r"^(?:<.*>|\w*Path\(.*\)|\{.*\}|\[<.*>\])$", re.DOTALL)
"""The text of a value that was not meant to be read: an object, a path, a mapping."""


def as_page(
    notebook: Any,
    solutions: Mapping[int, Solution],
    figures: Path | None = None,
    picture: Entry | None = None,
) -> Any:
    """Return the notebook as the site shows it.

    Parameters
    ----------
    notebook : NotebookNode
        The notebook, which is not changed. If it was not executed, a note below the title
        says so.
    solutions : mapping of int to Solution
        The solutions of its exercises, by number.
    figures : Path, optional
        The directory of published figures. An image that is there byte for byte is
        linked to, at ``../reports/figures``. All others are embedded.
    picture : Entry, optional
        The figure of the catalog whose thumbnail is shown next to the title.

    Returns
    -------
    NotebookNode
        Cells that import, set parameters or draw have the tag ``hide-input``.
        Consecutive cells that answer a prediction are in one fold, an HTML element
        ``details`` of the class ``answer``. An exercise is its hint and its solution, each
        in a fold of the class ``solution``.

    Raises
    ------
    UserError
        If an exercise has no solution, or if a fold would contain a heading.
    """
    page = copy.deepcopy(notebook)
    opening = f'<details class="answer">\n<summary>{ANSWER}</summary>'
    # The cells of the page, and whether the last of them stands in an open fold.
    cells: list[Any] = []
    in_fold = False
    for cell in page.cells:
        tags = cell.metadata.get("tags", [])
        # A cell that papermill inserted is left out, because the stored notebook lacks it.
        if "injected-parameters" in tags:
            continue
        # Cells of HTML open a fold before the first cell of an answer, and close it after the last.
        is_answer = _is_answer(cell)
        if is_answer != in_fold:
            html = opening if is_answer else "</details>"
            cells.append(_markdown(html, f"fold-{len(cells)}"))
        in_fold = is_answer
        number = _exercise_number(tags)
        if number is not None:
            # The hint and the solution take the place of the cell in which readers answer.
            cells.extend(_exercise(number, solutions))
            continue
        if cell.cell_type == "code":
            _fold_code(cell)
            cell.outputs = list(_shown(cell.outputs, figures))
        cells.append(cell)
    # The last cell of the notebook may be part of an answer.
    if in_fold:
        cells.append(_markdown("</details>", f"fold-{len(cells)}"))
    _add_below_title(cells, picture, was_run(page))
    page.cells = cells
    return page


def _is_answer(cell: Any) -> bool:
    """Return whether a cell is part of the answer to a prediction.

    The cells of an answer, and no others, are collapsed in the stored notebook.

    Raises
    ------
    UserError
        If a cell of an answer contains a heading.
    """
    # JupyterLab notes under this key that a cell is collapsed.
    if not cell.metadata.get("jupyter"):
        return False
    if _has_heading(cell):
        heading = cell.source.splitlines()[0]
        raise UserError(
            f"the cell {heading!r} is folded: a heading must stand outside of folds"
        )
    return True


def _add_below_title(
    cells: Sequence[Any], picture: Entry | None, was_run: bool
) -> None:
    """Add a thumbnail and, if the notebook was not run, a note below the title.

    Parameters
    ----------
    cells : sequence of NotebookNode
        The cells of a page. The first cell, whose first line is the title, is changed in
        place.
    picture : Entry or None
        The figure whose thumbnail is shown. None shows no thumbnail.
    was_run : bool
        Whether the notebook was run.
    """
    added = []
    if picture is not None:
        added.append(_thumbnail(picture))
    if not was_run:
        added.append(f":::{{note}}\n{NOT_RUN}\n:::\n")
    if added and cells:
        title, _, rest = cells[0].source.partition("\n")
        cells[0].source = "\n".join([title, "", *added, rest])


def was_run(notebook: Any) -> bool:
    """Return whether any cell of a notebook was run."""
    return any(cell.get("execution_count") for cell in notebook.cells)


def _thumbnail(picture: Entry) -> str:
    """Return Markdown of a small picture that leads to the gallery."""
    return (
        f":::{{figure}} ../thumbnails/{picture.id}-small.png\n"
        ":figclass: beside-title\n"
        f":target: ../gallery.html#{picture.id}\n"
        f":alt: {' '.join(picture.caption.split())}\n:::\n"
    )


def _markdown(source: str, cell_id: str) -> Any:
    return nbformat.v4.new_markdown_cell(source, id=cell_id)


def _has_heading(cell: Any) -> bool:
    is_markdown = cell.cell_type == "markdown"
    return is_markdown and re.search(r"^#{1,6} ", cell.source, re.MULTILINE) is not None


# -- code ----------------------------------------------------------------------------


def _fold_code(cell: Any) -> None:
    """Tag a code cell whose code is collapsed, and set the line that myst-nb shows instead.

    The cell is changed in place. A cell whose code is shown only gets an empty list of tags,
    if it has none.
    """
    tags = cell.metadata.setdefault("tags", [])
    summary = code_summary(cell.source, tags)
    # Without a summary, the code is shown.
    if not summary:
        return
    if "hide-input" not in tags:
        tags.append("hide-input")
    # The same line stands above the code, whether it is collapsed or not.
    prompts = {"code_prompt_show": summary, "code_prompt_hide": summary}
    cell.metadata["mystnb"] = prompts


def code_summary(source: str, tags: Sequence[str] = ()) -> str:
    """Return the line that stands for collapsed code, or "" if the code is shown.

    Code with a ``def`` is an algorithm and is shown, except in the cell that imports
    and checks parameters. All other code is collapsed. Its line is made from the comment
    with which the code begins, if there is one.

    ``tags`` are those of the cell.

    >>> code_summary("def step(): ..."), code_summary("import numpy as np")
    ('', 'Code: imports')
    >>> code_summary("# Draw two bars\\nplots.bars(ax, frame)")
    'Code: draw two bars'
    """
    if "parameters" in tags:
        return "Code: parameters"
    # The cell that imports and checks parameters may have a ``def``, too.
    is_setup = "parameters.validate(" in source
    if is_setup:
        return "Code: imports"
    if re.search(r"^def ", source, re.MULTILINE):
        return ""
    comment = re.match(r"\s*#+ *(.+)", source)
    if comment:
        words = comment[1].rstrip(".")
        return f"Code: {words[0].lower()}{words[1:]}"
    if _only_imports(source):
        return "Code: imports"
    return "Code"


def _only_imports(source: str) -> bool:
    try:
        statements = ast.parse(source).body
    except SyntaxError:  # a magic of IPython
        return False
    return bool(statements) and all(
        isinstance(statement, ast.Import | ast.ImportFrom) for statement in statements
    )


# -- outputs -------------------------------------------------------------------------


def _shown(outputs: Sequence[Any], figures: Path | None) -> Iterator[Any]:
    """Yield the outputs of a cell that are meant to be read, with links that work on the site.

    An output is left out if it is only the text of an object or of a path, such as that of a
    figure's file. Links start from the folder ``notebooks/``. Outputs in HTML are changed in
    place.

    Parameters
    ----------
    outputs : sequence of NotebookNode
        The outputs of a cell.
    figures : Path or None
        The directory of published figures. Figures that are not there are embedded.
    """
    for output in outputs:
        # Printed text and errors have no data.
        data = output.get("data", {})
        # An object that also has HTML or an image is shown by these, and not by its text.
        is_only_text = set(data) == {"text/plain"}
        if is_only_text and _OBJECT.match("".join(data["text/plain"]).strip()):
            continue
        if "text/html" in data:
            text = _FIGURE.sub(
                lambda match: _figure(match, figures), "".join(data["text/html"])
            )
            # Links to plotted numbers lead to the published file.
            data["text/html"] = _NUMBERS.sub(r'href="../reports/figures/\1.csv"', text)
        yield output


def _figure(match: re.Match[str], figures: Path | None) -> str:
    """Return HTML of a figure whose image scrolls if it is too wide.

    Parameters
    ----------
    match : re.Match
        A match of _FIGURE.
    figures : Path or None
        The directory of published figures. If the image is there byte for byte, it is linked
        to. Otherwise it is embedded.
    """
    source = f"data:image/png;base64,{match['data']}"
    # The caption links to the plotted numbers, whose file has the name of the figure.
    link_to_numbers = _NUMBERS.search(match["caption"])
    if figures is not None and link_to_numbers:
        file = figures / f"{link_to_numbers[1]}.png"
        if file.is_file() and file.read_bytes() == b64decode(match["data"]):
            source = f"../reports/figures/{file.name}"
    image = f'<img alt="{match["alt"]}" width="{match["width"]}" loading="lazy" src="{source}">'
    return f'<figure class="result"><div class="scroll">{image}</div>{match["caption"]}</figure>'


# -- exercises -----------------------------------------------------------------------


def _exercise_number(tags: Sequence[str]) -> int | None:
    for tag in tags:
        kind, _, number = tag.partition("-")
        if kind == "exercise":
            return int(number)
    return None


def _exercise(number: int, solutions: Mapping[int, Solution]) -> list[Any]:
    """Return cells with the hint and the solution of an exercise, each in a fold of its own.

    ``solutions`` are those of the notebook by number. If the exercise has none, a UserError
    says so.
    """
    if number not in solutions:
        raise UserError(f"exercise {number} has no solution")
    hint, code, explanation = solutions[number]
    answer = f"```python\n{answer_code(code, number)}\n```\n\n{explanation}"
    folds = {"hint": hint, "solution": answer}
    cells = []
    for what, text in folds.items():
        summary = f"<summary>Exercise {number}: {what}</summary>"
        fold = f'<details class="solution">\n{summary}\n\n{text}\n\n</details>'
        cells.append(_markdown(fold, f"exercise-{number}-{what}"))
    return cells


def answer_code(code: str, number: int) -> str:
    """Return the statements of a solution that its answer needs, without those that check answers.

    The answer to exercise 1 is the value of the name ``answer_1``.

    >>> print(answer_code("half = 2\\nanswer_1 = 1 / half\\nwrong_1 = [answer_1, 3]", 1))
    half = 2
    answer_1 = 1 / half
    """
    lines = code.splitlines()
    statements = ast.parse(code).body
    text: list[str] = []
    for index in sorted(_needed_statements(statements, f"answer_{number}")):
        # The lines between two statements, such as comments, belong to the second one. Line
        # numbers count from 1 and indices from 0, so that the number of a statement's last line
        # is the index of the line after it.
        begin = (statements[index - 1].end_lineno or 0) if index else 0
        text += lines[begin : statements[index].end_lineno]
    return "\n".join(text).strip("\n")


def _needed_statements(statements: Sequence[ast.stmt], name: str) -> set[int]:
    """Return the indices of the statements that the last value of a name depends on.

    At least one of the ``statements``, which are the top level of a solution, must set the
    name.
    """
    # The last statement that sets or changes the name.
    last = max(
        index
        for index, statement in enumerate(statements)
        if name in _changed(statement)
    )
    # Statements after the last change of the name cannot matter. An exception are functions: a
    # function may call another one that is defined below it.
    candidates = [
        index
        for index, statement in enumerate(statements)
        if index <= last or isinstance(statement, ast.FunctionDef)
    ]
    # A needed statement makes all names that it uses needed, too, and with them the statements
    # that set or change these names.
    needed_names = {name}
    needed: set[int] = set()
    pending = {last}
    while pending:
        needed |= pending
        for index in pending:
            needed_names |= _used(statements[index])
        pending = {
            index
            for index in candidates
            if index not in needed and needed_names & _changed(statements[index])
        }
    return needed


def _used(statement: ast.stmt) -> set[str]:
    """Return the names that a statement uses and that may be set outside of it.

    Names in the bodies of functions that the statement defines count, too.
    """
    names: set[str] = set()
    # Python's tables of symbols: one for the top level, with one for each function inside it.
    tables = [symtable.symtable(ast.unparse(statement), "solution", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        is_module = table.get_type() == "module"
        for symbol in table.get_symbols():
            # In a function, only global names come from outside. At the top level, any name that
            # is read can come from outside.
            if symbol.is_global() or (is_module and symbol.is_referenced()):
                names.add(symbol.get_name())
    return names


def _changed(statement: ast.stmt) -> set[str]:
    """Return the names that a statement binds, or whose objects it may change.

    An object may change by a call that is a statement of its own, such as names.append(x), or
    by an assignment to its items or attributes.
    """
    table = symtable.symtable(ast.unparse(statement), "solution", "exec")
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_assigned() or symbol.is_imported()
    }
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        # names.append(...) changes names.
        names |= _root(statement.value.func)
    if isinstance(statement, ast.Assign):
        # table["plan"] = ... changes table.
        for target in statement.targets:
            names |= _root(target)
    return names


def _root(expression: ast.expr) -> set[str]:
    """Return the first name of an expression such as ``table["plan"].values``, if any."""
    while isinstance(expression, ast.Subscript | ast.Attribute):
        expression = expression.value
    return {expression.id} if isinstance(expression, ast.Name) else set()
