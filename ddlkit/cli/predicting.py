"""Commands that read, fit and predict: none of them measures."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ddlkit.cli.command import JSON, arg, command, flag, is_numbers, show
from ddlkit.cli.converting import ELEMENT
from ddlkit.core import units
from ddlkit.core.errors import UserError, one_line

_RANKS = "between how many ranks messages were measured: chosen, or said if the file is silent [the file's]"
RANKS = arg("--ranks", type=int, help=_RANKS)
_TIMES = (
    "of a log: which times [both; in_place if these differ by more than they scatter]"
)
_OF_A_LOG = (
    arg("--place", choices=("in_place", "out_of_place"), help=_TIMES),
    arg("--table", type=int, help="of a log with several tables: which, from 1"),
)
_FORMS = "auto, alpha_beta, piecewise, segments, chords, table, or variants: piecewise:45KB [auto]"


@command(
    "fit a message cost to measured times",
    arg(
        "file",
        type=Path,
        help="collectives table, CSV of bytes and seconds, or a benchmark's log",
    ),
    arg("--form", default="auto", help=_FORMS),
    arg(
        "--collective",
        help="which, or what a log leaves open: all_reduce, all_gather, ...",
    ),
    arg("--link", help="of a recorded table: which link, as in lab:1gbit"),
    RANKS,
    *_OF_A_LOG,
    flag(
        "--compare",
        "all forms side by side, with their errors at sizes left out, and a drawing",
    ),
    arg(
        "--draw", type=Path, help="the drawing of --compare (PNG) [FILE-fits.png, here]"
    ),
    JSON,
)
def fit(arguments: argparse.Namespace) -> None:
    import numpy as np

    from ddlkit.core import fit as fitting
    from ddlkit.formats import messages
    from ddlkit.model import fits

    if arguments.compare:
        from ddlkit.show import DRAWING, needs

        needs("--compare", DRAWING)
    sizes, seconds, said = messages.read_bytes_seconds(
        arguments.file,
        collective=arguments.collective,
        link=arguments.link,
        ranks=arguments.ranks,
        place=arguments.place,
        table=arguments.table,
    )
    of: dict[str, Any] = {"collective": said.get("collective") or "all_reduce"}
    of |= {"workers": said.get("ranks"), "algorithm": said.get("algorithm")}
    note = {"place": said["place"]} if "place" in said else {}
    if arguments.compare:
        return _compare(arguments, sizes, seconds, of, note)
    if arguments.draw:
        raise UserError(
            f"--draw {arguments.draw}: draws what --compare compares: give both"
        )
    fitted = fitting.fit(
        arguments.form,
        sizes,
        seconds,
        collective=of["collective"],
        workers=of["workers"],
        algorithm=of["algorithm"],
    )
    description = fitted.to_dict()
    measured = fits.Measured.of(sizes, said.get("backend"), said["source"])
    if "median_abs_held_out_error" not in description["fit"]:
        errors = fitting.held_out_errors(fitted.form, sizes, seconds).errors
        median = float(np.median(abs(errors))) if errors.size else None
        description["fit"]["median_abs_held_out_error"] = median
    warnings = [*fits.several_populations(description["fit"])]
    description["fit"] |= {**measured._asdict(), **note, "warnings": warnings}
    _warn(warnings)
    if not arguments.json:  # what is nested is for programs
        whole = {**description, **description["fit"]}.items()
        description = {
            k: v for k, v in whole if not isinstance(v, (list, dict)) or is_numbers(v)
        }
    show(description, arguments.json)


def _compare(
    arguments: argparse.Namespace,
    sizes: Any,
    seconds: Any,
    of: dict[str, Any],
    note: dict[str, str],
) -> None:
    """Print how well each form does, and draw them."""
    from ddlkit.model import fits
    from ddlkit.show import write_cost_forms
    from ddlkit.store import own_output

    forms = [] if arguments.form == "auto" else [arguments.form]
    compared = fits.compare(
        sizes,
        seconds,
        *forms,
        collective=of["collective"],
        workers=of["workers"],
        algorithm=of["algorithm"],
    )
    to = arguments.draw or Path(f"{arguments.file.name.partition('.')[0]}-fits.png")
    own_output(to, arguments.file)
    write_cost_forms(compared.fits, compared.chosen, to)
    said = {"chosen": compared.chosen, "why": compared.why, "drawn": str(to), **note}
    if arguments.json:
        said["forms"] = json.loads(compared.table.to_json(orient="index"))
    else:
        named = compared.table.rename(columns={"sizes": "held out"}).rename_axis(None)
        print(named.to_string(float_format="{:.2%}".format, na_rep="-") + "\n")
    show(said, arguments.json)


_PLANS = "none, single, ddp, buffer:25MB, mg_wfbp, cuts:3,40, exact, search; a wrong one lists all"
_PLAN_HELP = f"as {_PLANS}; or a file of ddlkit plan --json, *.json"
_INPUTS = (
    arg("--profile", type=Path, required=True, help="layer profile (CSV)"),
    arg("--network", help="which network, when the profile holds several"),
    arg("--batch", type=int, help="which batch size, when the profile holds several"),
    arg(
        "--profile-ranks",
        type=int,
        help="measured by how many ranks, when it holds several",
    ),
    arg(
        "--forward-s",
        type=float,
        help="forward pass, for a profile without the column forward_s",
    ),
    arg(
        "--dilation", type=float, default=1.0, help="compute this many times slower [1]"
    ),
    ELEMENT,
    arg(
        "--accumulate",
        type=int,
        default=1,
        help="gradients over so many batches, sent once [1]",
    ),
    arg(
        "--collectives", type=Path, nargs="+", metavar="TABLE", help="to calibrate from"
    ),
    arg(
        "--collective",
        help="that sends gradients [all_reduce; with --density all_gather]",
    ),
    RANKS,
    *_OF_A_LOG,
    arg(
        "--link",
        help="over which link, as in lab:1gbit [the table's, if it has but one]",
    ),
    arg(
        "--cost",
        type=Path,
        help="in place of --collectives: message cost (JSON of ddlkit fit)",
    ),
    arg("--in-flight", type=int, default=1, help="collectives under way at once [1]"),
    arg(
        "--slowdown",
        type=Path,
        metavar="TABLE",
        help="of ddlkit measure slowdown: compute is real",
    ),
    arg(
        "--copies",
        type=Path,
        metavar="TABLE",
        help="of ddlkit measure copies: compute is real",
    ),
    arg(
        "--copy-s-per-byte",
        type=float,
        default=0.0,
        help="into and out of messages [0]",
    ),
    arg(
        "--density",
        type=float,
        help="share of gradients sent, with --selection: by all_gather",
    ),
    arg(
        "--selection",
        type=Path,
        nargs="+",
        metavar="TABLE",
        help="its times, or cost (JSON)",
    ),
    arg("--level", type=float, default=0.95, help="of an iteration's interval [0.95]"),
    JSON,
)


OPTIONAL = tuple(
    (names, {**how, "required": False} if "required" in how else how)
    for names, how in _INPUTS[:-1]
)


def _profile(arguments: argparse.Namespace) -> Any:
    """Return the layer profile, in the numbers that travel; what of it is assumed is said."""
    from ddlkit import store

    assumed: list[str] = []
    profile = store.read_profile(
        arguments.profile,
        arguments.network,
        arguments.batch,
        forward_s=arguments.forward_s,
        assumed=assumed,
        ranks=arguments.profile_ranks,
    )
    if assumed:
        text = one_line(f"{arguments.profile}: assumed {', '.join(assumed)}")
        print(f"ddlkit: {text}", file=sys.stderr)
    n_bytes = arguments.gradient_bytes
    return profile if n_bytes is None else profile.sent_as(n_bytes)


def forecast_of(
    arguments: argparse.Namespace, spec: str
) -> tuple[Any, list[str], Any, Any]:
    """Return the forecast under the plan ``spec``, what is doubtful (also warned of), profile, costs."""
    from ddlkit import formats
    from ddlkit.model import forecast
    from ddlkit.model.fits import doubts
    from ddlkit.model.predictor import plan_beside

    profile = _profile(arguments)
    workload = (
        profile.workload().scaled(arguments.dilation).accumulated(arguments.accumulate)
    )
    notes: list[str] = []
    communication, measured = _communication(arguments, notes)
    communication = _sparse(arguments, communication, workload)
    communication = _beside(arguments, communication, profile, notes)
    cost = communication.cost
    written = formats.read_plan(Path(spec)) if spec.endswith(".json") else None
    plan = written or plan_beside(spec, workload, communication)
    predicted = forecast(
        workload,
        plan,
        communication,
        copy_s_per_byte=arguments.copy_s_per_byte,
        level=arguments.level,
    )
    n_bytes = cost.collective_bytes(predicted.iteration.group_bytes)
    if cost.collective != "all_reduce" and not cost.selects:
        notes.append(
            f"the cost is of {cost.collective}, gradients go by all_reduce: fit that"
        )
    doubtful = [*notes, *doubts(profile.device, measured, n_bytes)]
    _warn(doubtful)
    return predicted, doubtful, profile, communication


REAL = """compute and messages are taken not to slow each other down; in recorded training they cost
0 to 3% more over links up to 1 Gbit/s, and up to 31% more over loopback: give --slowdown TABLE"""


def _beside(
    arguments: argparse.Namespace, messages: Any, profile: Any, notes: list[str]
) -> Any:
    """Return the same communication with what --slowdown and --copies say of real compute."""
    from ddlkit import store
    from ddlkit.model.contention import Contention
    from ddlkit.store.readers import choose, read_copy_s_per_byte

    if not (arguments.slowdown or arguments.copies):
        print(f"ddlkit: note: {one_line(REAL)}", file=sys.stderr)
        return messages
    beside = Contention.none()
    if path := arguments.slowdown:
        rows = store.load_table(path, "slowdown")
        wanted = {"ranks": messages.cost.workers, "link": arguments.link}
        rows, chosen = choose(rows, ("ranks", "link", "network", "batch"), wanted, path)
        beside = Contention.of(rows)
        for name in ("network", "batch"):
            if chosen[name] != (of := getattr(profile, name)):
                notes.append(
                    f"{path}: slowdown of {name} {chosen[name]}, the profile's is {of}"
                )
        machines = [
            store.load_stamp(each)["machine"]["name"]
            for each in _stamped(arguments, path)
        ]
        if len({*machines}) > 1:
            notes.append(
                f"{path}: slowdown of {machines[0]}, the rest is of {machines[-1]}"
            )
    if arguments.copies:
        beside = beside.copying(read_copy_s_per_byte(arguments.copies))
    return replace(messages, contention=beside)


def _stamped(arguments: argparse.Namespace, *paths: Path) -> list[Path]:
    """Return those of the tables, and of what else was given, that say which machine they are of."""
    from ddlkit import store

    every = [
        *paths,
        arguments.profile,
        *store.expand_tables(arguments.collectives or []),
    ]
    return [path for path in every if store.tables.is_stamped(path)]


def _warn(lines: Iterable[str]) -> None:
    for line in lines:
        print(f"ddlkit: warning: {one_line(line)}", file=sys.stderr)


def _sparse(arguments: argparse.Namespace, dense: Any, workload: Any) -> Any:
    """Return the same communication for messages of which a share is selected and gathered, where asked."""
    from ddlkit.core.sparse import ELEMENT_BYTES
    from ddlkit.store.readers import read_selection

    if (arguments.density is None) != (arguments.selection is None):
        raise UserError("give --density and --selection TABLE together")
    if arguments.density is None:
        return dense
    if (workload.bytes != ELEMENT_BYTES * workload.parameters).any():
        raise UserError(
            "--density: needs a profile whose gradients have 4 bytes a parameter"
        )
    return dense.sparse(
        arguments.density, read_selection(arguments.selection, arguments.density)
    )


def _communication(arguments: argparse.Namespace, notes: list[str]) -> tuple[Any, Any]:
    """Return `Communication`, and `Measured`, at the cost that is given or calibrated; notes : added to."""
    if bool(arguments.cost) == bool(arguments.collectives):
        raise UserError(
            "give --collectives TABLE to calibrate from, or --cost COST.json"
        )
    return (_given if arguments.cost else _calibrated)(arguments, notes)


def _given(arguments: argparse.Namespace, notes: list[str]) -> tuple[Any, Any]:
    """Return `Communication` at a cost given as JSON, and `Measured`: sizes and devices it was fitted to."""
    from ddlkit.core.cost import costs_from_dict
    from ddlkit.core.link import Link
    from ddlkit.model import Communication
    from ddlkit.model.fits import Measured
    from ddlkit.store.files import read_json

    advice = "write it by ddlkit fit FILE --json, or give FILE to --collectives"
    described = read_json(arguments.cost, advice)
    try:
        cost, draws = costs_from_dict(described)
        measured = Measured.read(described, cost)
    except UserError as error:
        raise UserError(f"{arguments.cost}: {error}") from error
    usual = "all_reduce" if arguments.density is None else cost.collective
    if cost.collective != (needed := arguments.collective or usual):
        problem = f"of {cost.collective}, not of {needed}, which sends the gradients"
        raise UserError(
            f"{arguments.cost}: {problem}: fit one of that, or say --collective"
        )
    if cost.workers is None:
        cost = replace(cost, workers=arguments.ranks)
    elif arguments.ranks not in (None, cost.workers):
        counts = f"a cost of {cost.workers} workers, not {arguments.ranks}"
        raise UserError(
            f"{arguments.cost}: {counts}: --ranks does not carry a cost to others"
        )
    return Communication(cost, draws, Link(in_flight=arguments.in_flight)), measured


def _calibrated(arguments: argparse.Namespace, notes: list[str]) -> tuple[Any, Any]:
    """Return `Communication` fitted to a table, and `Measured`: sizes and devices it was fitted to."""
    import pandas as pd

    from ddlkit import store
    from ddlkit.core.collective import of_gradients
    from ddlkit.formats.messages import read_collectives
    from ddlkit.model import Calibration
    from ddlkit.model.fits import Measured
    from ddlkit.store.readers import choose

    usual = of_gradients(sparse=arguments.density is not None)
    wanted = {
        "collective": arguments.collective or usual,
        "ranks": arguments.ranks,
        "link": arguments.link,
    }
    read = functools.partial(
        read_collectives,
        collective=arguments.collective,
        link=arguments.link,
        ranks=arguments.ranks,
        place=arguments.place,
        table=arguments.table,
        notes=notes,
    )
    paths = store.expand_tables(arguments.collectives)
    rows = pd.concat([read(path) for path in paths])
    rows, chosen = choose(
        rows.reset_index(drop=True), tuple(wanted), wanted, Path("--collectives")
    )
    lab = str(chosen["link"]), int(chosen["ranks"]), wanted["collective"]
    calibrated = Calibration.of(rows).between(*lab, in_flight=arguments.in_flight)
    return calibrated, Measured.of(rows["bytes"], *rows["backend"].unique())


STRATEGY = (
    arg(
        "--strategy",
        choices=("ddp", "fsdp"),
        default="ddp",
        help="fsdp: sharded, by FSDP2 [ddp]",
    ),
    arg(
        "--units",
        metavar="SPEC",
        help="of fsdp: modules as blocks.*,head, or size:25MB",
    ),
    flag("--no-prefetch", "of fsdp: a unit is gathered when it is needed, not before"),
    flag("--no-reshard", "of fsdp: units stay whole from forward to backward"),
)
_NOT_IN_THE_GRAPH = dict.fromkeys(("slowdown", "copies", "density"))
_NOT_IN_THE_GRAPH |= {"accumulate": 1, "copy_s_per_byte": 0.0, "in_flight": 1}
"""Inputs of a forecast that training's graph does not know, and what they are where nothing is said."""
_NOT_SHARDED = {
    **_NOT_IN_THE_GRAPH,
    "selection": None,
    "cost": None,
    "plan": "ddp",
    "html": None,
}
_SENT_S = ("communication_s", "exposed_communication_s")
_SHOWN = ("iteration_s", "compute_s", *_SENT_S, "scaling_factor")


