"""Where a notebook's numbers come from: measured here, or recorded on a named machine; it says which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import SelectionTimes
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.model.predictor import scatter_of

Floats = NDArray[np.float64]

CAMPAIGN, BEST = "campaign", "campaign-best"
"""Directories of campaigns that are recorded with their machine."""
QUICK = "campaign-quick"
"""Of the one that is measured live."""


@dataclass(frozen=True)
class Source:
    """Directories of recorded tables, in order: of files with one name, the first directory's counts.

    A live run on a machine without the lab thus reads its own layers and loopback collectives, and the
    recording for what only the lab can measure.
    """

    directories: tuple[Path, ...]

    def _found(self, kind: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for directory in self.directories:
            for path in (*directory.glob(f"{kind}-*.csv"), *directory.glob(f"{kind}-*.csv.gz")):
                found.setdefault(path.name, path)
        return found

    def has(self, kind: str) -> bool:
        """Whether there is any table of ``kind``."""
        return bool(self._found(kind))

    def _files(self, kind: str) -> list[Path]:
        """Every table of ``kind`` ("layers", "runs", ...), by name."""
        found = self._found(kind)
        if not found:
            places = ", ".join(str(directory) for directory in self.directories) or "nowhere"
            raise UserError(
                f"no table of {kind} in {places}: run ddlkit measure, or use --recorded"
            )
        return [found[name] for name in sorted(found)]

    def table(self, kind: str) -> pd.DataFrame:
        """All rows of a kind; hashes are checked."""
        tables = [store.load_table(path, kind) for path in self._files(kind)]
        return pd.concat(tables, ignore_index=True)

    def label(self, kind: str) -> str:
        """One line to print beside a figure: measured or recorded, on which machine, and when."""
        told = []
        for path in self._files(kind):
            stamp = store.load_stamp(path)
            how = "recorded" if store.RECORDED in path.resolve().parents else "measured live"
            told.append(f"{how} on {stamp['machine']['name']}, {stamp['time'][:10]}")
        return "; ".join(dict.fromkeys(told))

    def profile(
        self, network: str, *, ranks: int = 1, batch: int = 0, precision: str = "fp32"
    ) -> LayerProfile:
        """The layer profile of a network, measured with ``ranks`` ranks at work at the same time.

        batch : 0 for any; of several that fit, the first by directory, then by file name
        """
        for path in self._files("layers"):
            frame = store.load_table(path, "layers")
            wanted = {"network": network, "ranks": ranks, "precision": precision}
            if batch:
                wanted["batch"] = batch
            if (frame[list(wanted)] == pd.Series(wanted)).all(axis=1).any():
                return store.read_profile(path, network, ranks=ranks)
        size = f", batch {batch}," if batch else ""
        raise UserError(
            f"no {precision} layer profile of {network}{size} with {ranks} ranks: "
            "run ddlkit measure layers"
        )

    def workloads(self) -> dict[str, Workload]:
        """Every profile in any directory as a workload, by the hash that a Case carries."""
        files = [path for directory in self.directories for path in directory.glob("layers-*.csv")]
        profiles = [store.read_profile(path) for path in files]
        return {profile.sha256: profile.workload() for profile in profiles}

    def compute_scatter(self) -> dict[str, Floats]:
        """Of every profile whose samples were kept: iterations over their median, by the profile's hash."""
        found = {}
        for path in (path for one in self.directories for path in one.glob("layers-*.csv")):
            samples = path.with_name(path.name.replace("layers-", "samples-", 1))
            if samples.exists():
                scatter = scatter_of(store.load_table(samples, "samples"))
                found[store.read_profile(path).sha256] = scatter
        return found

    @property
    def alone(self) -> Source:
        """The first directory only: a campaign is judged by the calibration of its own labs."""
        return Source(self.directories[:1])

    def selections(self) -> dict[str, SelectionTimes]:
        """Selection times that replays waited out, by the hash that a sparse Case carries."""
        named = [path for name, path in self._found("selection").items() if "-rho" in name]
        return {one.sha256: one for one in map(store.read_selection_times, named)}

    def timeline(self, case: str) -> Timeline:
        """The measured or replayed timeline of a case. Raises UserError when none was kept."""
        rows = self.table("timeline")
        rows = rows[rows["case"] == case]
        if rows.empty:
            raise UserError(f"no timeline of case {case} was recorded")
        return Timeline(**{name: rows[name].to_numpy() for name in COLUMNS})


def default_recording() -> Path:
    """This machine's recording of the lab, or the first one where there is none of this machine.

    Raises UserError when no lab is recorded.
    """
    campaigns = [path for path in store.list_recorded() if [*path.glob("runs-replay-*.csv")]]
    if not campaigns:
        raise UserError(
            f"{store.RECORDED} holds no recording of the lab: measure first with ddlkit measure all"
        )
    mine = store.recorded_dir()
    return mine if mine in campaigns else campaigns[0]


def open_campaign(data: str = "", name: str = CAMPAIGN) -> Source:
    """A campaign of the lab: the directory ``data``, or one that is recorded with the default recording.

    Raises UserError when there is none.
    """
    found = Path(data) if data else default_recording() / name
    if not [*found.glob("runs-*.csv")]:
        file = f"examples/{name.replace('-', '_')}.yml"
        raise UserError(f"no campaign in {found}: run ddlkit lab campaign {file}")
    return Source((found, default_recording()))


def live_campaign(data: str = "") -> Source | None:
    """The quick campaign among the tables measured here, in ``data`` or build/measured; None without one."""
    if data in {path.name for path in store.list_recorded()}:
        return None
    found = (Path(data) if data else store.BUILD / "measured") / QUICK
    return open_campaign(str(found)) if [*found.glob("runs-*.csv")] else None


def open_source(data: str = "") -> Source:
    """The tables in ``data``: a machine's name under data/recorded, or a directory of measured tables.

    Without ``data`` what was measured here, if anything was. What a directory of one's own lacks is
    taken from the default recording. Raises UserError when ``data`` is neither.
    """
    if data in {path.name for path in store.list_recorded()}:
        return Source((store.RECORDED / data,))
    if not data:
        return Source((store.BUILD / "measured", default_recording()))
    for chosen in (Path(data), store.ROOT / data):
        if chosen.is_dir():
            return Source((chosen, default_recording()))
    raise UserError(
        f"no measured tables in {data}: give a directory, or a name under data/recorded"
    )


def campaign_dir(name: str) -> Path:
    """Where the campaign of that name was recorded: on this machine, else on the first that has it.

    Raises UserError when it was recorded nowhere.
    """
    mine = store.recorded_dir() / f"campaign-{name}"
    found = [mine, *sorted(store.RECORDED.glob(f"*/campaign-{name}"))]
    for directory in found:
        if [*directory.glob("runs-*.csv")]:
            return directory
    raise UserError(
        f"{store.RECORDED} holds no campaign {name}: run ddlkit lab campaign examples/campaign_{name}.yml"
    )


def machines(kind: str, data: str = "") -> dict[str, Source]:
    """All that is at hand of ``kind``: "here" for what was measured live, then each recording by name.

    data : as for `open_source`. Raises UserError when nothing of the kind is there.
    """
    recorded = store.list_recorded()
    own = tuple(path for path in open_source(data).directories if path not in recorded)
    sources = {"here": Source(own), **{path.name: Source((path,)) for path in recorded}}
    found = {name: source for name, source in sources.items() if source.has(kind)}
    if not found:
        raise UserError(f"no table of {kind} anywhere: run ddlkit record")
    return found
