"""The site, built by Sphinx from what `workbook.site.sources` writes. It loads nothing from a network."""

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
"""Warnings of Sphinx that an error quotes, at most."""


def write(
    executed: Sequence[Path],
    folder: Path,
    reports: Path,
    notebooks: Sequence[Path],
) -> Path:
    """Write ``REPRODUCTION.md`` and ``GOALS.md`` into ``reports``, and the site into ``folder``.

    Returns the start page. Raises UserError for a broken link or a formula that cannot be shown.
    """
    values = pages.write_reports(reports)
    source = folder.parent / "site-source"
    sources.assemble(executed, source, reports, values, notebooks)
    build(source, folder, repository_address())
    offer(notebooks, folder)
    return folder / "index.html"


def offer(notebooks: Sequence[Path], folder: Path) -> None:
    """Let readers download notebooks as they are stored, which they can run, not as they are shown."""
    for notebook in notebooks:
        copied = folder / "_sources" / "notebooks" / notebook.name
        atomic_write(copied, notebook.read_bytes())


def repository_address() -> str:
    """Return the address of the repository: ``repository-code`` of CITATION.cff, "" where it is absent."""
    return str(passages.citation().get("repository-code", ""))


def build(source: Path, folder: Path, repository: str = "") -> None:
    """Let Sphinx write the site of a directory of sources into ``folder``, which is replaced on success.

    Sphinx runs in a process of its own, because it changes what is global (roles, modules that are mocked).

    Parameters
    ----------
    repository : str
        The address of the repository; with it pages link to Binder, to Colab and to its issues.

    Raises
    ------
    UserError
        When Sphinx warns of anything, such as a link that leads nowhere; the error quotes what it said.
    """
    with scratch() as made:
        warned = made / "warnings.txt"
        command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "--jobs", "auto"]
        command += ["-c", str(CONFIGURATION), "-d", str(made / "doctrees")]
        command += ["-D", f"repository_address={repository}"]
        command += ["-D", f"html_extra_path={source / sources.EXTRA}"]
        command += ["-W", "-w", str(warned), str(source), str(made / "site")]
        search = [str(CONFIGURATION.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search))}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            text = warned.read_text(encoding="utf-8") if warned.is_file() else ""
            raise UserError(_told(text or done.stderr, source))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.move(made / "site", folder)


def _told(text: str, source: Path) -> str:
    """Return the warnings of Sphinx in one line, files named from the directory of sources."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(f"{source}/", "")
    lines = [
        line
        for line in plain.splitlines()
        if re.search(r"WARNING|ERROR|\w+Error: ", line)
    ]
    lines = lines or plain.strip().splitlines()[-1:]
    more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"the site cannot be built: {'; '.join(lines[:SHOWN])}{more}"
