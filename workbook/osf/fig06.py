"""osf Figure 6: number of messages and scaling factor against the fusion buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.units import GB, MB
from workbook.common import claims
from workbook.common.claims import Result, check, claimed
from workbook.common.source import REGIMES
from workbook.osf import by_buffer, settings
from workbook.osf.by_buffer import BUFFERS
from workbook.osf.cluster import TWO, PaperSetting
from workbook.osf.equations import largest_scaling_loss
from workbook.osf.frames import rows_of, tidy
from workbook.osf.lab import STRETCHED, Lab, graded, in_labs

# -- numbers -------------------------------------------------------------------------


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the messages and the scaling factor at 32 workers, by network and buffer.

    Parameters
    ----------
    setting : PaperSetting
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    DataFrame
        A row for each ``network``, ``buffer_bytes`` (0 is no fusion) and ``quantity``,
        which is "all-reduces", the number of messages, or "SF", the scaling factor.
        ``model`` is this number or factor.
    """
    cases = {"network": TWO, "buffer_bytes": (0, *BUFFERS)}
    return tidy(partial(by_buffer.modelled, setting), cases)


def numbers() -> pd.DataFrame:
    """Return the messages and the scaling factor by the buffer, modelled and measured.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, with their ranges over all compatible
        settings, and then those of `by_buffer.in_lab`. Only settings count in which an
        unfused message carries one tensor. The column ``grade`` ("model" or "lab") tells
        the rows apart. The paper prints no factor, but the relative change of the factor
        by a buffer of 1 GB, which is ``paper_change``. ``paper`` is the modelled factor
        without fusion times 1 plus this change.
    """
    model = settings.over(modelled, keys=[*by_buffer.KEYS, "quantity"], unit="tensor")
    # The paper prints a gain for ResNet-101 and a loss for VGG-16.
    printed_percent = {
        "ResNet101": claimed("osf-fig06-resnet101"),
        "VGG16": -claimed("osf-fig06-vgg16"),
    }
    change = model["network"].map(printed_percent) / 100
    unfused = rows_of(model, quantity="SF", buffer_bytes=0).set_index("network")
    # For each row, the modelled factor of its network without fusion.
    unfused_factor = model["network"].map(unfused["model"])
    is_1_gb = (model["quantity"] == "SF") & (model["buffer_bytes"] == GB)
    model["paper"] = (unfused_factor * (1 + change)).where(is_1_gb)
    frame = graded(model, *in_labs(by_buffer.in_lab))
    # ``change`` has the index of the model. The rows of the model come first in the frame and
    # have the same index there. The rows of the lab get NaN.
    return frame.assign(paper_change=change.where(is_1_gb))


def changes(frame: pd.DataFrame, network: str) -> dict[str, float]:
    """Return how much a buffer of 1 GB changes the scaling factor of a network.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    network : str
        The network.

    Returns
    -------
    dict of str to float
        The relative change by its source: of the "model", as the "paper" prints it, and as
        measured in the lab on the link with cheap start-ups ("measured") and on the one with
        expensive start-ups ("regime"). A link without both buffers has no key.
    """
    # The numbers of messages are left out. Rows of the lab have no quantity, and stay.
    rows = frame[(frame["network"] == network) & (frame["quantity"] != "all-reduces")]
    factors = rows.assign(
        # Measured in rows of the lab, and modelled in the others, which have nothing measured.
        factor=rows["measured"].fillna(rows["model"]),
        # In rows of the lab, ``look`` is the key of their link: "measured" or "regime". In
        # other rows it is NaN.
        source=rows["look"].fillna("model"),
    )
    by_buffer_size = factors.pivot_table(
        values="factor", index="source", columns="buffer_bytes"
    )
    change = (by_buffer_size[GB] / by_buffer_size[0] - 1).dropna()
    # One row alone has the printed change. It is NaN in all others, which the maximum skips.
    return {**change, "paper": rows["paper_change"].max()}


