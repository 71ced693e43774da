"""osf: Tables 2 and 3 counted anew, and the checks of its claims."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.units import GB, MB, MIB, parse_bytes
from workbook.common import claims, networks, source
from workbook.common.claims import (
    CHECKS,
    Result,
    at_most,
    check,
    counted,
    measured,
    modelled,
    own,
)
from workbook.common.specs import network_named
from workbook.osf import cluster
from workbook.osf import equations as osf
from workbook.osf import lab as osf_lab
from workbook.osf import scaling as osf_scaling
from workbook.osf.lab import Lab


def _mib(tensors: Sequence[int]) -> float:
    """Return a size in float32; osf's MB are MiB."""
    return 4 * sum(tensors) / MIB


def table2() -> pd.DataFrame:
    """Return osf Tab 2, counted from architectures: gflops are multiply-adds of one image / 1e9.

    layers: convolutions and dense layers, without a ResNet's projected shortcuts.
    """
    frame = claims.paper_table("osf", "tab02")
    names = frame["network"]
    shortcuts = {name: len(blocks) for name, blocks in networks.RESNET_BLOCKS.items()}
    return claims.recomputed(
        frame,
        gflops=[networks.multiply_adds(name) / 1e9 for name in names],
        size_mb=[_mib(networks.parameters(name)) for name in names],
        layers=[len(networks.layers(name)) - shortcuts.get(name, 0) for name in names],
        tensors=[len(networks.parameters(name)) for name in names],
    )


def table3() -> pd.DataFrame:
    """Return osf Tab 3: layers of VGG-16 that are replaced, and what replaces them."""
    layers = (
        *networks.layers("VGG16")[-3:],
        *cluster.network_layers(cluster.REPLACED)[-2:],
    )
    sizes = [*(_mib(layer.tensors) for layer in layers), 0.0]
    return claims.recomputed(claims.paper_table("osf", "tab03"), size_mb=sizes)


@check("osf-fig03-reduction")
def _osf_error_reduction() -> Result:
    errors = claims.prose("osf")
    least, largest = errors["fig03-csf-error-min"], errors["fig03-csf-error-max"]
    most = errors["fig03-osf-error-max"]
    ends = (most + 0.05) / (least - 0.5), (most - 0.05) / (largest + 0.05)
    note = (
        f"OSF errs by {most}% somewhere, CSF nowhere by more than {largest}%: only if one network has both, "
        "where with fusion (Fig 4b, almost unchanged from 1 KB on) Section 3.2 calls VGG-16's two errors "
        "comparable, a reduction near none"
    )
    return own([[100 * (1 - end) for end in ends]], note)


def _size(tensors: Sequence[int]) -> Result:
    note = f"as float32, in MiB; {4e-6 * sum(tensors):.1f} in MB of 10^6 bytes"
    return counted(_mib(tensors), note)


def _tensors(network: str) -> Result:
    return counted(len(networks.parameters(network)), "of the published architecture")


for _network in cluster.FIVE:
    check(f"osf-tab2-{_network.lower()}-tensors", _network)(_tensors)


IMPLYING = "ResNet-101: gain at 1 GB", "ResNet-101: 100 MB over 1 GB"


@check("osf-fig03-csf-min", "five: smallest CSF error", 100)
@check("osf-fig03-csf-max", "five: largest CSF error", 100)
@check("osf-fig03-resnets", "ResNets: CSF above SF", 1, 1)
@check("osf-fig07-vgg16", "VGG-16: communication at 1 GB", 100)
@check("osf-vgg16-one-layer", "VGG-16: share of one layer", 100)
def _by_model(quantity: str, scale: float = 1, offset: float = 0) -> Result:
    return claims.by_model(osf_scaling.setting_search(), quantity, scale, offset)


