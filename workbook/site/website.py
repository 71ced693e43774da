"""The site, which Sphinx builds from the files that `workbook.site.sources` writes.

The pages load nothing from a network.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.store.files import atomic_write, scratch
from workbook.site import pages, passages, sources

CONFIGURATION = Path(__file__).parent
"""The directory of conf.py."""
SHOWN = 5
"""How many warnings of Sphinx an error quotes."""


def write(
    executed: Sequence[Path],
    folder: Path,
    reports: Path,
    notebooks: Sequence[Path],
    jobs: str = "auto",
) -> Path:
    """Write the site, and ``REPRODUCTION.md`` and ``GOALS.md``.

    Parameters
    ----------
    executed : sequence of Path
        Executed copies of notebooks.
    folder : Path
        The directory of the site.
    reports : Path
        The directory of the two reports.
    notebooks : sequence of Path
        The notebooks as they are stored, in reading order.
    jobs : str, optional
        How many processes build the site, as for `build`.

    Returns
    -------
    Path
        The start page.

    Raises
    ------
    UserError
        If a notebook cannot be shown, or if Sphinx warns of anything, such as a broken link
        or a formula that cannot be shown.
    """
    # Verdicts, key numbers and figures, by the names that templates of pages use.
    values = pages.write_reports(reports)
    source = folder.parent / "site-source"
    sources.assemble(executed, source, reports, values, notebooks)
    build(source, folder, repository_address(), jobs)
    # Sphinx offers for download the notebooks as the site shows them, with solutions in place of
    # exercises. The stored notebooks replace these.
    offer(notebooks, folder)
    return folder / "index.html"


def offer(notebooks: Sequence[Path], folder: Path) -> None:
    """Write the notebooks that readers download from the site into its folder.

    They are the notebooks as stored, which readers can run, not those that the site shows,
    in which exercises are replaced by their solutions.
    """
    for notebook in notebooks:
        copied = folder / "_sources" / "notebooks" / notebook.name
        atomic_write(copied, notebook.read_bytes())


def repository_address() -> str:
    """Return the address of the repository from CITATION.cff, or "" if it has none."""
    return str(passages.citation().get("repository-code", ""))


def build(source: Path, folder: Path, repository: str = "", jobs: str = "auto") -> None:
    """Build the site by Sphinx, in a process of its own.

    In this process, Sphinx would change global state, such as roles and mocked modules.

    Parameters
    ----------
    source : Path
        The directory of sources.
    folder : Path
        The directory of the site, which is replaced if the build succeeds.
    repository : str, optional
        The address of the repository. With it, pages link to Binder, to Colab and to
        the issues of the repository.
    jobs : str, optional
        How many processes Sphinx uses. By default as many as there are cores. One needs
        less processor time in all.

    Raises
    ------
    UserError
        If Sphinx warns of anything, such as a link that leads nowhere. The error quotes
        the warnings.
    """
    # Everything that Sphinx writes stays in a temporary folder until the build has succeeded.
    with scratch() as built:
        warnings = built / "warnings.txt"
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "--jobs", jobs]
        command += ["-c", str(CONFIGURATION), "-d", str(built / "doctrees")]
        # Two settings that conf.py cannot know.
        command += ["-D", f"repository_address={repository}"]
        command += ["-D", f"html_extra_path={source / sources.EXTRA}"]
        # Warnings fail the build (-W), and are written to a file (-w).
        command += ["-W", "-w", str(warnings), str(source), str(built / "site")]
        # Sphinx imports workbook.site.extension, and must find it from any working directory. The
        # root of the repository is therefore searched first.
        search_path = [str(CONFIGURATION.parents[1])]
        if os.environ.get("PYTHONPATH"):
            search_path.append(os.environ["PYTHONPATH"])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(search_path)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            # If Sphinx ends with an exception, it writes no warning. The standard error then has
            # the reason.
            text = ""
            if warnings.is_file():
                text = warnings.read_text(encoding="utf-8")
            raise UserError(_reason(text or done.stderr, source))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(built / "site", folder)


def _reason(text: str, source: Path) -> str:
    """Return why the site cannot be built, in one line.

    The line quotes at most SHOWN warnings, and counts the others.

    Parameters
    ----------
    text : str
        The warnings of Sphinx, or what it printed.
    source : Path
        The directory of sources, which is cut from the names of files.
    """
    # Sphinx may colour its output by escape sequences of terminals.
    without_colours = re.sub(r"\x1b\[[0-9;]*m", "", text)
    all_lines = without_colours.replace(f"{source}/", "").splitlines()
    # A warning or an error of Sphinx, or the last line of an exception.
    pattern = re.compile(r"WARNING|ERROR|\w+Error: ")
    lines = [line for line in all_lines if pattern.search(line)]
    if not lines:
        # If nothing looks like a warning, the last line that is not blank says most.
        lines = [line for line in all_lines if line.strip()][-1:]
    reason = f"the site cannot be built: {'; '.join(lines[:SHOWN])}"
    if len(lines) > SHOWN:
        reason += f"; and {len(lines) - SHOWN} more"
    return reason
