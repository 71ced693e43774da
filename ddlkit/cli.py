"""``ddlkit ...``: one thin command for each station of the spine."""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ddlkit import __version__
from ddlkit.core import units
from ddlkit.core.errors import UserError

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake is one line on stderr and exit status 2."""
    arguments = _parser().parse_args(argv)
    if threading.current_thread() is threading.main_thread():
        # Being terminated cleans up as Ctrl-C does, also where a script started us with SIGINT ignored.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return int(arguments.command(arguments))
    except UserError as error:
        print(f"ddlkit: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("ddlkit: interrupted; what was measured is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (``| head``): not an error, but flushing again would be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ddlkit", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ddlkit {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in (
        *(_measure, _record, _import, _fit, _predict, _plan, _timeline),
        *(_bench, _lab, _book, _figures, _machine),
    ):
        add(commands)
    return parser


def _command(commands: Any, name: str, run: Command, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(command=run)
    return parser


def _show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as one JSON document, or as aligned lines for a person."""
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        shown = f"{value:.6g}" if isinstance(value, float) else value
        print(f"{name:<32} {shown}")


# ---------------------------------------------------------------- measure


def _measure(commands: Any) -> None:
    parser = _command(
        commands, "measure", _run_measure, "measure this machine and record what it says"
    )
    what = (
        "layers",
        "collectives",
        "training",
        "replay",
        "campaign",
        "convergence",
        "tensors",
        "all",
    )
    text = "all: without convergence (ten minutes, nothing of this machine) and tensors"
    parser.add_argument("what", choices=what, help=text)
    parser.add_argument("--profile", choices=("quick", "full"), default="quick", help="how long")
    parser.add_argument("--networks", help="for layers, with batch sizes: resnet50:32,vgg16:16")
    parser.add_argument("--out", type=Path, help="directory for the tables [build/measured]")


def _run_measure(arguments: argparse.Namespace) -> int:
    from ddlkit import store
    from ddlkit.run.lab import network
    from ddlkit.run.sessions import campaign
    from ddlkit.run.sessions import quick as suite

    out = arguments.out or store.BUILD / "measured"
    if arguments.what != "campaign":
        suite.measure(arguments.what, arguments.profile, out, _batches(arguments.networks))
    # Of all that there is to measure, it is left out where it cannot be; asked for, it says why.
    if arguments.what == "campaign" or (arguments.what == "all" and not network.available()):
        campaign.run(campaign.QUICK, out / campaign.QUICK.stem.replace("_", "-"))
    print(out)
    return 0


def _batches(text: str | None) -> dict[str, int] | None:
    """``"resnet50:32,vgg16:16"`` as a mapping; None when not given."""
    if text is None:
        return None
    pairs = [part.partition(":") for part in text.split(",")]
    if not all(batch.isdecimal() for _, _, batch in pairs):
        raise UserError(
            f"networks {text!r}: write names with batch sizes, as in resnet50:32,vgg16:16"
        )
    return {name: int(batch) for name, _, batch in pairs}


# ---------------------------------------------------------------- record


def _record(commands: Any) -> None:
    text = "record all that this machine can tell, most valuable first; goes on where it stopped"
    parser = _command(commands, "record", _run_record, text)
    parser.add_argument("--suite", choices=("gpu", "cpu"), required=True, help="on which device")
    parser.add_argument(
        "--profile", choices=("standard", "smoke"), default="standard", help="how much"
    )
    parser.add_argument("--budget", help="when to end, as in 8m or 90s [when all is measured]")
    parser.add_argument("--out", type=Path, help="directory [data/recorded/<this machine>]")


def _run_record(arguments: argparse.Namespace) -> int:
    from ddlkit.run.sessions.supervisor import record

    budget_s = units.parse_seconds(arguments.budget) if arguments.budget else math.inf
    print(record(arguments.suite, profile=arguments.profile, budget_s=budget_s, out=arguments.out))
    return 0


# ---------------------------------------------------------------- import, timeline