@check("osf-fig04a-above", "ResNet-101: CSF above at 1 KB, 1 MB", 1, 1)
@check("osf-fig04a-below", "ResNet-101: CSF below at 100 MB, 1 GB", 1, 1)
@check("osf-fig04a-csf", "ResNet-101: largest CSF error", 100)
def _of_fig4(quantity: str, scale: float, offset: float = 0) -> Result:
    """By both readings of how many GPUs Fig 4 is of; start-ups are in proportion to N - 1."""
    return _read(
        {f"{n} GPUs": (n,) for n in (cluster.WORKERS, 16)}, quantity, scale, offset
    )


@check("osf-fig08-before", "VGG-16: scaling factor")
@check("osf-fig08-after", "VGG-16 replaced: scaling factor")
@check("osf-fig08-intro", "VGG-16 replaced: scaling factor")
def _of_fig8(quantity: str) -> Result:
    """By all readings of which networks Fig 8 has with a buffer."""
    fused = {
        "neither": (0, 0),
        "the replaced": (0, 100 * MB),
        "both": (100 * MB, 100 * MB),
    }
    return _read(
        {f"{w} fused": (cluster.WORKERS, of) for w, of in fused.items()}, quantity
    )


def _read(
    readings: Mapping[str, Any], quantity: str, scale: float = 1, offset: float = 0
) -> Result:
    """Judge by each of several readings, arguments of `osf_scaling.setting_search`: all must agree."""
    searches = {
        name: osf_scaling.setting_search(*how) for name, how in readings.items()
    }
    read = {
        n: claims.by_model(each, quantity, scale, offset)
        for n, each in searches.items()
    }

    def judge(low: float, high: float) -> claims.Verdict:
        by = {name: one.judge(low, high) for name, one in read.items() if one.judge}
        note = "; ".join(
            f"{name}, {one.outcome}: {one.note}" for name, one in by.items()
        )
        outcomes = {one.outcome for one in by.values()}
        alike = len(outcomes) == 1
        return claims.Verdict(
            outcomes.pop() if alike else claims.Outcome.UNDECIDED, note
        )

    return replace(
        modelled(np.concatenate([one.spans for one in read.values()]), ""), judge=judge
    )


def _replayed(network: str, buffer: str, fitted: str) -> str:
    """Return what a buffer gains over no fusion in two replays, which start-ups decide."""
    places = {
        osf_lab.LAB: "negotiated",
        fitted: "where the link is set from a fit, not negotiated",
    }
    gains = list[str]()
    for campaign, where in places.items():
        factor = osf_lab.fused(Lab.load(campaign)).set_index(osf_lab.BUFFERED)[
            "measured"
        ]
        gain = factor[network, parse_bytes(buffer)] / factor[network, 0] - 1
        gains.append(f"{100 * gain:+.2g}% {where}")
    each = f"replayed by 4 workers at 1 Gbit/s {', '.join(gains)}"
    return f"it hangs on start-ups: {each}"


@check("osf-fig04b-unchanged", "VGG-16: change up to 100 MB")
def _unchanged(quantity: str) -> Result:
    note = _replayed("VGG16", "100 MB", source.REGIMES_VGG)
    return claims.by_model(osf_scaling.setting_search(), quantity, 1, 1, note)


@check("osf-fig06-resnet101", "1 GB", (), 100)
@check("osf-fig06-grows", "100 MB", IMPLYING, 1, 1)
def _gain_of_buffer(
    buffer: str, implying: Sequence[str], scale: float, offset: float = 0
) -> Result:
    """ResNet-101's, judged without the statements that imply it; replays cannot decide it."""
    note = _replayed("ResNet101", buffer, source.REGIMES)
    search = osf_scaling.setting_search().dropping(*implying)
    return claims.by_model(search, f"ResNet-101: gain at {buffer}", scale, offset, note)


@cache
def _fusion_gains() -> pd.DataFrame:
    """Return `gains_over` all settings that agree with the most of osf's statements on its cluster."""
    search = osf_scaling.setting_search()
    return cluster.gains_over(search.grid, search.most())


