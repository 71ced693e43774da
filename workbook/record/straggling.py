"""Traces of data-parallel training with known delays, and how they are recorded.

`data/straggling/scenarios.yml` states for each scenario which rank is delayed in which
phase, and which rank and phase are therefore right to name. Most layers sleep for the
time that they would compute, so that three ranks do not compete for two cores. Delays
act in iterations of an odd number only. Those of an even number show how long the same
iteration takes without them.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from ddlkit import store
from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.launch import Loopback
from ddlkit.jobs.rank import Rank, Tables, job
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.measure.parts import Ranks, ranks_in_lab
from ddlkit.measure.session import say
from ddlkit.measure.tracing import COMPRESSION, process_group_of_users, trace_iterations
from ddlkit.store.files import atomic_write, atomic_write_text, own_yaml, scratch
from workbook.common.places import DATA

SCENARIOS = DATA / "straggling" / "scenarios.yml"
"""The file that states all scenarios."""
REMEDY = "remedy"
"""The folder within a scenario's that has the traces with its remedy in place."""
ITERATIONS = 16
"""How many iterations are recorded: eight with delays, and eight without."""
WARMUP = 4
"""Iterations until DDP has rebuilt its buckets, and the first numbers of the rest."""
FOUR_BUCKETS_MB = 2.2
"""The size of buckets in MiB that makes four of them from seven layers that sleep.

Two layers fill a bucket, and the first layer is left for the last bucket. DDP makes its
first bucket smaller only where it is given no size at all."""
INPUT_S = 0.002
"""Seconds that loading a batch takes on every rank."""
UPDATE_S = 0.002
"""Seconds that the optimizer sleeps besides its own work."""
REFERENCE_BYTES = (4096, 65536, 524288, 2_000_000, 4_000_000, 12_000_000)
"""Sizes of the messages that are timed alone, on the same link."""
REFERENCE_BUDGET = Budget(max_s=1.0)
"""How long each of these sizes is timed."""
EXPECTED_S = 6.0
"""How long the ranks of a scenario take together, mostly to start, on an idle machine."""
ESTIMATE_S = 60.0
"""How long a recording takes at most, unless the machine hangs."""


@dataclass(frozen=True)
class Model:
    """The layers of a model, which are all alike.

    Attributes
    ----------
    layers : int
        How many layers there are.
    elements : int
        How many parameters a layer that sleeps has.
    width : int
        The inputs and outputs of a dense layer that computes; 0 for a layer that sleeps.
    forward_s, backward_s : float
        How long a layer sleeps in each phase, in seconds.
    batch : int
        How many rows the input has.
    """

    layers: int = 7
    elements: int = 300_000
    width: int = 0
    forward_s: float = 0.0035
    backward_s: float = 0.007
    batch: int = 1


MODELS = {
    "sleeping": Model(),
    "many_small": Model(layers=16, elements=25_000, forward_s=0.001, backward_s=0.001),
    "computing": Model(width=512, forward_s=0.0, backward_s=0.0, batch=256),
}
"""The models of the scenarios by name."""


@dataclass(frozen=True)
class Injection:
    """A delay on one rank, in iterations of an odd number.

    Attributes
    ----------
    rank : int
        The rank.
    phase : str
        "input", "forward", "backward" or "update".
    seconds : float
        The delay, of each layer that has it.
    layer : int or None
        The layer, which counts from the input, or None for all layers.
    """

    rank: int
    phase: str
    seconds: float
    layer: int | None = None

    def total_s(self, layers: int) -> float:
        """Return the seconds of the delay in one iteration of a model with so many layers."""
        # Loading a batch and updating the parameters happen once in an iteration. In the other
        # phases, each layer is delayed.
        happens_once = self.phase in ("input", "update")
        if happens_once or self.layer is not None:
            return self.seconds
        return layers * self.seconds


