"""Which rows of other people's measurements calibrate a model, and which test it: fixed before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ddlkit.core.errors import UserError
from ddlkit.formats.clusters import EXTERNAL, abci, cs336, pollux, vidur
from ddlkit.store import files
from ddlkit.store.files import own_yaml

RULES = EXTERNAL / "rules.yml"
READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    "pollux.read_iterations": pollux.read_iterations,
    "abci.read_iterations": abci.read_iterations,
    "abci.read_trainings": abci.read_trainings,
    "cs336.read_iterations": cs336.read_iterations,
    "vidur.read_all_reduce": vidur.read_all_reduce,
}
PARTS = ("compute", "calibrate", "fit", "test")


@dataclass(frozen=True)
class Rows:
    """The rows of one source by what they may be used for; no row is in two of the parts."""

    compute: pd.DataFrame
    calibrate: pd.DataFrame
    fit: pd.DataFrame
    test: pd.DataFrame


@lru_cache(maxsize=2)
def _read(text: str) -> Any:
    """What YAML says, read once: every rule is asked for many times."""
    return own_yaml(text)


def rules(path: Path = RULES) -> dict[str, dict[str, Any]]:
    """Rules by name, as data/external/rules.yml describes them.

    Raises UserError for a rule that lacks a part, or has a reader that is not in `READERS`.
    """
    try:
        found = _read(files.read_text(path))["rules"]
    except (yaml.YAMLError, TypeError, KeyError) as error:
        raise UserError(f"{path}: no YAML with rules: restore it") from error
    for name, rule in found.items():
        lacking = {"set", "read", "files", "predicts", *PARTS} - {"fit"} - rule.keys()
        if lacking or rule["read"] not in READERS:
            what = f"lacks {', '.join(sorted(lacking))}" if lacking else f"reads {rule['read']!r}"
            raise UserError(f"{path}: rule {name}: {what}: write it as the head of the file says")
    return dict(found)


def rows(name: str, path: Path = RULES) -> Rows:
    """The rows that a rule calls compute, calibrate, fit (none if it does not) and test.

    `files` are found beside the rules.

    Raises UserError for an unknown rule, for one without test rows, and where a row would be in two parts.
    """
    known = rules(path)
    if name not in known:
        raise UserError(f"unknown rule {name!r}: use one of {', '.join(known)}")
    rule = known[name]
    found = sorted(path.parent.glob(rule["files"]))
    if not found:
        raise UserError(f"{path}: rule {name}: there are no files {rule['files']}")
    frame = pd.concat([READERS[rule["read"]](file) for file in found], ignore_index=True)
    given = {"drawn": rule.get("drawn", [])}
    parts = {
        part: frame.query(rule[part], local_dict=given) if rule.get(part) else frame[:0]
        for part in PARTS
    }
    if pd.concat(parts.values()).index.has_duplicates or parts["test"].empty:
        raise UserError(
            f"{path}: rule {name}: tests nothing, or a row is in two parts: divide them"
        )
    return Rows(**parts)