def _by_reading(ends: pd.DataFrame, note: str, low_ends: Any = -math.inf) -> Result:
    """Judge by each reading's numbers, a column of all settings', or bounds: half must agree by all."""
    spans = np.stack(np.broadcast_arrays(low_ends, ends), axis=-1).reshape(-1, 2)

    def judge(low: float, high: float) -> claims.Verdict:
        shares = ((low_ends <= high) & (low <= ends)).mean()
        each = (f"{name} {of.min():.3g} to {of.max():.3g}" for name, of in ends.items())
        outcomes = "contradicted", "undecided", "compatible"
        outcome = outcomes[int(shares.max() > 0) + int(shares.min() >= 0.5)]
        note = "; ".join(
            map("{}, reached in {:.0%}, itself not counted".format, each, shares)
        )
        return claims.Verdict(claims.Outcome(outcome), note)

    settings = claims.over_compatible(osf_scaling.setting_search())
    return replace(modelled(spans, f"{note}, {settings}"), judge=judge)


@check("osf-fig11-constant-min", {"constant": "100 MB"}, "min")
@check("osf-fig11-constant-max", {"constant": "100 MB"}, "max")
@check("osf-fig11-mgwfbp-min", cluster.READINGS, "min")
@check("osf-fig11-mgwfbp-max", cluster.READINGS, "max")
def _fusion_gain(readings: Mapping[str, str], which: str) -> Result:
    """What the best of all plans can gain at most: adaFusion's is one of them."""
    table = 1 + _fusion_gains().set_index(["setting", "network"])
    over = table[[f"over_{name}" for name in readings]].set_axis(
        [*readings.values()], axis=1
    )
    most, own = (
        100 * (each.groupby("setting").agg(which) - 1)
        for each in (over, over.div(table["over_adafusion:repaired"], axis=0))
    )
    itself = ", ".join(f"{of.min():.3g} to {of.max():.3g}" for _, of in own.items())
    note = f"adaFusion by Eq 17 repaired {itself} (Eq 18's coefficients are not printed); any plan at most"
    return _by_reading(most, f"{note} (Eqs 4, 7, 11)")


@check("osf-fig11-best-buffer")
def _best_buffer() -> Result:
    """Networks for which the constant buffer is best: against those that Fig 4 has, and against more."""
    table = _fusion_gains().groupby("setting")[
        ["constant_over_others", "constant_over_more"]
    ]
    more = ", ".join(f"{size // MB}" for size in sorted(cluster.MORE))
    names = ["no fusion and the buffers of Fig 4", f"{more} MB too"]
    best = table.agg(lambda gains: gains.ge(0).sum()).set_axis(names, axis=1)
    return _by_reading(best, "against which others is not stated", low_ends=best)


LAB = "1 Gbit/s, layer times stretched to an earlier best setting's (ResNet-101 4.7, VGG-16 2.7 times)"
OURS = [network_named(name) for name in cluster.FIVE]


def _shares(phase: str) -> list[pd.Series]:
    """Return a phase's share, equal workers; of two at once ALLREDUCE counts, or NEGOTIATE: not stated."""
    keys, wanted = (
        ["workers", "buffer_bytes", "network"],
        f"slowest == 1 and phase == {phase!r}",
    )
    rows = (
        osf_lab.phases(Lab.load(), first=name) for name in ("ALLREDUCE", "NEGOTIATE")
    )
    return [each.query(wanted).set_index(keys)["measured"] for each in rows]


@check("osf-fig05-vgg16")
def _busier_link() -> Result:
    wide, negotiating = (each.unstack("network") for each in _shares("ALLREDUCE"))
    ratios, others = (
        (each["VGG16"] / each["ResNet101"]).dropna() for each in (wide, negotiating)
    )
    pairs = ratios.rename(osf_lab.buffer_name, level=1).items()
    each = ", ".join(f"{ratio:.5g} ({n}, {size})" for (n, size), ratio in pairs)
    full = f"both above {wide.loc[ratios.idxmin()].min() - 5e-5:.2%} in the least"
    note = f"all negotiated pairs (equal workers, buffer), ALLREDUCE first: {each}; {full}; NEGOTIATE first"
    return measured(
        [*ratios, *others], f"{note} {others.min():.3g} or more; {LAB}", "replayed", 4
    )


