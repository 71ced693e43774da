"""osf: Tables 2 and 3 counted anew, and the checks of its claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd

from ddlkit.core.units import GB, MIB
from ddlkit.papers import networks, osf
from ddlkit.papers.osf import cluster
from ddlkit.report import claims, source
from ddlkit.report.claims import CHECKS, Result, at_most, check, counted, measured, modelled, own
from ddlkit.report.figures import osf_lab, osf_scaling
from ddlkit.report.figures.osf_lab import Lab
from ddlkit.store import network_named


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
    layers = (*networks.layers("VGG16")[-3:], *cluster.network_layers(cluster.REPLACED)[-2:])
    sizes = [*(_mib(layer.tensors) for layer in layers), 0.0]
    return claims.recomputed(claims.paper_table("osf", "tab03"), size_mb=sizes)


@check("osf-fig03-reduction")
def _osf_error_reduction() -> Result:
    errors = claims.prose("osf")
    least, largest = errors["fig03-csf-error-min"], errors["fig03-csf-error-max"]
    most = errors["fig03-osf-error-max"]
    ends = (most + 0.05) / (least - 0.5), (most - 0.05) / (largest + 0.05)
    note = f"OSF errs by {most}% somewhere, and CSF nowhere by more than {largest}%"
    return own([[100 * (1 - end) for end in ends]], note)


def _tensors(network: str) -> Result:
    return counted(len(networks.parameters(network)), "of the published architecture")


for _network in cluster.FIVE:
    check(f"osf-tab2-{_network.lower()}-tensors", _network)(_tensors)


@check("osf-fig03-csf-min", "five: smallest CSF error", 100)
@check("osf-fig03-csf-max", "five: largest CSF error", 100)
@check("osf-fig03-resnets", "ResNets: CSF above SF", 1, 1)
@check("osf-fig04a-above", "ResNet-101: CSF above at 1 KB, 1 MB", 1, 1)
@check("osf-fig04a-below", "ResNet-101: CSF below at 100 MB, 1 GB", 1, 1)
@check("osf-fig04b-unchanged", "VGG-16: change up to 100 MB", 1, 1)
@check("osf-fig04a-csf", "ResNet-101: largest CSF error", 100)
@check("osf-fig07-vgg16", "VGG-16: communication at 1 GB", 100)
@check("osf-fig08-before", "VGG-16: scaling factor")
@check("osf-fig08-after", "VGG-16 replaced: scaling factor")
@check("osf-fig08-intro", "VGG-16 replaced: scaling factor")
def _by_model(statement: str, scale: float = 1, offset: float = 0) -> Result:
    return claims.by_model(osf_scaling.setting_search(), statement, scale, offset)


def _compatible_note() -> str:
    over = claims.over_compatible(osf_scaling.setting_search())
    return f"{over}; batch size, c, delta and timeout are not stated"


@cache
def _fusion_gains() -> pd.DataFrame:
    """Return `gains_over` all settings that agree with the most of osf's statements on its cluster."""
    search = osf_scaling.setting_search()
    return cluster.gains_over(search.grid, search.most())


@check("osf-fig11-constant-min", "over_constant", "min")
@check("osf-fig11-constant-max", "over_constant", "max")
@check("osf-fig11-mgwfbp-min", "over_mg_wfbp", "min")
@check("osf-fig11-mgwfbp-max", "over_mg_wfbp", "max")
def _fusion_gain(over: str, which: str) -> Result:
    """What the best of all plans can gain at most: adaFusion's is one of them."""
    gain = _fusion_gains().groupby("setting")[over].agg(which)
    note = f"of the best of all plans under Eqs 4, 7 and 11, {_compatible_note()}"
    return modelled([(-math.inf, 100 * float(gain.max()))], note)


@check("osf-fig11-best-buffer")
def _best_buffer() -> Result:
    best = _fusion_gains()["constant_over_others"].ge(0).groupby(_fusion_gains()["setting"]).sum()
    return modelled(best, f"against no fusion and Fig 4's other buffers, {_compatible_note()}")