@dataclass(frozen=True)
class Link:
    """The links of a lab: their rate, as in "1gbit", and their delay, as in "1ms"."""

    rate: str
    delay: str = "0s"


@dataclass(frozen=True)
class Right:
    """The rank and the phase that a diagnosis of the traces should name as delayed.

    Any phase is right if the phase is "any".
    """

    rank: int
    phase: str


@dataclass(frozen=True)
class Remedy:
    """What a second recording changes: the links, the size of DDP's buckets in MiB."""

    link: Link | None = None
    bucket_cap_mb: float | None = None


@dataclass(frozen=True)
class Scenario:
    """A training that is recorded, with its delays and the answer that is right.

    Attributes
    ----------
    name : str
        The name.
    ranks : int
        How many ranks train.
    model : str
        A name in `MODELS`.
    inject : sequence of Injection
        The delays.
    jitter_s : float
        The longest of the random delays that each layer of each rank has, in seconds.
    link : Link or None
        The links of a lab; None for the loopback interface.
    bucket_cap_mb : float
        The size of DDP's buckets in MiB.
    right : Right or None
        The rank and the phase that a diagnosis should name; None if it should name none.
    remedy : Remedy or None
        What a second recording changes; None if there is no second recording.
    """

    name: str
    ranks: int
    model: str
    inject: Sequence[Injection]
    jitter_s: float
    link: Link | None
    bucket_cap_mb: float
    right: Right | None
    remedy: Remedy | None

    def with_remedy(self) -> Scenario:
        """Return the scenario after its remedy, or the scenario itself if it has none."""
        if self.remedy is None:
            return self
        # A remedy changes the links, the size of the buckets, or both.
        return dataclasses.replace(
            self,
            link=self.remedy.link or self.link,
            bucket_cap_mb=self.remedy.bucket_cap_mb or self.bucket_cap_mb,
            remedy=None,
        )

    def members(self) -> Ranks:
        """Return the ranks, between which there is the scenario's link."""
        # Without a link of a lab, the ranks meet over the machine's loopback interface.
        if self.link is None:
            return Ranks(self.ranks, Loopback, {"backend": "gloo"})
        rate_bits_per_s = units.parse_bits_per_s(self.link.rate)
        delay_s = units.parse_seconds(self.link.delay)
        # The second result is the name of a table, which is not needed.
        members, _ = ranks_in_lab(self.ranks, rate_bits_per_s, delay_s)
        return members


def scenarios() -> dict[str, Scenario]:
    """Return all scenarios by name, as `SCENARIOS` states them."""
    stated = own_yaml(SCENARIOS.read_text())["scenarios"]
    return {name: _scenario(name, fields) for name, fields in stated.items()}


def _scenario(name: str, fields: Mapping[str, Any]) -> Scenario:
    """Return a scenario from its fields in the file.

    Only the fields ``ranks`` and ``model`` are required.
    """
    injections = []
    for delay in fields.get("inject", []):
        injection = Injection(
            rank=delay["rank"],
            phase=delay["phase"],
            seconds=delay["seconds"],
            # Without this field the delay is on all layers.
            layer=delay.get("layer"),
        )
        injections.append(injection)
    # The rank and the phase that a diagnosis should name. Without this field it should name none.
    right_answer = None
    if "right" in fields:
        right_answer = Right(
            rank=fields["right"]["rank"], phase=fields["right"]["phase"]
        )
    # A field that the remedy does not name is None here, and stays as it is in the scenario.
    remedy = None
    if "remedy" in fields:
        remedy = Remedy(
            link=_link(fields["remedy"]),
            bucket_cap_mb=fields["remedy"].get("bucket_cap_mb"),
        )
    return Scenario(
        name=name,
        ranks=fields["ranks"],
        model=fields["model"],
        inject=injections,
        jitter_s=fields.get("jitter_s", 0.0),
        link=_link(fields),
        bucket_cap_mb=fields.get("bucket_cap_mb", FOUR_BUCKETS_MB),
        right=right_answer,
        remedy=remedy,
    )