def _import(commands: Any) -> None:
    text = "make a layer profile of a layer-wise trace, a torch.profiler file or FLOP counts"
    parser = _command(commands, "import", _run_import, text)
    parser.add_argument("file", type=Path, help="the trace, Chrome trace (also .gz) or CSV")
    parser.add_argument("--kind", help="trace, kineto or flops [by content]")
    parser.add_argument("--out", type=Path, required=True, help="the layer profile (CSV)")
    parser.add_argument("--messages", type=Path, help="also bytes and seconds of messages (CSV)")
    parser.add_argument("--network", help="its name [the file's]")
    parser.add_argument("--batch", type=int, help="samples an iteration [1]")
    parser.add_argument("--device", help="what it ran on [as the file says]")
    parser.add_argument("--peak", type=float, help="of FLOP counts: peak rate in FLOP/s")
    parser.add_argument("--utilisation", type=float, help="of FLOP counts: share of it, 0 to 1")
    text = "of a trace: leave out what stands before the first layer with parameters"
    parser.add_argument("--without-input", action="store_true", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_import(arguments: argparse.Namespace) -> int:
    from ddlkit.formats import importing

    options = importing.ImportOptions(
        network=arguments.network,
        batch=arguments.batch,
        device=arguments.device,
        peak_flops_per_s=arguments.peak,
        utilisation=arguments.utilisation,
        with_input=not arguments.without_input,
    )
    found = importing.import_file(arguments.file, arguments.kind, options)
    importing.save_profile(found.profile, arguments.out)
    if arguments.messages:
        importing.save_messages(found.messages, arguments.messages)
    workload = found.profile.workload()
    result = {
        "kind": found.kind,
        "network": found.profile.network,
        "device": found.profile.device,
        "batch": found.profile.batch,
        "tensors": workload.n,
        "parameters": int(workload.parameters.sum()),
        "forward_s": workload.forward_s,
        "backward_s": float(workload.backward_s.sum()),
        "update_s": workload.update_s,
        "messages": len(found.messages),
    }
    if arguments.json:
        _show({**result, "findings": [finding._asdict() for finding in found.findings]}, True)
        return 0
    _show(result, False)
    for finding in found.findings:
        where = f" ({', '.join(finding.layers)})" if finding.layers else ""
        print(f"  {finding.what}{where}: {finding.text}")
    return 0


def _timeline(commands: Any) -> None:
    text = "export a recorded timeline as a Chrome trace, which Perfetto opens"
    parser = _command(commands, "timeline", _run_timeline, text)
    parser.add_argument("file", type=Path, help="timeline table (CSV, also .gz)")
    parser.add_argument("--case", help="key of the case, when it holds several")
    parser.add_argument("--repeat", type=int, help="which repeat, when it holds several")
    parser.add_argument("--out", type=Path, required=True, help="the Chrome trace (JSON)")


def _run_timeline(arguments: argparse.Namespace) -> int:
    from ddlkit import store

    line = store.read_timeline(arguments.file, arguments.case, arguments.repeat)
    store.atomic_write_text(arguments.out, json.dumps(line.to_chrome_trace()) + "\n")
    counts = {"ranks": len(set(line.rank)), "iterations": len(set(line.iteration))}
    _show({"spans": line.n, **counts, "out": arguments.out}, False)
    return 0


# ---------------------------------------------------------------- fit, predict, plan


def _fit(commands: Any) -> None:
    parser = _command(commands, "fit", _run_fit, "fit a message cost to measured times")
    text = "recorded collectives table, CSV of bytes and seconds, or nccl-tests log"
    parser.add_argument("file", type=Path, help=text)
    parser.add_argument(
        "--form",
        default="alpha_beta",
        help="alpha_beta, piecewise, piecewise:45KB (its threshold), segments or table",
    )
    parser.add_argument("--collective", help="of a recorded table: all_reduce or all_gather")
    parser.add_argument("--link", help="of a recorded table: which link, as in lab:1gbit")
    parser.add_argument("--ranks", type=int, help="of a recorded table: with how many ranks")
    parser.add_argument("--json", action="store_true", help="print the cost as JSON")


def _run_fit(arguments: argparse.Namespace) -> int:
    import numpy as np

    from ddlkit.core.fit import fit, held_out_errors
    from ddlkit.formats import messages

    wanted = {name: getattr(arguments, name) for name in ("collective", "link", "ranks")}
    sizes, seconds, known = messages.read_bytes_seconds(arguments.file, **wanted)
    found = fit(
        arguments.form,
        sizes,
        seconds,
        collective=known.get("collective") or "all_reduce",
        workers=known.get("ranks"),
        algorithm=known.get("algorithm"),
    )
    description = found.to_dict()
    _, held_out = held_out_errors(arguments.form, sizes, seconds)
    description["fit"]["median_abs_held_out_error"] = (
        float(np.median(abs(held_out))) if held_out.size else None
    )
    if arguments.json:
        _show(description, True)
        return 0
    summary = {name: value for name, value in description["fit"].items() if name != "draws"}
    _show({**{k: v for k, v in description.items() if k != "fit"}, **summary}, False)
    return 0


_PLAN_HELP = "as none, single, ddp, buffer:25MB, mg_wfbp, cuts:3,40 or exact; a wrong one lists all"


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--profile", type=Path, required=True, help="layer profile (CSV)")
    add("--network", help="which network, when the profile holds several")
    add("--batch", type=int, help="which batch size, when the profile holds several")
    add("--profile-ranks", type=int, help="measured by how many ranks, when it holds several")
    text = "seconds of the whole forward pass, for a profile without the column forward_s"
    add("--forward-s", type=float, help=text)
    add("--dilation", type=float, default=1.0, help="compute this many times slower [1]")
    text = "measured collectives to calibrate from (recorded tables, CSV or nccl-tests log)"
    add("--collectives", type=Path, nargs="+", metavar="TABLE", help=text)
    add("--ranks", type=int, help="workers that communicate [the table's, if it has but one]")
    add("--link", help="over which link, as in lab:1gbit [the table's, if it has but one]")
    add("--cost", type=Path, help="in place of --collectives: message cost (JSON of ddlkit fit)")
    add("--in-flight", type=int, default=1, help="collectives under way at once [1]")
    text = "to copy gradients into and out of messages [0]"
    add("--copy-s-per-byte", type=float, default=0.0, help=text)
    add("--json", action="store_true", help="print JSON")


def _inputs(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """(Workload, Communication) of the files."""
    from ddlkit import store

    if bool(arguments.cost) == bool(arguments.collectives):
        raise UserError("give --collectives TABLE to calibrate from, or --cost COST.json")
    assumed: list[str] = []
    profile = store.read_profile(
        arguments.profile,
        arguments.network,
        arguments.batch,
        ranks=arguments.profile_ranks,
        forward_s=arguments.forward_s,
        assumed=assumed,
    )
    if assumed:
        print(f"ddlkit: {arguments.profile}: assumed {', '.join(assumed)}", file=sys.stderr)
    workload = profile.workload().scaled(arguments.dilation)
    return workload, _given(arguments) if arguments.cost else _calibrated(arguments)


def _given(arguments: argparse.Namespace) -> Any:
    """Communication at a cost that is given as JSON."""
    from ddlkit.core.fit import costs_from_dict
    from ddlkit.core.link import Link
    from ddlkit.model import Communication

    cost, draws = costs_from_dict(_read_json(arguments.cost))
    if arguments.ranks not in (None, cost.workers):
        raise UserError(
            f"{arguments.cost}: a cost of {cost.workers} workers, not {arguments.ranks}"
        )
    return Communication(cost, draws, Link(in_flight=arguments.in_flight))


def _calibrated(arguments: argparse.Namespace) -> Any:
    """Communication as it was measured: the validated model's."""
    import pandas as pd

    from ddlkit.formats.messages import read_collectives
    from ddlkit.model import Calibration

    ranks, link = arguments.ranks, arguments.link
    tables = [read_collectives(path, ranks=ranks, link=link) for path in arguments.collectives]
    rows = pd.concat(tables, ignore_index=True)
    rows = rows[rows["collective"] == "all_reduce"]
    for name, asked in (("link", link), ("ranks", ranks)):
        found = rows[name].unique().tolist()
        if asked is None and len(found) > 1:
            listed = ", ".join(map(str, sorted(found)))
            raise UserError(f"--collectives: several values of {name} ({listed}): give --{name}")
        rows = rows if asked is None else rows[rows[name] == asked]
        if rows.empty:
            listed = ", ".join(map(str, sorted(found))) or "no all_reduce"
            raise UserError(f"--collectives: nothing with {name} {asked}: there is {listed}")
    one = rows.iloc[0]
    measured = Calibration.of(rows)
    return measured.between(str(one["link"]), int(one["ranks"]), in_flight=arguments.in_flight)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from error


def _predict(commands: Any) -> None:
    text = "predict an iteration from a profile and measured collectives, or a cost"
    parser = _command(commands, "predict", _run_predict, text)
    _add_inputs(parser)
    parser.add_argument("--plan", default="ddp", help=_PLAN_HELP)
    text = "iterations of the profile's machine, of real training (samples table): wider interval"
    parser.add_argument("--samples", type=Path, help=text)


def _run_predict(arguments: argparse.Namespace) -> int:
    from ddlkit import store
    from ddlkit.model import forecast, make_plan
    from ddlkit.model.predictor import STEADY, scatter_of

    workload, communication = _inputs(arguments)
    plan = make_plan(arguments.plan, workload, communication.cost)
    scatter = STEADY
    if arguments.samples:
        scatter = scatter_of(store.load_table(arguments.samples, "samples"))
    copies = {"copy_s_per_byte": arguments.copy_s_per_byte}
    found = forecast(workload, plan, communication, compute_scatter=scatter, **copies)
    result = {
        "iteration_s": found.prediction.iteration_s,
        "compute_s": found.prediction.compute_s,
        "communication_s": found.prediction.communication_s,
        "exposed_communication_s": found.prediction.exposed_communication_s,
        "scaling_factor": found.prediction.scaling_factor,
        "interval_95_s": list(found.interval_s) if found.interval_s else None,
        "plan": arguments.plan,
        "messages": len(plan.ends),
        "workers": communication.cost.workers,
    }
    _show(result, arguments.json)
    return 0


def _plan(commands: Any) -> None:
    text = "choose which gradients to fuse; planned for messages one after the other"
    parser = _command(commands, "plan", _run_plan, text)
    _add_inputs(parser)
    parser.add_argument("--planner", default="exact", help=_PLAN_HELP)


def _run_plan(arguments: argparse.Namespace) -> int:
    from ddlkit.model import forecast, make_plan

    workload, communication = _inputs(arguments)
    plan = make_plan(arguments.planner, workload, communication.cost)
    copies = {"copy_s_per_byte": arguments.copy_s_per_byte}
    found = forecast(workload, plan, communication, **copies)
    iteration_s, sizes = found.prediction.iteration_s, found.iteration.group_bytes
    if arguments.json:
        _show(plan.to_dict(iteration_s), True)
        return 0
    _show({"planner": plan.planner, "messages": len(sizes), "iteration_s": iteration_s}, False)
    for group, members in enumerate(plan.slices):
        first, last = workload.tensor[members.start], workload.tensor[members.stop - 1]
        print(f"  {group:>3}  {units.format_bytes(sizes[group]):>10}  {first} .. {last}")
    return 0


# ---------------------------------------------------------------- bench, machine


def _bench(commands: Any) -> None:
    parser = _command(commands, "bench", _run_bench, "how fast predicting and planning are")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_bench(arguments: argparse.Namespace) -> int:
    # "Per core" is only true on one thread, and BLAS reads this once, when NumPy loads.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    from ddlkit.run.sessions import bench

    _show(bench.run(), arguments.json)
    return 0


def _machine(commands: Any) -> None:
    parser = _command(commands, "machine", _run_machine, "what this machine is")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run_machine(arguments: argparse.Namespace) -> int:
    from ddlkit import machine

    _show({**machine.describe(), **machine.versions()}, arguments.json)
    return 0


# ---------------------------------------------------------------- lab


def _lab(commands: Any) -> None:
    parser = _command(
        commands, "lab", _run_lab, "a rate-limited network of namespaces (root, Linux)"
    )
    parser.add_argument("action", choices=("up", "status", "down", "clean", "campaign"))
    parser.add_argument("file", type=Path, nargs="?", help="of a campaign: what to measure (YAML)")
    parser.add_argument("--ranks", type=int, default=4, help="namespaces, one a rank [4]")
    parser.add_argument("--rate", default="1gbit", help="rate of each link, both ways [1gbit]")
    parser.add_argument("--ranks-per-node", type=int, default=1, help="that share a link [1]")
    parser.add_argument("--intra-rate", help="rate of each rank's link inside a node: 10gbit")
    parser.add_argument("--label", default="", help="name of the lab [the first free ddlN]")
    parser.add_argument(
        "--out", type=Path, help="of a campaign [data/recorded/<machine>/campaign-...]"
    )
    parser.add_argument("--dry-run", action="store_true", help="of a campaign: only say how long")


def _run_lab(arguments: argparse.Namespace) -> int:
    from ddlkit.run.lab import network

    if (arguments.action == "campaign") != bool(arguments.file):
        raise UserError("write ddlkit lab campaign FILE.yml; the other actions take no file")
    if arguments.action == "campaign":
        from ddlkit.run.sessions import campaign

        say = campaign.estimate if arguments.dry_run else campaign.run
        print(say(arguments.file, arguments.out))
    elif arguments.action == "up":
        shape = network.LabShape(
            arguments.ranks,
            units.parse_bits_per_s(arguments.rate),
            arguments.ranks_per_node,
            units.parse_bits_per_s(arguments.intra_rate) if arguments.intra_rate else 0.0,
        )
        lab = network.Lab(shape, arguments.label, persistent=True).up()
        print(
            f"{lab.label}: {lab.ranks} ranks over {lab.name}; namespaces {' '.join(lab.namespaces)}"
        )
    elif arguments.action == "status":
        for row in network.status():
            state = "up" if row["alive"] else "dead: run ddlkit lab clean"
            print(
                f"{row['label']}: {row['ranks']} ranks over {row['link']}, {row['owner']}, {state}"
            )
    elif arguments.action == "down":
        labels = (
            [arguments.label] if arguments.label else [row["label"] for row in network.status()]
        )
        for label in labels:
            network.attach(label).down()
            print(f"{label}: down")
    else:
        for label in network.clean():
            print(f"{label}: removed")
    return 0


# ---------------------------------------------------------------- book, figures


def _book(commands: Any) -> None:
    parser = _command(commands, "book", _run_book, "run the notebooks and build the report")
    parser.add_argument("--recorded", action="store_true", help="only from data/recorded")
    parser.add_argument("--data", type=Path, help="measured tables [build/measured]")
    parser.add_argument(
        "--reports",
        type=Path,
        help="where figures and REPRODUCTION.md go [reports with --recorded, else build/reports]",
    )
    parser.add_argument("--only", default="", help="notebooks by number: 20,40")


def _run_book(arguments: argparse.Namespace) -> int:
    from ddlkit.report import book

    print(
        book.build(
            recorded=arguments.recorded,
            data=arguments.data,
            reports=arguments.reports,
            only=[n for n in arguments.only.split(",") if n],
        )
    )
    return 0


def _figures(commands: Any) -> None:
    parser = _command(
        commands, "figures", _run_figures, "list or check the catalog of figures and tables"
    )
    parser.add_argument(
        "--check", action="store_true", help="fail on a missing image, CSV or tolerance"
    )
    parser.add_argument("--write", action="store_true", help="write reports/FIGURES.md")
    parser.add_argument("--reports", type=Path, help="directory that holds figures/ [reports]")


def _run_figures(arguments: argparse.Namespace) -> int:
    from ddlkit.report import catalog

    return catalog.command(check=arguments.check, write=arguments.write, reports=arguments.reports)


if __name__ == "__main__":
    raise SystemExit(main())
