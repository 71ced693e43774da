"""The rate-limited lab: what a campaign recorded there, as several figures need it.

One campaign has a link on which messages start cheaply, and another one a link on which
they start expensively. The latter link, called the *regime*, was set so that start-ups
and bytes weigh against compute as in the setting that an earlier search found best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.fit import fit
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import parse_bytes
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import LINK, Calibration, undisturbed
from workbook.common import places
from workbook.common.source import REGIMES, open_campaign, open_source
from workbook.osf.cluster import osf_name
from workbook.osf.equations import of_timeline

LAB = "campaign-osf"
"""The campaign at 1 Gbit/s."""
STRETCHED = (
    "1 Gbit/s, layer times stretched to an earlier best setting's "
    "(ResNet-101 4.7, VGG-16 2.7 times)"
)
"""How notes describe that campaign."""
EQ7 = "alpha_beta:ends"
"""osf Eq 7: a line whose delta is measured on the smallest message."""
OTHER_LINES = ("alpha_beta:medians", "alpha_beta", "alpha_beta:least_squares")
"""Lines through the medians, by relative error, and by least squares."""
RELATIVE_MEDIANS = "relative errors of the medians"
"""One more line, with the least squares of the relative errors at the medians."""
LABS = {"measured": "cheap start-ups", "regime": "expensive start-ups"}
"""The links of the two campaigns, by the look of their points in a figure."""
PLACES = {
    "": "cluster (model)",
    **{point_look: f"lab, {links}" for point_look, links in LABS.items()},
}
"""Headings of the cluster and of the labs, by the look of their points."""


def _calibration(collectives: pd.DataFrame) -> Calibration:
    """Return the costs of messages, also by each straight line that a claim asks for.

    These lines are EQ7, OTHER_LINES and RELATIVE_MEDIANS, which are keys of the calibration's
    ``costs_by_form``.

    Parameters
    ----------
    collectives : DataFrame
        The samples of collectives of a campaign.
    """
    # The calibration can fit all lines but RELATIVE_MEDIANS, which is added below.
    calibration = Calibration.of(collectives, also=(EQ7, *OTHER_LINES))
    # A cost is made from messages that share the link with no other message.
    alone = undisturbed(collectives[collectives["in_flight"] == 1])
    known = {}
    for (link, ranks, collective), rows in alone.groupby(LINK):
        key = (str(link), int(ranks), str(collective))
        medians_s = rows.groupby("bytes")["seconds"].median()
        # "alpha_beta" is the line with the least squares of the relative errors. Without draws,
        # no interval is computed.
        line = fit("alpha_beta", medians_s.index, medians_s, draws=0)
        messages = calibration.known[key]
        costs = {**messages.costs_by_form, RELATIVE_MEDIANS: line.cost}
        known[key] = replace(messages, costs_by_form=costs)
    return replace(calibration, known=known)


@dataclass(frozen=True)
class Lab:
    """What a campaign recorded.

    Attributes
    ----------
    runs : DataFrame
        A row for each measured iteration.
    spans : DataFrame
        The spans of the iterations whose timeline was recorded.
    workloads : mapping of str to Workload
        What a rank computes, by the hash of its profile.
    calibration : Calibration
        The costs that were fitted to the campaign's all-reduces.
    """

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    # The result is cached, because fitting the costs takes long.
    @classmethod
    @lru_cache(maxsize=8)
    def load(cls, campaign: str = LAB) -> Lab:
        """Return what a campaign recorded, or what a machine recorded outside of campaigns.

        The recordings that were asked for last are cached.

        Parameters
        ----------
        campaign : str, optional
            The name of a campaign, or of the directory of a recorded machine.

        Raises
        ------
        UserError
            If there is no recording of that name.
        """
        # Machines have a directory under RECORDED, and campaigns one under their machine's.
        is_machine = (places.RECORDED / campaign).is_dir()
        if is_machine:
            recording = open_source(campaign)
        else:
            recording = open_campaign(name=campaign)
        # A recording may span several directories. The tables of the campaign itself are in
        # the first one, and the others have the layer profiles that it needs.
        alone = recording.alone
        return cls(
            runs=alone.table("runs"),
            spans=alone.table("timeline"),
            workloads=recording.workloads(),
            calibration=_calibration(alone.table("collectives")),
        )

    def cases(self, *, negotiated: bool = False, plain: bool = False) -> list[Case]:
        """Return the cases that were run with or without a negotiation.

        Parameters
        ----------
        negotiated : bool, optional
            Whether to return the cases in which the ranks agreed on the order of messages.
            Otherwise all other cases are returned.
        plain : bool, optional
            Whether to return only cases with dense gradients, with workers that are
            equally fast, and with one message at a time.
        """
        # ``runs`` has a row for each iteration. All iterations of a case describe it alike, so
        # that one of them is enough.
        rows = self.runs.drop_duplicates("case").to_dict("records")
        cases = []
        for row in rows:
            case = Case.from_row(row)
            # A density of 1 means dense gradients, a straggler's factor of 1 equally fast
            # workers, and 1 in flight one message at a time. The three numbers are set and not
            # computed, so that they can be compared exactly.
            is_plain = case.density == case.straggler == case.in_flight == 1
            if case.negotiated == negotiated and (is_plain or not plain):
                cases.append(case)
        return cases

    def workload(self, case: Case) -> Workload:
        """Return what a rank of usual speed computes in a case."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    @cached_property
    def _rounds_by_case(self) -> dict[str, pd.DataFrame]:
        """Return the iterations of each case by its key, with their scaling factors."""
        factors = self.runs["compute_s"] / self.runs["iteration_s"]
        runs = self.runs.assign(factor=factors).set_index("repeat")
        return dict(list(runs.groupby("case", sort=False)))

    @cached_property
    def _spans_by_case(self) -> dict[str, pd.DataFrame]:
        """Return the spans of each case by its key."""
        return dict(list(self.spans.groupby("case", sort=False)))

    def rounds(self, case: Case) -> pd.DataFrame:
        """Return the iterations of a case by their round.

        The column ``factor`` is the scaling factor of each iteration (osf Eq 1).
        """
        return self._rounds_by_case[case.key]

    def spans_of(self, case: Case) -> pd.DataFrame:
        """Return the spans of a case, none if its timeline was not recorded."""
        return self._spans_by_case.get(case.key, self.spans[:0])

    def phases(self, case: Case, first: str = "ALLREDUCE") -> pd.DataFrame:
        """Return how long each phase took on rank 0, in seconds.

        Parameters
        ----------
        case : Case
            The case.
        first : {"ALLREDUCE", "WAIT", "NEGOTIATE"}, optional
            The phase that counts where phases overlap.

        Returns
        -------
        DataFrame
            A row for each repeated iteration whose timeline was recorded, and a column for
            each of `workbook.osf.equations.PHASES`.
        """
        spans = self.spans_of(case)
        rows = []
        for _, of_repeat in spans.groupby("repeat"):
            timeline = Timeline.from_columns(of_repeat)
            rows.append(of_timeline(timeline, first=first))
        return pd.DataFrame(rows)


