"""Arguments and results of the readers of foreign files.

They are alike for all formats of one purpose: message times, or layer profiles. Each
reader has a function ``read(text, file, options)``:

* ``text`` is the content of the file.
* ``file`` is the name of the file in errors. A ``UserError`` of a reader begins with it.
* ``options`` are `MessageOptions` for message times, and `ImportOptions` for profiles.
* The result is `MessageTimes`, or a `ReadProfile`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import LayerProfile

if TYPE_CHECKING:
    from pandas import DataFrame

KEYS = ("collective", "backend", "algorithm", "link", "link_bits_per_s", "ranks")
"""Columns that distinguish message times. A reader returns those that its file has."""

ONE_RANK = (
    "all its times are of one rank, which sends no messages: give times between two ranks "
    "or more"
)
"""The end of an error about a file that only has times of one rank."""


@dataclass(frozen=True)
class MessageOptions:
    """What a user adds to a file of message times, as options of ``ddlkit fit``.

    Attributes
    ----------
    collective : str or None
        The collective to choose, or that the file does not name.
    ranks : int or None
        The number of ranks to choose, or that the file does not state.
    place : {"in_place", "out_of_place"} or None
        Which times of a log to take.
    table : int or None
        Which table of a log to take, counted from 1.
    """

    collective: str | None = None
    ranks: int | None = None
    place: str | None = None
    table: int | None = None

    def refuse_options_of_logs(self, file: str) -> None:
        """Raise UserError if an option is set that only applies to a log.

        A log may have several tables, and times in place and out of place.

        Parameters
        ----------
        file : str
            The file, which is no log of a benchmark, as errors name it.

        Raises
        ------
        UserError
            If a place or a table is given.
        """
        for option in ("place", "table"):
            if getattr(self, option) is not None:
                raise UserError(
                    f"{file}: is not a benchmark's log, so that --{option} has no effect: "
                    "leave it out"
                )

    def refuse_place(self, source: str, file: str) -> None:
        """Raise UserError if the option ``place`` is set.

        Parameters
        ----------
        source : str
            The program, which does not distinguish times in place and out of place.
        file : str
            Its file, as errors name it.

        Raises
        ------
        UserError
            If a place is given.
        """
        if self.place is not None:
            raise UserError(
                f"{file}: {source} does not distinguish times in place: leave --place out"
            )

    def refuse_table(self, file: str, *, has_choice: bool = True) -> None:
        """Raise UserError if the option ``table`` is set.

        Parameters
        ----------
        file : str
            The file, whose tables have no numbers, as errors name it.
        has_choice : bool, optional
            Whether such a file may have times of several collectives or numbers of ranks.

        Raises
        ------
        UserError
            If a table is given.
        """
        if self.table is not None:
            advice = "leave --table out"
            if has_choice:
                advice += ", and choose by --collective and --ranks"
            raise UserError(f"{file}: --table has no effect on this file: {advice}")


class MessageTimes(NamedTuple):
    """The message times in a file.

    Attributes
    ----------
    source : str
        The program that measured them, or "csv".
    rows : DataFrame
        The columns ``bytes`` (sizes as `ddlkit.core.collective` counts them),
        ``seconds``, and those of `KEYS` that are known.
    note : str
        What the user should know of the rows. Empty if there is nothing.
    """

    source: str
    rows: DataFrame
    note: str = ""


@dataclass(frozen=True)
class ImportOptions:
    """What a user adds to a file of layer times, as options of ``ddlkit import``.

    Attributes
    ----------
    network : str or None
        The name of the network, or which one to choose.
    batch : int or None
        The number of samples in an iteration.
    device : str or None
        The device that computed.
    peak : float or None
        Of FLOP counts, the rate of the device in FLOP/s.
    utilisation : float or None
        Of FLOP counts, the share of the peak that is reached, above 0 and at most 1.
    without_input : bool
        Of a layer-wise trace, whether to leave out all that precedes the first layer
        with a gradient.
    compute_s : float or None
        Of FLOP counts, the seconds of forward and backward, instead of a rate.
    sequence : int or None
        Of a transformer, the tokens of a sample.
    gradient_bytes : int or None
        Bytes in which each element of a gradient is sent.
    iterations : tuple of int
        Of a trace of torch.profiler, the iterations to use. Empty for all.
    """

    network: str | None = None
    batch: int | None = None
    device: str | None = None
    peak: float | None = None
    utilisation: float | None = None
    without_input: bool = False
    compute_s: float | None = None
    sequence: int | None = None
    gradient_bytes: int | None = None
    iterations: tuple[int, ...] = ()


class ReadProfile(NamedTuple):
    """The layer profile in a file.

    Attributes
    ----------
    profile : LayerProfile
        The profile. Its network is "" if the file names none.
    findings : tuple of Finding
        What the user should know of the profile.
    """

    profile: LayerProfile
    findings: tuple[Finding, ...]
