"""Fit costs to measured times, with intervals, and choose a form by held-out errors.

Repeats of a size show how times scatter, but not whether the form of a cost follows
them. A size that is held out of a fit shows both: how far the cost that is fitted to
all other sizes is off there. Where sizes are measured often enough, the draws of a fit
are costs that are fitted to bootstrap samples. Where they are not, the draws are off by
errors like those of held-out sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core import units
from ddlkit.core.cost import (
    DRAWS,
    REPLACED,
    AlphaBeta,
    Chords,
    HeldOut,
    MessageCost,
    Samples,
    Table,
    parameters,
    unknown_form,
)
from ddlkit.core.errors import UserError, shown
from ddlkit.core.pieces import METHODS, VARIANTS, Fitter
from ddlkit.core.sparse import SelectionCost
from ddlkit.core.workload import Floats, Ints

C = TypeVar("C", MessageCost, SelectionCost)

MOST_ROWS = 100_000
"""The most rows of a fit, of which 200 bootstrap samples are in memory at once."""
MOST_SIZES = 2_000
"""The most distinct sizes of a fit."""
LEVEL = 0.95
"""The share of draws that an interval contains by default."""

# -- the automatic choice of a form ------------------------------------------------

AUTO = "auto"
"""The name that stands for the form with the least errors at held-out sizes."""
SIMPLE_FIRST = tuple(kind.form for kind in METHODS if issubclass(kind, MessageCost))
"""The names of all forms of a message cost, the simplest first."""
AS_GOOD = 1.1
"""A form is as good as the best one up to this multiple of the least error."""
NEGLIGIBLE = 1e-6
"""A difference of errors that is due to rounding."""
THROUGH_ALL = (Chords.form, Table.form)
"""The forms that pass through every size.

Between two sizes only these two neighbours decide the time.
"""
DISCOUNT_THROUGH_ALL = 0.25
"""The factor on held-out errors of the forms THROUGH_ALL when forms are compared.

Where a size is held out its neighbours are twice as far apart as they will be in the
fit. The error is four times as large as in the fit if times bend, and as large if times
only scatter. They bend in seven dense tables (`tuned` of the rules vidur-*) and in
twelve logs.
"""
MOST_SIZES_HELD_OUT = 24
"""The most sizes that are held out in turn, evenly spaced in their order."""

# -- errors that turn into draws ---------------------------------------------------

ENOUGH_REPEATS = 4
"""The least median number of repeats of a size for which bootstrap samples are drawn.

Samples of fewer repeats hardly differ.
"""
FAR = 4.0
"""How many times beyond the sizes of a fit the form is tried, at either end."""
GAP_POWER = 2.0
"""The power of the `gap` around a size with which errors of THROUGH_ALL grow."""
DECAY = 2.0
"""How fast the weight of an error falls with distance.

One mean step between sizes farther away, an error counts exp(-DECAY) times as much.
"""
SHARED = 0.5
"""The share of the expected error that is the same near every size.

With few errors neither those near a size nor the mean of all suffices alone.
"""
LEAST_ERROR = 1e-4
"""The least error of a held-out size, because smaller ones are chance."""
MEAN_OVER_GEOMETRIC = float(np.exp(np.euler_gamma))
"""The mean of an exponential distribution, divided by its geometric mean.

