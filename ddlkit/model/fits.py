"""What a user should know of a cost: how well it fits, and where it may not hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import DRAWS, AlphaBeta, Chords, MessageCost, Table
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fit import (
    DISCOUNT_THROUGH_ALL,
    SIMPLE_FIRST,
    THROUGH_ALL,
    Fit,
    chosen_because,
    errors_by_form,
    fit,
    forms_for_sizes,
    held_out_errors,
    least_sizes_to_hold_out,
)
from ddlkit.core.lab_links import is_lab, read_link
from ddlkit.core.pieces import grouped
from ddlkit.core.units import KIB, format_bytes, format_seconds
from ddlkit.core.workload import Floats

if TYPE_CHECKING:
    from pandas import DataFrame

_DEVICES = {
    "nccl": "GPUs",
    "nccl-tests": "GPUs",
    "osu-cuda": "GPUs",
    "osu-rocm": "GPUs",
    "gloo": "processors",
    "osu": "processors",
    "imb": "processors",
}
"""The devices between which the programs that time messages send them."""


# -- forms compared --------------------------------------------------------------------


class Comparison(NamedTuple):
    """Forms that were fitted to the same times, the simplest first.

    Attributes
    ----------
    table : DataFrame
        A row for each form. "held_out_sizes" is the number of sizes that were held out of the
        fit. "median_error" and "worst_error" are the median and the largest absolute relative
        error at these sizes. "compared_error" is the error by which "auto" compares forms: the
        median error, or a quarter of it for a form that passes through every size. The errors
        are NaN if there are too few sizes to hold one out.
    fits : dict of str to Fit
        The fits by form. The chosen one has draws.
    chosen : str
        The form that "auto" chooses.
    why : str
        The reason for the choice, in words.
    """

    table: DataFrame
    fits: dict[str, Fit[MessageCost]]
    chosen: str
    why: str


def compare(
    sizes: ArrayLike,
    seconds: ArrayLike,
    *forms: str,
    collective: str | None = None,
    workers: int | None = None,
    algorithm: str | None = None,
) -> Comparison:
    """Compare the forms among which "auto" chooses, and further forms.

    Parameters
    ----------
    sizes : array_like, shape (n,)
        The sizes of the messages in bytes.
    seconds : array_like, shape (n,)
        The time of each message.
    *forms : str
        Further forms to compare.
    collective : str, optional
        The name of the collective.
    workers : int, optional
        Between how many ranks the messages were sent.
    algorithm : str, optional
        How the collective is carried out, as "ring".

    Returns
    -------
    Comparison
        Errors and fits by form, and the form that "auto" chooses. A form that cannot be
        fitted to these times has no fit.

    Raises
    ------
    UserError
        If there are too few different sizes to compare forms, or if the chosen form or one of
        ``forms`` cannot be fitted to these times.

    Examples
    --------
    >>> sizes = [1e3, 1e4, 1e5, 1e6, 1e7]
    >>> compared = compare(sizes, [1e-3 + 1e-8 * size for size in sizes])
    >>> compared.chosen, int(compared.table.loc["alpha_beta", "held_out_sizes"])
    ('alpha_beta', 3)
    """
    import pandas as pd

    # All names once, in their order: the candidates of "auto" first.
    names = tuple(dict.fromkeys([*SIMPLE_FIRST, *forms]))
    # The relative errors of each form at sizes that were held out of its fit.
    held_out = errors_by_form(names, sizes, seconds)
    # Of the candidates of "auto", the straight line needs the fewest sizes. If there are too few
    # for the line, none of these candidates has errors at held-out sizes.
    needed = least_sizes_to_hold_out(AlphaBeta.form)
    n_sizes = np.unique(np.asarray(sizes)).size
    if n_sizes < needed:
        advice = "measure more sizes"
        # Each form needs at least two sizes.
        possible = forms_for_sizes(n_sizes)
        if possible:
            advice += f", or fit a single form ({' or '.join(possible)})"
        raise UserError(
            "forms are compared by their errors at sizes that are left out of the fit, which "
            f"takes at least {needed} different sizes, and these times have only {n_sizes}: "
            f"{advice}"
        )
    # Further forms are compared in the table, but "auto" does not choose among them.
    automatic = {form: held_out[form] for form in SIMPLE_FIRST if form in held_out}
    chosen, why = chosen_because(automatic)
    fits = {}
    rows = {}
    for form in names:
        try:
            fits[form] = fit(
                form,
                sizes,
                seconds,
                # Draws are costs that show how uncertain the fitted one is. Only the chosen form
                # needs them.
                draws=DRAWS if form == chosen else 0,
                collective=collective,
                workers=workers,
                algorithm=algorithm,
            )
        except UserError:
            # The error is raised only for the chosen form and for those that were asked for. Other
            # forms have no fit then.
            if form in (chosen, *forms):
                raise
        # A form that needs every size has no errors at held-out sizes.
        errors: ArrayLike = ()
        if form in held_out:
            errors = np.abs(held_out[form].errors)
        rows[form] = _summary_of_errors(form, errors)
    table = pd.DataFrame.from_dict(rows, orient="index").rename_axis("form")
    return Comparison(table, fits, chosen, why)


def _summary_of_errors(form: str, errors: ArrayLike) -> dict[str, float]:
    """Return the row of a form in `Comparison.table`.

    ``errors`` are the absolute relative errors at sizes that were held out of its fit.
    """
    import pandas as pd

    # The median and the maximum of an empty series are NaN.
    series = pd.Series(errors, dtype=float)
    median_error = series.median()
    # "auto" chooses the form by these errors. Where a size is held out, its neighbours are
    # twice as far apart as in the final fit. The errors of forms that pass through every
    # size are therefore too large, and "auto" discounts them.
    factor = DISCOUNT_THROUGH_ALL if form in THROUGH_ALL else 1.0
    return {
        "held_out_sizes": len(series),
        "median_error": median_error,
        "worst_error": series.max(),
        "compared_error": factor * median_error,
    }


def table_cost(rows: DataFrame, workers: int) -> MessageCost:
    """Return the measured times of one collective as a cost.

    Parameters
    ----------
    rows : DataFrame
        Rows of a table ``collectives``, all of one collective and algorithm on one link.
    workers : int
        The number of workers.

    Returns
    -------
    MessageCost
        A cost of the form "table".
    """
    fitted = fit(
        "table",
        rows["bytes"],
        rows["seconds"],
        draws=0,
        collective=rows["collective"].iloc[0],
        workers=workers,
        algorithm=rows["algorithm"].iloc[0],
    )
    return fitted.cost


# -- reasons to doubt a cost -----------------------------------------------------------


class Measured(NamedTuple):
    """What is known of the messages to which a cost was fitted.

    Attributes
    ----------
    from_bytes : float or None
        The smallest size; None if not known.
    to_bytes : float or None
        The largest size; None if not known.
    devices : {"GPUs", "processors"} or None
        The devices between which the messages were sent; None if not known.
    """

    from_bytes: float | None = None
    to_bytes: float | None = None
    devices: str | None = None

    @classmethod
    def of(cls, sizes: ArrayLike, *programs: str | None) -> Measured:
        """Return what is known from the sizes of messages and from the programs.

        Parameters
        ----------
        sizes : array_like, shape (n,)
            The sizes of the messages in bytes.
        *programs : str or None
            The backends or programs that timed the messages.

        Returns
        -------
        Measured
            Without devices if the programs are unknown or use different devices.

        Examples
        --------
        >>> Measured.of([1024, 4096], "nccl")
        Measured(from_bytes=1024.0, to_bytes=4096.0, devices='GPUs')
        """
        # None and programs whose devices are not known are left out.
        known_devices = {
            _DEVICES[program] for program in programs if program in _DEVICES
        }
        devices = None
        if len(known_devices) == 1:
            devices = known_devices.pop()
        return cls(float(np.min(sizes)), float(np.max(sizes)), devices)

    @classmethod
    def read(cls, description: Mapping[str, Any], cost: MessageCost) -> Measured:
        """Return what the JSON of a cost says of the messages to which it was fitted.

        Parameters
        ----------
        description : mapping
            The JSON of a cost, as ``ddlkit fit --json`` writes it.
        cost : MessageCost
            The cost that the JSON describes.

        Returns
        -------
        Measured
            The range of sizes of the fit, and the devices. If the JSON of a table states
            no such range, as where the table was written by hand, the range is that of its
            own sizes. Other costs then have no sizes.

        Raises
        ------
        UserError
            If the JSON states sizes that are not positive numbers, or a device that is
            not a text.
        """
        # A cost that was written by hand has no entry "fit". All values are then None.
        fitted = description.get("fit", {})
        measured = cls(
            from_bytes=fitted.get("from_bytes"),
            to_bytes=fitted.get("to_bytes"),
            # Costs that earlier versions wrote have the devices under another name.
            devices=fitted.get("devices", fitted.get("between")),
        )
        # A missing size counts as right.
        are_sizes = _is_size(measured.from_bytes) and _is_size(measured.to_bytes)
        if not are_sizes or not isinstance(measured.devices, str | None):
            raise UserError(
                f"the cost's fit states {shown(tuple(measured))}: "
                "must be two sizes above zero and a name of devices: fit the cost again"
            )
        # If the fit of a table states no sizes, the table itself has them. Its fit may still
        # state the devices, which are kept.
        if measured.from_bytes is None and isinstance(cost, Table):
            return cls.of(cost.bytes)._replace(devices=measured.devices)
        return measured


def _is_size(value: Any) -> bool:
    """Return whether a value is a number above zero, or missing."""
    return value is None or (isinstance(value, (int, float)) and value > 0)


def burst_left_out(link: str) -> Iterator[str]:
    """Yield a warning if a cost leaves out the burst of the link of its messages.

    A link whose rate a token bucket limits saves up tokens while it is idle, and with this
    burst the next bytes pass at once. A cost holds only for a message before which the link has
    saved up the burst. A message that follows soon finds the burst used up, and takes longer.
    A table of collectives names its link, so that predictions from it allow for the burst.

    Parameters
    ----------
    link : str
        The name of the link, as tables state it. It is empty if it is not known.

    Yields
    ------
    str
        At most one warning.

    Examples
    --------
    >>> len([*burst_left_out("lab:1gbit")]), len([*burst_left_out("loopback")])
    (1, 0)
    """
    # A link that no lab made has no burst, and neither has a lab's link without a rate, such as
    # "lab".
    if ":" not in link or not is_lab(link):
        return
    if read_link(link).burst_s:
        yield (
            f"the link {link} saves up a burst while it is idle, which this cost does not "
            "hold, so that a prediction with --cost takes every message for one that finds "
            "the burst: predict with --collectives and the table"
        )


def several_populations(fitted: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning if a cost was probably fitted to several kinds of messages.

    Such messages have, for example, different links or numbers of ranks. At each size
    the curve then passes close to the median, and single rows are far from it.

    Parameters
    ----------
    fitted : mapping
        The summary of a fit, as `ddlkit.core.fit.Fit.to_dict` returns it under "fit".

    Yields
    ------
    str
        A warning, if the median relative error of single rows is above 1%, and more
        than ten times the median error at sizes that are held out of the fit. At a
        held-out size, the error is that of the median of its rows.
    """
    error = fitted["median_abs_relative_error"]
    held_out_error = fitted["median_abs_held_out_error"]
    # With too few sizes to hold one out, the error at held-out sizes is None.
    if held_out_error is not None and error > max(10 * held_out_error, 0.01):
        yield (
            f"half of the rows are off by {error:.1%} and more, but the medians of sizes "
            f"held out of the fit only by {held_out_error:.1%}, so that times of one size differ much: "
            "if they are of several kinds, such as several networks, fit each kind alone"
        )


