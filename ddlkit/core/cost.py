"""The cost of one message: a function from bytes to seconds, with draws of it.

A form is a formula with a name and parameters. A cost is a form with values, and also
states for which collective, how many workers and which algorithm it holds. Costs are
written as JSON and read back.

References
----------
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.collective import find_collective
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import KIB, MOST
from ddlkit.core.workload import Floats

MOST_WORKERS = 100_000
"""The most workers of a cost: more than any machine has GPUs."""
SMALL_BYTES = 4 * KIB
"""The size up to which a message takes hardly longer than its start-up.

This holds for links of 1 Gbit/s or more.
"""
REPLACED = {
    "curve": "chords",
    "density_log": "log",
    "piecewise:joined": "piecewise",
    "ring_all_reduce": "alpha_beta, with the number of ranks in the option --ranks of ddlkit fit",
    "segments:joined": "segments",
    "segments:jump": "segments",
    "sparse_gather": "another form for the times of its all_gather (ddlkit predict adds the selection by "
    "--density and --selection)",
    "stepped": "table, or alpha_beta of a ring",
}
"""Forms and variants of earlier versions, and what replaces each of them."""


# -- forms, and how they are written -----------------------------------------------


@dataclass(frozen=True, eq=False)
class Form(ABC):
    """A formula with a name and parameters.

    The fields of a subclass are its parameters, numbers or vectors, whose names contain
    their units. Keyword-only fields state for which messages a cost holds.

    Attributes
    ----------
    form : str
        The name, which is a class variable.

    Raises
    ------
    UserError
        If a parameter is not a finite number, or a vector of them.
    """

    form: ClassVar[str]

    def __post_init__(self) -> None:
        # Annotations are text in this module. A parameter whose annotation is not
        # "float" is a vector.
        for name, annotation in parameters(type(self)).items():
            value = getattr(self, name)
            if annotation == "float":
                # NaN fails every comparison, and is refused, too.
                valid = _is_number(value) and abs(value) <= MOST
            else:
                # A read-only copy takes the place of the vector. A frozen dataclass lets
                # its fields be set only in this way.
                value = self._vector(name, value)
                value.setflags(write=False)
                object.__setattr__(self, name, value)
                valid = bool(np.all(np.abs(value) <= MOST))
            if not valid:
                # `check` is not used here, because it takes the text of the error as an
                # argument. To make this text for every valid value would take longer than
                # the rest of the check.
                raise UserError(
                    f"{self.form} cost: {name} is {shown(value)}: "
                    f"must be a finite number up to {MOST:g}"
                )

    def _vector(self, name: str, value: Any) -> Floats:
        """Return the vector of a parameter as an array, or raise a UserError that names it."""
        try:
            return np.array(value, dtype=float)
        except (TypeError, ValueError, OverflowError):
            raise UserError(
                f"{self.form} cost: {name} is {shown(value)}: must be a list of numbers"
            ) from None

    def check(self, is_met: Any, requirement: str) -> None:
        """Raise a UserError that states a requirement, unless the requirement is met.

        Parameters
        ----------
        is_met : bool
            Whether the requirement is met.
        requirement : str
            The requirement in words.
        """
        if not is_met:
            raise UserError(f"{self.form} cost: {requirement}")

    def to_dict(self) -> dict[str, Any]:
        """Return the name of the form and its fields as JSON-ready values.

        Fields that are None are left out. `from_dict` reads the result.
        """
        description: dict[str, Any] = {"form": self.form}
        for name in described_fields(type(self)):
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            if value is not None:
                # `KEYS` has the fields whose key differs from their name.
                description[KEYS.get(name, name)] = value
        return description


KEYS = {"workers": "ranks"}
"""Keys of JSON descriptions that differ from the names of fields.