@check("osf-vgg16-one-layer")
def _vgg_layer_share() -> Result:
    search = osf_scaling.setting_search()
    units, overheads = np.nonzero(search.most().any(axis=(1, 3, 4)))
    delta_s = search.grid.free["overhead_s"][overheads]
    sizes = np.array([sum(layer.tensors) for layer in networks.layers("VGG16")])
    sent_s = osf.update_s(4.0 * sizes, cluster.WORKERS, cluster.NETWORK_BYTES_PER_S)
    messages = np.where(np.array(cluster.UNITS)[units] == "tensor", 2, 1)
    shares = (sent_s.max() + messages * delta_s) / (sent_s.sum() + messages * sizes.size * delta_s)
    return modelled(100 * shares, f"by Eq 7 {_compatible_note()}")


@check("osf-below-bdp")
def _below_bdp() -> Result:
    shares = []
    for capacity in (0, *cluster.BUFFERS):
        sent = [cluster.fused(n, 1.0, capacity, math.inf, "tensor") for n in cluster.FIVE]
        sizes = np.concatenate([plan.group_bytes(work) for work, plan, _ in sent])
        shares.append(100 * float(np.mean(sizes < 45e3)))
    return modelled(shares, "all five networks, buffers from none to 1 GB: neither is stated")


LAB = "in the lab at 1 Gbit/s, recorded layer times waited out, every message negotiated"
OURS = [network_named(name) for name in cluster.FIVE]


@check("osf-fig05-vgg16")
def _busier_link() -> Result:
    phases = osf_lab.phases(Lab.load()).query("phase == 'ALLREDUCE' and buffer_bytes == 0")
    wide = (
        phases.query("slowest == 1")
        .pivot(index="workers", columns="network", values="measured")
        .dropna()
    )
    full = wide["ResNet101"] > 1 / 1.01  # "higher" is by 1% or more, for which it leaves no room
    note = f"{len(wide) - full.sum()} of {len(wide)} numbers of workers, {LAB}"
    return measured((wide["VGG16"] / wide["ResNet101"])[~full], note, "replayed")


@check("osf-fig06-falls")
def _too_long_a_wait() -> Result:
    runs = Lab.load().runs.query("network == 'resnet101'").eval("factor = compute_s / iteration_s")
    wide = runs.pivot_table("factor", "straggler", "plan")
    ratios = (wide["buffer:100MB"] / wide["buffer:1GB"]).dropna()
    return measured(ratios, f"4 workers, equal and with one 10% slower, {LAB}", "replayed")


@check("osf-fig06-resnet101")
def _one_message() -> Result:
    gains = []
    for campaign in (source.REGIMES, osf_lab.LAB):
        factor = osf_lab.fused(Lab.load(campaign)).set_index(osf_lab.BUFFERED)["measured"]
        gains.append(100 * (factor["ResNet101", GB] / factor["ResNet101", 0] - 1))
    note = f"4 workers in the lab, start-ups as expensive as osf's; without that delay {gains[1]:+.0f}%"
    return measured(gains[0], note, "replayed")


@check("osf-fig03-osf-most", "osf")
@check("osf-fig03-csf-least", "csf")
@check("osf-fig03-reduction-each", "100 * (1 - osf / csf)")
def _error_in_lab(what: str) -> Result:
    """Errors in %, both with Eq 7 and without sign, or how much smaller osf's is."""
    cases = osf_lab.unfused([Lab.load("campaign"), Lab.load()]).query("network in @OURS")
    errors = 100 * cases[["OSF printed", "CSF"]].abs().set_axis(["osf", "csf"], axis=1)
    names = ", ".join(sorted({*cases["network"]}))
    note = f"{len(cases)} cases of {names} in the lab, 2 to 8 workers at 0.5 and 1 Gbit/s"
    return measured(errors.eval(what), note, "replayed")


@check("osf-eq4-backward")
def _backward_over_forward() -> Result:
    layers = pd.concat(each.table("layers") for each in source.recordings("layers").values())
    alone = layers.query("ranks == 1 and precision == 'fp32' and network in @OURS")
    sums = alone.groupby(["network", "machine"])[["forward_s", "backward_s"]].sum()
    names, machines = (", ".join(level) for level in sums.index.levels)
    note = f"{names} on {machines}; in operations it is 2 (sharing-backward-flop)"
    return measured(sums["backward_s"] / sums["forward_s"], note, "recorded")


