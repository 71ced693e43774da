"""Where a notebook's numbers come from: measured here, or recorded on a named machine; it says which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.sparse import SelectionTimes
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Floats, LayerProfile, Workload
from ddlkit.model.predictor import scatter_of
from workbook.common import places

# Directories of campaigns beside a machine's other recordings.
CAMPAIGN, BEST, REPEATS = "campaign", "campaign-best", "campaign-repeats"
REGIMES, REGIMES_VGG, LIMIT = (
    "campaign-regimes",
    "campaign-regimes-vgg",
    "campaign-limit",
)
LINKS, LINKS_AGAIN = "campaign-links", "campaign-links-again"
LINKS_THIRD, LINKS_FOURTH = "campaign-links-third", "campaign-links-fourth"
OMGS, SPARSE_TRAINING = "campaign-omgs", "sparse-training"
TRAINED = "campaign-training"
LABS, ECHOES = "labs-open", "labs-echo"
ALONE = "ranks == 1 and precision == 'fp32'"  # rows of a profile of one rank alone
HERE = "here"  # the machine of tables that are not under data/recorded
TEACHING = "cpu-2x-amd-epyc"
"""The recording that teaches: text, figures and tables of the lessons are made from it."""


def machine_of(directory: Path) -> str:
    """Return whose tables a directory holds: a machine's name under data/recorded, else "here".

    >>> machine_of(places.RECORDED / "gpu-h100" / "campaign"), machine_of(Path("build/measured"))
    ('gpu-h100', 'here')
    """
    directory = directory.resolve()
    if places.RECORDED not in directory.parents:
        return HERE
    return directory.relative_to(places.RECORDED).parts[0]


@dataclass(frozen=True)
class Source:
    """Directories of recorded tables, in order: of files with one name, the first directory's counts."""

    directories: tuple[Path, ...]

    def _paths(self, kind: str) -> list[Path]:
        paths: dict[str, Path] = {}
        for directory in self.directories:
            for path in store.list_tables(directory, f"{kind}-*.csv*"):
                paths.setdefault(path.name, path)
        return list(paths.values())

    def has(self, kind: str) -> bool:
        """Return whether there is any table of ``kind`` ("layers", "runs", ...)."""
        return bool(self._paths(kind))

    def _files(self, kind: str) -> list[Path]:
        if paths := self._paths(kind):
            return paths
        places = ", ".join(map(str, self.directories)) or "nowhere"
        raise UserError(
            f"no table of {kind} in {places}: run ddlkit measure, or use --recorded"
        )

    def is_live(self, kind: str) -> bool:
        """Return whether the first table of ``kind`` was measured on this machine, not recorded."""
        return machine_of(self._files(kind)[0].parent) == HERE

    def table(self, kind: str) -> pd.DataFrame:
        """Return rows of a kind with their ``machine``; of collectives over one link, only the first's."""
        rows = pd.concat(self._tables(kind), ignore_index=True)
        if kind != "collectives":
            return rows
        first = rows.groupby(["link", "ranks"])["machine"].transform("first")
        return rows[rows["machine"] == first].reset_index(drop=True)

    def rounds(self, kind: str) -> pd.DataFrame:
        """Return as `table`, with rounds (``repeat``) of numbers that no two files share; odd stays odd."""
        first, tables = 0, []
        for table in self._tables(kind):
            tables.append(table.assign(repeat=table["repeat"] + first))
            first += 2 * (int(table["repeat"].max()) // 2 + 1) if len(table) else 0
        return pd.concat(tables, ignore_index=True)

    def _tables(self, kind: str) -> list[pd.DataFrame]:
        return [
            store.load_table(path, kind).assign(machine=machine_of(path.parent))
            for path in self._files(kind)
        ]

    def apart(self, kind: str) -> dict[str, Source]:
        """Return the tables of each machine that has some of ``kind``, alone, by its name: never merged."""
        sources: dict[str, Source] = {}
        for directory in self.directories:
            earlier = sources.get(machine_of(directory), Source(())).directories
            sources[machine_of(directory)] = Source((*earlier, directory))
        return {
            machine: source for machine, source in sources.items() if source.has(kind)
        }

    def label(self, kind: str) -> str:
        """Return one line to print beside a figure: measured or recorded, on which machine, and when."""
        parts = []
        for path in self._files(kind):
            stamp = store.load_stamp(path)
            how = "measured live" if machine_of(path.parent) == HERE else "recorded"
            remark = f" ({stamp['remark']})" if stamp.get("remark") else ""
            parts.append(
                f"{how} on {stamp['machine']['name']}, {stamp['time'][:10]}{remark}"
            )
        return "; ".join(dict.fromkeys(parts))

    def machine(self, kind: str) -> dict[str, Any]:
        """Return the machine that the first table of ``kind`` was measured on, as its stamp has it."""
        return dict(store.load_stamp(self._files(kind)[0])["machine"])

    def profile(self, network: str) -> LayerProfile:
        """Return the first fp32 profile of a network on one rank alone."""
        for path in self._files("layers"):
            rows = store.load_table(path, "layers").query(
                f"network == @network and {ALONE}"
            )
            if len(rows):
                return store.read_profile(path, network, ranks=1)
        raise UserError(
            f"no fp32 profile of {network} on one rank: run ddlkit measure layers"
        )

    def networks(self) -> list[str]:
        """Return the names of those that `profile` finds, sorted."""
        return sorted(self.table("layers").query(ALONE)["network"].unique())

    def _profiles(self) -> dict[Path, LayerProfile]:
        paths = [
            store.list_tables(directory, "layers-*.csv")
            for directory in self.directories
        ]
        return {path: store.read_profile(path) for those in paths for path in those}

    def workloads(self) -> dict[str, Workload]:
        """Return every profile in any directory as a workload, by the hash that a Case carries."""
        return {
            profile.sha256: profile.workload() for profile in self._profiles().values()
        }

    def compute_scatter(self) -> dict[str, Floats]:
        """Return iterations over their median by profile's hash, of every profile whose samples were kept."""
        scatter = {}
        for path, profile in self._profiles().items():
            samples = path.with_name(path.name.replace("layers-", "samples-", 1))
            if store.has_table(samples):
                scatter[profile.sha256] = scatter_of(
                    store.load_table(samples, "samples")
                )
        return scatter

    @property
    def alone(self) -> Source:
        """The first directory only: a campaign is judged by the calibration of its own labs."""
        return Source(self.directories[:1])

    def selections(self) -> dict[str, SelectionTimes]:
        """Return selection times that replays waited out, by the hash that a sparse Case carries."""
        paths = [path for path in self._paths("selection") if "-rho" in path.name]
        return {times.sha256: times for times in map(store.read_selection_times, paths)}

    def timeline(self, case: str) -> Timeline:
        """Return the measured or replayed timeline of a case; of one that none was kept of, an empty one."""
        rows = self.table("timeline").query("case == @case")
        return Timeline.from_columns(rows)


def teaching_recording() -> Path:
    """Return the directory of the recording that teaches. Raises UserError where it is missing."""
    directory = places.RECORDED / TEACHING
    if not Source((directory,)).has("runs-replay"):
        raise UserError(
            f"{directory} holds no recording of the lab: get the folder data/ as it was published"
        )
    return directory


def open_source(data: str = "") -> Source:
    """Return the tables that a lesson is made from.

    Parameters
    ----------
    data : str
        The name of a machine under data/recorded, or a directory of measured tables, which the
        recording that teaches completes. Empty means the recording that teaches.

    Raises
    ------
    UserError
        If there is neither such a recording nor such a directory.
    """
    if not data:
        return Source((teaching_recording(),))
    if data in {path.name for path in places.list_recorded()}:
        return Source((places.RECORDED / data,))
    for directory in (Path(data), places.ROOT / data):
        if directory.is_dir():
            return Source((directory, teaching_recording()))
    raise UserError(
        f"no tables in {data}: give a directory, or a name under data/recorded"
    )


def open_here(here: str) -> Source:
    """Return the tables that were measured on this machine, which may be none.

    Parameters
    ----------
    here : str
        The directory of these tables. Empty, or one that does not exist, means that nothing was measured.
    """
    directory = Path(here)
    return Source((directory,)) if here and directory.is_dir() else Source(())


def _place(data: str, name: str, *kinds: str) -> Path:
    """Return the directory ``data``, else the recorded one of that name, of this machine before others."""
    recorded = [teaching_recording() / name, *sorted(places.RECORDED.glob(f"*/{name}"))]
    for place in [Path(data)] if data else recorded:
        if any(map(Source((place,)).has, kinds)):
            return place
    raise UserError(
        f"no {name} in {data or places.RECORDED}: measure it as examples/*.yml say"
    )


def open_campaign(data: str = "", name: str = CAMPAIGN) -> Source:
    """Return the campaign in ``data``, else the recorded one of that name, over its layer profiles."""
    place = _place(data, name, "runs")
    return Source((place, teaching_recording() if data else place.parent))


def open_labs(data: str = "", name: str = LABS) -> Source:
    """Return calibrations of many labs, or echoes: those in ``data``, else the recorded ones of that name."""
    place = _place(data, name, "collectives", "echoes")
    return Source((place, *([place.with_name("labs")] if place.name == LABS else [])))


def open_sharing(data: str = "") -> Source | None:
    """Return training beside its messages on one machine: in ``data``, else the first recorded, or None."""
    named = places.RECORDED / data if data and "/" not in data else Path(data)
    recorded = sorted(places.RECORDED.glob("*/"))
    roots = [*([named / "sharing", named] if data else []), *recorded]
    sources = [Source((at,)) for at in [*roots, *(at / "sharing" for at in recorded)]]
    return next(
        (source for source in sources if source.has("sharing_iterations")), None
    )


def recordings(kind: str) -> dict[str, Source]:
    """Return the recording of each machine that has tables of ``kind``, by name: nothing measured since."""
    return Source(tuple(places.list_recorded())).apart(kind)


def everywhere(kind: str) -> pd.DataFrame:
    """Return all recorded rows of ``kind``, of campaigns too, with their directory as ``place``."""
    at = {str(path): Source((path,)) for path in sorted(places.RECORDED.glob("**/"))}
    return pd.concat([at[p].table(kind).assign(place=p) for p in at if at[p].has(kind)])


def machines(kind: str, data: str = "") -> dict[str, Source]:
    """Return all that is there of ``kind``: "here" for what is live in ``data``, then recordings by name."""
    recorded = places.list_recorded()
    live = [path for path in open_source(data).directories if path not in recorded]
    sources = Source((*live, *recorded)).apart(kind)
    if not sources:
        raise UserError(f"no table of {kind} anywhere: run python -m workbook record")
    return sources


def as_replayed(
    tables: Source, network: str, link: str, workers: int
) -> tuple[Workload, pd.DataFrame]:
    """Return a network's compute as replayed over a link, and those replays.

    If there are none, the compute is that of the network's profile.
    """
    runs = tables.table("runs")
    place = {"origin": "replayed", "network": network, "link": link, "workers": workers}
    for column, value in place.items():
        runs = runs[runs[column] == value]
    if runs.empty:
        return tables.profile(network).workload(), runs
    profile, dilation = runs[["profile_sha256", "dilation"]].iloc[0]
    workload = tables.workloads()[profile].scaled(dilation)
    same = (runs["profile_sha256"] == profile) & (runs["dilation"] == dilation)
    return workload, runs[same]