Options and tables count ranks. Descriptions of earlier versions have the name of the field.
"""
_FIELD_OF_KEY = {key: name for name, key in KEYS.items()}

F = TypeVar("F", bound=Form)


def _is_number(value: Any) -> bool:
    """Return whether a value, which may come from a file, is a single number.

    True and False are no numbers here, although Python counts them as integers.
    """
    is_number = isinstance(value, (int, float, np.number))
    return is_number and not isinstance(value, bool)


def described_fields(kind: type[Form]) -> tuple[str, ...]:
    """Return the names of the fields that a form's JSON description has.

    These are all fields but `MessageCost.samples`, which describes how the cost was
    measured, and not the cost.
    """
    return tuple(each.name for each in fields(kind) if each.name != "samples")


@cache
def parameters(kind: type[Form]) -> dict[str, Any]:
    """Return the annotation of each parameter of a form, by the name of the parameter.

    An annotation is text, such as "float". Keyword-only fields are no parameters: they
    state for which messages a cost holds.
    """
    return {each.name: each.type for each in fields(kind) if not each.kw_only}


def unknown_form(name: Any, forms: Collection[str]) -> UserError:
    """Return the error that says what to use in place of an unknown form.

    Parameters
    ----------
    name : str
        The name, or any other value that a file has in its place.
    forms : collection of str
        All names that are known.

    Returns
    -------
    UserError
        For a form of an earlier version, the error names the form that replaces it.
    """
    if isinstance(name, str) and name in REPLACED:
        return UserError(
            f"cost form {name!r} is no more: use {REPLACED[name]}, and fit again"
        )
    return UserError(f"unknown cost form {shown(name)}: use one of {', '.join(forms)}")


def from_dict(
    description: Any,
    forms: Mapping[str, type[F]],
    advice: str = "write it by ddlkit fit --json",
) -> F:
    """Return the cost that `Form.to_dict` described.

    Parameters
    ----------
    description : dict
        The description. Its entry "fit" is ignored.
    forms : mapping of str to type
        The class of each form.
    advice : str, optional
        What the user should do if the description names no form, or has missing or unknown
        fields. The error then ends in it.

    Returns
    -------
    Form
        The cost, an instance of one of the classes of ``forms``.

    Raises
    ------
    UserError
        If this is not the description of a cost.
    """
    # A file may have any value in the place of a cost.
    if not isinstance(description, dict) or "form" not in description:
        raise UserError(f"is not a cost, since it names no form: {advice}")
    form = description["form"]
    # A file may have any value here, also one that cannot be looked up in a mapping.
    if not isinstance(form, str) or form not in forms:
        raise unknown_form(form, forms)
    kind = forms[form]
    values = _values_by_field(kind, description)
    _refuse_wrong_fields(kind, names=set(values), advice=advice)
    try:
        return kind(**values)
    except (TypeError, ValueError, OverflowError) as error:
        # A file can have a value of any type for a field. The text of such an error is about
        # Python, and not about the file.
        raise UserError(
            f"{kind.form} cost: a value is not of the type that it should have: {advice}"
        ) from error


def _values_by_field(
    kind: type[Form], description: Mapping[Any, Any]
) -> dict[str, Any]:
    """Return the values that a description of a form states, by the name of the field.

    The entries "form" and "fit" are no fields. The field ``workers`` has the key "ranks" now,
    and had the key "workers" in earlier versions (`KEYS`). Raises UserError if a description
    has both.
    """
    values: dict[str, Any] = {}
    for key, value in description.items():
        if key in ("form", "fit"):
            continue
        name = _FIELD_OF_KEY.get(str(key), str(key))
        if name in values:
            raise UserError(
                f"a cost of the form {kind.form} states {key} twice, under the present "
                "and an earlier name: leave one out"
            )
        values[name] = value
    return values


def _refuse_wrong_fields(kind: type[Form], names: set[str], advice: str) -> None:
    """Raise UserError unless fields of these names suffice to make a cost of a form.

    Parameters must be there. All other fields, such as the number of workers, may be left
    out. The error ends in ``advice``.
    """
    missing = set(parameters(kind)) - names
    unknown = names - set(described_fields(kind))
    problems = []
    if missing:
        problems.append(f"lacks {', '.join(sorted(missing))}")
    if unknown:
        problems.append(f"has the unknown parameters {', '.join(sorted(unknown))}")
    if problems:
        raise UserError(
            f"a cost of the form {kind.form} {' and '.join(problems)}: {advice}"
        )


# -- costs of messages -------------------------------------------------------------


class NegativeCostError(UserError):
    """A cost that is negative at the size of some message.

    Parameters
    ----------
    what : str
        What takes the time that is negative, as in "a message".
    n_bytes : float
        The size of the message.
    """

    def __init__(self, what: str, n_bytes: float) -> None:
        super().__init__(
            f"the cost of {what} of {n_bytes:.0f} bytes is negative: measure messages of about "
            "this size, too, and fit again"
        )


class Samples(NamedTuple):
    """How many back-to-back messages each measured time averages.

    Attributes
    ----------
    bytes : ndarray, shape (s,)
        Sizes of the measured collectives, increasing.
    messages : ndarray, shape (s,)
        The number of back-to-back messages that a time of each size averages.
    """

    bytes: Floats
    messages: Floats


FORMS: dict[str, type[MessageCost]] = {}
"""Every form of a message cost by its name. A class enters when it is defined."""


@dataclass(frozen=True, eq=False)
class MessageCost(Form):
    """The time of one collective as a function of its size.

    A cost is called with sizes in bytes.

    Parameters
    ----------
    collective : str, optional
        The name of the collective.
    workers : int, optional
        Between how many ranks the cost holds, None if that is not known.
    algorithm : str, optional
        How the collective is carried out, as "ring", None if that is not known.
    samples : Samples, optional
        How many back-to-back messages each measured time averages, by size. By default
        every message was measured alone.

    Raises
    ------
    UserError
        If a field has a value that makes no sense.

    Examples
    --------
    >>> AlphaBeta(alpha_s=0.5, beta_s_per_byte=1e-6)(4_000_000)
    4.5
    """

    collective: str = field(default="all_reduce", kw_only=True)
    workers: int | None = field(default=None, kw_only=True)
    algorithm: str | None = field(default=None, kw_only=True)
    samples: Samples | None = field(default=None, kw_only=True)

    def __init_subclass__(cls, *, described: bool = True) -> None:
        """Register a subclass in FORMS, if its costs can be described as JSON.

        Forms with ``described=False``, which have other costs as parameters, cannot be
        read from a file.
        """
        if described:
            FORMS[cls.form] = cls

    def __post_init__(self) -> None:
        super().__post_init__()
        workers = self.workers
        if workers is not None:
            # True and False are integers to Python, and no numbers of workers.
            is_integer = isinstance(workers, (int, np.integer))
            is_integer = is_integer and not isinstance(workers, bool)
            if not (is_integer and 1 <= workers <= MOST_WORKERS):
                # `check` is not used here, because it takes the text of the error as an
                # argument. To make this text for every valid value would take longer than
                # the rest of the check.
                raise UserError(
                    f"{self.form} cost: the number of ranks is {shown(workers)}: must be a "
                    f"whole number from 1 to {MOST_WORKERS}"
                )
        # An unknown algorithm is None. It passes the check as an empty name.
        names = (("collective", self.collective), ("algorithm", self.algorithm or ""))
        for name, value in names:
            if not isinstance(value, str):
                raise UserError(
                    f"{self.form} cost: {name} is {shown(value)}: must be a name"
                )

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return the time of messages.

        Parameters
        ----------
        n_bytes : array_like
            Sizes of any shape.

        Returns
        -------
        float or ndarray
            Seconds, a float for a single size.
        """
        # A single number is by far the most frequent argument. To make it an array first
        # would take three times as long.
        if isinstance(n_bytes, (int, float)):
            return float(self._seconds(np.float64(n_bytes)))
        sizes = np.asarray(n_bytes, dtype=float)
        seconds = self._seconds(sizes)
        return float(seconds) if sizes.ndim == 0 else seconds

    @abstractmethod
    def _seconds(self, sizes: Any) -> Any:
        """Return seconds for sizes, a NumPy number or an array of any shape."""

    @property
    def selects(self) -> bool:
        """Return whether gradients are selected first, which takes compute time."""
        # Only the cost of sparsified gradients, a subclass in another module, has the
        # field ``selecting``: the time to select, or None if that is not known.
        return getattr(self, "selecting", None) is not None

    def selection_s(self, n_bytes: ArrayLike) -> Floats:
        """Return the compute time of selecting gradients: zero, if none are selected."""
        return np.zeros(np.shape(n_bytes))

    def sent_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the total size of the collectives that send a message.

        ``n_bytes`` are sizes of gradients of any shape, and the result has this shape.
        Dense gradients are sent whole, by a single collective.
        """
        return np.asarray(n_bytes, dtype=float)

    def collective_bytes(self, n_bytes: ArrayLike) -> Floats:
        """Return the size of each collective that sends a message.

        ``n_bytes`` are sizes of gradients of any shape, and the result has this shape.
        """
        return self.sent_bytes(n_bytes)

    def startup_s(self) -> float:
        """Return the time of a message of one byte, in seconds.

        For some fitted lines this is negative.
        """
        return self._one_byte_s

    @cached_property
    def _one_byte_s(self) -> float:
        """Return the time of a message of one byte, which is asked for again and again."""
        return float(self(1.0))

    def messages_per_sample(self, n_bytes: ArrayLike) -> Floats:
        """Return how many back-to-back messages each measured time averages.

        ``n_bytes`` are sizes of messages of any shape, and the result has this shape.
        """
        # Look up the bytes that are sent, because the sizes in ``samples`` are those of
        # measured collectives. A sparsified message sends fewer bytes than its gradients
        # have.
        sent_bytes = self.sent_bytes(n_bytes)
        if self.samples is None:
            # Every message was measured alone.
            return np.ones_like(sent_bytes)
        # Between two measured sizes, the number of messages is interpolated linearly in
        # the logarithm of the size. Outside, the number of the nearest size holds.
        measured_bytes, messages = self.samples
        return np.interp(np.log(sent_bytes), np.log(measured_bytes), messages)

    def by_algorithm(self, algorithm: str) -> MessageCost:
        """Return the same cost with ``algorithm``, such as "ring", as its algorithm."""
        return replace(self, algorithm=algorithm)

    def with_workers(self, workers: int | None) -> MessageCost:
        """Return the same cost, stated to hold between ``workers`` workers."""
        return replace(self, workers=workers)

    def at_workers(self, workers: int) -> MessageCost:
        """Return the cost of a ring between ``workers`` workers, computed from this cost.

        Parameters
        ----------
        workers : int
            The number of workers for which a cost is wanted, at least 2.

        Returns
        -------
        MessageCost
            This cost with another start-up time and another time of a byte.

        Raises
        ------
        UserError
            If the cost is not an `AlphaBeta` with the algorithm "ring" and its workers,
            or if the collective is unknown.

        Notes
        -----
        The start-up grows with the steps of the ring, and the time of a byte with the
        bytes that each link carries. An all-reduce between n workers has 2(n-1) steps,
        and each link carries 2(n-1)/n of the bytes.

        Examples
        --------
        >>> two = AlphaBeta(2.0, 0.5, workers=2, algorithm="ring")
        >>> four = two.at_workers(4)
        >>> four.alpha_s, four.beta_s_per_byte
        (6.0, 0.75)
        """
        is_line_of_ring = isinstance(self, AlphaBeta) and self.algorithm == "ring"
        if not is_line_of_ring or self.workers is None:
            raise UserError(
                f"a cost of the form {self.form} with {self.workers or 'unknown'} workers "
                f"and algorithm {self.algorithm or 'unknown'} holds for no other number "
                "of workers: only an alpha_beta cost of algorithm 'ring' can be taken there"
            )
        assert isinstance(self, AlphaBeta)  # for the type checker
        self.check(min(workers, self.workers) >= 2, "a ring has at least 2 workers")
        ring = find_collective(self.collective)
        # The start-up time is the time of all steps, each of which takes the same time.
        steps_ratio = ring.steps(workers) / ring.steps(self.workers)
        # The time of a byte is proportional to the share of the message that each link
        # carries. A ring cuts the message into pieces of equal size, so this share is the
        # number of pieces that the link carries, divided by the number of all pieces. The old
        # time of a byte is multiplied by the new share, and divided by the old share.
        sent_ratio = ring.pieces_sent(workers) / ring.pieces_sent(self.workers)
        old_pieces = ring.pieces(self.workers)
        new_pieces = ring.pieces(workers)
        beta = self.beta_s_per_byte * sent_ratio * old_pieces / new_pieces
        return replace(
            self,
            alpha_s=self.alpha_s * steps_ratio,
            beta_s_per_byte=beta,
            workers=workers,
        )


@dataclass(frozen=True, eq=False)
class AlphaBeta(MessageCost):
    """A straight line: t = alpha + beta * bytes.

    Parameters
    ----------
    alpha_s : float
        The start-up time in seconds.
    beta_s_per_byte : float
        The time of a byte in seconds.
    """

    form: ClassVar[str] = "alpha_beta"
    alpha_s: float
    beta_s_per_byte: float

    def _seconds(self, sizes: Floats) -> Floats:
        return self.alpha_s + self.beta_s_per_byte * sizes


@dataclass(frozen=True, eq=False)
class Table(MessageCost):
    """Measured times, interpolated in the logarithms of size and time.

    A message below the first size takes the time of the first size. Beyond the last
    size the time grows along the line through the last two sizes, but never falls.

    Parameters
    ----------
    bytes : ndarray, shape (k,)
        At least two sizes, increasing.
    seconds : ndarray, shape (k,)
        The time at each size.

    Raises
    ------
    UserError
        If sizes do not increase from above zero, if a time is not above zero, or if
        lengths differ.

    Examples
    --------
    >>> table = Table(bytes=np.array([1e3, 1e5]), seconds=np.array([0.1, 10.0]))
    >>> round(table(1e4), 6)
    1.0
    """

    form: ClassVar[str] = "table"
    bytes: Floats
    seconds: Floats

    def __post_init__(self) -> None:
        super().__post_init__()
        # A file may have a single number in the place of a list. It counts as a list of
        # one number, and fewer than two sizes are refused below.
        sizes = np.atleast_1d(self.bytes)
        seconds = np.atleast_1d(self.seconds)
        # `Form` has checked above that all numbers are finite.
        self.check(
            sizes.ndim == 1 and sizes.shape == seconds.shape,
            "bytes and seconds must be lists of equal length, but have the shapes "
            f"{sizes.shape} and {seconds.shape}",
        )
        # Sizes that increase from one above zero are all above zero.
        increase = (sizes[1:] > sizes[:-1]).all()
        self.check(
            sizes.size >= 2 and sizes[0] > 0 and increase,
            "bytes must be at least 2 sizes, above zero and increasing",
        )
        self.check((seconds > 0).all(), "every time in seconds must be above zero")

    @cached_property
    def _logs(self) -> tuple[Floats, Floats]:
        """Return the logarithms of bytes and of seconds.

        They are kept, because a table is often called with one size at a time.
        """
        return np.log(self.bytes), np.log(self.seconds)

    @cached_property
    def _s_per_byte_beyond(self) -> float:
        """Return seconds per byte beyond the last size: the slope between the last two sizes.

        Measured times may fall from one size to the next. Extrapolated times never do, so
        a negative slope counts as 0.
        """
        last_s_per_byte = (self.seconds[-1] - self.seconds[-2]) / (
            self.bytes[-1] - self.bytes[-2]
        )
        return max(float(last_s_per_byte), 0.0)

    def _seconds(self, sizes: Floats) -> Floats:
        log_bytes, log_seconds = self._logs
        # A size below the first one is raised to it, so that no logarithm of 0 occurs.
        # Beyond the last size `np.interp` returns the last time, and the time of the bytes
        # beyond that size is added below.
        log_sizes = np.log(np.maximum(sizes, self.bytes[0]))
        inside_s = np.exp(np.interp(log_sizes, log_bytes, log_seconds))
        beyond_bytes = np.maximum(sizes - self.bytes[-1], 0.0)
        return inside_s + self._s_per_byte_beyond * beyond_bytes

    def startup_s(self) -> float:
        """Return the start-up time of a message, in seconds.

        If the first size is at most SMALL_BYTES, its time is the start-up time. A good
        part of the time of a larger first size is due to its bytes. The start-up time
        is then extrapolated to 0 bytes along the line through the first two sizes, and
        is never below 0.
        """
        if self.bytes[0] <= SMALL_BYTES:
            # A message of one byte, below the first size, takes the time of that size.
            return super().startup_s()
        first_s_per_byte = (self.seconds[1] - self.seconds[0]) / (
            self.bytes[1] - self.bytes[0]
        )
        # Measured times may fall from one size to the next, but extrapolated ones never do.
        startup_s = self.seconds[0] - max(first_s_per_byte, 0.0) * self.bytes[0]
        return float(max(0.0, startup_s))


@dataclass(frozen=True, eq=False)
class Chords(Table):
    """Measured times, interpolated in the size itself and not in logarithms.

    The parameters, the attributes and the extrapolation are those of `Table`.

    Examples
    --------
    >>> Chords(bytes=np.array([1.0, 3.0]), seconds=np.array([10.0, 20.0]))(2)
    15.0
    """

    form: ClassVar[str] = "chords"

    def _seconds(self, sizes: Floats) -> Floats:
        # Below the first size, `np.interp` returns the time of the first size. Beyond the
        # last size the extrapolation of `Table` is used.
        inside_s = np.interp(sizes, self.bytes, self.seconds)
        return np.where(sizes > self.bytes[-1], super()._seconds(sizes), inside_s)


@dataclass(frozen=True, eq=False)
class Piecewise(MessageCost):
    """Logarithmic in the size below a threshold, and linear from there on (osf Eq 18).

    The fields are D_Thresh, a1, b1, a2 and b2 of the paper, in this order:

        t = a1 log2(bytes) + b1    below D_Thresh
        t = a2 bytes + b2          from D_Thresh on

    Parameters
    ----------
    threshold_bytes : float
        The size from which the time is linear.
    log_slope_s : float
        The seconds that each doubling of a size below the threshold adds.
    log_intercept_s : float
        The time of one byte by the logarithmic piece, in seconds.
    slope_s_per_byte : float
        The seconds that each byte adds from the threshold on.
    intercept_s : float
        The time of no bytes by the linear piece, in seconds.
    """

    form: ClassVar[str] = "piecewise"
    threshold_bytes: float
    log_slope_s: float
    log_intercept_s: float
    slope_s_per_byte: float
    intercept_s: float

    def _seconds(self, sizes: Floats) -> Floats:
        # The logarithm of 0 bytes would be minus infinity.
        log2_bytes = np.log2(np.maximum(sizes, 1.0))
        small_s = self.log_slope_s * log2_bytes + self.log_intercept_s
        large_s = self.slope_s_per_byte * sizes + self.intercept_s
        return np.where(sizes < self.threshold_bytes, small_s, large_s)


@dataclass(frozen=True, eq=False)
class Segments(MessageCost):
    """Several straight pieces, which need not join.

    Parameters
    ----------
    breaks_bytes : ndarray, shape (k-1,)
        The first size of each piece but the first one, increasing.
    alpha_s : ndarray, shape (k,)
        The start-up time of each piece, in seconds.
    beta_s_per_byte : ndarray, shape (k,)
        The time of a byte in each piece, in seconds.

    Raises
    ------
    UserError
        If the numbers of values do not fit, or if breaks do not increase.
    """

    form: ClassVar[str] = "segments"
    breaks_bytes: Floats
    alpha_s: Floats
    beta_s_per_byte: Floats

    def __post_init__(self) -> None:
        super().__post_init__()
        # A file may have a single number in the place of a list of one number.
        for name in ("breaks_bytes", "alpha_s", "beta_s_per_byte"):
            # The class is frozen, so the attribute cannot be assigned.
            object.__setattr__(self, name, np.atleast_1d(getattr(self, name)))
        breaks = self.breaks_bytes
        alpha_s = self.alpha_s
        beta = self.beta_s_per_byte
        fits_together = alpha_s.shape == beta.shape == (breaks.size + 1,)
        self.check(
            fits_together and np.all(np.diff(breaks) > 0),
            f"{breaks.size} breaks_bytes, {alpha_s.size} alpha_s and {beta.size} "
            "beta_s_per_byte: k pieces need k-1 breaks_bytes, which increase, and k "
            "values of each of the others",
        )

    def _seconds(self, sizes: Floats) -> Floats:
        # The piece of a size has the number of breaks up to this size. By "right", a size
        # that equals a break belongs to the piece that begins there.
        piece = np.searchsorted(self.breaks_bytes, sizes, side="right")
        return self.alpha_s[piece] + self.beta_s_per_byte[piece] * sizes


# -- draws: how sure a cost is -----------------------------------------------------

DRAWS = 200
"""How many draws of a cost ``ddlkit fit`` writes."""
MOST_DRAWS = 10_000
"""The most draws of a cost that are read from a file."""
ERRORS_IN_MEAN = 10
"""How many errors count in the mean error near a size.

