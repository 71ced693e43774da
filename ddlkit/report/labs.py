"""Where a measured cost ends: between its sizes, in other labs, and under disturbances.

Labs held out, stated before it was computed (2026-11-22): a lab is its link and its ranks; medians of its
sizes are the truth. What should decide at a size, of bytes at the link's rate less framing and the median of
the smallest size: "start-up" where bytes take less than half of that, "bytes" where more than twice, else
"knee". A lab is well predicted where the median of |error| over all sizes is at most 3%.

Disturbances, fixed before the recording: a case fails if its measured median lies outside the interval of
single iterations, or the predicted one is off from it by more than FAILS.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.fit import interval
from ddlkit.core.iteration import Iteration, group_ends
from ddlkit.core.link import FRAMING_BYTES, STEPS, read_link, wire_s_per_byte
from ddlkit.core.units import parse_bits_per_s
from ddlkit.core.workload import Floats, Workload
from ddlkit.model.calibration import Calibration, Communication, undisturbed
from ddlkit.model.predictor import plan_of
from ddlkit.model.rings import RingLab, held_out_rings, ring_labs
from ddlkit.report.accuracy import mean_difference

WELL = 0.03
"""Median |error| of a lab that counts as well predicted."""
ECHO_BYTES = 28 + FRAMING_BYTES
"""Around the payload of an echo: IP, ICMP and what a wire counts."""


# -- between sizes, and start-ups -----------------------------------------------------------------


def startup_share(cases: pd.DataFrame, collectives: pd.DataFrame) -> pd.Series:
    """Return (cases,) what all messages' start-ups take one after the other, over compute.

    cases : of `accuracy.validate` or `accuracy.joined`; a start-up is the median of the smallest message
        that was calibrated in the case's lab
    """
    keys = ["link", "ranks", "collective"]
    alone = collectives[collectives["in_flight"] == 1]
    rows = alone[alone["bytes"] == alone.groupby(keys)["bytes"].transform("min")]
    startup_s = rows.groupby(keys)["seconds"].median()
    labs = pd.MultiIndex.from_frame(cases[["link", "workers", "collective"]])
    messages = cases["ends"].astype(str).str.count(";") + 1
    share = messages.to_numpy() * startup_s.reindex(labs).to_numpy() / cases["measured_compute_s"]
    return share.rename("startup_share")


# -- labs that were not measured ------------------------------------------------------------------


def waking(echoes: pd.DataFrame) -> float:
    """Return seconds that a round trip takes besides for each second of delay, by a table ``echoes``.

    The slope, over emulated links with delay, of what an echo of one rank takes beyond its four delays and
    its bytes on four links: a process that has slept longer is slower to wake.
    """
    alone = echoes[(echoes["operation"] == "echo") & (echoes["at_once"] == 1)]
    medians = alone.groupby(["link", "ranks"])[["seconds", "bytes"]].median().reset_index()
    named = medians["link"].map(read_link)
    delay_s = named.map(lambda link: link.delay_s)
    bytes_s = 8 * 4 * (medians["bytes"] + ECHO_BYTES) / named.map(lambda link: link.rate_bits_per_s)
    beyond_s = medians["seconds"] - 4 * delay_s - bytes_s
    return float(np.polyfit(delay_s[delay_s > 0], beyond_s[delay_s > 0], 1)[0])


def held_out(collectives: pd.DataFrame, cores: int, woken: float) -> pd.DataFrame:
    """Return one row per lab of equal links and size, each lab predicted from all others of its kind.

    Columns: kind ("tbf", "emulated"), link, ranks, bytes, measured_s, predicted_s, error, and what decides.
    Links without delay are of no kind. woken : `waking`. Raises UserError where there is no lab.
    """
    labs = ring_labs(collectives)
    if not labs:
        raise UserError("no lab of equal links to extrapolate from: record examples/labs.yml")
    frames = []
    for engine, law in (("tbf", None), ("emulated", woken)):
        alike = [lab for lab in labs if lab.kind == (engine, law is not None)]
        for lab, ring in zip(alike, held_out_rings(alike, cores, law), strict=False):
            row = {"kind": engine, "link": lab.link, "ranks": lab.workers, "decides": _decides(lab)}
            row |= {"bytes": lab.bytes, "measured_s": lab.seconds, "predicted_s": ring(lab.bytes)}
            frames.append(pd.DataFrame({**row, "error": ring(lab.bytes) / lab.seconds - 1}))
    return pd.concat(frames, ignore_index=True)


def _decides(lab: RingLab) -> np.ndarray:
    """Return (s,) the class of each size."""
    named, least_s = lab.named, lab.seconds[0]
    wire = wire_s_per_byte("all_reduce", lab.workers, named.rate_bits_per_s, named.framing)
    small, large = lab.bytes * wire < least_s / 2, lab.bytes * wire > 2 * least_s
    return np.select([small, large], ["start-up", "bytes"], "knee")


def algorithms(collectives: pd.DataFrame, link: str, ranks: int) -> pd.DataFrame:
    """Return measured times of algorithms sent step by step over that of the fastest: (algorithm, bytes).

    Before them two columns: their steps, and the bytes on the busiest link over the message's.
    """
    rows = collectives[collectives["algorithm"].str.startswith(STEPS)]
    rows = rows[(rows["link"] == link) & (rows["ranks"] == ranks) & (rows["in_flight"] == 1)]
    names = undisturbed(rows)["algorithm"].str.removeprefix(STEPS)
    counts = pd.DataFrame(textbook(ranks), ["steps", "bytes"]).T
    seconds = rows.pivot_table("seconds", names, "bytes", "median")
    return counts.join(seconds / seconds.min(), how="inner")


def textbook(ranks: int) -> dict[str, tuple[int, float]]:
    """Return of each algorithm its steps, and the bytes on the busiest link over the message's.

    As Thakur, Rabenseifner and Gropp print them ("Optimization of Collective Communication Operations in
    MPICH", 2005, sections 4.1 to 4.5), with a fold where ranks are no power of two. Hierarchical: rings
    within nodes of 4 ranks, or of the next number that divides the ranks, and between nodes.
    """
    bits, share = ranks.bit_length() - 1, 2 * (ranks - 1) / ranks
    core, rounds = 1 << bits, (ranks - 1).bit_length()
    fold = 2 * (core < ranks)
    node = max(size for size in range(1, 5) if ranks % size == 0)
    return {
        "ring": (2 * (ranks - 1), share),
        "halving_doubling": (2 * bits + fold, 2 * (core - 1) / core + fold),
        "tree": (2 * rounds, 2 * rounds),
        "hierarchical": (2 * (node - 1) + 2 * (ranks // node - 1), share),
        "direct": (2, share),
    }


# -- disturbances ---------------------------------------------------------------------------------

FAILS = 0.05
MSS_BYTES, FRAME_BYTES = 1448, 1538
"""Of a full packet: what it carries, and what that takes on the wire."""
TIMEOUT_S = 0.2
"""Least time after which Linux sends again what nobody has asked for."""
CONTROLS = ("reno", "cubic", "bbr")
LOSS_BASED = CONTROLS[:2]
CHANGE = re.compile(r"|0s:(?P<what>rate|background|loss)=(?P<value>[\w.%]+)(?P<one>,rank=\d+)?")


class Disturbance(NamedTuple):
    """What is known of a disturbance before anything is measured under it.

    name : "one link at 1/4", "loss 1%, cubic"; kind : without how strong it is
    share : of the slowest link's rate that is left; loss : share of packets; control : TCP's
    """

    name: str
    kind: str
    share: float
    loss: float
    control: str

    def of_rate(self, round_trip_s: float, rate_bits_per_s: float) -> float:
        """Return the share of the rate that messages get, losses considered.

        TCP that takes loss for congestion keeps sqrt(3/2) / sqrt(p) packets in flight (Mathis, Semke,
        Mahdavi and Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997), and
        cubic on short ways as much; bbr keeps its rate and sends again what is lost.
        """
        if not self.loss or self.control not in LOSS_BASED:
            return self.share * (1 - self.loss)
        window_bits = math.sqrt(1.5 / self.loss) * FRAME_BYTES * 8
        return min(1 - self.loss, window_bits / round_trip_s / rate_bits_per_s)


def disturbance_of(case: Case) -> Disturbance | None:
    """Return what a case says of a disturbance that lasts the whole iteration; None for any other."""
    change = CHANGE.fullmatch(case.changes)
    if change is None or case.straggler_spread:
        return None
    control = next((name for name in CONTROLS if name in case.link.split("-")), CONTROLS[0])
    if not change["what"]:
        name = "none" if control == CONTROLS[0] else f"none, {control}"
        return Disturbance(name, name, 1.0, 0.0, control)
    if change["what"] == "rate":
        share = parse_bits_per_s(change["value"]) / case.link_bits_per_s
        links = "one link" if change["one"] else "all links"
        return Disturbance(f"{links} at 1/{1 / share:g}", f"{links} slower", share, 0.0, control)
    value = float(change["value"].removesuffix("%")) / 100
    if change["what"] == "background":
        return Disturbance(f"others {value:.0%}", "others", 1 - value, 0.0, control)
    return Disturbance(f"loss {100 * value:g}%, {control}", f"loss, {control}", 1.0, value, control)


def predicted_s(
    case: Case, workload: Workload, calm: Communication, disturbance: Disturbance
) -> Floats:
    """Return (n,) single iterations as they may come, by the calibration of the calm lab.

    Bytes take longer by the share of the rate that is left: a ring sends all bytes over every link, so the
    slowest link's share is everybody's. No sender is told that the last packet of a transfer is lost: a
    timer does, after 0.2 s where that was the only one, else after two round trips.
    """
    if not calm.draws or calm.noise is None:
        raise UserError("a disturbance needs the calibration's draws and noise: fit it with draws")
    iteration = Iteration(workload, plan_of(case), calm.cost)
    sizes, ranks = iteration.group_bytes, case.workers
    alone_s = np.array([cost(sizes) for cost in calm.draws])
    alone_s *= calm.noise.factors(sizes, len(alone_s))
    round_trip_s = 4 * read_link(case.link).delay_s
    wait_s = np.where(sizes / ranks <= MSS_BYTES, TIMEOUT_S, 2 * round_trip_s)
    transfers = 2 * (ranks - 1) * ranks
    lost = np.random.default_rng(0).poisson(disturbance.loss * transfers, alone_s.shape)
    alone_s += lost * wait_s
    large = calm.noise.bytes[calm.noise.bytes >= calm.noise.bytes[-1] / 16]
    slope = np.polyfit(large, calm.cost(large), 1, w=1 / calm.cost(large))[0]  # where bytes decide
    bytes_s = np.minimum(alone_s, slope * sizes)
    share = disturbance.of_rate(round_trip_s, case.link_bits_per_s)
    ends_s = group_ends(iteration.ready_s, alone_s + bytes_s * (1 / share - 1))
    return np.asarray(ends_s[:, -1] + workload.update_s)


def disturbed(
    runs: pd.DataFrame, workloads: Mapping[str, Workload], calibration: Calibration
) -> pd.DataFrame:
    """Return one row per disturbance and plan: predicted with its interval, measured, error, fails.

    ``covered`` is the share of single iterations in the interval; ``repeatability`` the mean difference of
    two iterations over their median.
    """
    rows = []
    for _, own in runs.groupby("case", sort=False):
        case = Case.from_row(own.iloc[0].to_dict())
        disturbance = disturbance_of(case)
        if disturbance is None:
            continue
        workload = workloads[case.profile_sha256].scaled(case.dilation)
        single_s = predicted_s(case, workload, calibration.of_case(case), disturbance)
        took_s, (lower_s, upper_s) = own["iteration_s"], interval(single_s)
        measured_s, middle_s = float(took_s.median()), float(np.median(single_s))
        row: dict[str, Any] = {"disturbance": disturbance.name, "kind": disturbance.kind}
        row |= {"plan": case.plan, "predicted_s": middle_s, "lower_s": lower_s, "upper_s": upper_s}
        row |= {"measured_s": measured_s, "relative_error": middle_s / measured_s - 1}
        row["inside"] = bool(lower_s <= measured_s <= upper_s)
        row["covered"] = float(took_s.between(lower_s, upper_s).mean())
        row["repeatability"] = mean_difference(took_s) / measured_s
        rows.append({**row, "fails": not row["inside"] or abs(row["relative_error"]) > FAILS})
    return pd.DataFrame(rows)