@check("osf-fig09-lower", "loss", "running")
@check("osf-fig09-accuracy", "accuracy", "held_out")
def _trained(what: str, where: str) -> Result:
    recorded = source.recordings("convergence").values()
    rows = pd.concat(each.table("convergence") for each in recorded)
    last = rows[(rows["epoch"] == rows["epochs"].max()) & (rows["measured_on"] == where)]
    wide = last.pivot(index=["machine", "seed"], columns="network", values=what)
    ratios = wide.div(wide["vgg16_eighth"], axis=0)
    low, high = ratios["vgg16_eighth_no_dropout"].agg(["min", "max"])
    each = f"{len(ratios)} seeds, networks an eighth as wide, other images"
    note = f"{each}; {low:.2g} to {high:.2g} without dropout alone, which the replacement drops too"
    return measured(ratios["vgg16_eighth_replaced"], note, "recorded")


LINES = {"ring_all_reduce": "through both ends", "alpha_beta:least_squares": "by least squares"}
BENT = "piecewise:BDP"


@check("osf-fig10-small", "bytes < bandwidth_delay_bytes")
@check("osf-fig10-all", "bytes > 0")
def _linear_over_piecewise(which: str) -> Result:
    """Median error per tensor, each size unseen: each of two honest lines over osf Eq 18's."""
    medians = _cost_errors().query(which).groupby(["link", "model"])["error"].median().unstack()
    ratios = medians[[*LINES]].div(medians[BENT], axis=0).rename(columns=LINES).stack()
    each = "; ".join(f"{link}, {line} {ratio:.2g}" for (link, line), ratio in ratios.items())
    return measured(ratios, f"which line decides: {each}", "recorded")


@cache
def _cost_errors() -> pd.DataFrame:
    """Return, per lab link, a row per tensor of ResNet-101 and cost, with |error|; of the last machine."""
    of_link: dict[str, pd.DataFrame] = {}
    for recording in source.recordings("tensors").values():
        tensors = recording.table("tensors").query("link.str.startswith('lab:')")
        collectives = recording.table("collectives")
        rows = osf_lab.fig10(collectives, tensors, "ResNet101", (*LINES, BENT))
        rows = rows.loc[rows.index.repeat(rows["tensors"])].eval("error = abs(error)")
        of_link |= dict([*rows.groupby("link")])
    return pd.concat(of_link.values())


CHECKS |= {
    "osf-tab2-resnet50-gflops": lambda: counted(
        2 * networks.multiply_adds("ResNet50") / 1e9,
        "two operations a multiply-add, of which there are half as many",
    ),
    "osf-tab2-vgg16-size": lambda: counted(_mib(networks.parameters("VGG16")), "as float32"),
    "osf-tab3-dense1": lambda: counted(_mib(networks.layers("VGG16")[-3].tensors), "as float32"),
    "osf-sf-example": lambda: own(osf.scaling_factor(9, 1.25, 8), "Eq 1"),
    "osf-fig06-vgg16": lambda: at_most(
        100 * osf.largest_scaling_loss(0.085),
        "if communication time grows by 8% (Fig 7b), rounded up to 8.5%",
    ),
    "osf-fig05-allreduce": lambda: modelled(
        (-math.inf, _by_model("ResNet-101: ALLREDUCE share", 100).high),
        "at most, as the model has neither negotiation nor copies in memory",
    ),
    "osf-fig06-grows": lambda: modelled(
        1 + _fusion_gains().query("network == 'ResNet101'")["constant_over_none"],
        _compatible_note(),
    ),
    "osf-fig05-negotiate": lambda: measured(
        100 * osf_lab.phases(Lab.load()).query("slowest == 1 and phase == 'NEGOTIATE'")["measured"],
        f"2 to 8 equal workers, {LAB}",
        "replayed",
    ),
}