@check("osf-fig05-negotiate")
def _negotiation() -> Result:
    exposed, whole = (100 * each for each in _shares("NEGOTIATE"))
    each = (
        f"{name} {of.min():.2g} to {of.max():.3g}"
        for name, of in whole.groupby("network")
    )
    note = f"ALLREDUCE first, at most {exposed.max():.3g}; NEGOTIATE first, {', '.join(each)}; 2 to 8 equal"
    note += f" workers, VGG-16 up to 4, buffers from none to 1 GB, {LAB}"
    return measured([*exposed, *whole], note, "replayed", n=len(exposed))


@check("osf-fig06-falls")
def _too_long_a_wait() -> Result:
    runs = (
        Lab.load()
        .runs.query("network == 'resnet101'")
        .eval("factor = compute_s / iteration_s")
    )
    wide = runs.pivot_table("factor", "straggler", "plan")
    ratios = [*(wide["buffer:100MB"] / wide["buffer:1GB"]).dropna()]
    costly = osf_lab.fused(Lab.load(source.REGIMES)).set_index(osf_lab.BUFFERED)[
        "measured"
    ]
    ratios.append(costly["ResNet101", 100 * MB] / costly["ResNet101", GB])
    note = "4 workers: equal, one 10% slower; equal on a link set from a fit (stretched 2.6 times)"
    return measured(ratios, f"{note}; {LAB.replace(', VGG-16 2.7', '')}", "replayed")


EPYC = "cpu-2x-amd-epyc"
CAMPAIGNS = (
    "campaign",
    osf_lab.LAB,
    source.REGIMES,
    source.REGIMES_VGG,
    "campaign-dag",
    EPYC,
)


@check("osf-fig03-osf-most", "100 * osf", False)
@check("osf-fig03-csf-least", "100 * csf", True)
@check("osf-fig03-reduction-each", "100 * (1 - osf / csf)", True)
def _error_in_lab(what: str, least: bool) -> Result:
    """Errors in % by Eq 7, without sign, or how much smaller osf's is; least or most is the worst of them."""
    lines = osf_lab.EQ7, *osf_lab.OTHER_LINES
    every = [
        osf_lab.unfused(CAMPAIGNS, line).query("network in @OURS") for line in lines
    ]
    errors = [
        each[["OSF printed", "CSF"]].abs().set_axis(["osf", "csf"], axis=1)
        for each in every
    ]
    ranked, *others = (each.eval(what).sort_values(ascending=least) for each in errors)
    worst, then = (
        every[0].loc[ranked.index[0]],
        ", ".join(f"{each:.3g}" for each in ranked[1:5]),
    )
    case = f"{worst['network']}, {worst['workers']} x {worst['link']}, then {then}%"
    by = ", ".join(f"{each.iloc[0]:.3g}" for each in others)
    note = (
        f"all plain replays without fusion; the worst for the claim: {case}; messages by Eq 7's line through "
        f"the smallest and the largest; by medians, relative error or least squares the worst is {by}%"
    )
    return measured(ranked, note, "replayed")


@check("osf-eq4-backward")
def _backward_over_forward() -> Result:
    alone = source.everywhere("layers").query("ranks == 1")
    sums = alone.groupby(["network", "place", "precision"])[
        ["forward_s", "backward_s"]
    ].sum()
    ratios = sums["backward_s"] / sums["forward_s"]
    of_table = ratios[ratios.index.isin(OURS, level=0)].groupby("network")
    each = ", ".join(
        f"{name} {of.min():.3g} to {of.max():.3g}" for name, of in of_table
    )
    ends = f"{ratios.idxmin()[0]} the least, {ratios.idxmax()[0]} the most; of Table 2 {each}"
    note = f"{ends}; one rank on CPUs, two machines, fp32 and bf16; in operations 2 (sharing-backward-flop)"
    return measured(ratios, note, "recorded")