TOO_SLOW = 1.5
"""A smaller message is strangely slow from this multiple of a larger one's time on.

Recorded tables with several repeats of each size stay below 1.3, except where other
programs disturbed the messages, or where a token bucket let some through at once.
"""

FAR_OFF = 2.0
"""A size is strangely slow from this multiple of what its neighbours suggest on."""

MOST_HELD_OUT = 0.25
"""The median error at held-out sizes from which on times hardly follow the size.

In recorded tables the form with the least errors is off by up to 15%.
"""


def _about_one_size(size: str) -> str:
    """Return what to do about the times of one size that are unlike all others."""
    return (
        f"in a copy of the table, remove the rows of {size}, or replace them by rows of this "
        "size that are measured again"
    )


def strange_times(
    sizes: ArrayLike,
    seconds: ArrayLike,
    form: str = Chords.form,
    remedy: str | None = None,
) -> Iterator[str]:
    """Yield a warning for each way in which times do not depend on the size as usual.

    Parameters
    ----------
    sizes : array_like, shape (n,)
        The sizes of messages in bytes. Sizes may repeat, and their median counts.
    seconds : array_like, shape (n,)
        The time of each message.
    form : str, optional
        The form of the cost that is fitted to these times. The default interpolates
        linearly between neighbouring sizes, and is rarely far off if times depend on
        the size at all.
    remedy : str, optional
        What all warnings advise. By default, each warning has advice of its own.

    Yields
    ------
    str
        Up to three warnings, each with the sizes it is about: the time of one size is
        far from the times of its neighbours, smaller messages take longer than larger
        ones, or the fit is far off at sizes that are held out of it.

    Examples
    --------
    >>> sizes = [1024, 2048, 4096, 8192]
    >>> for warning in strange_times(sizes, [1e-5, 5e-5, 1.1e-5, 1.2e-5]):
    ...     print(warning.partition(": ")[0])
    2 KiB takes 50 µs, but 1 KiB takes 10 µs and 4 KiB takes 11 µs
    >>> list(strange_times(sizes, [1.0e-5, 1.0e-5, 1.1e-5, 1.2e-5]))
    []
    """
    row_sizes = np.asarray(sizes, float)
    row_seconds = np.asarray(seconds, float)
    # The distinct sizes in ascending order, and an array of the times of each of them.
    distinct, groups = grouped(row_sizes, row_seconds)
    medians_s = np.array([np.median(group) for group in groups])
    # The index of the size whose time is strangest, or None.
    outlier = _outlier(distinct, medians_s)
    if outlier is not None:
        yield _unlike_neighbours(distinct, medians_s, outlier, remedy)
        # The outlier alone shall not cause the other warnings, too.
        is_other = row_sizes != distinct[outlier]
        row_sizes = row_sizes[is_other]
        row_seconds = row_seconds[is_other]
        distinct = np.delete(distinct, outlier)
        medians_s = np.delete(medians_s, outlier)
    yield from _slower_than_larger(distinct, medians_s, remedy)
    yield from _far_off_held_out(form, row_sizes, row_seconds, remedy)