# -- drawing -------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the factor by the size of the buffer, modelled, measured and printed.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    # The key "regime" is the link with expensive start-ups, and "measured" the one with cheap
    # start-ups. Both changes are measured.
    change = changes(frame, "ResNet101")
    title = (
        "A buffer of 1 GB changes ResNet-101's measured factor by "
        f"{change['regime']:+.0%} with expensive start-ups and by "
        f"{change['measured']:+.0%} with cheap ones"
    )
    # The name of a modelled quantity sets the style of its line and the label in the legend.
    # "model" is the name of the style for modelled values.
    named = frame.replace({"quantity": {"SF": "model"}})
    # ``quantities`` lists modelled quantities only. The measured and the printed factors are
    # columns of the frame, and are drawn in any case.
    return by_buffer.draw(named, quantities=["model"], title=title)


# -- claims --------------------------------------------------------------------------

IMPLYING = (
    "ResNet-101: gain of the factor with 1 GB",
    "ResNet-101: gain of 100 MB over 1 GB",
)
"""The statements that imply a gain at 100 MB."""


@check("osf-fig06-vgg16")
def _loss() -> Result:
    note = (
        "if communication time grows by at most 8.5%, which rounds to Fig 7b's 8%; "
        "either may be wrong"
    )
    return claims.at_most(100 * largest_scaling_loss(0.085), note)


@check("osf-fig06-resnet101", "1 GB", (), 100)
@check("osf-fig06-grows", "100 MB", IMPLYING, 1, 1)
def _gain_of_buffer(
    buffer: str, implying: Sequence[str], scale: float, offset: float = 0
) -> Result:
    """Return the gain of ResNet-101 in the settings that meet the other statements.

    Replays cannot decide the claim. Where messages have cheap start-ups, the buffer lowers the
    factor. Where messages have expensive start-ups, the buffer raises the factor. The paper does
    not state the start-ups of its cluster. The note reports a replay of each kind.

    Parameters
    ----------
    buffer : str
        The size of the buffer, such as "100 MB".
    implying : sequence of str
        The names of statements that imply the gain. They do not count, because a setting that
        meets them cannot contradict the gain.
    scale, offset : float
        The number of the claim is ``offset + scale * gain``: with 100 and 0 the gain in %,
        and with 1 and 1 the factor divided by that without a buffer.
    """
    note = by_buffer.replayed_gain("ResNet101", buffer, REGIMES)
    search = settings.setting_search().dropping(*implying)
    quantity = f"ResNet-101: gain of the factor with {buffer}"
    return claims.by_model(search, quantity, scale, offset, note)


@check("osf-fig06-falls")
def _fall_beyond_100_mb() -> Result:
    """Return the factor with 100 MB divided by that with 1 GB, in replays of ResNet-101.

    Two ratios are of the link with cheap start-ups: with equal workers, and with one of them
    10% slower. The third ratio is of the link with expensive start-ups, with equal workers.

    Replays compute longer than was recorded, by a factor of their campaign, so that compute
    weighs against communication as in a setting of the model. The setting is one that an
    earlier search found best for the paper.
    """
    runs = Lab.load().runs.query("network == 'resnet101'")
    factors = runs.assign(factor=runs["compute_s"] / runs["iteration_s"])
    # The mean scaling factors, with a column for each plan. The two rows are of equal workers
    # (``straggler`` is 1) and of one that computes 1.1 times as long as the others.
    by_plan = factors.pivot_table(values="factor", index="straggler", columns="plan")
    # Where one of the two buffers was not replayed there is no ratio.
    ratios = list((by_plan["buffer:100MB"] / by_plan["buffer:1GB"]).dropna())

    # The link with expensive start-ups. Its start-up and rate were also set by the setting of the
    # earlier search, which the note calls a fit.
    expensive = by_buffer.in_lab(Lab.load(REGIMES)).set_index(by_buffer.KEYS)
    measured = expensive["measured"]
    ratios.append(measured["ResNet101", 100 * MB] / measured["ResNet101", GB])
    # STRETCHED describes the campaign with cheap start-ups, and ends with the two networks'
    # factors of compute: "(ResNet-101 4.7, VGG-16 2.7 times)". This claim is not about VGG-16.
    on_cheap_link = STRETCHED.replace(", VGG-16 2.7", "")
    # The note says what the three ratios are of, in their order. "stretched 2.6 times" belongs to
    # the third ratio, and the stretching in ``on_cheap_link`` to the first two.
    note = (
        "4 workers: equal, one 10% slower; equal on a link set from a fit (stretched "
        f"2.6 times); {on_cheap_link}"
    )
    return claims.measured(ratios, note, "replayed")