def is_sharded(arguments: argparse.Namespace) -> bool:
    """Return whether sharded training is asked for. Raises UserError for its options without that."""
    options = arguments.units, arguments.no_prefetch, arguments.no_reshard
    if arguments.strategy != "fsdp" and any(options):
        raise UserError(
            "--units, --no-prefetch and --no-reshard are of --strategy fsdp: give that"
        )
    return bool(arguments.strategy == "fsdp")


def sharded(arguments: argparse.Namespace, *specs: str) -> list[dict[str, Any]]:
    """Return what sharded training takes by each way to make units, resharded after forward and not."""
    from ddlkit.model.fits import doubts
    from ddlkit.model.sharded import SENT, Sharding, forecast

    said = (
        (name, usual, getattr(arguments, name, usual))
        for name, usual in _NOT_SHARDED.items()
    )
    given = [
        f"--{name.replace('_', '-')}" for name, usual, value in said if value != usual
    ]
    if given or not specs[0]:
        problem = (
            f"takes no {given[0]}"
            if given
            else "needs --units, as blocks.* or size:25MB"
        )
        raise UserError(
            f"--strategy fsdp {problem}: messages are those of --collectives"
        )
    profile, notes, by, rows = _profile(arguments), list[str](), {}, []
    for name in SENT:
        of = argparse.Namespace(**{**vars(arguments), "collective": name})
        by[name], measured = _communication(of, notes)
        sizes = [
            size for spec in specs for size in Sharding.of(profile, spec).bytes if size
        ]
        notes += doubts(profile.device, measured, sizes)
    for spec, reshard in product(specs, (True, False)):
        whole = Sharding.of(profile, spec).scaled(arguments.dilation)
        program = whole.program(prefetch=not arguments.no_prefetch, reshard=reshard)
        told, interval_s = forecast(program, by, arguments.level)
        row = {
            "units": spec,
            "reshard": reshard,
            **{n: getattr(told, n) for n in _SHOWN},
        }
        row |= {"interval_s": interval_s, "level": arguments.level}
        both = told.compute_s, told.communication_s
        row |= {"no_overlap_s": sum(both), "perfect_overlap_s": max(both)}
        row |= {"messages": len(program.messages), "workers": by[SENT[0]].cost.workers}
        rows.append({**row, "gathered_bytes": whole.gathered_bytes(reshard=reshard)})
    _warn(dict.fromkeys(notes))
    return rows