def _link(fields: Mapping[str, Any]) -> Link | None:
    """Return the links that the fields of a scenario or of its remedy name, or None without any."""
    if "link" not in fields:
        return None
    return Link(rate=fields["link"]["rate"], delay=fields["link"].get("delay", "0s"))


# -- what a rank does ------------------------------------------------------------------


@dataclass(frozen=True)
class StragglingSettings:
    """The settings of the job.

    Attributes
    ----------
    name : str
        The name of the scenario.
    with_remedy : bool
        Whether its remedy is in place.
    directory : str
        Where each rank writes its trace.
    """

    name: str
    with_remedy: bool
    directory: str

    @property
    def scenario(self) -> Scenario:
        """Return the scenario, which each rank reads itself."""
        scenario = scenarios()[self.name]
        return scenario.with_remedy() if self.with_remedy else scenario


@job(StragglingSettings)
def straggling_job(me: Rank, settings: StragglingSettings) -> Iterator[Tables]:
    """Train the model of a scenario with its delays, and write the trace of this rank.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : StragglingSettings
        The scenario, and the directory of the traces.

    Yields
    ------
    mapping of str to DataFrame
        Nothing. The job leaves traces and no tables.
    """
    # The ranks share few cores, so that each computes by one thread.
    torch.set_num_threads(1)
    # All ranks draw the same parameters.
    torch.manual_seed(0)
    scenario = settings.scenario
    shape = MODELS[scenario.model]
    delays = Delays(scenario, me.rank)
    layers = [Layer(shape, number, delays) for number in range(shape.layers)]
    # As in a user's own training, gloo has two threads. In the default group of this library's
    # ranks it has one.
    ddp = DistributedDataParallel(
        nn.Sequential(*layers),
        bucket_cap_mb=scenario.bucket_cap_mb,
        process_group=process_group_of_users(me),
    )
    optimizer = SleepingSGD(ddp.parameters(), delays)
    # An item of the data set is a whole batch. With None, the loader does not put several items
    # together.
    loader = DataLoader(Batches(shape, delays), batch_size=None)
    batches = iter(loader)

    def iterate(number: int) -> None:
        # Delays depend on whether the number of the iteration is odd.
        delays.iteration = number
        # The sum of the outputs serves as the loss.
        loss = ddp(next(batches)).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    trace_iterations(
        iterate, Path(settings.directory), me, iterations=ITERATIONS, warmup=WARMUP
    )
    # This makes the function a generator, which yields no tables.
    yield from ()


class Delays:
    """How much longer than usual a rank takes, by the delays and the random jitter of a scenario.

    Parameters
    ----------
    scenario : Scenario
        The scenario.
    rank : int
        The rank.

    Attributes
    ----------
    iteration : int
        The number of the iteration that runs. Only odd ones have delays.
    """

    def __init__(self, scenario: Scenario, rank: int) -> None:
        self.iteration = 0
        self._own = [delay for delay in scenario.inject if delay.rank == rank]
        self._jitter_s = scenario.jitter_s
        # Each rank draws other random delays.
        self._random = np.random.default_rng(rank)

    def seconds(self, phase: str, layer: int | None = None) -> float:
        """Return the delay of a phase, or of one layer in this phase, in seconds.

        In iterations of an even number the result is 0. The delay is computed all the same, so
        that the computation itself makes no difference between odd and even iterations.

        Parameters
        ----------
        phase : str
            "input", "forward", "backward" or "update".
        layer : int or None, optional
            The layer, which counts from the input. None for a phase that has no layers.
        """
        total_s = 0.0
        for delay in self._own:
            # A delay without a layer is on all layers.
            is_of_layer = delay.layer is None or delay.layer == layer
            if delay.phase == phase and is_of_layer:
                total_s += delay.seconds
        if layer is not None:
            # Layers also have a jitter, which is drawn anew for each layer and phase.
            total_s += self._random.uniform(0, self._jitter_s)
        if self.iteration % 2 == 0:
            return 0.0
        return total_s


