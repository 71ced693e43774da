"""What a reader of a foreign file is asked, and what it gives: the same for all formats of one purpose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import LayerProfile

if TYPE_CHECKING:
    from pandas import DataFrame

KEYS = ("collective", "backend", "algorithm", "link", "link_bits_per_s", "ranks")
"""Columns by which message times are told apart; a reader gives those that its file has."""


@dataclass(frozen=True)
class MessageOptions:
    """What a file of message times may leave open, as the options of ``ddlkit fit``; None: not said.

    collective, ranks : taken as said where the file is silent, else they choose among its tables
    place : which times of a log, "in_place" or "out_of_place"; table : which table of a log, from 1
    """

    collective: str | None = None
    ranks: int | None = None
    place: str | None = None
    table: int | None = None

    def refuse_those_of_a_log(self, file: str) -> None:
        """Raise UserError if place or table is given: ``file`` is no log, and has neither."""
        if self.place is not None or self.table is not None:
            raise UserError(f"{file}: no log: leave --place and --table out")


class MessageTimes(NamedTuple):
    """Message times as a file has them.

    source : the program that measured them, or "csv"
    rows : ``bytes`` of a message as core/link.py counts them, ``seconds``, and those of KEYS that are known
    note : what the user should know of the rows; empty: nothing
    """

    source: str
    rows: DataFrame
    note: str = ""


@dataclass(frozen=True)
class ImportOptions:
    """What a file may leave open, as the options of ``ddlkit import``; None: not said."""

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
    """The layer profile in a file, of a network named "" if the file names none; and what to know of it."""

    profile: LayerProfile
    findings: tuple[Finding, ...]
