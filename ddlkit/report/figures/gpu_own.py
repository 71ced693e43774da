"""What `ddlkit record --suite gpu` found on GPUs of one's own, as panels: of what a recording has tables for.

A machine may have been taken away early: what is missing leaves its panel out.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from ddlkit import store
from ddlkit.core.iteration import Iteration, no_overlap
from ddlkit.core.plan import ddp
from ddlkit.model.calibration import Calibration
from ddlkit.report import compare
from ddlkit.report.source import Source, machine_of

Panels = dict[str, tuple[str, pd.DataFrame]]
"""By heading, which says what is found, the label of an axis and a table: a row a case, a column a series."""


def recorded() -> dict[str, Panels]:
    """By machine the `panels` of each recording under data/recorded that has any."""
    found = {path.name: panels(Source((path,))) for path in store.list_recorded()}
    return {name: one for name, one in found.items() if one}


def panels(source: Source) -> Panels:
    """Steps of several GPUs, kernels beside messages, and the share of a GPU that training reaches."""
    where = machine_of(source.directories[0])
    found: Panels = {}
    if source.has("runs") and source.has("collectives") and len(rows := trained(source)):
        rest = (rows["measured"] - rows["workbook"]).median()
        says = f": {rest:+.2g} ms beyond the model" if rest == rest else ""
        known = rows.dropna(axis=1, how="all")
        found[f"{where}, a step of several GPUs{says}"] = "longer than its compute [ms]", known
    if source.has("contention") and len(times := _slowdowns(source)):
        says = f"kernels beside messages: up to {times.max().max():.0f}% longer"
        found[f"{where}, {says}"] = "longer than alone [%]", times
    if source.has("layers") and source.has("peaks") and len(shares := _shares(source)):
        ends = shares.min().min(), shares.max().max()
        says = "training: {:.0f} to {:.0f}% of the fastest product".format(*ends)
        found[f"{where}, {says}"] = "share of the fastest matrix product [%]", shares
    return found


def _slowdowns(source: Source) -> pd.DataFrame:
    """By kernel and who communicates, by how many per cent it takes longer; medians over what that takes."""
    slow = compare.slowdowns(source.table("contention"))
    slow = slow[(slow["device"] == "cuda") & (slow["kernel"] != "idle")]
    columns = [slow[one].str.replace("_", " ") for one in ("kernel", "communication")]
    times = slow.pivot_table("slowdown", *columns, aggfunc="median")
    return 100 * (times.rename(columns={"standin": "stand-in"}) - 1)


def _shares(source: Source) -> pd.DataFrame:
    """By network, at its largest batch on one GPU, and precision, `compare.layer_speeds`'s c in per cent."""
    tables: Mapping[str, Source] = {"": source}
    speeds = [compare.layer_speeds(tables, name).assign(network=name) for name in source.networks()]
    if not speeds:
        return pd.DataFrame()
    rows = pd.concat(speeds).query("device == 'cuda' and ranks == 1").dropna(subset="c")
    largest = rows[rows["batch"] == rows.groupby("network")["batch"].transform("max")]
    return 100 * largest.pivot_table("c", largest["network"].map(store.network_title), "precision")


def trained(source: Source) -> pd.DataFrame:
    """By network, batch and ranks, milliseconds that a step of several GPUs takes longer than its compute.

    Columns: measured; no_overlap and workbook, from layers stretched to that compute and all-reduces on
    their own; NaN where either was not recorded.
    """
    runs = source.table("runs")
    runs = runs[(runs["device"] == "cuda") & (runs["kind"] == "training") & (runs["plan"] == "ddp")]
    known = Calibration.of(source.table("collectives"), draws=0).known
    profiles = {path: store.load_table(path, "layers").iloc[0] for path in source.profiles()}
    alone = {
        (one["network"], one["batch"]): store.read_profile(path)
        for path, one in profiles.items()
        if (one["ranks"], one["precision"]) == (1, "fp32")
    }
    rows = {}
    for key, own in runs.groupby(["network", "batch", "workers", "link"]):
        network, batch, ranks, link = key
        compute_s, layers = own["compute_s"].median(), alone.get((network, batch))
        longer = {"measured": own["iteration_s"].median() - compute_s}
        messages = known.get((link, ranks, "all_reduce"))
        if layers is not None and messages is not None:
            work = layers.workload()
            work = work.scaled(compute_s / work.compute_s)
            one = Iteration(work, ddp(work), messages.cost, messages.link)
            longer["no_overlap"] = no_overlap(one).iteration_s - compute_s
            longer["workbook"] = one.prediction.iteration_s - compute_s
        name = f"{store.network_title(str(network))}, batch {batch}, {ranks} GPUs"
        rows[name] = {model: 1e3 * seconds for model, seconds in longer.items()}
    return pd.DataFrame.from_dict(
        rows, orient="index", columns=["measured", "no_overlap", "workbook"]
    )


def numbers(drawn: Panels) -> pd.DataFrame:
    """What `panels` show, a row a number: axis, case, series, value."""
    tables = []
    for label, rows in drawn.values():
        long = rows.rename_axis(index="case", columns="series").stack().rename("value")
        tables.append(long.reset_index().assign(axis=label))
    return pd.concat(tables, ignore_index=True)[["axis", "case", "series", "value"]]
