"""The tables that notebooks and figures are made from, measured here or recorded.

A *recording* is a directory of tables below data/recorded, which is named for the
machine that measured them. A *campaign* is a directory below a recording: runs in the
lab and the calibration of the lab's links. Every table has a stamp that says where and
when it was measured, so that a figure can say so too.
"""

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

# Names of campaigns and of other directories below a recording.
CAMPAIGN = "campaign"
BEST = "campaign-best"
REPEATS = "campaign-repeats"
REGIMES = "campaign-regimes"
REGIMES_VGG = "campaign-regimes-vgg"
LIMIT = "campaign-limit"
LINKS = "campaign-links"
LINKS_AGAIN = "campaign-links-again"
LINKS_THIRD = "campaign-links-third"
LINKS_FOURTH = "campaign-links-fourth"
OMGS = "campaign-omgs"
SPARSE_TRAINING = "sparse-training"
TRAINED = "campaign-training"
LABS = "labs-open"
ECHOES = "labs-echo"

ALONE = "ranks == 1 and precision == 'fp32'"
"""The query for the rows of a layer profile that one rank measured alone in fp32."""
HERE = "here"
"""The name of the machine whose tables are not under data/recorded."""
TEACHING = "cpu-2x-amd-epyc"
"""The recording that teaches: text, figures and tables of the lessons are made from it."""


def machine_of(directory: Path) -> str:
    """Return which machine measured the tables of a directory.

    Parameters
    ----------
    directory : Path
        A directory of tables.

    Returns
    -------
    str
        The name of a machine under data/recorded, else "here".

    Examples
    --------
    >>> machine_of(places.RECORDED / "gpu-h100" / "campaign"), machine_of(Path("build/measured"))
    ('gpu-h100', 'here')
    """
    directory = directory.resolve()
    if places.RECORDED not in directory.parents:
        return HERE
    return directory.relative_to(places.RECORDED).parts[0]


