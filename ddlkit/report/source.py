"""Where a notebook's numbers come from: measured here, or recorded on a named machine; it says which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
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

CAMPAIGN, BEST, REPEATS = "campaign", "campaign-best", "campaign-repeats"
LINKS, REGIMES, LINKS_AGAIN = "campaign-links", "campaign-regimes", "campaign-links-again"
LINKS_THIRD, LINKS_FOURTH = "campaign-links-third", "campaign-links-fourth"
REGIMES_VGG, LIMIT = "campaign-regimes-vgg", "campaign-limit"
"""Directories of campaigns that are recorded with their machine; those in later lines were foretold."""
SHARING = "sharing"
"""Directory of messages, kernels and training that share a machine, beside its other recordings."""
LABS, FRESH_LABS, STEPPED_LABS, BOTH_LABS = "labs-open", "labs-fresh", "labs", "labs-both"
"""Directories of calibrations of many labs, beside a machine's other recordings: gloo's own ring; labs that
confirm what is told from those; algorithms that are sent step by step; the same links by both engines."""
AGAIN_LABS, ALIKE_LABS = "labs-fresh-again", "labs-alike"
"""Directories of labs that were foretold: those that confirm a second time, by two laws; the same links by
both engines, ours counting and saving as the kernel's bucket does."""
ECHOES = "labs-echo"
"""Directory of echoes over such links, and of small all-reduces with the packets that they are made of."""
DISTURBED, REPLANNING, CALM = "campaign-disturbed", "campaign-replanning", "campaign-calm"
"""Directories of disturbed iterations, of plans made again after a rate has changed, and of iterations
without loss before any, and after one with it."""
OMGS, SPARSE_TRAINING = "campaign-omgs", "sparse-training"
"""Directories of sparsified gradients: replayed at 16 ranks, foretold; really trained at 2 and 4."""
QUICK = "campaign-quick"
"""Directory of the campaign that is measured live."""
HERE = "here"
"""Name of the machine in tables that are not under data/recorded."""


def machine_of(directory: Path) -> str:
    """Whose tables a directory holds: a machine's name under data/recorded, else "here".

    >>> machine_of(store.RECORDED / "gpu-h100" / "campaign"), machine_of(Path("build/measured"))
    ('gpu-h100', 'here')
    """
    directory = directory.resolve()
    if store.RECORDED not in directory.parents:
        return HERE
    return directory.relative_to(store.RECORDED).parts[0]