class Pause(torch.autograd.Function):
    """Sleeps in the forward and in the backward pass, and leaves all numbers as they are."""

    @staticmethod
    def forward(context: Any, values: Tensor, layer: Layer) -> Tensor:
        """Sleep for the forward pass of a layer."""
        context.layer = layer
        layer.sleep("forward")
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Sleep for the backward pass of the layer, before its gradients are computed."""
        context.layer.sleep("backward")
        # The second argument of `forward`, the layer, has no gradient.
        return gradient.clone(), None


class Layer(nn.Module):
    """A layer that sleeps or computes, and that may be delayed.

    Parameters
    ----------
    shape : Model
        Its size, and how long it sleeps.
    number : int
        The number of the layer, which counts from the input.
    delays : Delays
        The delays of this rank.
    """

    def __init__(self, shape: Model, number: int, delays: Delays) -> None:
        super().__init__()
        self.number = number
        self.delays = delays
        self.usual_s = {"forward": shape.forward_s, "backward": shape.backward_s}
        # A layer that sleeps hardly computes. It adds the sum of its parameters to its input, so
        # that each of them has a gradient to exchange. A layer with a width computes.
        self.work: nn.Module = AddedSum(shape.elements)
        if shape.width:
            self.work = nn.Sequential(nn.Linear(shape.width, shape.width), nn.ReLU())

    def forward(self, values: Tensor) -> Tensor:
        """Return what the layer computes. The layer sleeps after its work."""
        # In the backward pass the order is the reverse: the sleep comes before the gradients of the
        # work, so that a delay holds up this layer's own gradients.
        paused: Tensor = Pause.apply(self.work(values), self)
        return paused

    def sleep(self, phase: str) -> None:
        """Sleep as long as the layer takes in phase "forward" or "backward" of this iteration."""
        seconds = self.usual_s[phase] + self.delays.seconds(phase, self.number)
        if seconds > 0:
            time.sleep(seconds)


class AddedSum(nn.Module):
    """Adds the sum of its parameters, so that all of them have a gradient."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.addends = nn.Parameter(torch.randn(elements))

    def forward(self, values: Tensor) -> Tensor:
        """Return the values, each with the same sum added."""
        return values + self.addends.sum()


class Batches(Dataset[Tensor]):
    """A data set whose batches take a while to load, and longer where they are delayed."""

    def __init__(self, shape: Model, delays: Delays) -> None:
        self.shape = shape
        self.delays = delays

    def __len__(self) -> int:
        return WARMUP + ITERATIONS

    def __getitem__(self, number: int) -> Tensor:
        time.sleep(INPUT_S + self.delays.seconds("input"))
        # Layers that sleep have width 0 and take inputs of any width.
        width = self.shape.width or 16
        return torch.randn(self.shape.batch, width)


