"""What selecting the largest elements costs: forms of the function (elements, density) -> seconds.

The `omgs` paper's formula can be read in two ways, with and without the density, and selection
on today's devices follows neither: it reads the tensor a few times. The first two readings grow faster than
the tensor, so that merging two tensors costs time (omgs Eq 12); with the third, merging saves one start.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core import cost
from ddlkit.core.cost import Floats
from ddlkit.core.errors import UserError
from ddlkit.core.form import Form

SELECTION_FORMS: dict[str, type[SelectionCost]] = {}
"""Every form of a selection cost by its name; a class with a ``form`` enters it when it is defined."""


@dataclass(frozen=True, eq=False)
class SelectionCost(Form):
    """The time to select the largest density x elements of a tensor; call it on numbers or arrays.

    operation, device : what was measured on what, None if unknown
    """

    operation: str | None = field(default=None, kw_only=True)
    device: str | None = field(default=None, kw_only=True)

    def __init_subclass__(cls) -> None:
        SELECTION_FORMS[cls.form] = cls

    def __call__(self, elements: ArrayLike, density: ArrayLike) -> Any:
        """Seconds for tensors of ``elements``, at least 1 each, at ``density``, above 0 to 1.

        Shapes broadcast; two scalars give a float.
        """
        d, rho = np.broadcast_arrays(np.asarray(elements, float), np.asarray(density, float))
        seconds = self._seconds(d, rho)
        return float(seconds) if d.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, d: Floats, rho: Floats) -> Floats: ...


@dataclass(frozen=True, eq=False)
class DensityLog(SelectionCost):
    """omgs Eq 10 as printed: t = gamma rho d log2 d, with gamma = gamma_s; the base is not printed."""

    form: ClassVar[str] = "density_log"
    gamma_s: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.gamma_s * rho * d * np.log2(d)


@dataclass(frozen=True, eq=False)
class Log(SelectionCost):
    """omgs Eq 10 without rho, as its authors' published code has it: t = gamma d log2 d."""

    form: ClassVar[str] = "log"
    gamma_s: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.gamma_s * d * np.log2(d)


@dataclass(frozen=True, eq=False)
class Scan(SelectionCost):
    """t = t0 + passes x bytes / bandwidth: a start-up, and a time per element whatever the density."""

    form: ClassVar[str] = "scan"
    start_s: float
    s_per_element: float

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        return self.start_s + self.s_per_element * d


@dataclass(frozen=True, eq=False)
class SelectionTable(SelectionCost):
    """Measured times, interpolated in log-log; beyond the densities as at the nearest one.

    elements : (n,); density : (m,); seconds : (m, n), row by row a `ddlkit.core.cost.Table`
    """

    form: ClassVar[str] = "table"
    elements: Floats
    density: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        self._freeze("elements")
        self._freeze("density")
        rows = np.array(self.seconds, dtype=float)
        if rows.shape != (self.density.size, self.elements.size):
            raise UserError("table cost: seconds must hold one row a density, one column a size")
        if not self.density.size or np.any(np.diff(self.density) <= 0) or self.density[0] <= 0:
            raise UserError("table cost: density must be increasing and above zero")
        if self.elements.size < 2 or np.any(np.diff(self.elements) <= 0) or self.elements[0] <= 0:
            raise UserError("table cost: elements must be 2 or more, increasing, above zero")
        if not np.all(rows > 0) or not np.all(np.isfinite(rows)):
            raise UserError("table cost: every time in seconds must be finite and above zero")
        rows.setflags(write=False)
        object.__setattr__(self, "seconds", rows)

    def _seconds(self, d: Floats, rho: Floats) -> Floats:
        logs = np.log([cost.Table(self.elements, row)(d) for row in self.seconds])
        last = len(logs) - 1
        at = np.interp(np.log(rho), np.log(self.density), np.arange(last + 1))
        below = np.minimum(at.astype(int), last)
        above = np.minimum(below + 1, last)
        lower, upper = (np.take_along_axis(logs, k[None], 0)[0] for k in (below, above))
        return np.asarray(np.exp(lower + (at - below) * (upper - lower)))