With this number the half-width of 95% of the draws is below three times the error, as a
median over fourteen dense tables (rules vidur-*), and 87% of their rows lie in the
interval.
"""


@dataclass(frozen=True, eq=False)
class HeldOut(Form):
    """How far a cost is off near each size, as errors at held-out sizes show.

    An error is the absolute logarithm of the measured time divided by the predicted one.

    Parameters
    ----------
    at_bytes : ndarray, shape (k,)
        Sizes, increasing, from the first to the last one of the fit.
    normalized_log_errors : ndarray, shape (k,)
        The mean error near each size. For a table it is divided by g ** ``gap_power``. Here g
        is the gap that the size leaves when it is held out: the logarithm of the ratio of
        its two neighbours among the measured sizes.
    growth_below, growth_above : float
        How much the error grows from the smallest size of the fit to a size that is
        smaller by the factor e, and from the largest size to one that is larger by e.
    gap_power : float
        The power with which the errors of a table grow with the gap between two measured
        sizes. It is 0 for all other costs, whose errors do not depend on gaps.

    Raises
    ------
    UserError
        If sizes do not increase, if there is not one error for each, or if an error, a
        growth or the power is negative.
    """

    form: ClassVar[str] = "held_out"
    at_bytes: Floats
    normalized_log_errors: Floats
    growth_below: float
    growth_above: float
    gap_power: float

    def __post_init__(self) -> None:
        # This refuses what is no finite number.
        super().__post_init__()
        # A file may have a single number in the place of a list of one number.
        sizes = np.atleast_1d(self.at_bytes)
        errors = np.atleast_1d(self.normalized_log_errors)
        # There are two sizes at least, because the first and the last size of a fit differ.
        # Sizes that increase from 0 on are all above zero.
        increase = sizes.size >= 2 and np.all(np.diff(sizes, prepend=0.0) > 0)
        self.check(
            increase and sizes.shape == errors.shape,
            "at_bytes must increase, and there must be an error for each size",
        )
        # None of these numbers may be negative. The text names the errors for all of them.
        least_value = min(
            errors.min(), self.growth_below, self.growth_above, self.gap_power
        )
        self.check(least_value >= 0, "errors must not be below zero")

    def log_error(self, sizes: ArrayLike, cost: MessageCost) -> Floats:
        """Return the mean error of a cost at given sizes.

        Parameters
        ----------
        sizes : array_like
            Sizes of any shape, in bytes.
        cost : MessageCost
            The fitted cost. The sizes of a table decide how wide the gaps are.

        Returns
        -------
        ndarray
            Mean absolute logarithms of the measured time divided by the predicted one, in the
            shape of ``sizes``.
        """
        # The logarithm of 0 bytes would be minus infinity.
        log_bytes = np.log(np.maximum(sizes, 1.0))
        fitted_log_bytes = np.log(self.at_bytes)
        # Outside the fitted sizes `np.interp` returns the error at the nearest one.
        error = np.interp(log_bytes, fitted_log_bytes, self.normalized_log_errors)
        # A table is interpolated, and errs more in a wide gap between measured sizes (see `gap`).
        # Before an error was stored, it was divided by gap**gap_power, for the gap that its size
        # left when it was held out. Here it is multiplied by gap**gap_power, for the gap around
        # each of ``sizes``. Errors of other costs do not depend on gaps, and were stored as they
        # are.
        if self.gap_power and isinstance(cost, Table):
            error = error * gap(cost.bytes, sizes) ** self.gap_power
        # How far each size lies outside the fitted ones, 0 for a size within them.
        log_below = np.maximum(fitted_log_bytes[0] - log_bytes, 0.0)
        log_above = np.maximum(log_bytes - fitted_log_bytes[-1], 0.0)
        growth = self.growth_below * log_below + self.growth_above * log_above
        return np.asarray(error + growth)

    def draws(self, cost: MessageCost, count: int) -> tuple[MessageCost, ...]:
        """Return draws of a cost: costs that are off by multiples of its expected error.

        The multiples are quantiles of the distribution of errors, evenly spaced in
        probability. Draws are too fast and too slow by turns.

        Parameters
        ----------
        cost : MessageCost
            The fitted cost.
        count : int
            How many draws to return.

        Returns
        -------
        tuple of MessageCost, length count
            The draws, which differ from ``cost`` more and more.
        """
        # Draws 0 and 1 are a pair, and so are draws 2 and 3, and so on. The first draw of a
        # pair is too fast, and the second one is too slow. Both have the same probability.
        # With k pairs, the probabilities are the centres of k equal parts of the range from 0
        # to 1. If the count is odd, the last pair lacks its second draw.
        numbers = np.arange(count)
        # If no draw is wanted, there is no pair, and 1 avoids a division by 0.
        n_pairs = max((count + 1) // 2, 1)
        pair_of_draw = numbers // 2
        probabilities = (pair_of_draw + 0.5) / n_pairs
        ratios = _error_ratios(probabilities)
        is_too_slow = numbers % 2 == 1
        signed_ratios = np.where(is_too_slow, ratios, -ratios)
        return tuple(
            _DrawnCost(
                cost=cost,
                held_out=self,
                ratio=float(ratio),
                collective=cost.collective,
                workers=cost.workers,
                algorithm=cost.algorithm,
                samples=cost.samples,
            )
            for ratio in signed_ratios
        )


def _error_ratios(probabilities: Floats) -> Floats:
    """Return the quantiles of the ratio of a new error to the mean of known errors.

    Parameters
    ----------
    probabilities : ndarray, shape (k,)
        Probabilities from 0 on and below 1.

    Returns
    -------
    ndarray, shape (k,)
        The ratios below which a new error stays with these probabilities.

    Notes
    -----
    Errors are taken to follow an exponential distribution, whose mean is estimated from
    n = ERRORS_IN_MEAN errors. The estimate is uncertain, so the ratio of a new error to
    the estimated mean has a heavier tail than an exponential distribution. Its predictive
    distribution is a Lomax distribution:

        P(ratio > x) = (1 + x / n) ** -n.
    """
    # From 1 - p = (1 + x / n) ** -n follows x = n ((1 - p) ** (-1 / n) - 1). The functions
    # expm1 and log1p keep the digits of small ratios.
    return ERRORS_IN_MEAN * np.expm1(-np.log1p(-probabilities) / ERRORS_IN_MEAN)


@dataclass(frozen=True, eq=False)
class _DrawnCost(MessageCost, described=False):
    """A draw: a fitted cost that is made wrong by a multiple of its expected error.

    Attributes
    ----------
    cost : MessageCost
        The fitted cost.
    held_out : HeldOut
        The expected error of ``cost`` near each size.
    ratio : float
        The multiple. A draw with a positive ratio is too slow, and a draw with a
        negative one is too fast.
    """

    form: ClassVar[str] = "drawn"
    cost: MessageCost
    held_out: HeldOut
    ratio: float

    def __post_init__(self) -> None:
        """Check nothing, since all fields come from a cost that was checked."""

    def _seconds(self, sizes: Floats) -> Floats:
        # Errors are logarithms of the measured time divided by the predicted one.
        log_error = self.ratio * self.held_out.log_error(sizes, self.cost)
        return np.asarray(self.cost(sizes) * np.exp(log_error))

    def by_algorithm(self, algorithm: str) -> MessageCost:
        """Return the draw, and the cost in it, with ``algorithm`` as the algorithm."""
        fitted = self.cost.by_algorithm(algorithm)
        return replace(self, cost=fitted, algorithm=algorithm)

    def with_workers(self, workers: int | None) -> MessageCost:
        """Return the draw, and the cost in it, stated to hold between ``workers`` workers."""
        return replace(self, cost=self.cost.with_workers(workers), workers=workers)

    def at_workers(self, workers: int) -> MessageCost:
        """Return the draw between ``workers`` workers, which has the same ratio."""
        return replace(self, cost=self.cost.at_workers(workers), workers=workers)

    def startup_s(self) -> float:
        """Return the start-up time, off by ``ratio`` times the error at the first size.

        The error at 0 bytes would be too large. It grows below the first size because
        nothing was measured there, and not because the start-up is less certain.
        """
        first_bytes = self.held_out.at_bytes[0]
        log_error = self.held_out.log_error(first_bytes, self.cost)
        return self.cost.startup_s() * float(np.exp(self.ratio * log_error))


def gap(measured: Floats, sizes: ArrayLike) -> Floats:
    """Return how far apart the two measured sizes around each size are.

    Parameters
    ----------
    measured : ndarray, shape (k,)
        Measured sizes, increasing.
    sizes : array_like
        Sizes of any shape. For a size outside all measured ones, the two nearest
        measured sizes are taken.

    Returns
    -------
    ndarray
        For each size, the logarithm of the ratio of the measured size above it to the measured
        size below it, in the shape of ``sizes``.

    Examples
    --------
    >>> gap(np.array([1.0, 2.0, 16.0]), [1.5, 3.0]).round(3).tolist()
    [0.693, 2.079]
    """
    # The index of the first measured size that is at least as large. The clip leaves a
    # measured size on either side, also for sizes outside all measured ones.
    above = np.clip(np.searchsorted(measured, sizes), 1, measured.size - 1)
    return np.asarray(np.log(measured[above] / measured[above - 1]))


def costs_from_dict(
    description: dict[str, Any],
) -> tuple[MessageCost, list[MessageCost]]:
    """Return the cost that ``ddlkit fit`` wrote, and its draws.

    Draws are written in one of two ways. If they follow from errors at held-out sizes,
    those errors are written, and the draws are made anew. Otherwise each draw is
    written by the parameters in which it differs from the cost.

    Parameters
    ----------
    description : dict
        A cost as `ddlkit.core.fit.Fit.to_dict` describes it, or as written by hand.

    Returns
    -------
    cost : MessageCost
        The cost.
    draws : list of MessageCost
        Up to MOST_DRAWS draws. A cost that was written by hand has none.

    Raises
    ------
    UserError
        If the cost or its draws cannot be read.
    """
    cost = from_dict(description, FORMS)
    summary = description.get("fit", {})
    if not isinstance(summary, dict):
        raise UserError(
            f"the cost's fit is {shown(summary)}: write what ddlkit fit does, or none"
        )
    try:
        if summary.get("held_out"):
            return cost, _draws_of_held_out(cost, summary["held_out"])
        # Each draw is a dictionary of the parameters in which it differs from the cost.
        described_draws = summary.get("draws", [])[:MOST_DRAWS]
        return cost, [replace(cost, **changed) for changed in described_draws]
    except (AttributeError, KeyError, TypeError, ValueError, UserError) as error:
        # A file can have a value of any type in the place of draws, hence so many
        # exceptions. Only a UserError has a text about the file, and not about Python.
        reason = f": {error}" if isinstance(error, UserError) else ""
        raise UserError(
            f"the cost's draws are not what ddlkit fit writes: fit again{reason}"
        ) from error


def _draws_of_held_out(
    cost: MessageCost, description: Mapping[str, Any]
) -> list[MessageCost]:
    """Return the draws of a cost that are computed from errors at held-out sizes.

    ``description`` has the fields of a `HeldOut` and the number of draws ("draws"). If
    it lacks this number, there are DRAWS of them, and never more than MOST_DRAWS.
    """
    # All entries but "draws" are fields of the errors.
    held_out_fields = dict(description)
    count = min(int(held_out_fields.pop("draws", DRAWS)), MOST_DRAWS)
    # `from_dict` needs the name of the form, which a description may lack.
    with_form = {"form": HeldOut.form, **held_out_fields}
    held_out = from_dict(with_form, {HeldOut.form: HeldOut})
    return [*held_out.draws(cost, count)]
