"""Checks of the claims of `osf`."""

from __future__ import annotations

import numpy as np

from ddlkit.core.units import MIB
from ddlkit.papers import osf
from ddlkit.report.claims import Result, check, claimed, paper_table, percent


@check("osf-sf-example")
def _worked_example() -> Result:
    return osf.scaling_factor(9, 1.25, 8), "Eq 1"


@check("osf-eq8-limit")
def _eq8_limit() -> Result:
    layers = {"forward_s": 3.0, "backward_s": [2.0] * 3, "sent_s": [0.0] * 3}
    literal, repaired = osf.osf(**layers), osf.osf(**layers, first=0)  # type: ignore[arg-type]
    note = f"Eq 8 sums from j = i + 1; from j = i, as its prose and Eq 15 say, OSF is {repaired:g}"
    return literal, note


@check("osf-fig03-reduction")
def _osf_error_reduction() -> Result:
    ratio = 1 - claimed("osf-fig03-osf-max") / claimed("osf-fig03-csf-max")
    return percent(ratio), "1 - 8.4/51.9: a ratio of two maxima, not the least of five reductions"


@check("osf-vgg16-one-layer")
def _vgg_layer_share() -> Result:
    layers, networks = paper_table("osf", "tab03"), paper_table("osf", "tab02")
    largest = layers.loc[layers["layer"] == "Fully Connected Layer 1", "size_mb"].iloc[0]
    whole = networks.loc[networks["network"] == "VGG16", "size_mb"].iloc[0]
    one, every = osf.update_s(np.array([largest, whole]) * MIB, workers=32, bytes_per_s=25e9 / 8)
    return percent(one / every), "Eq 7 without overhead: it is the layer's share of the bytes"


@check("osf-fig06-vgg16")
def _vgg_loss() -> Result:
    bound = osf.largest_scaling_loss(0.08)
    return percent(bound), "at most, if communication time grows by 8% (Fig 7b) and nothing else"


@check("osf-fig08-after")
def _replacement() -> Result:
    return (
        _sf_after_replacement(),
        "Eq 2 with the bytes of Table 3 and 0.25 before; Section 1: 0.75",
    )


@check("osf-fig08-intro")
def _replacement_as_introduced() -> Result:
    return (
        _sf_after_replacement(),
        "Eq 2 with the bytes of Table 3 and 0.25 before; Section 4.1: 0.72",
    )


def _sf_after_replacement() -> float:
    """CSF when the three dense layers' bytes go and the new layers' come; computation unchanged."""
    networks = paper_table("osf", "tab02").set_index("network")["size_mb"]
    layers = paper_table("osf", "tab03").groupby("model")["size_mb"].sum()
    before = claimed("osf-fig08-before")
    kept = networks["VGG16"] - layers["VGG16"] + layers["VGG16 w/ layer replacement"]
    communication = (1 / before - 1) * kept / networks["VGG16"]
    return osf.csf(1.0, communication)


@check("osf-tab2-resnet50-tensors")
def _resnet_tensors() -> Result:
    count = len(osf.table2_parameters("ResNet50"))
    return count, "the published architecture; the table's ResNets all follow 10 x blocks + 16"


@check("osf-tab2-vgg16-tensors")
def _vgg_tensors() -> Result:
    more = len(osf.table2_parameters("VGG19")) - len(osf.table2_parameters("VGG16"))
    note = f"a weight and a bias for each of 16 layers; VGG-19 has {more} more, the table 2 more"
    return len(osf.table2_parameters("VGG16")), note


@check("osf-tab2-vgg16-size")
def _vgg_size() -> Result:
    return 4 * sum(osf.table2_parameters("VGG16")) / MIB, "float32; the table's MB are MiB"


@check("osf-below-bdp")
def _below_bdp() -> Result:
    networks = (*osf.RESNET_BLOCKS, *osf.VGG_CONVOLUTIONS)
    small = {n: [4 * size < 45e3 for size in osf.table2_parameters(n)] for n in networks}
    below = [flag for flags in small.values() for flag in flags]
    vgg = small["VGG16"]
    note = f"all five networks; 53.1% is VGG-16's {sum(vgg)}/{len(vgg)} alone"
    return percent(sum(below) / len(below)), note


@check("osf-fig11-constant-max")
def _largest_gain() -> Result:
    factors = np.linspace(0.001, 1, 1000)
    gains = [osf.largest_fusion_gain(float(factor)) for factor in factors]
    best = float(factors[int(np.argmax(gains))])
    note = f"at most, for any network and plan (at SF = {best:.1f}), unless overhead dominates"
    return percent(max(gains)), note


@check("osf-fig11-constant-min")
def _largest_gain_of_vgg() -> Result:
    before = claimed("osf-fig08-before")
    note = "at most for VGG-16 at SF = 0.25 (Section 4.1), so not all five networks gain 32.2%"
    return percent(osf.largest_fusion_gain(before)), note
