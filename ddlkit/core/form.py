"""What all cost forms share: checked parameters, and a JSON description that reads back to the same cost."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields
from typing import Any, ClassVar, TypeVar

import numpy as np

from ddlkit.core.errors import UserError

UNDESCRIBED = {"described": False}
"""Metadata of a field that is no part of a form's JSON description."""


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A formula with a name and parameters: keyword-only fields say what it holds for."""

    form: ClassVar[str]

    def __post_init__(self) -> None:
        for name in parameters(type(self)):
            value = getattr(self, name)
            real = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
            if not real or not np.isfinite(value):
                raise UserError(f"{self.form} cost: {name} is {value!r}: must be a finite number")

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready: ``form``, its unit-named parameters, and what is known of what it holds for."""
        values = {f.name: getattr(self, f.name) for f in _described(type(self))}
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in values.items()}
        return {"form": self.form, **{k: v for k, v in plain.items() if v is not None}}

    def _freeze(self, *names: str) -> None:
        """Make the named fields read-only float vectors of one common length."""
        arrays = [np.array(getattr(self, name), dtype=float) for name in names]
        if any(
            a.ndim != 1 or a.shape != arrays[0].shape or not np.all(np.isfinite(a)) for a in arrays
        ):
            raise UserError(
                f"{self.form} cost: {' and '.join(names)} must be lists of equal length, all finite"
            )
        for name, array in zip(names, arrays, strict=True):
            array.setflags(write=False)
            object.__setattr__(self, name, array)


F = TypeVar("F", bound=Form)


def _described(kind: type[Form]) -> list[Field[Any]]:
    return [f for f in fields(kind) if f.metadata.get("described", True)]


def parameters(kind: type[Form]) -> tuple[str, ...]:
    """Names of a form's parameters, without what it holds for."""
    return tuple(f.name for f in fields(kind) if not f.kw_only)


def from_dict(description: Any, forms: Mapping[str, type[F]]) -> F:
    """The cost that ``to_dict`` described; what ``Fit.to_dict`` adds under "fit" is passed over.

    Raises UserError for an unknown form or wrong parameters.
    """
    if not isinstance(description, dict) or description.get("form") not in forms:
        form = description.get("form") if isinstance(description, dict) else description
        raise UserError(f"unknown cost form {form!r}: use one of {', '.join(forms)}")
    kind = forms[description["form"]]
    known, own = {f.name for f in _described(kind)}, set(parameters(kind))
    given = set(description) - {"form", "fit"}
    if given - known or own - given:
        unknown, missing = ", ".join(given - known) or "none", ", ".join(own - given) or "none"
        raise UserError(f"{kind.form} cost: unknown parameters: {unknown}; missing: {missing}")
    try:
        return kind(**{name: description[name] for name in given})
    except (TypeError, ValueError) as error:
        raise UserError(f"{kind.form} cost: {error}") from error