def strange_rows(rows: DataFrame, remedy: str | None = None) -> Iterator[str]:
    """Yield a warning for each way in which a table's times do not depend on size as usual.

    Parameters
    ----------
    rows : DataFrame
        Rows of a table ``collectives``, all of one collective, number of ranks and link.
        Rows with several messages in flight are ignored, and so are rows during which
        other programs used the cores.
    remedy : str, optional
        What all warnings advise. By default, each warning has advice of its own.

    Yields
    ------
    str
        The warnings of `strange_times`.
    """
    # Importing this takes pandas and SciPy, which other functions here do not need.
    from ddlkit.model.calibration import undisturbed

    # `undisturbed` leaves out rows during which other programs used the cores.
    one_at_a_time = undisturbed(rows[rows["in_flight"] == 1])
    yield from strange_times(
        one_at_a_time["bytes"], one_at_a_time["seconds"], remedy=remedy
    )


def disturbed_sizes(rows: DataFrame, remedy: str) -> Iterator[str]:
    """Yield a warning if something else used the cores whenever messages of a size were timed.

    Parameters
    ----------
    rows : DataFrame
        Rows of a table ``collectives``, all of one collective, number of ranks and link.
        Rows with several messages in flight are ignored.
    remedy : str
        What the warning advises.

    Yields
    ------
    str
        The warning, with the number of such sizes.
    """
    # Importing this takes pandas and SciPy, which other functions here do not need.
    from ddlkit.model.calibration import are_disturbed

    one_at_a_time = rows[rows["in_flight"] == 1]
    # For each size, whether no sample of it was undisturbed.
    is_disturbed = are_disturbed(one_at_a_time).groupby(one_at_a_time["bytes"]).all()
    if is_disturbed.any():
        yield (
            f"of {is_disturbed.sum()} of {len(is_disturbed)} sizes, all messages were timed "
            "while other programs used the cores, so that predictions may be too slow: "
            f"{remedy}"
        )


