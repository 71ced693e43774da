"""What cases of a campaign are made of, recorded or, until then, guessed: profiles, times of selection."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.sparse import ELEMENT_BYTES, SelectionTimes, selected
from ddlkit.core.units import KIB
from ddlkit.core.workload import LayerProfile
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure.selection import measure_selection
from ddlkit.run.nets import registry
from ddlkit.run.sessions.kinds import best_device, layers_point
from ddlkit.run.sessions.reader import Campaign, CaseRequest
from ddlkit.run.sessions.session import Point, table_path


@dataclass(frozen=True)
class Extent:
    """How long a campaign's labs are calibrated, and networks measured that were not yet.

    sizes : of a calibration, up to the largest message, which is added
    layers : for each network; messages : for each size, both sessions together
    """

    sizes: tuple[int, ...]
    layers: Budget
    messages: Budget


EXTENTS = {
    "quick": Extent(
        sizes=tuple(KIB << power for power in range(0, 20, 2)),
        layers=Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=2.0),
        messages=Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=0.3),
    ),
    # Few samples, and doubling sizes where messages are cut into segments.
    "dense": Extent(
        sizes=tuple(KIB << power for power in (0, 2, 4, 6, 8, 10, 11, 12, 14)),
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=10.0),
        messages=Budget(warmup=1, min_repeats=4, max_repeats=30, max_s=0.6),
    ),
    "medium": Extent(
        sizes=tuple(KIB << power for power in range(0, 20, 2)),
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=10.0),
        messages=Budget(warmup=1, min_repeats=6, max_repeats=40, max_s=1.0),
    ),
    "full": Extent(
        sizes=tuple(KIB << power for power in range(20)),  # 1 KiB .. 512 MiB
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=20.0),
        messages=Budget(warmup=1, min_repeats=5, max_repeats=60, max_s=2.0),
    ),
}
# What the processor limits, not the link: with several in flight, only these.

SELECTION_SIZES = (1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
SELECTION_BUDGET = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.5)
SELECTION_S = 1e-8  # of an element, until it was measured


class Inputs:
    """What the cases of a campaign are made of: profiles, and times of selection.

    directory : in which the campaign's tables lie
    """

    def __init__(self, campaign: Campaign, out: Path, folder: str) -> None:
        self.campaign, self.folder, self.directory = campaign, folder, out / folder
        self.extent = EXTENTS[campaign.calibration]

    def path(self, schema: str, name: str) -> Path:
        """Where a table of the campaign lies."""
        return table_path(self.directory, schema, name)

    def points(self, requests: Sequence[CaseRequest]) -> Iterator[Point]:
        """What must be measured before the cases of these requests are known."""
        for name, batch in dict.fromkeys((r.case.network, r.case.batch) for r in requests):
            if self._profile_path(name, batch) != store.recorded_dir() / _profile_file(name, batch):
                how = {"device": best_device(), "folder": self.folder}
                yield layers_point(name, batch, 1, self.extent.layers, **how)
        if self.campaign.selection == "recorded":
            for density in sorted({request.case.density for request in requests} - {1.0}):
                measure = partial(_selections, density)
                yield Point("selection", f"rho{density:g}", measure, 30.0, folder=self.folder)

    def profile(self, name: str, batch: int) -> LayerProfile:
        """The recorded profile; until there is one, the network's tensors with guessed times."""
        path = self._profile_path(name, batch)
        return guessed_profile(name, batch) if path is None else store.read_profile(path)

    def _profile_path(self, name: str, batch: int) -> Path | None:
        """The recorded profile: the campaign's own, or this machine's."""
        directories = (self.directory, store.recorded_dir())
        paths = [directory / _profile_file(name, batch) for directory in directories]
        return next((path for path in paths if store.has_table(path)), None)

    def selection_times(self, density: float) -> SelectionTimes:
        """Seconds to select, as recorded for the campaign; until then, as guessed."""
        path = self.path("selection", f"rho{density:g}")
        if store.has_table(path):
            return store.read_selection_times(path, density)
        sizes = np.array(SELECTION_SIZES, dtype=float)
        return SelectionTimes(sizes, np.array([density]), sizes * SELECTION_S)

    def largest_bytes(self, case: Case, workers: int) -> int:
        """Of a message that carries all of a network, as the calibration counts it."""
        n_bytes = int(self.profile(case.network, case.batch).gradient_bytes.sum())
        if case.density == 1:
            return n_bytes
        kept = selected(-(-n_bytes // ELEMENT_BYTES), case.density)
        return workers * ELEMENT_BYTES * kept


def _selections(density: float) -> pd.DataFrame:
    measure = partial(measure_selection, densities=[density])
    frames = [measure("cpu", size, budget=SELECTION_BUDGET) for size in SELECTION_SIZES]
    return pd.concat(frames, ignore_index=True)


def _profile_file(name: str, batch: int) -> str:
    return f"layers-{name}-b{batch}-r1.csv"


@functools.cache
def guessed_profile(name: str, batch: int) -> LayerProfile:
    """A network's tensors, backward time in proportion to their size: its speed does not matter here."""
    with torch.device("meta"):  # sizes alone: weights would take seconds to draw
        tensors = dict(registry.build(name).named_parameters())
    sizes = np.array([tensor.numel() for tensor in tensors.values()])
    return LayerProfile(
        network=name,
        device="cpu",
        batch=batch,
        tensor=tuple(tensors),
        layer=tuple(tensors),
        parameters=sizes,
        gradient_bytes=4 * sizes,
        forward_s=0.1 * sizes / sizes.sum(),
        backward_s=0.2 * sizes / sizes.sum(),
        flops=np.zeros(len(sizes)),
    )