@dataclass(frozen=True)
class Source:
    """Directories of recorded tables.

    Attributes
    ----------
    directories : tuple of Path
        The directories in order. If several have a file of one name, the file in the
        first of them counts.
    """

    directories: tuple[Path, ...]

    def _paths(self, kind: str) -> list[Path]:
        """Return the tables of a kind, none if there are none."""
        paths: dict[str, Path] = {}
        for directory in self.directories:
            for path in store.list_tables(directory, f"{kind}-*.csv*"):
                # Of files of one name, that in the first directory counts.
                paths.setdefault(path.name, path)
        return list(paths.values())

    def _files(self, kind: str) -> list[Path]:
        """Return the tables of a kind. Raises UserError if there are none."""
        paths = self._paths(kind)
        if not paths:
            searched = ", ".join(map(str, self.directories)) or "nowhere"
            raise UserError(
                f"no table of {kind} in {searched}: run ddlkit measure, or use --recorded"
            )
        return paths

    def _tables(self, kind: str) -> list[pd.DataFrame]:
        """Return the rows of each table of a kind, with a column ``machine``."""
        tables = []
        for path in self._files(kind):
            rows = store.load_table(path, kind)
            tables.append(rows.assign(machine=machine_of(path.parent)))
        return tables

    def _profiles(self) -> dict[Path, LayerProfile]:
        """Return every layer profile of all directories by its path."""
        profiles = {}
        for directory in self.directories:
            for path in store.list_tables(directory, "layers-*.csv"):
                profiles[path] = store.read_profile(path)
        return profiles

    def has(self, kind: str) -> bool:
        """Return whether there is any table of ``kind`` ("layers", "runs", ...)."""
        return bool(self._paths(kind))

    def is_live(self, kind: str) -> bool:
        """Return whether the first table of ``kind`` was measured on this machine."""
        return machine_of(self._files(kind)[0].parent) == HERE

    def table(self, kind: str) -> pd.DataFrame:
        """Return the rows of all tables of a kind.

        Parameters
        ----------
        kind : str
            The kind of tables, such as "layers" or "runs".

        Returns
        -------
        DataFrame
            The rows with their ``machine``. If several machines measured collectives
            over one link with the same number of ranks, only the rows of the machine that
            comes first are returned, so that no cost is fitted to the times of two machines.

        Raises
        ------
        UserError
            If there is no such table.
        """
        rows = pd.concat(self._tables(kind), ignore_index=True)
        if kind != "collectives":
            return rows
        # For each row, the first machine that measured this link with so many ranks.
        first_machine = rows.groupby(["link", "ranks"])["machine"].transform("first")
        return rows[rows["machine"] == first_machine].reset_index(drop=True)

    def rounds(self, kind: str) -> pd.DataFrame:
        """Return the rows of all tables of a kind with rounds that are told apart.

        Parameters
        ----------
        kind : str
            The kind of tables, which have a column ``repeat``.

        Returns
        -------
        DataFrame
            The rows with their ``machine``. A ``repeat`` is the number of a round, counted
            on from file to file, so that no two files share one. Odd numbers stay odd,
            because the best configuration is chosen on odd rounds and judged on even ones.
        """
        tables = []
        # What is added to the rounds of the next file.
        offset = 0
        for table in self._tables(kind):
            tables.append(table.assign(repeat=table["repeat"] + offset))
            if len(table):
                # The least even number above the file's own last round.
                offset += 2 * (int(table["repeat"].max()) // 2 + 1)
        return pd.concat(tables, ignore_index=True)

    def apart(self, kind: str) -> dict[str, Source]:
        """Return the sources of the machines that have a table of a kind.

        Parameters
        ----------
        kind : str
            The kind of tables.

        Returns
        -------
        dict of str to Source
            By machine, a source of the directories of this machine alone. Tables of
            several machines are never merged.
        """
        sources: dict[str, Source] = {}
        for directory in self.directories:
            machine = machine_of(directory)
            # The directories of this machine that were found so far.
            earlier = sources.get(machine, Source(())).directories
            sources[machine] = Source((*earlier, directory))
        return {
            machine: source for machine, source in sources.items() if source.has(kind)
        }

    def label(self, kind: str) -> str:
        """Return a line that says where and when the tables of a kind were measured.

        Parameters
        ----------
        kind : str
            The kind of tables.

        Returns
        -------
        str
            For example "recorded on <machine>, 2026-11-20". Several origins are separated
            by semicolons, and tables of the same origin are named once.
        """
        origins = []
        for path in self._files(kind):
            # The stamp of a table says on which machine and when it was measured.
            stamp = store.load_stamp(path)
            is_live = machine_of(path.parent) == HERE
            verb = "measured live" if is_live else "recorded"
            day = stamp["time"][:10]
            origin = f"{verb} on {stamp['machine']['name']}, {day}"
            if stamp.get("remark"):
                origin += f" ({stamp['remark']})"
            origins.append(origin)
        # A dict keeps each origin once, in order.
        return "; ".join(dict.fromkeys(origins))

    def machine(self, kind: str) -> dict[str, Any]:
        """Return the stamp's machine of the first table of ``kind``."""
        return dict(store.load_stamp(self._files(kind)[0])["machine"])

    def profile(self, network: str) -> LayerProfile:
        """Return the profile of a network that one rank measured alone in fp32.

        If profiles of several batch sizes exist, it is that of the largest batch, at which
        the host limits a GPU least. If several tables have this batch, the first one counts.

        Parameters
        ----------
        network : str
            The name of the network.

        Returns
        -------
        LayerProfile

        Raises
        ------
        UserError
            If there is no such profile.
        """
        largest_batch = 0
        path_of_largest: Path | None = None
        for path in self._files("layers"):
            rows = store.load_table(path, "layers")
            alone = rows.query(f"network == @network and {ALONE}")
            if len(alone) and alone["batch"].max() > largest_batch:
                largest_batch = int(alone["batch"].max())
                path_of_largest = path
        if path_of_largest is None:
            raise UserError(
                f"no fp32 profile of {network} on one rank: run ddlkit measure layers"
            )
        return store.read_profile(
            path_of_largest, network, batch=largest_batch, ranks=1
        )

    def networks(self) -> list[str]:
        """Return the names of the networks that `profile` has, sorted."""
        return sorted(self.table("layers").query(ALONE)["network"].unique())

    def workloads(self) -> dict[str, Workload]:
        """Return every layer profile as a workload.

        Returns
        -------
        dict of str to Workload
            Workloads by the hash of the profile. A `Case`, which describes a run, names
            its profile by this hash.
        """
        return {
            profile.sha256: profile.workload() for profile in self._profiles().values()
        }

    def compute_scatter(self) -> dict[str, Floats]:
        """Return how iterations scatter around the median of their layer profile.

        Returns
        -------
        dict of str to ndarray
            The time of each iteration divided by the median time, by the hash of the
            profile. Profiles whose samples were not kept are left out.
        """
        scatter = {}
        for path, profile in self._profiles().items():
            # The samples of a profile are in a table next to it.
            samples = path.with_name(path.name.replace("layers-", "samples-", 1))
            if store.has_table(samples):
                rows = store.load_table(samples, "samples")
                scatter[profile.sha256] = scatter_of(rows)
        return scatter

    @property
    def alone(self) -> Source:
        """Return the first directory alone.

        A campaign is judged by the calibration of its own labs.
        """
        return Source(self.directories[:1])

    def selections(self) -> dict[str, SelectionTimes]:
        """Return the selection times that sparse replays sleep for.

        Returns
        -------
        dict of str to SelectionTimes
            Selection times by their hash. A sparse `Case`, which describes a run, names
            its selection times by this hash.
        """
        selections = {}
        for path in self._paths("selection"):
            # A name with "-rho" is that of a table for one density rho, the share of the gradients
            # that is selected. Replays sleep for its times. Other tables have the times of single
            # sizes.
            if "-rho" in path.name:
                times = store.read_selection_times(path)
                selections[times.sha256] = times
        return selections

    def timeline(self, case: str) -> Timeline:
        """Return the measured or replayed timeline of a case.

        The timeline is empty if none was kept of the case.
        """
        rows = self.table("timeline").query("case == @case")
        return Timeline.from_columns(rows)


def teaching_recording() -> Path:
    """Return the directory of the recording that teaches: lessons are made from it.

    Raises
    ------
    UserError
        If the directory has no tables of replays, as without the published data.
    """
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
    data : str, optional
        The name of a machine under data/recorded, or a directory of measured tables,
        relative to the working directory or to the root of the project. The recording that
        teaches, from which lessons are made, completes such a directory. It is also the
        default.

    Returns
    -------
    Source

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
        The directory of these tables. An empty name, or a directory that does not
        exist, means that nothing was measured.

    Returns
    -------
    Source
        The tables, of no directory if nothing was measured.
    """
    directory = Path(here)
    # An empty name is tested first, because its path would be the working directory.
    if here and directory.is_dir():
        return Source((directory,))
    return Source(())


def _directory_with(data: str, name: str, *kinds: str) -> Path:
    """Return the first directory that has a table of one of the kinds.

    Parameters
    ----------
    data : str
        The only directory to search, or "" for the recorded ones.
    name : str
        The name that a recorded directory has below its machine. The recording that
        teaches, from which lessons are made, is searched before other machines.
    *kinds : str
        The kinds of tables, of which one suffices.

    Returns
    -------
    Path
        The directory.

    Raises
    ------
    UserError
        If no such directory has a table of these kinds.
    """
    if data:
        candidates = [Path(data)]
    else:
        # The sorted list has the first directory once more, which does no harm.
        candidates = [teaching_recording() / name]
        candidates += sorted(places.RECORDED.glob(f"*/{name}"))
    for directory in candidates:
        if any(Source((directory,)).has(kind) for kind in kinds):
            return directory
    raise UserError(
        f"no {name} in {data or places.RECORDED}: measure it as examples/*.yml say"
    )


def open_campaign(data: str = "", name: str = CAMPAIGN) -> Source:
    """Return a campaign together with its layer profiles.

    Parameters
    ----------
    data : str, optional
        The directory of the campaign. By default the recorded one.
    name : str, optional
        The name of the recorded campaign.

    Returns
    -------
    Source
        The directories of the campaign and of the layer profiles.

    Raises
    ------
    UserError
        If there are no such runs.
    """
    directory = _directory_with(data, name, "runs")
    # A recorded campaign lies in the recording of its machine, which has the profiles. A
    # given directory is completed by the recording from which lessons are made.
    profiles = teaching_recording() if data else directory.parent
    return Source((directory, profiles))


def open_labs(data: str = "", name: str = LABS) -> Source:
    """Return what was timed on the links of many labs: collectives, or echoes.

    An echo is a round trip: a payload is sent to another rank, which returns it.

    Parameters
    ----------
    data : str, optional
        The directory of their tables. By default the recorded one.
    name : str, optional
        The name of the recorded directory.

    Returns
    -------
    Source

    Raises
    ------
    UserError
        If there is neither a table of collectives nor one of echoes.
    """
    # One of the two tables suffices.
    directory = _directory_with(data, name, "collectives", "echoes")
    directories = [directory]
    if directory.name == LABS:
        # LABS is the directory "labs-open". The labs that were timed before its labs are in
        # the directory "labs" next to it.
        directories.append(directory.with_name("labs"))
    return Source(tuple(directories))


def open_sharing(data: str = "") -> Source | None:
    """Return the recording of training during messages on one machine.

    Its tables lie in a directory or in the folder ``sharing`` of the directory.

    Parameters
    ----------
    data : str, optional
        A directory, or the name of a machine under data/recorded, which is searched
        first. Without a name, or if nothing is found there, the recording is that of the
        first recorded machine that has such tables.

    Returns
    -------
    Source or None
        The recording, or None if there is none anywhere.
    """
    recorded = sorted(places.RECORDED.glob("*/"))
    candidates = []
    if data:
        # The name of a machine has no slash, and that of a directory has at least one.
        named = Path(data) if "/" in data else places.RECORDED / data
        candidates += [named / "sharing", named]
    # Machines with a GPU should have these tables among their others, and machines without one
    # in ``sharing``. In this order, all machines with a GPU come before the others.
    candidates += recorded
    candidates += [directory / "sharing" for directory in recorded]
    for directory in candidates:
        source = Source((directory,))
        if source.has("sharing_iterations"):
            return source
    return None


def recordings(kind: str) -> dict[str, Source]:
    """Return the recordings of all machines that have tables of a kind.

    Parameters
    ----------
    kind : str
        The kind of tables.

    Returns
    -------
    dict of str to Source
        Recordings by the name of the machine. What was measured on this machine, outside
        data/recorded, is not among them.
    """
    return Source(tuple(places.list_recorded())).apart(kind)


def everywhere(kind: str) -> pd.DataFrame:
    """Return all recorded rows of a kind, those of campaigns included.

    Parameters
    ----------
    kind : str
        The kind of tables.

    Returns
    -------
    DataFrame
        The rows with their directory as ``place``.

    Raises
    ------
    ValueError
        If there is no such table.
    """
    tables = []
    for directory in sorted(places.RECORDED.glob("**/")):
        source = Source((directory,))
        if source.has(kind):
            tables.append(source.table(kind).assign(place=str(directory)))
    return pd.concat(tables)


def machines(kind: str, data: str = "") -> dict[str, Source]:
    """Return the tables of a kind of all machines, measured here or recorded.

    Parameters
    ----------
    kind : str
        The kind of tables.
    data : str, optional
        A directory of measured tables, as `open_source` takes it.

    Returns
    -------
    dict of str to Source
        "here" for what was measured in ``data``, then recordings by name.

    Raises
    ------
    UserError
        If there is no such table anywhere.
    """
    recorded = places.list_recorded()
    # What was measured on this machine comes first.
    live = [path for path in open_source(data).directories if path not in recorded]
    sources = Source((*live, *recorded)).apart(kind)
    if not sources:
        raise UserError(f"no table of {kind} anywhere: run python -m workbook record")
    return sources


def as_replayed(
    tables: Source, network: str, link: str, workers: int
) -> tuple[Workload, pd.DataFrame]:
    """Return a network's compute as it was replayed over a link, and these replays.

    Instead of computing, a replay sleeps for the times of a layer profile, multiplied by a
    factor, the ``dilation``.

    Parameters
    ----------
    tables : Source
        Runs and layer profiles.
    network : str
        The name of the network.
    link : str
        The name of the link.
    workers : int
        The number of workers.

    Returns
    -------
    workload : Workload
        The profile with its compute times multiplied by the ``dilation`` of the replays.
        If there are no replays, the profile as it was measured.
    runs : DataFrame
        The replays of this workload, which may be none.
    """
    runs = tables.table("runs")
    wanted = {
        "origin": "replayed",
        "network": network,
        "link": link,
        "workers": workers,
    }
    for column, value in wanted.items():
        runs = runs[runs[column] == value]
    if runs.empty:
        return tables.profile(network).workload(), runs
    # The first replay decides which profile and which dilation are returned.
    profile_sha256, dilation = runs[["profile_sha256", "dilation"]].iloc[0]
    workload = tables.workloads()[profile_sha256].scaled(dilation)
    # Replays with another profile or another dilation have another compute.
    is_same_profile = runs["profile_sha256"] == profile_sha256
    is_same = is_same_profile & (runs["dilation"] == dilation)
    return workload, runs[is_same]