def buffer_of(case: Case) -> tuple[str, int] | None:
    """Return the network and the fusion buffer of a case.

    Returns
    -------
    (str, int) or None
        The network in the paper's spelling, and the size of its buffer in bytes, which
        is 0 without fusion. None if the case has another plan, such as MG-WFBP's.
    """
    # A plan is named as in "none", "buffer:25MB" or "mg_wfbp".
    kind, _, size = case.plan.partition(":")
    if kind not in ("none", "buffer"):
        return None
    # The plan "none" has no size.
    buffer_bytes = parse_bytes(size) if size else 0
    return osf_name(case.network), buffer_bytes


def buffer_name(size: float) -> str:
    """Return a label for a buffer of a size in bytes, such as "25 MB", or "none" if it is 0.

    The units are decimal, as those of the paper seem to be.
    """
    units = {"GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0}
    # The largest unit of which the size has at least one.
    for name, unit in units.items():
        if size >= unit:
            return f"{size / unit:g} {name}"
    return "none"


def in_labs(
    numbers_of: Callable[[Lab], pd.DataFrame], regime: str = REGIMES
) -> list[pd.DataFrame]:
    """Return the numbers of two campaigns, with cheap and with expensive start-ups.

    Parameters
    ----------
    numbers_of : callable
        Takes a campaign, and returns its numbers.
    regime : str, optional
        The name of the campaign with expensive start-ups. The other campaign is LAB.

    Returns
    -------
    list of DataFrame
        The numbers of each campaign, first those with cheap start-ups. The column ``look``
        is the key of the campaign's link in LABS, "measured" (cheap) or "regime" (expensive).
    """
    cheap = numbers_of(Lab.load(LAB)).assign(look="measured")
    expensive = numbers_of(Lab.load(regime)).assign(look="regime")
    return [cheap, expensive]


def graded(model: pd.DataFrame, *labs: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of the model, and below them those of the lab's tables.

    The column ``grade`` is "model" or "lab". A column that a table does not have is NaN in its
    rows. The rows are numbered anew.
    """
    tables = [model.assign(grade="model")]
    for lab in labs:
        tables.append(lab.assign(grade="lab"))
    return pd.concat(tables, ignore_index=True)