def rounds_apart(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables of several recordings as one, in which no two share the number of a round (``repeat``).

    Each counts its rounds from 0. What is compared within a round must be of one recording: from one to the
    next a machine's speed changes by more than what is looked for. Even rounds stay even, and odd ones odd.
    """
    first, apart = 0, []
    for one in tables:
        apart.append(one.assign(repeat=one["repeat"] + first))
        first += 2 * (int(one["repeat"].max()) // 2 + 1) if len(one) else 0
    return pd.concat(apart, ignore_index=True)


@dataclass(frozen=True)
class Source:
    """Directories of recorded tables, in order: of files with one name, the first directory's counts.

    A live run on a machine without the lab thus reads its own layers and loopback collectives, and the
    recording for what only the lab can measure. ``merges`` says so in one line, and every table has a
    column ``machine``. What is predicted is judged machine by machine: see ``apart``.
    """

    directories: tuple[Path, ...]

    def _found(self, kind: str) -> dict[str, Path]:
        found: dict[str, Path] = {}
        for directory in self.directories:
            files = (*directory.glob(f"{kind}-*.csv"), *directory.glob(f"{kind}-*.csv.gz"))
            for path in sorted(files):
                found.setdefault(path.name, path)
        return found

    def has(self, kind: str) -> bool:
        """Whether there is any table of ``kind``."""
        return bool(self._found(kind))

    def is_live(self, kind: str) -> bool:
        """Whether the first table of ``kind`` was measured on this machine, not recorded."""
        return machine_of(self._files(kind)[0].parent) == HERE

    def _files(self, kind: str) -> list[Path]:
        """Every table of ``kind`` ("layers", "runs", ...), by directory, then by name."""
        found = self._found(kind)
        if not found:
            places = ", ".join(str(directory) for directory in self.directories) or "nowhere"
            raise UserError(
                f"no table of {kind} in {places}: run ddlkit measure, or use --recorded"
            )
        return list(found.values())

    def table(self, kind: str) -> pd.DataFrame:
        """All rows of a kind, with the ``machine`` that each is of; hashes are checked.

        Of collectives over one link between as many ranks, only the first machine's: a cost is one's.
        """
        rows = pd.concat(self._tables(kind), ignore_index=True)
        if kind != "collectives":
            return rows
        first = rows.groupby(["link", "ranks"])["machine"].transform("first")
        return rows[rows["machine"] == first].reset_index(drop=True)

    def rounds(self, kind: str) -> pd.DataFrame:
        """As `table`, of a kind whose files count rounds (``repeat``): see `rounds_apart`."""
        return rounds_apart(self._tables(kind))

    def _tables(self, kind: str) -> list[pd.DataFrame]:
        return [
            store.load_table(path, kind).assign(machine=machine_of(path.parent))
            for path in self._files(kind)
        ]

    @property
    def merges(self) -> str:
        """One line: which kinds of tables are of which machines, those of several machines first."""
        of_kind: dict[str, dict[str, None]] = {}
        for path in self._found("*").values():
            of_kind.setdefault(path.name.partition("-")[0], {})[machine_of(path.parent)] = None
        kinds: dict[str, list[str]] = {}
        for kind, names in sorted(of_kind.items(), key=lambda item: (-len(item[1]), item[0])):
            kinds.setdefault(" and ".join(names), []).append(kind)
        return "; ".join(f"{', '.join(those)} of {names}" for names, those in kinds.items())

    def apart(self, kind: str) -> dict[str, Source]:
        """The tables of each machine that has some of ``kind``, alone, by its name: never merged."""
        own: dict[str, tuple[Path, ...]] = {}
        for directory in self.directories:
            machine = machine_of(directory)
            own[machine] = (*own.get(machine, ()), directory)
        sources = {machine: Source(directories) for machine, directories in own.items()}
        return {machine: source for machine, source in sources.items() if source.has(kind)}

    def label(self, kind: str) -> str:
        """One line to print beside a figure: measured or recorded, on which machine, and when."""
        parts = []
        for path in self._files(kind):
            stamp = store.load_stamp(path)
            how = "measured live" if machine_of(path.parent) == HERE else "recorded"
            remark = f" ({stamp['remark']})" if stamp.get("remark") else ""
            parts.append(f"{how} on {stamp['machine']['name']}, {stamp['time'][:10]}{remark}")
        return "; ".join(dict.fromkeys(parts))

    def cores(self, kind: str) -> int:
        """Of the machine that the first table of ``kind`` was measured on."""
        return int(store.load_stamp(self._files(kind)[0])["machine"]["cpu"]["cores"])

    def gpu(self, kind: str) -> str:
        """Model of the GPU where the first table of ``kind`` was measured; "" without one."""
        gpus = store.load_stamp(self._files(kind)[0])["machine"].get("gpus", [])
        return str(gpus[0]["model"]) if gpus else ""

    def begun(self, kind: str) -> datetime:
        """When the first table of ``kind`` was saved: what was decided later may have seen it."""
        stamps = [store.load_stamp(path) for path in self._files(kind)]
        return min(datetime.fromisoformat(stamp["time"]) for stamp in stamps)

    def profile(self, network: str) -> LayerProfile:
        """The fp32 profile of a network on one rank alone: the first by directory, then by file name."""
        wanted = pd.Series({"network": network, "ranks": 1, "precision": "fp32"})
        for path in self._files("layers"):
            frame = store.load_table(path, "layers")
            if (frame[wanted.index] == wanted).all(axis=1).any():
                return store.read_profile(path, network, ranks=1)
        raise UserError(f"no fp32 profile of {network} on one rank: run ddlkit measure layers")

    def networks(self) -> list[str]:
        """Those that `profile` finds, in order of their names."""
        rows = self.table("layers")
        alone = rows[(rows["ranks"] == 1) & (rows["precision"] == "fp32")]
        return sorted(alone["network"].unique())

    def profiles(self) -> dict[Path, LayerProfile]:
        """Every profile in any directory, also where an earlier directory has a file of that name."""
        files = [path for directory in self.directories for path in directory.glob("layers-*.csv")]
        return {path: store.read_profile(path) for path in files}

    def workloads(self) -> dict[str, Workload]:
        """Every profile as a workload, by the hash that a Case carries."""
        return {one.sha256: one.workload() for one in self.profiles().values()}

    def compute_scatter(self) -> dict[str, Floats]:
        """Iterations over their median, of every profile whose samples were kept, by the profile's hash."""
        found = {}
        for path, profile in self.profiles().items():
            samples = path.with_name(path.name.replace("layers-", "samples-", 1))
            if samples.exists():
                found[profile.sha256] = scatter_of(store.load_table(samples, "samples"))
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
    """This machine's recording of the lab, else the first one. Raises UserError when there is none."""
    recorded = [path for path in store.list_recorded() if [*path.glob("runs-replay-*.csv")]]
    if not recorded:
        raise UserError(f"{store.RECORDED} holds no recording of the lab: run ddlkit measure all")
    mine = store.recorded_dir()
    return mine if mine in recorded else recorded[0]


def open_source(data: str = "") -> Source:
    """The tables in ``data``: a machine's name under data/recorded, or a directory of measured tables.

    Without ``data`` what was measured here, if anything was. What a directory of one's own lacks is
    taken from the default recording; print ``merges`` to say so. Raises UserError when ``data`` is neither.
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


def open_campaign(data: str = "", name: str = CAMPAIGN) -> Source:
    """A campaign of the lab: that in the directory ``data``, else the one that was recorded.

    Recorded on this machine, or on the first that has it. Its layer profiles may be those that the machine,
    or for ``data`` the default recording, had already. Raises UserError when there is none.
    """
    recorded = [default_recording() / name, *sorted(store.RECORDED.glob(f"*/{name}"))]
    for found in [Path(data)] if data else recorded:
        if [*found.glob("runs-*.csv")]:
            return Source((found, default_recording() if data else found.parent))
    file = f"examples/{name.replace('-', '_')}.yml"
    raise UserError(f"no campaign in {data or store.RECORDED}: run ddlkit lab campaign {file}")


def open_labs(data: str = "", name: str = LABS) -> Source:
    """Calibrations of many labs of one machine, or echoes: in the directory ``data``, else those recorded.

    With LABS come those of STEPPED_LABS, beside which they lie.

    Raises UserError when there are none.
    """
    recorded = [store.recorded_dir() / name, *sorted(store.RECORDED.glob(f"*/{name}"))]
    for found in [Path(data)] if data else recorded:
        if [*found.glob("collectives-*.csv"), *found.glob("echoes-*.csv")]:
            beside = [found.with_name(STEPPED_LABS)] if found.name == LABS else []
            return Source((found, *beside))
    raise UserError(f"no labs in {data or store.RECORDED}: run ddlkit measure examples/labs.yml")


def open_sharing(data: str = "") -> Source | None:
    """Training that shares a machine with its messages: in ``data``, a machine's name or a directory, else
    the first recorded, of GPUs before others; None where nothing was.

    A GPU's lies among its other tables, a processor's in a directory of its own.
    """
    named = store.RECORDED / data if data and "/" not in data else Path(data)
    every = sorted(path for path in store.RECORDED.glob("*") if path.is_dir())
    gpus = [path for path in every if _trained_with(path)]
    asked = [named / SHARING, named] if data else []
    for found in [*asked, *gpus, *(path / SHARING for path in every)]:
        if _trained_with(found):
            return Source((found,))
    return None


def _trained_with(directory: Path) -> bool:
    return any(directory.glob("sharing_iterations-*.csv*"))


def live_campaign(data: str = "") -> Source | None:
    """The quick campaign among the tables measured here, in ``data`` or build/measured; None without one."""
    if data in {path.name for path in store.list_recorded()}:
        return None
    found = (Path(data) if data else store.BUILD / "measured") / QUICK
    return open_campaign(str(found)) if [*found.glob("runs-*.csv")] else None


def recordings(kind: str) -> dict[str, Source]:
    """The recording of each machine that has tables of ``kind``, by name: nothing that was measured since."""
    return Source(tuple(store.list_recorded())).apart(kind)


def machines(kind: str, data: str = "") -> dict[str, Source]:
    """All that is at hand of ``kind``: "here" for what was measured live, then each recording by name.

    data : as for `open_source`. Raises UserError when nothing of the kind is there.
    """
    recorded = store.list_recorded()
    own = [path for path in open_source(data).directories if path not in recorded]
    found = Source((*own, *recorded)).apart(kind)
    if not found:
        raise UserError(f"no table of {kind} anywhere: run ddlkit record")
    return found