@command(
    "predict an iteration from a profile and measured collectives, or a cost",
    *_INPUTS,
    arg("--plan", default="ddp", help=f"{_PLAN_HELP} [ddp]"),
    *STRATEGY,
)
def predict(arguments: argparse.Namespace) -> None:
    if is_sharded(arguments):
        return show(
            sharded(arguments, arguments.units)[arguments.no_reshard], arguments.json
        )
    predicted, doubtful, *_ = forecast_of(arguments, arguments.plan)
    iteration, interval_s = predicted.iteration, predicted.interval_s
    result = {name: getattr(predicted.prediction, name) for name in _SHOWN}
    result |= {
        "interval_s": list(interval_s) if interval_s else None,
        "level": arguments.level,
    }
    result |= {"plan": arguments.plan, "messages": len(iteration.plan.ends)}
    result["workers"] = iteration.cost.workers
    real = arguments.slowdown or arguments.copies
    result["contention"] = _contention(iteration) if real else None
    if arguments.density:
        result["selection_s"] = float(
            iteration.cost.selection_s(iteration.group_bytes).sum()
        )
        result["selection_form"] = iteration.cost.selecting.form
    show({**result, "warnings": doubtful} if arguments.json else result, arguments.json)


def _contention(iteration: Any) -> dict[str, float]:
    """Return what was assumed of real compute: medians over messages, and of buckets."""
    import numpy as np

    slowed = {
        name: float(np.median(getattr(iteration.link, name)))
        for name in ("slowdown", "message_slowdown")
    }
    return slowed | {
        name: getattr(iteration, name) for name in ("copy_s_per_byte", "bucket_s")
    }


