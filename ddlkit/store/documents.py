"""JSON and YAML that others wrote, read within limits: of depth, of values, of numbers, of aliases.

A file of some hundred bytes can stand for billions of values, and one nested a hundred thousand deep ends the
reader: what is read here is a document that any walk through it comes to the end of. Sizes in bytes are
limited where files are read (`ddlkit.store.files`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.store import files

MOST_DEPTH = 50
"""Levels of lists and mappings: the deepest file known here, a profiler's, has 7."""
MOST_VALUES = 10_000_000
"""Of JSON, by its commas and brackets: a profile of half a million events; read, about a gigabyte."""
MOST_YAML_CHARACTERS = 128 * 1024
"""Of YAML, which people write by hand: PyYAML takes about a second for so much."""
MOST_YAML_VALUES = 100_000
"""Of YAML, each alias counted as all that it stands for."""
INT64 = 2**63


def parse_json(text: str) -> Any:
    """The document in JSON text. Whole numbers beyond 64 bits become floats, as elsewhere.

    Raises ValueError that says what is wrong, also for a document beyond the limits.

    >>> parse_json('{"a": [1, 100000000000000000000]}')
    {'a': [1, 1e+20]}
    """
    if sum(map(text.count, ",[{")) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES} values")
    try:
        found = json.loads(text, parse_int=_number)
    except RecursionError:
        raise _too_deep() from None
    level = [found]
    for _ in range(MOST_DEPTH):
        level = [
            inner for outer in level for inner in _inside(outer) if isinstance(inner, (dict, list))
        ]
        if not level:
            return found
    raise _too_deep()


def read_json(path: Path, advice: str) -> Any:
    """The document in a file of JSON, raising UserError that ends in ``advice``, and as `files.read_text`."""
    try:
        return parse_json(files.read_text(path))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}): {advice}") from error


def parse_yaml(text: str) -> Any:
    """The document in YAML text.

    Raises ValueError that names the line, also for a document beyond the limits; ImportError without PyYAML.
    """
    import yaml

    if len(text) > MOST_YAML_CHARACTERS:
        raise ValueError(f"{len(text)} characters, more than {MOST_YAML_CHARACTERS}")
    try:
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MOST_DEPTH:
                raise _too_deep()
        # Before anything is made of it: a merge copies what its aliases stand for.
        node = yaml.compose(text, yaml.SafeLoader)
        values, levels = _extent(node, {}) if node else (0, 0)
        if values > MOST_YAML_VALUES:
            raise ValueError(f"with its aliases more than {MOST_YAML_VALUES} values")
        if levels > MOST_DEPTH + 1:
            raise _too_deep()
        return _within_64_bits(yaml.safe_load(text))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{getattr(error, 'problem', 'unreadable')}") from None


def own_yaml(text: str) -> Any:
    """The document in YAML text of this project's own, without limits; ten times as fast where libyaml is.

    Raises yaml.YAMLError; ImportError without PyYAML.
    """
    import yaml

    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {MOST_DEPTH} deep")


def _number(text: str) -> int | float:
    """Digits as a number; Python takes minutes for some millions of them."""
    number = int(text) if len(text) <= len(f"-{INT64}") else INT64
    return number if -INT64 <= number < INT64 else float(text)


def _inside(value: Any) -> Any:
    """The values that it holds, if any."""
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _extent(node: Any, known: dict[int, tuple[float, int]]) -> tuple[float, int]:
    """How many values it stands for, and in how many levels; without end for one that holds itself."""
    if id(node) not in known:
        known[id(node)] = float("inf"), 0
        held = node.value if isinstance(node.value, list) else ()
        inner = [one for pair in held for one in (pair if isinstance(pair, tuple) else (pair,))]
        extents = [(0.0, 0), *(_extent(one, known) for one in inner)]
        values, levels = zip(*extents, strict=True)
        known[id(node)] = 1 + sum(values), 1 + max(levels)
    return known[id(node)]


def _within_64_bits(value: Any) -> Any:
    """The same with whole numbers beyond 64 bits as floats."""
    if isinstance(value, Mapping):
        return {name: _within_64_bits(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_within_64_bits(one) for one in value]
    if isinstance(value, int) and not -INT64 <= value < INT64:
        return float(Decimal(value))
    return value