def _unlike_neighbours(
    sizes: Floats, medians_s: Floats, outlier: int, remedy: str | None
) -> str:
    """Return the warning that one size takes strangely long or short.

    ``outlier`` is the index of the size. It is neither the first nor the last one, so both
    neighbours exist. ``medians_s`` has the median time of each of ``sizes``. ``remedy`` is
    what the warning advises, by default what `_about_one_size` says.
    """
    smaller = _size_and_time(sizes[outlier - 1], medians_s[outlier - 1])
    strange = _size_and_time(sizes[outlier], medians_s[outlier])
    larger = _size_and_time(sizes[outlier + 1], medians_s[outlier + 1])
    advice = remedy or _about_one_size(format_bytes(sizes[outlier]))
    return f"{strange}, but {smaller} and {larger}: {advice}"


def _size_and_time(n_bytes: float, seconds: float) -> str:
    return f"{format_bytes(n_bytes)} takes {format_seconds(seconds)}"


def _outlier(sizes: Floats, medians_s: Floats) -> int | None:
    """Return the index of the size that is strangest compared with its neighbours.

    ``sizes``, shape (s,), increase, and ``medians_s`` has the median time of each of
    them. The result is None if no size is strangely slow or fast.
    """
    # The first and the last size have one neighbour only, and are never outliers.
    if len(sizes) < 3:
        return None
    log_sizes = np.log(sizes)
    log_s = np.log(medians_s)
    # By how much each inner size is beyond its limits, negative within the limits.
    excess = np.maximum(_too_slow_by(log_sizes, log_s), _too_fast_by(log_sizes, log_s))
    farthest = int(np.argmax(excess))
    # The first inner size has the index 1.
    return farthest + 1 if excess[farthest] > 0 else None


