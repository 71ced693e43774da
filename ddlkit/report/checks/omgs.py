"""Checks of the claims of `omgs`."""

from __future__ import annotations

from ddlkit.core.units import MIB
from ddlkit.papers import omgs, osf
from ddlkit.report.claims import Result, check, paper_table, percent


@check("omgs-model-size")
def _model_size() -> Result:
    return 4 * sum(osf.table2_parameters("ResNet50")) / MIB, "float32; MB are MiB"


@check("omgs-dense-communication")
def _dense_communication() -> Result:
    size = 4 * sum(osf.table2_parameters("ResNet50"))
    least = float(osf.update_s(size, workers=16, bytes_per_s=1e9 / 8))
    return (
        least,
        f"a ring at wire speed (osf Eq 7); the printed time is {least / 1.92:.0%} efficient",
    )


@check("omgs-gamma")
def _gamma() -> Result:
    elements = sum(osf.table2_parameters("ResNet50"))
    iteration = paper_table("omgs", "tab06").set_index("model")["topk_s"]["ResNet-50"]
    whole = omgs.selection_s(2.2**-10, 0.001, elements)
    note = f"at most, if selecting fits in ResNet-50's iteration; as printed it takes {whole:.0f} s"
    return omgs.largest_gamma(float(iteration), 0.001, elements), note


@check("omgs-tab5-mgs-vgg16")
def _merged_vgg() -> Result:
    tensors = omgs.cifar_vgg16_parameters()
    note = f"accumulated to 8192 elements over {len(tensors)} tensors (the Cifar-10 VGG-16)"
    return len(omgs.merge_up_to(tensors[::-1], 8192)), note


@check("omgs-tab5-mgs-resnet50")
def _merged_resnet() -> Result:
    tensors = osf.table2_parameters("ResNet50")
    note = f"accumulated to 8192 elements over {len(tensors)} tensors"
    return len(omgs.merge_up_to(tensors[::-1], 8192)), note


@check("omgs-tab6-s1-resnet50")
def _speedup_resnet() -> Result:
    return _speedup("ResNet-50", "topk_s")


@check("omgs-tab6-s2-inception")
def _speedup_inception() -> Result:
    return _speedup("Inception-v4", "mgs_s")


@check("omgs-tab6-s2-lstm")
def _speedup_lstm() -> Result:
    return _speedup("LSTM-PTB", "mgs_s")


def _speedup(model: str, other: str) -> Result:
    """Ratio of two times of omgs Tab VI, and its range when both are rounded to a millisecond."""
    row = paper_table("omgs", "tab06").set_index("model").loc[model]
    slow, fast, half = float(row[other]), float(row["omgs_s"]), 0.0005
    least, most = (slow - half) / (fast + half), (slow + half) / (fast - half)
    return slow / fast, f"{slow} s over {fast} s; rounding allows {least:.4f} to {most:.4f}"


@check("omgs-best-gain")
def _best_improvement() -> Result:
    rows = paper_table("omgs", "tab06").set_index("model")
    gains = rows["topk_s"] / rows["omgs_s"] - 1
    return percent(float(gains.max())), f"from Table VI, {gains.idxmax()}"