Errors are averaged by the geometric mean, which a single large error hardly moves. This
factor turns it into an estimate of the mean.
"""


def interval(draws: ArrayLike, level: float = LEVEL) -> Floats:
    """Return the interval that contains the middle draws, a share ``level`` of all.

    Parameters
    ----------
    draws : array_like, shape (B, ...)
        Draws of one or more values.
    level : float, optional
        The share of the draws that lie in the interval, strictly between 0 and 1.

    Returns
    -------
    ndarray, shape (2, ...)
        The lower and the upper end of the interval of each value.

    Raises
    ------
    UserError
        If the level is not between 0 and 1, or if there are no draws.

    Examples
    --------
    >>> interval([0, 1, 2, 3, 4], level=0.5).tolist()
    [1.0, 3.0]
    """
    _refuse_wrong_level(level)
    # What is left out at either end: 0.025 for a level of 0.95. Without rounding, the
    # result of the subtraction would differ from 0.025 in its last bit.
    tail = round((1 - level) / 2, 12)
    values = np.asarray(draws, dtype=float)
    if not values.size:
        raise UserError(
            "there are no draws, and so no interval: give at least one draw"
        )
    return np.asarray(np.quantile(values, [tail, 1 - tail], axis=0))


@cache
def _order_statistic(n: int, rarity: int | Fraction) -> int:
    """Return which of n sorted samples is a lower bound on the median of their distribution.

    The result is the largest k for which the k-th smallest sample exceeds this median with a
    probability of at most 1 / ``rarity``, or 0 if there is none. The k-th smallest sample
    exceeds the median if fewer than k samples lie below the median. Each sample lies below it
    with probability 1/2, so every subset of the samples is equally likely to be those below.
    The probability is therefore the number of subsets with fewer than k members, divided by
    2**n, the number of all subsets.

    For 6 samples and a rarity of 40, the result is 1. Of the 64 subsets, 1 has fewer than
    1 member, and 1/64 is at most 1/40. But 7 subsets have fewer than 2 members, and 7/64 is
    more than 1/40.
    """
    # The largest k that is known to be possible, and the numbers of subsets with exactly k
    # members and with at most k. Only integers and fractions are compared, which is exact.
    k = 0
    subsets_of_k = 1
    subsets_up_to_k = 1
    # k + 1 is possible, too, if the subsets with fewer than k + 1 members are few enough.
    # These are the subsets with at most k members.
    while rarity * subsets_up_to_k <= 2**n:
        # The binomial coefficient C(n, k + 1), computed from C(n, k).
        subsets_of_k = subsets_of_k * (n - k) // (k + 1)
        k += 1
        subsets_up_to_k += subsets_of_k
    return k


def _refuse_wrong_level(level: float) -> None:
    """Raise UserError if the level of an interval is not strictly between 0 and 1."""
    if not 0 < level < 1:
        raise UserError(
            f"level is {shown(level)}: must be above 0 and below 1, as 0.95"
        )


def median_interval(
    samples: Sequence[float] | Floats, level: float = LEVEL
) -> tuple[float, float]:
    """Return a confidence interval of the median that holds for any distribution.

    Parameters
    ----------
    samples : array_like, shape (n,)
        Independent samples.
    level : float, optional
        The least probability that the interval contains the median.

    Returns
    -------
    lower, upper : float
        The k-th smallest and the k-th largest sample, or minus and plus infinity for
        too few samples.

    Raises
    ------
    UserError
        If ``level`` does not lie strictly between 0 and 1.

    Notes
    -----
    Each sample lies below the median with probability 1/2. The k-th smallest sample
    exceeds the median if fewer than k samples lie below, so k is the largest number
    with P(Binomial(n, 1/2) < k) <= (1 - level) / 2.

    Examples
    --------
    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    """
    _refuse_wrong_level(level)
    # Each tail has the probability (1 - level) / 2, once in 40 for a level of 0.95. The
    # decimal number is made a fraction by way of its text, because the float is not
    # exactly 0.95.
    exact_level = Fraction(str(float(level)))
    k = _order_statistic(len(samples), rarity=2 / (1 - exact_level))
    if k == 0:
        return -np.inf, np.inf
    ordered = np.sort(samples)
    # The k-th smallest and the k-th largest sample, counted from 1.
    return float(ordered[k - 1]), float(ordered[-k])


# -- the fit -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Fit(Generic[C]):
    """A fitted cost, and how far to trust it.

    Attributes
    ----------
    cost : MessageCost or SelectionCost
        The fitted cost.
    draws : tuple of costs, length B
        Costs that show how uncertain ``cost`` is. They are fitted to bootstrap samples of the
        repeats of each size. If sizes have too few repeats, each draw is ``cost`` with errors
        like those of ``held_out``.
    sizes : ndarray, shape (n,)
        The sizes of the rows that were fitted: bytes of messages, or elements of
        selections.
    seconds : ndarray, shape (n,)
        The measured times of these rows.
    form : str
        The requested form, such as "piecewise:45KB". For "auto", the chosen form.
    held_out : HeldOut, optional
        The errors at held-out sizes, if sizes have fewer repeats than ENOUGH_REPEATS.
    held_out_error : float, optional
        The median absolute relative error at held-out sizes, if such errors were
        computed.
    why : str
        Why the form was chosen, for "auto".
    """

    cost: C
    draws: tuple[C, ...]
    sizes: Floats
    seconds: Floats
    form: str
    held_out: HeldOut | None = None
    held_out_error: float | None = None
    why: str = ""

    @property
    def relative_residuals(self) -> Floats:
        """Return (fitted - measured) / measured of each row, shape (n,)."""
        return np.asarray(self.cost(self.sizes) / self.seconds - 1)

    def interval(self, sizes: ArrayLike, level: float = LEVEL) -> tuple[Floats, Floats]:
        """Return the interval of the fitted time at given sizes.

        Parameters
        ----------
        sizes : array_like
            Sizes of any shape.
        level : float, optional
            The share of the draws that lie in the interval.

        Returns
        -------
        lower_s, upper_s : ndarray
            In seconds, in the shape of ``sizes``.

        Raises
        ------
        UserError
            If the fit has no draws.
        """
        if not self.draws:
            raise UserError(
                "this fit has no interval: ask for draws, and measure a size more than "
                "its form needs"
            )
        sizes = np.asarray(sizes, float)
        # This calls the function `interval` of this module.
        lower_s, upper_s = interval([draw(sizes) for draw in self.draws], level)
        return lower_s, upper_s

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as JSON-ready values, with the fit and its draws.

        `ddlkit.core.cost.costs_from_dict` reads them. Draws that follow from errors at
        held-out sizes are not listed: the entry "held_out" has these errors and the
        number of draws. Other draws are listed as "draws".
        """
        errors = np.abs(self.relative_residuals)
        # "from_bytes" and "to_bytes" are numbers of elements for a cost of selections.
        summary: dict[str, Any] = {
            "form": self.form,
            "rows": len(self.seconds),
            "median_abs_relative_error": float(np.median(errors)),
            "max_abs_relative_error": float(np.max(errors)),
            "from_bytes": float(self.sizes.min()),
            "to_bytes": float(self.sizes.max()),
        }
        if self.why:
            summary["why_this_form"] = self.why
        if self.held_out_error is not None:
            summary["median_abs_held_out_error"] = self.held_out_error
        if self.held_out:
            # These draws can be made again from the errors, so only their number is
            # written.
            described_errors = self.held_out.to_dict()
            # The form of `HeldOut` is "held_out", which the key says already.
            del described_errors["form"]
            summary["held_out"] = {"draws": len(self.draws), **described_errors}
        elif self.draws:
            summary["draws"] = self._described_draws()
        return {**self.cost.to_dict(), "fit": summary}

    def _described_draws(self) -> list[dict[str, Any]]:
        """Return the parameters of each draw, as JSON-ready values.

        What a draw has in common with the cost is left out: the form, what the cost holds for,
        and the sizes ("bytes") if the form is a `Table`.
        """
        names = [name for name in parameters(type(self.cost)) if name != "bytes"]
        described = []
        for draw in self.draws:
            values = draw.to_dict()
            described.append({name: values[name] for name in names})
        return described