def _too_slow_by(log_sizes: Floats, log_s: Floats) -> Floats:
    """Return by how much sizes are too slow compared with their neighbours.

    ``log_sizes`` and ``log_s``, shape (s,), are the logarithms of increasing sizes and of
    their times. The result has the shape (s - 2,), for all sizes but the first and the
    last. It is the logarithm of a ratio: a size's time over the longest time that is not
    too slow. So it is above 0 for a size that is too slow.

    A size is too slow if it takes longer than three limits:

    * FAR_OFF times as long as a line between its neighbours predicts, in the logarithms of
      size and time.
    * TOO_SLOW times as long as the smaller neighbour. Of several slow sizes in a row, this
      excludes the last one, which may be above the line, too.
    * As long as the larger neighbour. This excludes the first one of several slow sizes.
    """
    smaller = log_s[:-2]
    inner = log_s[1:-1]
    larger = log_s[2:]
    # Where each inner size lies between its neighbours: from 0 to 1.
    share = (log_sizes[1:-1] - log_sizes[:-2]) / (log_sizes[2:] - log_sizes[:-2])
    interpolated = smaller + share * (larger - smaller)
    # A factor on a time is added as a logarithm.
    limits = (interpolated + np.log(FAR_OFF), smaller + np.log(TOO_SLOW), larger)
    # A slow size exceeds all three limits, and so the largest one.
    too_slow_by: Floats = inner - np.max(limits, axis=0)
    return too_slow_by


def _too_fast_by(log_sizes: Floats, log_s: Floats) -> Floats:
    """Return by how much sizes are too fast compared with their neighbours.

    ``log_sizes`` and ``log_s``, shape (s,), are the logarithms of increasing sizes and of
    their times. The result has the shape (s - 2,), for all sizes but the first and the
    last. It is log(limit / time), where the limit is the shortest time that is not too fast.
    So it is above 0 for a size that is too fast.

    A size is too fast if both neighbours are too slow compared with it: the smaller one takes
    TOO_SLOW times as long, and the larger one TOO_SLOW times as long for each byte. Unlike
    `_too_slow_by`, this function draws no straight line between the neighbours, in the
    logarithms of size and time. The usual times, a start-up and a time for each byte, lie below
    such a line, and far below it if the sizes of the neighbours are far apart. They would seem
    too fast.
    """
    smaller = log_s[:-2]
    inner = log_s[1:-1]
    larger = log_s[2:]
    # A larger neighbour may take longer in proportion to its bytes.
    log_bytes_ratio = log_sizes[2:] - log_sizes[1:-1]
    # A factor on a time is added as a logarithm.
    limits = (
        smaller - np.log(TOO_SLOW),
        larger - log_bytes_ratio - np.log(TOO_SLOW),
    )
    # A fast size is below both limits, and so below the lower one.
    too_fast_by: Floats = np.min(limits, axis=0) - inner
    return too_fast_by


SMALL_BYTES = 64 * KIB
"""Up to this size, the time of a message is mostly its start-up."""
LONG_STARTUP_S = 0.1
"""From this time of a small message on, the unit of the times may be wrong."""