LEARNING = {"running": "while training", "training": "on training images"}


@check("osf-fig09-lower", "loss", LEARNING)
@check("osf-fig09-accuracy", "accuracy", {"held_out": "held out", **LEARNING})
def _trained(what: str, places: Mapping[str, str]) -> Result:
    """The replaced network over the original, which the paper trains with or without dropout: both."""
    rows = source.everywhere("convergence").query("measured_on in @places")
    last = rows[rows["epoch"] == rows["epochs"].max()].replace({"measured_on": places})
    wide = last.pivot(index=["measured_on", "seed"], columns="network", values=what)
    wide.columns = [
        "original with dropout",
        "without",
        "replaced",
    ]  # in the order of their names
    ratios = pd.concat([wide["replaced"] / wide[name] for name in wide.columns[:2]])
    groups = (
        wide.agg(lambda of: of.map("{:.3g}".format)).groupby(level=0).agg(" and ".join)
    )
    each = (
        ", ".join(f"{name} {of}" for name, of in row.items())
        for _, row in groups.iterrows()
    )
    listed = "; ".join(map("{}: {}".format, groups.index, each))
    note = f"after {last['epoch'].max()} epochs, by seed, {listed}"
    return measured(ratios, note, "recorded", n=last["seed"].nunique())


LINES = [osf_lab.LINE_MODELS[0], *osf_lab.OTHER_LINES]
BENT = "piecewise:BDP"


@check("osf-fig10-small", "bytes < bandwidth_delay_bytes")
@check("osf-fig10-all", "bytes > 0")
def _linear_over_piecewise(which: str) -> Result:
    """Each of four honest lines' median error over osf Eq 18's, of every link."""
    rows = _cost_errors().query(which).eval("apart = abs(repeated)")
    medians = rows.groupby(["link", "model"])["error"].median().unstack()
    ratios = medians[LINES].div(medians[BENT], axis=0)
    apart = (rows.groupby("link")["apart"].agg(name) for name in ("median", "max"))
    listed = (
        f"{link} {', '.join(f'{x:.2g}' for x in row)}"
        for link, *row in ratios.itertuples()
    )
    each = "; ".join(map("{} (runs {:.1%} apart, up to {:.1%})".format, listed, *apart))
    note = f"medians; n links, lines by both ends, medians, relative error, least squares: {each}"
    return measured(ratios.stack(), note, "recorded", n=len(ratios))


@cache
def _cost_errors() -> pd.DataFrame:
    """Return, per link, a row per tensor of ResNet-101 and cost, with |error|; of the last machine."""
    of_link: dict[str, pd.DataFrame] = {}
    for recording in source.recordings("tensors").values():
        tables = recording.table("collectives"), recording.table("tensors")
        rows = osf_lab.fig10(*tables, "ResNet101", [*LINES, BENT])
        rows = rows.loc[rows.index.repeat(rows["tensors"])].eval("error = abs(error)")
        of_link |= dict([*rows.groupby("link")])
    return pd.concat(of_link.values())


CHECKS |= {
    "osf-tab2-resnet50-gflops": lambda: counted(
        2 * networks.multiply_adds("ResNet50") / 1e9,
        "two operations a multiply-add; multiply-adds are half, which agrees",
    ),
    "osf-tab2-vgg16-size": lambda: _size(networks.parameters("VGG16")),
    "osf-tab3-dense1": lambda: _size(networks.layers("VGG16")[-3].tensors[:1]),
    "osf-sf-example": lambda: own(osf.scaling_factor(9, 1.25, 8), "Eq 1"),
    "osf-fig06-vgg16": lambda: at_most(
        100 * osf.largest_scaling_loss(0.085),
        "if communication time grows by at most 8.5%, which rounds to Fig 7b's 8%; either may be wrong",
    ),
}