def fit(
    form: str,
    sizes: ArrayLike,
    seconds: ArrayLike,
    draws: int = DRAWS,
    *,
    collective: str | None = None,
    workers: int | None = None,
    algorithm: str | None = None,
    samples: Samples | None = None,
    operation: str | None = None,
    device: str | None = None,
) -> Fit[Any]:
    """Fit a form of cost to raw samples.

    Parameters
    ----------
    form : str
        A form of `ddlkit.core.pieces.METHODS`, also with a variant, as in
        "piecewise:45KB" or "alpha_beta:ends". "auto" stands for the form of a message
        cost with the least errors at sizes that are held out of its fit.
    sizes : array_like, shape (n,)
        Bytes of messages, or elements of selections. Sizes may repeat.
    seconds : array_like, shape (n,)
        The measured time of each.
    draws : int, optional
        How many draws the fit has: costs that show how uncertain the fitted one is. With
        0 the fit has no interval and, unless ``form`` is "auto", no error at held-out sizes.
    collective, workers, algorithm, samples : optional
        What a cost of messages holds for, as `MessageCost` describes it. None leaves
        the default of `MessageCost`.
    operation, device : optional
        What a cost of selections holds for, as `SelectionCost` describes it.

    Returns
    -------
    Fit
        The cost that was fitted, its form, and its errors.

    Raises
    ------
    UserError
        If the form is unknown, or one of selections although a ``collective`` is given,
        if there are too few or too many sizes, if a size or a time is not above zero, or
        if ``draws`` is negative.

    Examples
    --------
    >>> line = fit("alpha_beta", [0.5e6, 1e6, 2e6], [0.75, 1.0, 1.5])
    >>> round(line.cost.alpha_s, 6), round(line.cost.beta_s_per_byte * 1e6, 6)
    (0.5, 0.5)
    """
    if draws < 0:
        raise UserError(f"draws is {draws}: must be 0 or more")
    sizes, seconds = _checked(sizes, seconds)
    why = ""
    # The errors of the form at held-out sizes, None until they are computed. They take long
    # to compute, so they are computed only if the choice of a form or the draws need them.
    errors_of_form: HeldOutErrors | None = None
    if form == AUTO:
        by_form = errors_by_form(SIMPLE_FIRST, sizes, seconds)
        form, why = chosen_because(by_form)
        # If no size could be held out, ``by_form`` is empty.
        errors_of_form = by_form.get(form, _NO_SIZE_HELD_OUT)

    # The class of the cost, the function that fits it, and how many sizes it needs.
    kind, fitter, least_sizes = _method(form)
    if collective is not None:
        _refuse_form_of_selections(kind, form)
    _refuse_too_few_sizes(sizes, form, least_sizes)

    # A cost of messages has the first four of these fields, and a cost of selections
    # the last two. Neither accepts the fields of the other, so those that are None are
    # not passed.
    holds_for = _without_none(
        collective=collective,
        workers=workers,
        algorithm=algorithm,
        samples=samples,
        operation=operation,
        device=device,
    )
    cost = kind(**fitter(sizes, seconds), **holds_for)

    # The draws say how uncertain the cost is.
    error_model = None
    drawn_costs: tuple[Any, ...] = ()
    if draws and not _draws_need_held_out_errors(kind, sizes):
        # Each draw is fitted to a bootstrap sample of the measured rows.
        resampled = _bootstrap(kind, fitter, sizes, seconds, draws)
        drawn_costs = tuple(kind(**values, **holds_for) for values in resampled)
    elif draws:
        # Sizes have too few repeats for bootstrap samples. Each draw is the cost with errors
        # such as those at held-out sizes, which the choice of a form may have computed.
        if errors_of_form is None:
            errors_of_form = held_out_errors(form, sizes, seconds)
        error_model = _error_model(form, sizes, seconds, errors_of_form)
        # If no size could be held out, there is no model, and the fit has no draws.
        if error_model is not None:
            drawn_costs = error_model.draws(cost, draws)

    return Fit(
        cost=cost,
        draws=drawn_costs,
        sizes=sizes,
        seconds=seconds,
        form=form,
        held_out=error_model,
        held_out_error=_median_error(errors_of_form),
        why=why,
    )