class SleepingSGD(torch.optim.SGD):
    """Stochastic gradient descent whose steps sleep first, and longer where they are delayed."""

    def __init__(self, parameters: Iterable[nn.Parameter], delays: Delays) -> None:
        super().__init__(parameters, lr=1e-6)
        self.delays = delays

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Sleep, and then update the parameters."""
        time.sleep(UPDATE_S + self.delays.seconds("update"))
        return super().step(closure)


# -- recording -------------------------------------------------------------------------


def record(out: Path, names: Sequence[str] = ()) -> Path:
    """Record scenarios, and write their traces and a table of what happened.

    Parameters
    ----------
    out : Path
        The directory. Each scenario has a folder of its name in it, with a trace for each
        rank. If the scenario has a remedy, two more things lie in its folder: the folder
        ``remedy`` with the traces after the remedy, and ``collectives.csv`` with the times
        of messages on the link of the scenario while no training uses it.
    names : sequence of str, optional
        The names of the scenarios. By default all are recorded.

    Returns
    -------
    Path
        The table ``truth.csv``, as `truth_rows` describes it.

    Raises
    ------
    UserError
        If there is no such scenario, and if a rank fails.
    """
    by_name = scenarios()
    for name in names:
        if name not in by_name:
            raise UserError(f"scenario {name}: use one of {', '.join(by_name)}")
    chosen = [by_name[name] for name in names] or [*by_name.values()]
    total_s = sum(_expected_s(scenario) for scenario in chosen)
    noun = "scenarios" if len(chosen) > 1 else "scenario"
    say(f"{len(chosen)} {noun} to record, about {total_s / 60:.1f} min")
    for number, scenario in enumerate(chosen, 1):
        name = scenario.name
        folder = out / name
        expected = format_seconds(_expected_s(scenario))
        say(
            f"[{number}/{len(chosen)}] recording {name}, about {expected} if the machine is idle"
        )
        record_scenario(name, folder)
        if scenario.remedy:
            _record_reference(scenario, folder)
            record_scenario(name, folder / REMEDY, with_remedy=True)
    path = out / "truth.csv"
    atomic_write_text(path, truth(out).to_csv(index=False))
    return path


def _expected_s(scenario: Scenario) -> float:
    """Return the seconds that recording a scenario is expected to take."""
    # With a remedy, messages are timed and the training is recorded a second time.
    return EXPECTED_S * (3 if scenario.remedy else 1)


def record_scenario(name: str, folder: Path, *, with_remedy: bool = False) -> None:
    """Train a scenario once, and write a trace for each of its ranks.

    Parameters
    ----------
    name : str
        The name of the scenario.
    folder : Path
        Where the traces of its ranks are written.
    with_remedy : bool, optional
        Whether its remedy is in place.
    """
    # The ranks write their traces into a temporary directory, from which they are copied without
    # the name of the machine.
    with scratch() as directory:
        settings = StragglingSettings(name, with_remedy, str(directory))
        settings.scenario.members().run(straggling_job, settings, ESTIMATE_S)
        for path in sorted(directory.glob("rank*.json.gz")):
            trace = without_names(json.loads(gzip.decompress(path.read_bytes())))
            document = json.dumps(trace, separators=(",", ":")).encode()
            # With a time of 0 in place of the current time, the same trace always gives the same
            # file.
            packed = gzip.compress(document, compresslevel=COMPRESSION, mtime=0)
            atomic_write(folder / path.name, packed)


def without_names(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace without the names of the machine and of the file that the profiler wrote."""
    return {
        key: value
        for key, value in trace.items()
        if key not in ("host_name", "traceName")
    }


def truth(out: Path) -> pd.DataFrame:
    """Return which delays were injected, and how long iterations took with and without them.

    Parameters
    ----------
    out : Path
        The directory of the recordings.

    Returns
    -------
    DataFrame
        The rows of `truth_rows`, of all scenarios that are recorded there. A scenario with a
        remedy, which is other links or another size of buckets, also has the rows of its second
        recording, with the remedy in place.
    """
    rows = []
    for name, scenario in scenarios().items():
        folder = out / name
        if folder.is_dir():
            rows += truth_rows(scenario, folder)
        if (folder / REMEDY).is_dir():
            rows += truth_rows(scenario.with_remedy(), folder / REMEDY)
    return pd.DataFrame(rows)


def _injected_s(scenario: Scenario) -> dict[tuple[Any, str], float]:
    """Return the injected seconds of an iteration by rank and phase, over all layers."""
    layers = MODELS[scenario.model].layers
    totals_s: dict[tuple[Any, str], float] = {}
    for delay in scenario.inject:
        key = (delay.rank, delay.phase)
        totals_s[key] = totals_s.get(key, 0.0) + delay.total_s(layers)
    return totals_s


