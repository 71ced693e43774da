"""Where a measured cost ends: between its sizes, and in other labs.

Labs held out, stated before it was computed (2026-11-22): a lab is its link and its ranks; medians of its
sizes are the truth. What should decide at a size, of bytes at the link's rate less framing and the median of
the smallest size: "start-up" where bytes take less than half of that, "bytes" where more than twice, else
"knee". A lab is well predicted where the median of |error| over all sizes is at most 3%.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from ddlkit.core.lab_links import FRAMING_BYTES, read_link, wire_s_per_byte
from workbook.validate.rings import held_out_rings, ring_labs

WELL = 0.03  # median |error| of a lab that counts as well predicted
ECHO_BYTES = (
    28 + FRAMING_BYTES
)  # around the payload of an echo: IP, ICMP and what a wire counts


def waking(echoes: pd.DataFrame) -> float:
    """Return seconds that an echo takes beyond four delays and its bytes, for each second of delay."""
    alone = echoes[(echoes["operation"] == "echo") & (echoes["at_once"] == 1)]
    medians = (
        alone.groupby(["link", "ranks"])[["seconds", "bytes"]].median().reset_index()
    )
    named = medians["link"].map(read_link)
    delay_s = named.map(lambda link: link.delay_s)
    bytes_s = (
        8
        * 4
        * (medians["bytes"] + ECHO_BYTES)
        / named.map(lambda link: link.rate_bits_per_s)
    )
    beyond_s = medians["seconds"] - 4 * delay_s - bytes_s
    return float(np.polyfit(delay_s[delay_s > 0], beyond_s[delay_s > 0], 1)[0])


def held_out(collectives: pd.DataFrame, cores: int, wake_up: float) -> pd.DataFrame:
    """Return one row per lab and size, each lab predicted from all others of its kind; wake_up : `waking`."""
    labs, frames = ring_labs(collectives), []
    for kind, law in (("tbf", None), ("emulated", wake_up)):
        alike = [lab for lab in labs if lab.kind == (kind, law is not None)]
        for lab, ring in zip(alike, held_out_rings(alike, cores, law), strict=False):
            link, least_s, predicted_s = lab.named, lab.seconds[0], ring(lab.bytes)
            wire = wire_s_per_byte(
                "all_reduce", lab.workers, link.rate_bits_per_s, link.framing
            )
            few, many = lab.bytes * wire < least_s / 2, lab.bytes * wire > 2 * least_s
            decides = np.select([few, many], ["start-up", "bytes"], "knee")
            row = {
                "kind": kind,
                "link": lab.link,
                "ranks": lab.workers,
                "decides": decides,
            }
            row |= {
                "bytes": lab.bytes,
                "measured_s": lab.seconds,
                "predicted_s": predicted_s,
            }
            frames.append(pd.DataFrame({**row, "error": predicted_s / lab.seconds - 1}))
    return pd.concat(frames, ignore_index=True)