def other_unit(sizes: ArrayLike, seconds: ArrayLike) -> list[str]:
    """Return a warning if a small message takes so long that the unit may be wrong.

    Parameters
    ----------
    sizes : array_like, shape (n,)
        The sizes of messages in bytes, from a file that another program or a user wrote.
    seconds : array_like, shape (n,)
        The time of each message, as if the file had seconds.

    Returns
    -------
    list of str
        One warning, or none: if there are no messages, if the smallest size is above
        `SMALL_BYTES`, or if its fastest message takes less than `LONG_STARTUP_S`.
    """
    row_sizes = np.asarray(sizes, float)
    row_seconds = np.asarray(seconds, float)
    if not row_sizes.size or row_sizes.min() > SMALL_BYTES:
        return []
    smallest = row_sizes.min()
    shortest_s = row_seconds[row_sizes == smallest].min()
    if shortest_s < LONG_STARTUP_S:
        return []
    return [
        f"{_size_and_time(smallest, shortest_s)}: check that the times are in the unit that "
        "the file says, as in seconds in a column seconds"
    ]


def _slower_than_larger(
    sizes: Floats, medians_s: Floats, remedy: str | None = None
) -> Iterator[str]:
    """Yield a warning if a smaller size takes TOO_SLOW times as long as a larger one.

    The warning names the pair of sizes with the largest ratio of times. ``sizes``, shape
    (s,), increase, and ``medians_s`` has the median time of each of them. ``remedy`` is
    what the warning advises, by default to measure again.
    """
    # For each size, the longest time among it and all smaller sizes.
    slowest_so_far = np.maximum.accumulate(medians_s)
    ratios = slowest_so_far / medians_s
    larger = int(np.argmax(ratios))
    if ratios[larger] < TOO_SLOW:
        return
    # The ratio is above 1, so the longest time up to this size is that of a smaller one.
    smaller = int(np.argmax(medians_s[:larger]))
    yield (
        "smaller messages take longer than larger ones: "
        f"{_size_and_time(sizes[smaller], medians_s[smaller])}, but "
        f"{_size_and_time(sizes[larger], medians_s[larger])}, so that predictions are "
        f"unreliable for messages of up to {format_bytes(sizes[larger])}: "
        f"{remedy or 'measure again on an idle machine, into a new file or directory'}"
    )


def _far_off_held_out(
    form: str, sizes: Floats, seconds: Floats, remedy: str | None = None
) -> Iterator[str]:
    """Yield a warning if a form is off by MOST_HELD_OUT at sizes held out of its fit.

    ``sizes`` and ``seconds`` are the size and the time of each measured message.
    ``remedy`` is what the warning advises, by default to measure more.
    """
    held_out = held_out_errors(form, sizes, seconds)
    # With too few sizes, none is held out. The median is that of absolute errors.
    if not held_out.sizes.size or held_out.median <= MOST_HELD_OUT:
        return
    worst = int(np.argmax(np.abs(held_out.errors)))
    yield (
        f"a cost of the form {form} is off by {held_out.median:.0%} (median) at sizes "
        f"left out of its fit, most at {format_bytes(held_out.sizes[worst])} "
        f"({held_out.errors[worst]:+.0%}): "
        f"{remedy or 'measure more sizes, or more repeats'}"
    )


def warnings_of_fit(description: Mapping[str, Any]) -> list[str]:
    """Return the warnings about a fit that are in the JSON of the fitted cost.

    Parameters
    ----------
    description : mapping
        The JSON of a cost, as ``ddlkit fit --json`` writes it.

    Returns
    -------
    list of str
        No warning for a cost that was written by hand.

    Raises
    ------
    UserError
        If the entry of the warnings is not a list of texts.
    """
    warnings = description.get("fit", {}).get("warnings", [])
    are_texts = isinstance(warnings, list) and all(
        isinstance(warning, str) for warning in warnings
    )
    if not are_texts:
        raise UserError(
            f"the cost's fit states the warnings {shown(warnings)}: must be a list of "
            "texts: fit the cost again"
        )
    return list(warnings)


_MEASURE_THESE = (
    "measure such sizes too, with the program that made the table (ddlkit measure "
    "collectives has the option --sizes)"
)
"""What to do about sizes that were not measured."""