def truth_rows(scenario: Scenario, folder: Path) -> list[dict[str, Any]]:
    """Return which delays were injected, and how long iterations took with and without them.

    Every row also has the ``right_rank`` and the ``right_phase`` that a diagnosis of the traces
    should name. Both are empty if it should name none.

    Parameters
    ----------
    scenario : Scenario
        The scenario.
    folder : Path
        The folder of its traces.

    Returns
    -------
    list of dict
        A row for each rank and phase with delays, or one with an empty rank and phase if there is
        none. Seconds of iterations are medians of those that `iterations_s` returns.
    """
    # Only iterations of an odd number have delays.
    even_s, odd_s = iterations_s(folder)
    totals_s = _injected_s(scenario)
    if not totals_s:
        # A scenario without delays has one row, for the times of its iterations.
        totals_s[("", "")] = 0.0
    rows = []
    # Seconds are rounded to microseconds.
    for (rank, phase), injected_s in totals_s.items():
        rows.append(
            {
                "scenario": scenario.name,
                "recording": folder.name,
                "rank": rank,
                "phase": phase,
                "injected_s": round(injected_s, 6),
                "right_rank": scenario.right.rank if scenario.right else "",
                "right_phase": scenario.right.phase if scenario.right else "",
                "even_iteration_s": round(float(np.median(even_s)), 6),
                "odd_iteration_s": round(float(np.median(odd_s)), 6),
            }
        )
    return rows


def iterations_s(folder: Path) -> tuple[list[float], list[float]]:
    """Return how long the iterations of a training took, in seconds.

    An iteration lasts from the moment in which the last rank ended the iteration before, to the
    moment in which the last rank ends this one. An update that is late on one rank thus makes its
    own iteration longer, and not the next one, in which the other ranks wait.

    Parameters
    ----------
    folder : Path
        The folder of the traces, which share one clock.

    Returns
    -------
    even_s, odd_s : list of float
        The iterations with even numbers, which have no delays, and those with odd numbers,
        which have them. The first iteration is left out, because no trace shows the end of
        the iteration before it.
    """
    # The end of an iteration on its last rank, in microseconds, by the iteration's number.
    ends_us: dict[int, float] = {}
    for path in sorted(folder.glob("rank*.json.gz")):
        trace = json.loads(gzip.decompress(path.read_bytes()))
        for event in trace["traceEvents"]:
            # An iteration is an event "ProfilerStep#" with its number. For events with another
            # name, ``is_step`` is an empty text. Events with a duration have "X" as "ph".
            _, is_step, number = event["name"].partition("ProfilerStep#")
            if is_step and event.get("ph") == "X":
                end_us = event["ts"] + event["dur"]
                # The last rank to end counts.
                ends_us[int(number)] = max(end_us, ends_us.get(int(number), end_us))
    even_s: list[float] = []
    odd_s: list[float] = []
    for number in sorted(ends_us)[1:]:
        iteration_us = ends_us[number] - ends_us[number - 1]
        if number % 2:
            odd_s.append(iteration_us / 1e6)
        else:
            even_s.append(iteration_us / 1e6)
    return even_s, odd_s


def _record_reference(scenario: Scenario, folder: Path) -> None:
    """Time all-reduces between the ranks of a scenario while no training uses their link.

    The times are saved as a table, with which messages in training can be compared.

    Parameters
    ----------
    scenario : Scenario
        The scenario.
    folder : Path
        Where the table is written.
    """
    settings = CollectivesSettings(["all_reduce"], REFERENCE_BYTES, REFERENCE_BUDGET)
    tables = scenario.members().run(collectives_job, settings, ESTIMATE_S)
    store.save_table(
        tables["collectives"],
        folder,
        "collectives",
        schema="collectives",
        command=["python", "-m", "workbook", "record", "straggling"],
    )
