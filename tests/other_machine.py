"""Imported by the ranks of a job: each then believes that its processor is of a model of its own."""

from __future__ import annotations

import os

from ddlkit.store import machine

_NUMBER = os.environ.get("RANK") or os.environ["SLURM_PROCID"]
machine._cpu_model = lambda: f"Processor {_NUMBER}"