def _median_error(errors: HeldOutErrors | None) -> float | None:
    """Return the median absolute relative error at held-out sizes.

    The result is None if no errors were computed, or if no size could be held out.
    """
    if errors is None or not errors.sizes.size:
        return None
    return errors.median


def _refuse_form_of_selections(kind: type[Any], form: str) -> None:
    """Raise UserError if a form is one of selections, which no collective can have.

    A selection finds the largest elements of a tensor, which alone are then sent. Its cost
    is the time for that. ``kind`` is the class of the form.
    """
    if issubclass(kind, SelectionCost):
        raise UserError(
            f"cost form {form!r} is of selections: use {', '.join(SIMPLE_FIRST)}"
        )


def _refuse_too_few_sizes(sizes: Floats, form: str, least_sizes: int) -> None:
    """Raise UserError if there are fewer distinct sizes than the fit of a form needs."""
    n_sizes = np.unique(sizes).size
    if n_sizes < least_sizes:
        advice = "measure more sizes"
        possible = forms_for_sizes(n_sizes)
        # A selection has forms of its own.
        if possible and form in SIMPLE_FIRST:
            advice += f", or fit the form {' or '.join(possible)}"
        raise UserError(
            f"a cost of the form {form} needs at least {least_sizes} different sizes, but "
            f"these times have only {n_sizes}: {advice}"
        )


def forms_for_sizes(n_sizes: int) -> list[str]:
    """Return the forms that can be fitted to times of so many different sizes.

    Parameters
    ----------
    n_sizes : int
        The number of different sizes.

    Returns
    -------
    list of str
        Those of `SIMPLE_FIRST` that need no more sizes. There may be none.

    Examples
    --------
    >>> forms_for_sizes(1), forms_for_sizes(2)
    ([], ['chords', 'table'])
    """
    return [form for form in SIMPLE_FIRST if _method(form).least_sizes <= n_sizes]


def _without_none(**fields: Any) -> dict[str, Any]:
    """Return the keyword arguments that are not None, by name."""
    return {name: value for name, value in fields.items() if value is not None}


def _draws_need_held_out_errors(kind: type[Any], sizes: Floats) -> bool:
    """Return whether draws are made from errors at held-out sizes.

    If sizes were repeated often enough, draws are fits to bootstrap samples instead.
    Costs of selections have no errors at held-out sizes, so their draws are always fits
    to bootstrap samples. ``kind`` is the class of the cost.
    """
    _, repeats = np.unique(sizes, return_counts=True)
    few_repeats = np.median(repeats) < ENOUGH_REPEATS
    return bool(few_repeats) and issubclass(kind, MessageCost)


class _Method(NamedTuple):
    """How a form is fitted.

    Attributes
    ----------
    kind : type
        The class of the cost.
    fitter : Fitter
        Returns the parameters of a cost by name, from sizes and seconds.
    least_sizes : int
        How many distinct sizes a fit needs at least.
    """

    kind: type[Any]
    fitter: Fitter
    least_sizes: int


def _method(form: str) -> _Method:
    """Return how a form is fitted: its class, its fitter, and how many sizes it needs.

    ``form`` is a name, or a name and a variant, as in "piecewise:45KB". Raises UserError
    for an unknown form or variant.
    """
    known_forms = (*SIMPLE_FIRST, AUTO)
    # REPLACED has the forms of earlier versions. Some of their names contain a colon
    # ("segments:jump"), so they are looked up before the name is cut at its colon.
    if form in REPLACED:
        raise unknown_form(form, known_forms)
    name, colon, variant = form.partition(":")
    variant_refused = UserError(f"cost form {form!r}: write {name} alone")
    # "auto" has no variants. A bare "auto" is never passed to this function, because its
    # callers replace it by another form.
    if name == AUTO and colon:
        raise variant_refused
    kinds = {kind.form: kind for kind in METHODS}
    if name not in kinds:
        raise unknown_form(name, known_forms)
    kind = kinds[name]
    fitter, least_sizes = METHODS[kind]
    if not colon:
        return _Method(kind, fitter, least_sizes)
    # Some forms have no variants, and the variant must not be empty, as in "piecewise:".
    if kind not in VARIANTS or not variant:
        raise variant_refused
    fitter_of_variant = VARIANTS[kind](variant)
    return _Method(kind, fitter_of_variant, least_sizes)