@command(
    "choose which gradients to fuse; planned for messages one after the other",
    *_INPUTS,
    arg("--planner", default="exact", help=f"as {_PLANS} [exact]"),
)
def plan(arguments: argparse.Namespace) -> None:
    predicted, doubtful, *_ = forecast_of(arguments, arguments.planner)
    iteration_s, chosen = predicted.prediction.iteration_s, predicted.iteration.plan
    proof = {} if chosen.least_s is None else {"no_plan_below_s": chosen.least_s}
    if (arguments.slowdown or arguments.copies) and chosen.least_s is not None:
        doubtful.append(
            "exact is optimal without contention only: try --planner search"
        )
        _warn(doubtful[-1:])
    if arguments.json:
        show({**chosen.to_dict(iteration_s), **proof, "warnings": doubtful}, True)
        return
    sizes, tensor = predicted.iteration.group_bytes, predicted.iteration.workload.tensor
    result = {
        "planner": chosen.planner,
        "messages": len(sizes),
        "iteration_s": iteration_s,
    }
    show({**result, **proof}, False)
    for group, members in enumerate(chosen.slices):
        first, last = tensor[members.start], tensor[members.stop - 1]
        print(
            f"  {group:>3}  {units.format_bytes(sizes[group]):>10}  {first} .. {last}"
        )


