"""Sharded training: laws of its program, the order of FSDP2 itself, replays, and what a campaign reached."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import cli, store
from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.model import Calibration
from ddlkit.model.sharded import GATHER, SCATTER, SENT, Program, Sharding, bounds, forecast
from ddlkit.report import accuracy

RECORDED = store.DATA / "sharded"
CASE = ["origin", "network", "batch", "ranks", "link", "units", "prefetch"]
KNOWN = ["predicted_s", "lower_s", "upper_s", "none_s", "perfect_s", "compute_s"]


@cache
def calibration() -> Calibration:
    paths = store.list_tables(RECORDED, "collectives*.csv*")
    return Calibration.of(pd.concat([store.load_table(path) for path in paths]))


@cache
def profile(network: str, batch: int) -> LayerProfile:
    (path,) = store.list_tables(RECORDED, f"layers-{network}-b{batch}-r1.csv*")
    return store.read_profile(path)


def said(
    origin: str, network: str, batch: int, ranks: int, link: str, units: str, prefetch: bool
) -> dict[str, float]:
    """What was said of a case before it ran; of real training of what messages add to it in brief."""
    by = {name: calibration().between(link, ranks, name) for name in SENT}
    whole = Sharding.of(profile(network, batch), units)
    if origin == "measured":
        program = whole.program(blocking=True)
        added, (low_s, high_s) = forecast(program, by, brief_s=np.zeros(1))
        serial_s = program.compute_s + float(forecast(program, by)[0].communication_s)
        numbers = added.iteration_s, low_s, high_s, serial_s, np.nan, program.compute_s
        return dict(zip(KNOWN, numbers, strict=True))
    messages = whole.program().messages
    sent_s = sum(float(by[each.collective].cost(each.bytes)) for each in messages)
    program = whole.scaled(float(f"{sent_s / whole.program().compute_s:.4g}")).program(prefetch=prefetch)
    found, (low_s, high_s) = forecast(program, by)
    numbers = found.iteration_s, low_s, high_s, *bounds(found), found.compute_s
    return dict(zip(KNOWN, numbers, strict=True))


def came(case: dict[str, Any], rows: pd.DataFrame) -> dict[str, float]:
    """What a case took, and how far all models are off."""
    measured_s = rows.loc[rows["quantity"] == "iteration", "seconds"].median()
    brief_s = rows.loc[rows["quantity"] == "brief", "seconds"].to_numpy()
    predicted_s, low_s, high_s = (case[name] for name in KNOWN[:3])
    if len(brief_s):
        by = {name: calibration().between(case["link"], case["ranks"], name) for name in SENT}
        program = Sharding.of(profile(case["network"], case["batch"]), case["units"]).program(
            blocking=True
        )
        found, (low_s, high_s) = forecast(program, by, brief_s=brief_s)
        predicted_s = found.iteration_s
    exposed_s = measured_s - case["compute_s"]
    return {
        "measured_s": measured_s,
        "brief_s": float(np.median(brief_s)) if len(brief_s) else np.nan,
        "error": predicted_s / measured_s - 1,
        "none": case["none_s"] / measured_s - 1,
        "perfect": case["perfect_s"] / measured_s - 1,
        "serial": case["none_s"] / measured_s - 1,
        "apart": case["none_s"] / case["perfect_s"] - 1,
        "exposed": (predicted_s - case["compute_s"]) / exposed_s - 1,
        "inside": float(low_s <= measured_s <= high_s),
        "half": (high_s - low_s) / measured_s / 2,
        "disturbed": rows["disturbed"].mean(),
        "limited": rows["processor_limited"].mean(),
    }
