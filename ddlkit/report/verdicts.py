"""The papers' claims, computed again: reproduced, differs, or not attempted.

A claim is one number of a paper, transcribed in data/papers/<key>/claims.csv. A check computes that
number anew, from the paper's own other numbers, its equations or a count; it never sees the claimed
value. A claim is *reproduced* when |computed - value| <= tolerance x |value|.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.papers import dag, omgs, osf, sharing
from ddlkit.report.outputs import format_quantity

PAPERS = ("osf", "sharing", "dag", "omgs")
VERDICTS = ("reproduced", "differs", "not attempted")

Result = tuple[float, str]
Check = Callable[[], Result]


@dataclass(frozen=True)
class Claim:
    """One number of a paper: where it stands, and within which relative tolerance it must agree.

    ``figure`` is the catalog entry it belongs to, "" if none.
    """

    id: str
    paper: str
    place: str
    quantity: str
    value: float
    unit: str
    tolerance: float
    condition: str
    figure: str

    def verdict(self, computed: float | None) -> str:
        """One of VERDICTS."""
        if computed is None:
            return "not attempted"
        # One unit in the last place of a double must not turn an exact match into a difference.
        margin = self.tolerance * abs(self.value) + 1e-12 * abs(self.value)
        return "reproduced" if abs(computed - self.value) <= margin else "differs"


def load_claims(papers: Path | None = None) -> tuple[Claim, ...]:
    """All claims under ``papers`` (data/papers by default), paper by paper in the order written.

    Raises UserError naming file, line and field for a row that is incomplete or not a number.
    """
    folder = papers or store.DATA / "papers"
    claims = [claim for key in PAPERS for claim in _read(folder / key / "claims.csv", key)]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise UserError(f"{folder}: claim {claim.id} appears twice: give each its own id")
        seen.add(claim.id)
    return tuple(claims)


def _read(path: Path, paper: str) -> list[Claim]:
    names = [field.name for field in fields(Claim)]
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = list(reader)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: restore the file") from error
    if reader.fieldnames != names:
        raise UserError(f"{path}: columns are {reader.fieldnames}: must be {', '.join(names)}")
    return [_claim(row, paper, f"{path}, line {line}") for line, row in enumerate(rows, 2)]


def _claim(row: dict[str, str], paper: str, where: str) -> Claim:
    if None in row or None in row.values():
        raise UserError(f"{where}: has more or fewer cells than the header")
    numbers = {name: _number(row[name], f"{where}, {name}") for name in ("value", "tolerance")}
    for name in ("id", "place", "quantity", "unit"):
        if not row[name]:
            raise UserError(f"{where}: {name} is empty")
    if row["paper"] != paper:
        raise UserError(f"{where}: paper is {row['paper']!r}, but this is the file of {paper!r}")
    return Claim(**{**row, **numbers})  # type: ignore[arg-type]


def _number(cell: str, where: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UserError(f"{where}: {cell!r} is not a finite number >= 0")
    return value


CHECKS: dict[str, Check] = {}
"""Claim id -> function that computes (value in the claim's unit, note)."""


def check(claim: str) -> Callable[[Check], Check]:
    """Register the decorated function as the check of a claim."""

    def register(function: Check) -> Check:
        CHECKS[claim] = function
        return function

    return register


def evaluate(claims: Sequence[Claim] | None = None) -> pd.DataFrame:
    """One row a claim: its columns, ``computed`` (NaN if not attempted), ``difference`` (relative),
    ``verdict`` and ``note``."""
    rows = []
    for claim in load_claims() if claims is None else claims:
        computed, note = CHECKS[claim.id]() if claim.id in CHECKS else (None, "")
        shown = math.nan if computed is None else float(computed)
        difference = (shown - claim.value) / claim.value if claim.value else shown
        verdict = claim.verdict(computed)
        row = {"computed": shown, "difference": difference, "verdict": verdict, "note": note}
        rows.append({**asdict(claim), **row})
    return pd.DataFrame(rows)


def counts(verdicts: pd.DataFrame) -> dict[str, int]:
    """How many claims got each verdict."""
    return {name: int((verdicts["verdict"] == name).sum()) for name in VERDICTS}


def markdown(verdicts: pd.DataFrame) -> str:
    """The verdicts as a Markdown table, attempted claims first."""
    head = ("claim", "place", "quantity", "printed", "computed", "verdict", "note")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for row in in_order(verdicts).itertuples():
        condition = f" ({row.condition})" if row.condition else ""
        printed, computed = (format_quantity(v, row.unit) for v in (row.value, row.computed))
        cells = (
            row.id,
            row.place,
            row.quantity + condition,
            printed,
            computed,
            row.verdict,
            row.note,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def in_order(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Attempted claims first, otherwise in the order of the files."""
    return verdicts.sort_values("verdict", key=lambda v: v == "not attempted", kind="stable")


def paper_table(paper: str, name: str) -> pd.DataFrame:
    """A transcribed table or figure: data/papers/<paper>/<name>.csv. Raises UserError if missing."""
    path = store.DATA / "papers" / paper / f"{name}.csv"
    if not path.is_file():
        raise UserError(f"{path} is missing: restore it from the repository")
    return pd.read_csv(path)


def _percent(share: float) -> float:
    return 100 * share


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
    values = {claim.id: claim.value for claim in load_claims()}
    ratio = 1 - values["osf-fig03-osf-max"] / values["osf-fig03-csf-max"]
    return _percent(ratio), "1 - 8.4/51.9: a ratio of two maxima, not the least of five reductions"


@check("osf-vgg16-one-layer")
def _vgg_layer_share() -> Result:
    layers, networks = paper_table("osf", "tab03"), paper_table("osf", "tab02")
    largest = layers.loc[layers["layer"] == "Fully Connected Layer 1", "size_mb"].iloc[0]
    whole = networks.loc[networks["network"] == "VGG16", "size_mb"].iloc[0]
    one, every = osf.update_s(np.array([largest, whole]) * MIB, workers=32, bytes_per_s=25e9 / 8)
    return _percent(one / every), "Eq 7 without overhead: it is the layer's share of the bytes"


@check("osf-fig06-vgg16")
def _vgg_loss() -> Result:
    bound = osf.largest_scaling_loss(0.08)
    return _percent(bound), "at most, if communication time grows by 8% (Fig 7b) and nothing else"


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
    before = next(claim.value for claim in load_claims() if claim.id == "osf-fig08-before")
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
    return _percent(sum(below) / len(below)), note


@check("osf-fig11-constant-max")
def _largest_gain() -> Result:
    factors = np.linspace(0.001, 1, 1000)
    gains = [osf.largest_fusion_gain(float(factor)) for factor in factors]
    best = float(factors[int(np.argmax(gains))])
    note = f"at most, for any network and plan (at SF = {best:.1f}), unless overhead dominates"
    return _percent(max(gains)), note


@check("osf-fig11-constant-min")
def _largest_gain_of_vgg() -> Result:
    before = next(claim.value for claim in load_claims() if claim.id == "osf-fig08-before")
    note = "at most for VGG-16 at SF = 0.25 (Section 4.1), so not all five networks gain 32.2%"
    return _percent(osf.largest_fusion_gain(before)), note


@check("sharing-fig02-speedup")
def _allreduce_speedup() -> Result:
    grid = paper_table("sharing", "fig02").set_index(["blocks", "threads"])["relative_time"]
    ratio = float(grid[1, 256] / grid[2, 256])
    return _percent(1 - ratio), f"time saved; as a speedup it is {_percent(1 / ratio - 1):.0f}%"


@check("sharing-fig04-best")
def _resnet18_gain() -> Result:
    row = _throughput("ResNet-18", 32)
    return _percent(sharing.gain(row["1x256"], row["2x256"])), "from Fig 8, same network and batch"


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    def saved_ms(batch: int) -> float:
        row = _throughput("ResNet-18", batch)
        slow, fast = row["2x256"], max(row.values())
        return 1e3 * (sharing.iteration_s(batch, slow) - sharing.iteration_s(batch, fast))

    return saved_ms(16), f"from Fig 8; {saved_ms(128):.1f} ms at batch 128: not constant"


@check("sharing-best-gain")
def _best_gain() -> Result:
    rows = paper_table("sharing", "fig08").set_index(["network", "batch"])
    grid = rows.filter(regex=r"^\d+x\d+$")
    gains = {key: sharing.gain(row.max(), row["2x256"]) for key, row in grid.iterrows()}
    network, batch = max(gains, key=lambda key: gains[key])
    config = grid.loc[(network, batch)].idxmax()
    return _percent(gains[network, batch]), f"best of Fig 8: {network}, batch {batch}, {config}"


def _throughput(network: str, batch: int) -> dict[str, float]:
    """Images per second by configuration, sharing Fig 8."""
    rows = paper_table("sharing", "fig08").set_index(["network", "batch"])
    row = rows.filter(regex=r"^\d+x\d+$").loc[(network, batch)]
    return {str(config): float(value) for config, value in row.items()}


@check("sharing-tab2-vit-flops")
def _vit_flops() -> Result:
    note = "count of all matrix products; the printed value is 5/3 of it"
    return sharing.vit_flops() / 1e9, note


@check("dag-fig01-tasks")
def _tasks() -> Result:
    tasks = dag.iteration_tasks(layers=3, gpus=4)
    return sum(tasks.values()), ", ".join(f"{count} {kind}" for kind, count in tasks.items())


@check("dag-tab4-alexnet")
def _alexnet_parameters() -> Result:
    parameters = int(paper_table("dag", "tab06")["size_bytes"].sum()) // 4
    return (
        parameters / 1e6,
        f"{parameters:,} in Table VI: Caffe's AlexNet with grouped convolutions",
    )


@check("dag-tab4-resnet50")
def _resnet_parameters() -> Result:
    parameters = sum(osf.table2_parameters("ResNet50"))
    return parameters / 1e6, f"{parameters:,} in the published architecture"


@check("dag-storage")
def _storage() -> Result:
    speed = paper_table("dag", "tab02")["storage_bytes_per_s"]
    return float(speed[0] / speed[1]), "1.1 GB/s over 367.30 MB/s"


@check("dag-nvlink")
def _nvlink() -> Result:
    speed = paper_table("dag", "tab02")["connection_bytes_per_s"]
    return float(speed[1] / speed[0]), "95 GB/s over 15 GB/s"


@check("dag-v100-speed")
def _v100_speed() -> Result:
    return 0.243 / 0.0625, "0.243 s over 0.0625 s, the backward times of Section V-C"


@check("dag-efficiency")
def _efficiency() -> Result:
    printed_millions = paper_table("dag", "tab04").set_index("network")["parameters_millions"]
    printed = _infiniband_use(1e6 * float(printed_millions["ResNet-50"]))
    counted = _infiniband_use(sum(osf.table2_parameters("ResNet50")))
    note = f"24 M parameters in 0.0797 s; with 25.557 M {_percent(counted):.1f}%"
    return _percent(printed), note


def _infiniband_use(parameters: float) -> float:
    rate = float(paper_table("dag", "tab02")["network_bits_per_s"][1]) / 8
    return dag.communication_efficiency(4 * parameters, 0.0797, rate)


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
    return _percent(float(gains.max())), f"from Table VI, {gains.idxmax()}"
