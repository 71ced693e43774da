"""Which columns each recorded table has: what schema.json beside this module says.

There, names of columns stand under their "kind check"; a table's ``but`` are columns that it has of
another kind, ``later`` the defaults of columns that earlier recordings lack, ``renamed`` earlier names.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.store.sheet import Column, Schema

_CASE = {
    axis.name: Column(
        axis.name,
        axis.type,  # type: ignore[arg-type]
        axis.metadata.get("check", ""),
        default=str(axis.default) if axis.metadata.get("later") else None,
        later=axis.metadata.get("later", False),
    )
    for axis in fields(Case)
}


def _columns(groups: dict[str, str]) -> dict[str, Column]:
    """Columns by name, from names by "kind check"."""
    columns: dict[str, Column] = {}
    for group, names in groups.items():
        kind, _, check = group.partition(" ")
        columns |= {name: Column(name, kind, check) for name in names.split()}  # type: ignore[arg-type]
    return columns


def _schemas(described: dict[str, Any]) -> dict[str, Schema]:
    known = _columns(described["columns"])
    for name, default in described["later"].items():
        known[name] = replace(known[name], default=default, later=True)
    for name, values in described["renamed_values"].items():
        known[name] = replace(known[name], aliases=tuple(values.items()))
    schemas = {}
    for name, table in described["tables"].items():
        case = _CASE if table.get("starts_with_case") else {}
        own = known | _columns(table.get("but", {})) | case
        columns = tuple(own[column] for column in (*case, *table["columns"].split()))
        key, renamed = tuple(table.get("key", "").split()), table.get("renamed", {})
        schemas[name] = Schema(name, columns, key, tuple(renamed.items()))
    return schemas


SCHEMAS = _schemas(json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


def schema_named(name: str) -> Schema:
    """The schema of that name. Raises UserError listing the known ones."""
    if name not in SCHEMAS:
        raise UserError(f"unknown schema {name!r}: use one of {', '.join(SCHEMAS)}")
    return SCHEMAS[name]