def doubts(device: str, measured: Measured, n_bytes: ArrayLike) -> Iterator[str]:
    """Yield a warning for each way in which a cost may not hold for a workload.

    Parameters
    ----------
    device : str
        The device of the layer profile, such as "cpu"; empty or "unknown" if not known.
    measured : Measured
        What is known of the messages to which the cost was fitted.
    n_bytes : array_like, shape (G,)
        The sizes of the messages to predict, in bytes.

    Yields
    ------
    str
        A warning about other devices, or about sizes outside the measured ones.
    """
    yield from doubts_of_devices(device, measured)
    sizes = np.asarray(n_bytes, dtype=float)
    outside = _not_measured(measured, sizes)
    if outside.size:
        sent = _format_range(outside.min(), outside.max())
        # If the smallest and the largest size look alike, the text has one size and no " to ".
        # Without "each", the size of several messages could be taken for their sum.
        has_one_size = " to " not in sent
        if outside.size > 1 and has_one_size:
            sent = f"{sent} each"
        verb = "is" if outside.size == 1 else "are"
        yield (
            f"{outside.size} of {sizes.size} messages ({sent}) {verb} outside the sizes "
            f"that were measured ({_measured_range(measured)}), so that times are "
            f"extrapolated: {_MEASURE_THESE}"
        )


def doubts_of_devices(device: str, measured: Measured) -> Iterator[str]:
    """Yield a warning if layers and messages were measured on different devices.

    Parameters
    ----------
    device : str
        The device of the layer profile, such as "cpu"; empty or "unknown" if not known.
    measured : Measured
        What is known of the messages to which the cost was fitted.

    Yields
    ------
    str
        The warning. None if one of the devices is not known.
    """
    if device in ("", "unknown") or measured.devices is None:
        return
    # Every other device is a GPU, whatever its name.
    computed_on = "processors" if device == "cpu" else "GPUs"
    if measured.devices != computed_on:
        yield (
            f"the profile is of {computed_on} ({device}), the messages were timed "
            f"between {measured.devices}: measure both on the same devices"
        )


def doubts_of_units(
    measured: Measured, bytes_by_units: Mapping[str, ArrayLike]
) -> Iterator[str]:
    """Yield a warning if units of sharded training have sizes that were not measured.

    Parameters
    ----------
    measured : Measured
        What is known of the messages to which the cost was fitted.
    bytes_by_units : mapping of str to array_like, shape (G,)
        The sizes of the messages in bytes, for each way to divide a network into units,
        such as "size:25MB".

    Yields
    ------
    str
        At most one warning, about all ways to make units. If several ways are compared, it
        names each one that has sizes that were not measured.
    """
    # For each way to make units that has sizes that were not measured: these sizes.
    outside_by_units = {}
    for units, n_bytes in bytes_by_units.items():
        outside = _not_measured(measured, np.asarray(n_bytes, dtype=float))
        if outside.size:
            outside_by_units[units] = outside
    if not outside_by_units:
        return
    sizes = np.concatenate(list(outside_by_units.values()))
    where = ""
    if len(bytes_by_units) > 1:
        where = f" (units {', '.join(outside_by_units)})"
    yield (
        f"messages of {_format_range(sizes.min(), sizes.max())}{where} are outside the "
        f"sizes that were measured ({_measured_range(measured)}), so that their times "
        f"are extrapolated: {_MEASURE_THESE}"
    )


def _not_measured(measured: Measured, sizes: Floats) -> Floats:
    """Return those of the sizes that are outside the measured ones, all in bytes.

    If the measured sizes are not known, none is outside.
    """
    if measured.from_bytes is None or measured.to_bytes is None:
        return np.empty(0)
    return sizes[(sizes < measured.from_bytes) | (sizes > measured.to_bytes)]


def _measured_range(measured: Measured) -> str:
    """Return the smallest and the largest measured size in words.

    Callers have found sizes outside them, so both are known.
    """
    assert measured.from_bytes is not None
    assert measured.to_bytes is not None
    return f"{format_bytes(measured.from_bytes)} to {format_bytes(measured.to_bytes)}"


def _format_range(lower: float, upper: float) -> str:
    """Return two sizes as text, or one if they look alike."""
    # A dict has equal texts only once, and unlike a set it keeps the order.
    sizes = dict.fromkeys([format_bytes(lower), format_bytes(upper)])
    return " to ".join(sizes)