def _checked(sizes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Return sizes and seconds as arrays of shape (n,), sorted by size.

    Raises UserError if lengths differ, if there are too many rows or distinct sizes, or
    if a value is not a number above zero.
    """
    sizes = np.asarray(sizes, dtype=float).ravel()
    seconds = np.asarray(seconds, dtype=float).ravel()
    if sizes.shape != seconds.shape:
        raise UserError(
            f"{sizes.size} sizes but {seconds.size} times: give one time for each size"
        )
    if sizes.size > MOST_ROWS or np.unique(sizes).size > MOST_SIZES:
        raise UserError(
            f"{sizes.size} sizes: a fit takes at most {MOST_ROWS} rows of {MOST_SIZES} "
            "sizes: leave some out"
        )
    _refuse_out_of_range(sizes, "size")
    _refuse_out_of_range(seconds, "time")
    order = np.argsort(sizes, kind="stable")
    return sizes[order], seconds[order]


def _refuse_out_of_range(column: Floats, name: str) -> None:
    """Raise UserError, which names the first wrong row, if a value is not above zero.

    Values that are too small or too large to be a size or a time are wrong, too, and so is
    NaN. ``name`` says what the values are: "size" or "time".
    """
    # NaN fails both comparisons.
    is_valid = (column >= units.LEAST) & (column <= units.MOST)
    wrong = np.flatnonzero(~is_valid)
    if wrong.size:
        raise UserError(
            f"row {wrong[0]}: {name} is {column[wrong[0]]:g}: must be finite and "
            f"above zero, from {units.LEAST:g} to {units.MOST:g}"
        )


def _bootstrap(
    kind: Callable[..., Any], fitter: Fitter, sizes: Floats, seconds: Floats, draws: int
) -> Iterator[dict[str, Any]]:
    """Yield the parameters that are fitted to each of ``draws`` bootstrap samples.

    A sample has as many rows of each size as were measured. These rows are drawn with
    replacement from the measured rows of the size.

    Parameters
    ----------
    kind : type
        The class of the cost.
    fitter : Fitter
        Returns the parameters from sizes and seconds.
    sizes, seconds : ndarray, shape (n,)
        The measured rows, sorted by size.
    draws : int
        The number of samples.

    Yields
    ------
    dict
        The parameters by name.
    """
    samples = _bootstrap_samples(sizes, draws)
    if kind not in (Table, Chords):
        for rows in samples:
            yield fitter(sizes, seconds[rows])
        return

    # The parameters of `Table` and `Chords` are the distinct sizes and their median times. It
    # is many times faster to compute the medians of all samples at once.
    distinct, first_rows = np.unique(sizes, return_index=True)
    # One row for each sample, and one column for each measured row. Rows are sorted by
    # size, so the columns of a size are neighbours, and begin at its first measured row.
    sampled_s = seconds[np.stack(samples)]
    times_by_size = np.split(sampled_s, first_rows[1:], axis=1)
    medians_by_size = [np.median(times_s, axis=1) for times_s in times_by_size]
    # Back to one row for each sample, with a column for each size.
    for medians_of_sample_s in np.column_stack(medians_by_size):
        yield {"bytes": distinct, "seconds": medians_of_sample_s}


def _bootstrap_samples(sizes: Floats, draws: int) -> list[Ints]:
    """Return bootstrap samples of measured rows, as indices of rows.

    Parameters
    ----------
    sizes : ndarray, shape (n,)
        The size of each row, sorted.
    draws : int
        The number of samples.

    Returns
    -------
    list of ndarray of int, length draws
        Each sample has n rows. Row i of a sample has the same size as the measured row i,
        and is drawn with replacement from the measured rows of this size.
    """
    # The seed is fixed, so that the same rows always have the same draws.
    rng = np.random.default_rng(0)
    _, first_rows, counts = np.unique(sizes, return_index=True, return_counts=True)
    # For each row: the first row of its size, and the number of rows of its size. The
    # rows of one size are consecutive, because sizes are sorted. So a row of a sample is
    # this first row plus a random number below the number of rows.
    first_of_row = np.repeat(first_rows, counts)
    count_of_row = np.repeat(counts, counts)
    return [first_of_row + rng.integers(0, count_of_row) for _ in range(draws)]


# -- errors at held-out sizes ------------------------------------------------------


class HeldOutErrors(NamedTuple):
    """The errors of a form at sizes, each of which was held out of a fit.

    Attributes
    ----------
    sizes : ndarray, shape (k,)
        The held-out sizes.
    errors : ndarray, shape (k,)
        (predicted - measured) / measured, where measured is the median time of the
        size.
    predicted_s : ndarray, shape (k,)
        The time that the fit to all other sizes predicts, in seconds.
    """

    sizes: Floats
    errors: Floats
    predicted_s: Floats

    @property
    def median(self) -> float:
        """Return the median absolute relative error."""
        return float(np.median(np.abs(self.errors)))


_NO_SIZE_HELD_OUT = HeldOutErrors(
    sizes=np.empty(0), errors=np.empty(0), predicted_s=np.empty(0)
)
"""The errors of any form if no size can be held out."""


def held_out_errors(form: str, sizes: ArrayLike, seconds: ArrayLike) -> HeldOutErrors:
    """Return how far a form is off at sizes that are held out of its fit, one at a time.

    For each size that is held out, the form is fitted anew to all other sizes.

    Parameters
    ----------
    form : str
        A form as `fit` takes it. For "auto", a form is chosen for each held-out size.
    sizes, seconds : array_like, shape (n,)
        Raw samples, as `fit` takes them.

    Returns
    -------
    HeldOutErrors
        Relative errors at up to MOST_SIZES_HELD_OUT sizes. An error is positive if the
        prediction is longer than the median of the measured times. The smallest and the
        largest size are never held out, because the form would extrapolate there. Sizes
        without which the form cannot be fitted are not held out either.

    Examples
    --------
    >>> errors = held_out_errors("alpha_beta", [1, 2, 3, 4], [2.0, 3.0, 6.0, 5.0])
    >>> errors.sizes.tolist(), errors.errors.round(2).tolist()
    ([2.0, 3.0], [0.09, -0.33])
    """
    sizes, seconds = _checked(sizes, seconds)
    held_out_sizes = []
    errors = []
    predictions_s = []
    for size in _sizes_to_hold_out(form, sizes):
        is_held_out = sizes == size
        try:
            fitted = fit(form, sizes[~is_held_out], seconds[~is_held_out], draws=0)
        except UserError:
            continue  # the form cannot be fitted without this size
        predicted_s = fitted.cost(size)
        measured_s = np.median(seconds[is_held_out])
        held_out_sizes.append(size)
        errors.append(predicted_s / measured_s - 1)
        predictions_s.append(predicted_s)
    return HeldOutErrors(
        sizes=np.array(held_out_sizes, float),
        errors=np.array(errors, float),
        predicted_s=np.array(predictions_s, float),
    )


def _sizes_to_hold_out(form: str, sizes: Floats) -> list[float]:
    """Return the sizes that are held out in turn, at most MOST_SIZES_HELD_OUT.

    The list is empty if too few of ``sizes`` would be left for a fit of ``form``.
    """
    distinct = np.unique(sizes)
    if distinct.size < least_sizes_to_hold_out(form):
        return []
    # At the smallest and at the largest size, the form would extrapolate.
    candidates = distinct[1:-1]
    # Evenly spaced positions from the first candidate to the last one.
    n_held_out = min(candidates.size, MOST_SIZES_HELD_OUT)
    positions = np.linspace(0, candidates.size - 1, n_held_out)
    return [float(size) for size in candidates[positions.round().astype(int)]]


def least_sizes_to_hold_out(form: str) -> int:
    """Return how many different sizes there must be for errors at held-out sizes.

    Parameters
    ----------
    form : str
        A form as `fit` takes it.

    Returns
    -------
    int
        The least number of sizes. One of them can be held out, and the form can be
        fitted to the others.

    Raises
    ------
    UserError
        If no form has this name.

    Examples
    --------
    >>> least_sizes_to_hold_out("alpha_beta"), least_sizes_to_hold_out("piecewise")
    (4, 6)
    """
    # "auto" chooses alpha_beta for few sizes, so it needs as many sizes as alpha_beta.
    form_of_fewest_sizes = AlphaBeta.form if form == AUTO else form
    least_sizes = _method(form_of_fewest_sizes).least_sizes
    # One size more than a fit of the form needs. Neither the smallest size nor the largest one
    # is held out, so there must be a third size in any case.
    return max(least_sizes + 1, 3)


def errors_by_form(
    forms: Sequence[str], sizes: ArrayLike, seconds: ArrayLike
) -> dict[str, HeldOutErrors]:
    """Return the errors of several forms at sizes that are held out of their fits.

    Parameters
    ----------
    forms : sequence of str
        Forms as `fit` takes them.
    sizes, seconds : array_like, shape (n,)
        Raw samples, as `fit` takes them.

    Returns
    -------
    dict of str to HeldOutErrors
        The errors of each form, in the order of ``forms``. A form is missing if no size
        could be held out, because the other sizes are too few to fit the form.
    """
    by_form = {}
    for form in forms:
        errors = held_out_errors(form, sizes, seconds)
        # Without a size that was held out, there is no error.
        if errors.sizes.size:
            by_form[form] = errors
    return by_form


def chosen_because(errors_of_form: Mapping[str, HeldOutErrors]) -> tuple[str, str]:
    """Return the form that "auto" chooses, and why.

    Parameters
    ----------
    errors_of_form : mapping of str to HeldOutErrors
        The errors of each form, the simplest form first.

    Returns
    -------
    form : str
        The simplest form whose median error is at most AS_GOOD times the least one. Before
        errors are compared, those of forms that pass through every size (THROUGH_ALL) are
        multiplied by DISCOUNT_THROUGH_ALL. If there are too few sizes to compare forms, it
        is "alpha_beta".
    why : str
        The reason, in one line.
    """
    # The straight line needs the fewest sizes. If even it has no errors at held-out sizes,
    # no other form has any.
    if AlphaBeta.form not in errors_of_form:
        return AlphaBeta.form, "too few sizes to leave one out and compare forms"
    medians = {form: errors.median for form, errors in errors_of_form.items()}
    # The error of a form that passes through every size is multiplied by a factor below 1.
    # Such a form errs more at held-out sizes than in the fit, where neighbouring sizes are
    # closer together.
    compared = dict(medians)
    for form in THROUGH_ALL:
        if form in compared:
            compared[form] *= DISCOUNT_THROUGH_ALL
    # The simplest form comes first, so the first form below the limit is the simplest.
    # Differences up to NEGLIGIBLE are due to rounding.
    limit = AS_GOOD * min(compared.values()) + NEGLIGIBLE
    chosen = next(form for form, error in compared.items() if error <= limit)
    return chosen, _why_chosen(chosen, medians, compared)


def _why_chosen(
    chosen: str, medians: Mapping[str, float], compared: Mapping[str, float]
) -> str:
    """Return why `chosen_because` has chosen a form, in one line.

    ``medians`` has the median error of each form, and ``compared`` the error by which it
    was compared, which is a quarter of the median for the forms THROUGH_ALL.
    """
    stated = [f"{form} {_percent(median)}" for form, median in medians.items()]
    why = f"median errors at sizes left out of the fit: {', '.join(stated)}."
    through_all = [form for form in THROUGH_ALL if form in compared]
    if through_all:
        # Where a size is left out, the distance between measured sizes is twice as large. The
        # error of times that bend grows with its square, hence a quarter and not a half.
        quarters = [_percent(compared[form]) for form in through_all]
        why += (
            f" {' and '.join(through_all)}, which pass through every size, are compared by a "
            f"quarter of their error ({' and '.join(quarters)}), because leaving a size out doubles "
            "the distance between the sizes around it."
        )
    why += (
        f" {chosen} is the simplest form whose compared error is at most {AS_GOOD:g} times "
        "the least, or differs from it by rounding"
    )
    return why


def _percent(error: float) -> str:
    """Return an error in percent with three digits, so that small errors differ, too."""
    return f"{100 * error:.3g}%"


def unseen_errors(
    make: Callable[..., Any], fitted: Sequence[Floats], tested: Sequence[Floats]
) -> tuple[Floats, Floats]:
    """Return how far costs are off at sizes from which they were not made.

    For each tested size, a cost is made anew from all other sizes.

    Parameters
    ----------
    make : callable
        Returns a cost from sizes and seconds, both of shape (m,).
    fitted : pair of ndarray, shape (n,)
        Sizes and seconds from which costs are made, each time without the tested size.
    tested : pair of ndarray, shape (k,)
        Sizes and seconds that the costs should predict.

    Returns
    -------
    sizes : ndarray
        The distinct sizes of ``tested``.
    errors : ndarray
        (predicted - measured) / measured, where measured is the median time of the
        size.
    """
    fitted_sizes, fitted_seconds = fitted
    tested_sizes, tested_seconds = tested
    sizes = np.unique(tested_sizes)
    errors = []
    for size in sizes.tolist():
        is_other = fitted_sizes != size
        cost = make(fitted_sizes[is_other], fitted_seconds[is_other])
        measured_s = np.median(tested_seconds[tested_sizes == size])
        errors.append(cost(size) / measured_s - 1)
    return sizes, np.array(errors)


# -- draws of a cost whose sizes are not repeated ----------------------------------


def _error_model(
    form: str, sizes: Floats, seconds: Floats, errors: HeldOutErrors
) -> HeldOut | None:
    """Return a model of the errors of single times, near each size and beyond all sizes.

    Parameters
    ----------
    form : str
        The form of the fit.
    sizes, seconds : ndarray, shape (n,)
        All rows, sorted by size.
    errors : HeldOutErrors
        The k held-out sizes, and what was predicted for them.

    Returns
    -------
    HeldOut or None
        None if no size could be held out.
    """
    if not errors.sizes.size:
        return None
    # `errors` are errors of the median of each size. A cost predicts single times, so
    # the errors of the m single rows of held-out sizes are needed here.
    is_held_out = np.isin(sizes, errors.sizes)
    row_sizes = sizes[is_held_out]
    # The index of the size of each row among the held-out sizes, which increase.
    size_index = np.searchsorted(errors.sizes, row_sizes)
    predicted_s = errors.predicted_s[size_index]
    # The absolute logarithms of measured times, divided by predicted times.
    row_errors = _log_errors(predicted_s, seconds[is_held_out])

    # The error grows beyond the sizes of the fit. If there are too few sizes to test the form
    # there, it is assumed to grow by the largest known error for each factor of two. Growth
    # is stated for each factor of e, hence the division.
    growth_if_too_few = float(row_errors.max()) / math.log(2)
    growth_below = _growth_beyond(
        form, sizes, seconds, end=sizes[0], if_too_few=growth_if_too_few
    )
    growth_above = _growth_beyond(
        form, sizes, seconds, end=sizes[-1], if_too_few=growth_if_too_few
    )

    # The gap between two sizes is the logarithm of their ratio. The wider the gap, the larger is
    # the error within it of a form that passes through every size. A held-out size leaves a
    # wider gap than there is in the fit to all sizes. So each error is divided by a power of the
    # gap that its size left, and `HeldOut` calls the result normalized. For other forms the
    # power is 0, and errors stay as they are.
    gap_power = GAP_POWER if form in THROUGH_ALL else 0.0
    gaps_without_size = _gap_without(row_sizes, np.unique(sizes))
    normalized_errors = row_errors / gaps_without_size**gap_power

    # Errors are stored at the held-out sizes, and at both ends of the fit.
    at_bytes = np.unique([sizes[0], *errors.sizes, sizes[-1]])
    return HeldOut(
        at_bytes=at_bytes,
        normalized_log_errors=_smoothed(at_bytes, row_sizes, normalized_errors),
        growth_below=growth_below,
        growth_above=growth_above,
        gap_power=gap_power,
    )


def _gap_without(sizes: Floats, distinct: Floats) -> Floats:
    """Return the gap that each size would leave in a table of the distinct sizes.

    ``sizes`` are some of ``distinct``, which increases, but neither the first nor the
    last one. The gap is the logarithm of the ratio of the next larger size to the next smaller
    one.
    The result has the shape of ``sizes``.
    """
    # The index of each size among the distinct sizes.
    position = np.searchsorted(distinct, sizes)
    return np.asarray(np.log(distinct[position + 1] / distinct[position - 1]))


def _growth_beyond(
    form: str, sizes: Floats, seconds: Floats, end: float, if_too_few: float
) -> float:
    """Return by how much the error grows for each factor of e beyond the fitted sizes.

    The form is fitted to rows whose sizes are far from one end of the table, and
    predicts the rows at this end. The growth is the median error of these predictions,
    divided by the logarithm of the factor between the end and the nearest fitted size.
    An error is the absolute logarithm of the measured time divided by the predicted time.

    Parameters
    ----------
    form : str
        The form of the fit.
    sizes, seconds : ndarray, shape (n,)
        All rows, sorted by size.
    end : float
        The first or the last size.
    if_too_few : float
        The growth to return if the far rows are too few to fit the form.

    Returns
    -------
    float
        The growth of the error.
    """
    # A size is far if it is larger or smaller than the end by the factor FAR or more.
    is_far = (sizes >= FAR * end) | (sizes <= end / FAR)
    try:
        cost = fit(form, sizes[is_far], seconds[is_far], draws=0).cost
    except UserError:
        return if_too_few
    at_end = sizes == end
    errors_at_end = _log_errors(cost(sizes[at_end]), seconds[at_end])
    # From the end to the nearest size that was fitted.
    log_distance = np.abs(np.log(sizes[is_far] / end)).min()
    return float(np.median(errors_at_end) / log_distance)


def _smoothed(at_bytes: Floats, sizes: Floats, errors: Floats) -> Floats:
    """Return the expected error near each of ``at_bytes``, by a kernel smoother.

    Parameters
    ----------
    at_bytes : ndarray, shape (k,)
        The sizes for which an error is expected, increasing.
    sizes : ndarray, shape (m,)
        The sizes at which errors are known.
    errors : ndarray, shape (m,)
        The known errors: absolute logarithms of the measured time divided by the predicted one.

    Returns
    -------
    ndarray, shape (k,)
        Expected errors.

    Notes
    -----
    A known error has the weight exp(-DECAY d). Here d is the distance between its size
    and the size of ``at_bytes``, in logarithms, with the mean step of ``at_bytes`` as
    unit. The expected error is a mixture of two means: the geometric mean with these weights,
    and the geometric mean of all errors without weights, which has the share SHARED. If the
    form is far off in one range of sizes, the expected errors of other ranges therefore grow,
    but mainly by way of the second mean.
    """
    # An error below LEAST_ERROR is chance, and would pull the geometric mean down.
    log_errors = np.log(np.maximum(errors, LEAST_ERROR))
    log_bytes = np.log(at_bytes)
    mean_step = (log_bytes[-1] - log_bytes[0]) / (log_bytes.size - 1)
    # One row for each of ``at_bytes``, one column for each error: shape (k, m).
    distance = np.abs(log_bytes[:, None] - np.log(sizes)) / mean_step
    weight = np.exp(-DECAY * distance)
    # The product of the matrix and the errors is the weighted sum of each row.
    near = np.exp(weight @ log_errors / weight.sum(axis=1))
    everywhere = np.exp(log_errors.mean())
    geometric_mean = (1 - SHARED) * near + SHARED * everywhere
    # Errors are taken to be exponentially distributed, so their mean is this multiple of
    # their geometric mean.
    return np.asarray(MEAN_OVER_GEOMETRIC * geometric_mean)


def _log_errors(predicted_s: Floats, measured_s: Floats) -> Floats:
    """Return the absolute logarithms of measured times divided by predicted ones, shape (n,).

    Where a cost extrapolates, its prediction can be zero or below, and has no logarithm. A
    prediction counts as at least a thousandth of the measured time.
    """
    positive_s = np.maximum(predicted_s, measured_s / 1000)
    return np.asarray(np.abs(np.log(measured_s / positive_s)))