@command(
    "write a plan or a cost as PyTorch takes it",
    arg("given", type=Path, nargs="?", metavar="COST", help="as --cost"),
    arg(
        "--to",
        choices=("ddp", "inductor", "profile"),
        required=True,
        help="who takes it",
    ),
    *OPTIONAL,
    arg("--planner", default="exact", help=f"for ddp: as {_PLANS} [exact]"),
    arg("--torch", metavar="VERSION", help="for which [the installed one]"),
)
def export(arguments: argparse.Namespace) -> None:
    from ddlkit.formats import export as texts

    arguments.cost, notes = arguments.given or arguments.cost, list[str]()
    version = texts.tested(arguments.to, arguments.torch)
    if arguments.to != "ddp":
        print(
            getattr(texts, arguments.to)(
                _communication(arguments, notes)[0].cost, version
            )
        )
        _warn(notes)
        return
    if arguments.profile is None:
        raise UserError("--to ddp: give --profile, the layers whose gradients are sent")
    print(texts.ddp(forecast_of(arguments, arguments.planner)[0].iteration, version))


@command(
    "change tasks of training's graph (dag Fig 1), and see what limits afterwards",
    *_INPUTS,
    arg("--plan", default="ddp", help=f"{_PLAN_HELP} [ddp]"),
    *(
        arg(
            name,
            action="append",
            default=[],
            metavar=metavar,
            help=f"{text}; may be repeated",
        )
        for name, metavar, text in (
            (
                "--scale",
                "WHAT=FACTOR",
                "a kind, resource, layer:3 or rank:2 as in all_reduce=0.5",
            ),
            ("--straggler", "RANK:FACTOR", "a rank computes so many times as long"),
            (
                "--layer",
                "NAME=FACTOR",
                "a layer so many times as large, in time and bytes",
            ),
        )
    ),
    arg(
        "--strategy", default="Caffe-MPI", help="or CNTK, MXNet, TensorFlow [Caffe-MPI]"
    ),
    arg(
        "--gpus",
        type=int,
        help="so many GPUs afterwards, by a cost that can be transferred there",
    ),
    arg("--gpus-per-machine", type=int, default=1, help="that share a disk [1]"),
    arg(
        "--inputs",
        type=Path,
        help="table of python -m workbook record input: reading, decoding [nothing]",
    ),
)
def what_if(arguments: argparse.Namespace) -> None:
    from ddlkit.core.iteration import Iteration
    from ddlkit.core.taskgraph import changed, described, schedule

    for name, left_out in _NOT_IN_THE_GRAPH.items():
        if getattr(arguments, name) != left_out:
            option = name.replace("_", "-")
            raise UserError(f"--{option}: the graph has no task for it: leave it out")
    changes = [_change(text, "=") for text in arguments.scale]
    changes += [_change(text, ":", "rank:") for text in arguments.straggler]
    predicted, doubtful, profile, _ = forecast_of(arguments, arguments.plan)
    plan, cost = predicted.iteration.plan, predicted.iteration.cost
    before = Iteration(predicted.iteration.workload, plan, cost)
    other = profile.resized(dict(_change(text, "=") for text in arguments.layer))
    there = cost.workers or 1
    gpus = there if arguments.gpus is None else arguments.gpus
    if gpus < 1:
        raise UserError(f"--gpus {gpus}: there must be at least one")
    moved = cost if gpus == there else cost.at_workers(gpus)
    after = Iteration(other.workload().scaled(arguments.dilation), plan, moved)
    graph, grown = _graph(arguments, before, profile), _graph(arguments, after, other)
    compared = described(schedule(graph), schedule(changed(grown, changes)))
    result = {"tasks": graph.n, "longest_path_s": graph.longest_path_s, **compared}
    for when, n in (("", there), ("_after", gpus)):
        rate = n * profile.batch / result[f"iteration_s{when}"]
        result |= {f"gpus{when}": n, f"samples_per_s{when}": rate}
    show({**result, "warnings": doubtful} if arguments.json else result, arguments.json)


def _graph(arguments: argparse.Namespace, iteration: Any, profile: Any) -> Any:
    """Return the tasks of ten iterations of training by these arguments."""
    from ddlkit.core.strategies import strategy
    from ddlkit.core.taskgraph import Gpus, of_iteration
    from ddlkit.store.readers import read_inputs

    read_s = read_inputs(arguments.inputs, profile.batch) if arguments.inputs else {}
    gpus = Gpus.of(iteration.cost.workers or 1, arguments.gpus_per_machine, False)
    return of_iteration(
        iteration,
        strategy(arguments.strategy),
        gpus,
        forward_s=profile.forward_s * arguments.dilation,
        iterations=10,
        io_s=read_s.get("io_s", 0.0),
        decode_s=read_s.get("decode_s", 0.0),
        h2d_s=read_s.get("h2d_s", 0.0),
    )


def _change(text: str, parted_by: str, of: str = "") -> tuple[str, float]:
    """Return what is changed, and how many times as long it takes."""
    what, parted, factor = text.rpartition(parted_by)
    try:
        return of + what, float(factor if parted else "")
    except ValueError:
        raise UserError(
            f"{text!r}: write all_reduce=0.5 to scale, 3:1.2 for a straggler"
        ) from None
