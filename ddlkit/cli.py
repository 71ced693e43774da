"""``ddlkit ...``: one thin command for each station of the spine."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import math
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from ddlkit import __version__
from ddlkit.core import units
from ddlkit.core.errors import UserError, one_line

Run = Callable[[argparse.Namespace], int | None]
Argument = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """What a command does, what its help says, and its arguments as argparse takes them."""

    run: Run
    text: str
    arguments: Sequence[Argument]


COMMANDS: dict[str, Command] = {}


def arg(*names: str, **options: Any) -> Argument:
    """An argument of a command."""
    return names, options


def flag(name: str, text: str) -> Argument:
    """An argument that is there or not."""
    return arg(name, action="store_true", help=text)


def command(text: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Register a function as the command of its own name."""

    def register(run: Run) -> Run:
        COMMANDS[run.__name__.rstrip("_").replace("_", "-")] = Command(run, text, arguments)
        return run

    return register


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user's mistake, or a machine's limit, is one line on stderr and exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal may know ASCII only
    arguments = _parser().parse_args(argv)
    # What arithmetic makes of numbers beyond its range is looked for in the result, see `_checked`.
    warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
    if threading.current_thread() is threading.main_thread():
        _end_as_ctrl_c_does()
    try:
        return arguments.run(arguments) or 0
    except UserError as error:
        print(f"ddlkit: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        # Who measured says so: elsewhere there is nothing that could be kept.
        with contextlib.suppress(OSError):
            print("; ".join(["ddlkit: interrupted", *map(str, interrupt.args)]), file=sys.stderr)
        exec(
            ""
        )  # an extension may have left word for Python that it end by SIGINT, whatever it was
        return 128 + (_ended_by or [signal.SIGINT])[0]
    except BrokenPipeError:
        # The reader of our output has gone (``| head``): not an error, but flushing again would be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (OSError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno not in LIMITS:
            raise
        print(f"ddlkit: error: {_limit(error)}", file=sys.stderr)
        return 2
    finally:
        _ended_by.clear()
        while _reminders:
            _reminders.pop().cancel()


LIMITS = {
    errno.ENOSPC: "make room there, or choose another directory",
    errno.EDQUOT: "make room there, or choose another directory",
    errno.EROFS: "choose another directory",
    errno.EMFILE: "allow more open files: ulimit -n",
    errno.ENFILE: "end other programs: too many files are open on this machine",
    errno.EAGAIN: "end other programs, or allow more processes: ulimit -u",
    errno.ENOMEM: "free memory, or ask for less",
}
"""What a machine may be short of, wherever that is found, and what to do."""


def _limit(error: OSError | MemoryError) -> str:
    """What is used up, and where if that is known, in one line."""
    if isinstance(error, MemoryError):
        return f"memory is used up: {LIMITS[errno.ENOMEM]}"
    words = (error.strerror, error.filename, LIMITS[error.errno or errno.ENOMEM])
    return ": ".join(str(word) for word in words if word)


def ask(command: str, *files: Any, **options: Any) -> dict[str, Any]:
    """What ``ddlkit COMMAND FILES --OPTION VALUE --json`` prints, for notebooks and programs.

    Raises UserError for what the command would refuse. Its warnings are in the result.
    """
    said = ((f"--{name.replace('_', '-')}", str(value)) for name, value in options.items())
    words = [
        *command.split(),
        *map(str, files),
        *(word for pair in said for word in pair),
        "--json",
    ]
    page, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(wrong):
        try:
            arguments = _parser().parse_args(words)
        except SystemExit:
            raise UserError(wrong.getvalue().splitlines()[-1]) from None
        arguments.run(arguments)
    found: dict[str, Any] = json.loads(page.getvalue())
    return found


AGAIN_S = 0.5
"""So long after an interrupt it comes again, if nothing is dealing with it."""
AGAIN = signal.SIGUSR2
_reminders: list[threading.Timer] = []
_ended_by: list[int] = []
"""The signals that came, first the one that tells the exit status."""


def _end_as_ctrl_c_does() -> None:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does, also where SIGINT is ignored; lose no interrupt."""
    for number in (signal.SIGTERM, AGAIN):
        signal.signal(number, _interrupt)
    # SIGINT is ignored in the background of a script; SIGHUP, as the terminal is gone, under nohup.
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(number) == usual:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    """Python drops what is raised in a finaliser, and extensions what is raised beneath them; not this."""
    reminder = threading.Timer(AGAIN_S, os.kill, (os.getpid(), AGAIN))
    reminder.daemon = True
    reminder.start()
    _reminders.append(reminder)
    if number != AGAIN:
        _ended_by.append(number)
    if number != AGAIN or not isinstance(sys.exception(), KeyboardInterrupt):
        raise KeyboardInterrupt


class _Parser(argparse.ArgumentParser):
    """One whose complaint is one line after the usage, and which takes no "--" for an option's value."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        for word in words:
            if word.startswith("--") and word.endswith("=--"):
                self.error(f"argument {word[:-3]}: -- is no value")
        return super().parse_known_args(words, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="ddlkit", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ddlkit {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, one in COMMANDS.items():
        added = commands.add_parser(name, help=one.text, description=one.text)
        added.set_defaults(run=one.run)
        for names, options in one.arguments:
            added.add_argument(*names, **options)
    return parser


def _show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as one JSON document, or as aligned lines for a person.

    Raises UserError for a number that is none.
    """
    for name, value in result.items():
        _check_finite(name, value)
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<32} {_shown(value)}")


def _check_finite(name: str, value: Any) -> None:
    """Raise a UserError for a number that is infinite or none, anywhere in the value."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(
            f"{name} comes out as {value}: sizes, times or rates that went in are far beyond what can "
            "be: check them and their units"
        )
    if isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            _check_finite(name, one)


FEW = 4
"""So many numbers a person reads one by one; of more, the range tells enough."""


def _shown(value: Any) -> str:
    """A value as a person reads it: lists of many numbers by their range; None: not known."""
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:.6g}"
    numbers = list(value.values() if isinstance(value, dict) else value) if _many(value) else []
    if len(numbers) > FEW:
        return f"{len(numbers)} from {_shown(min(numbers))} to {_shown(max(numbers))} (--json: all)"
    if numbers and isinstance(value, dict):
        return ", ".join(f"{name} {_shown(number)}" for name, number in value.items())
    if value in ([], {}):
        return "none"
    return ", ".join(map(_shown, numbers)) if numbers else str(value)


def _many(value: Any) -> bool:
    """Whether it is a list of numbers, or numbers by name."""
    held = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(isinstance(one, (int, float)) for one in held)


JSON = flag("--json", "print JSON")


# ---------------------------------------------------------------- measure

_MEASURE = """a suite (quick, full, cpu, gpu, smoke), a file of a suite or a campaign, or a part of the
suite quick: layers, collectives, training, replay, campaign, convergence, tensors, input, all (without the
last three, which take minutes and say more of single networks)"""


_PACK = """keep the whole recording in this file, too, every 20 s: a kill at any time leaves it whole, and
the next run goes on from it where the directory is empty; by hand: tar xzf FILE.tgz -C data/recorded"""


_ALGORITHM_HELP = """of all-reduces, for collectives, sent step by step: ring, halving_doubling, tree,
hierarchical or direct; or library [the library's own]"""


def _session(where: str) -> tuple[Argument, ...]:
    """What every session of measuring can be asked."""
    return (
        arg("--budget", help="when to end, as in 8m30s or 90s [when all is measured]"),
        flag("--dry-run", "only say what and how long"),
        arg("--out", type=Path, help=f"directory for the tables [{where}]"),
        arg("--pack", type=Path, metavar="FILE.tgz", help=_PACK),
        flag("--ignore-load", "measure although others use the GPU; every stamp says so"),
    )


def _measured(arguments: argparse.Namespace, what: str, **how: Any) -> None:
    from ddlkit.run.sessions import engine

    budget_s = units.parse_seconds(arguments.budget) if arguments.budget else math.inf
    chosen = ("out", "dry_run", "pack", "ignore_load")
    common = {"budget_s": budget_s, **{name: getattr(arguments, name) for name in chosen}}
    try:
        print(engine.measure(what, **common, **how))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was measured is kept") from None


@command(
    "measure this machine and record what it shows; goes on where it stopped",
    arg("what", metavar="NAME|FILE", help=_MEASURE),
    arg("--profile", choices=("quick", "full"), default="quick", help="whose part it is [quick]"),
    arg("--networks", help="for layers, with batch sizes: resnet50:32,vgg16:16"),
    arg("--algorithm", default="", help=_ALGORITHM_HELP),
    *_session("build/measured, for recordings data/recorded/<this machine>"),
)
def measure(arguments: argparse.Namespace) -> None:
    networks = arguments.networks.split(",") if arguments.networks else ()
    chosen = {"networks": networks, "algorithm": arguments.algorithm}
    _measured(arguments, arguments.what, profile=arguments.profile, **chosen)


@command(
    "record all that this machine can show: ddlkit measure cpu, gpu or smoke",
    arg("--suite", choices=("gpu", "cpu"), required=True, help="on which device"),
    arg("--profile", choices=("standard", "smoke"), default="standard", help="how much [standard]"),
    flag(
        "--preflight", "measure nothing: check in half a minute that all it needs is here and works"
    ),
    *_session("data/recorded/<this machine>"),
)
def record(arguments: argparse.Namespace) -> int | None:
    device = "cuda" if arguments.suite == "gpu" else "cpu"
    if arguments.preflight:
        from ddlkit.run.sessions.preflight import preflight

        return preflight(device, arguments.out)
    name = arguments.suite if arguments.profile == "standard" else arguments.profile
    _measured(arguments, name, device=device)
    return None


# ---------------------------------------------------------------- import, timeline


ELEMENT = arg(
    "--gradient-bytes", help="of a number of a gradient: 2, fp16, bf16 [as the file says]"
)


@command(
    "make a layer profile of a layer-wise trace, a torch.profiler file, FLOP counts or a transformer's shape",
    arg("file", type=Path, help="the trace, Chrome trace (also .gz) or CSV"),
    arg("--kind", help="trace, kineto, flops or transformer [by content]"),
    arg("--out", type=Path, required=True, help="the layer profile (CSV)"),
    arg("--messages", type=Path, help="also bytes and seconds of messages (CSV)"),
    arg("--network", help="its name [the file's]; of transformers: which one"),
    arg("--batch", type=int, help="samples an iteration [1]"),
    arg("--device", help="what it ran on [as the file says]"),
    arg("--peak", type=float, help="of counts: peak rate in FLOP/s"),
    arg("--utilisation", type=float, help="of counts: share of it, 0 to 1"),
    arg("--compute-s", type=float, help="of counts: forward and backward, in place of a rate"),
    arg("--sequence", type=int, help="of a transformer: tokens of a sample"),
    ELEMENT,
    flag("--without-input", "of a trace: leave out all before the first layer with parameters"),
    JSON,
)
def import_(arguments: argparse.Namespace) -> None:
    from ddlkit import formats

    options = formats.ImportOptions(
        network=arguments.network,
        batch=arguments.batch,
        device=arguments.device,
        peak_flops_per_s=arguments.peak,
        utilisation=arguments.utilisation,
        with_input=not arguments.without_input,
        compute_s=arguments.compute_s,
        sequence=arguments.sequence,
        element_bytes=_element_bytes(arguments),
    )
    found = formats.import_file(arguments.file, arguments.kind, options)
    workload = found.profile.workload()
    formats.save_profile(found.profile, arguments.out, arguments.file)
    if arguments.messages:
        formats.save_messages(found.messages, arguments.messages, arguments.file, arguments.out)
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
        return
    _show(result, False)
    for finding in found.findings:
        where = f" ({', '.join(finding.layers)})" if finding.layers else ""
        print(f"  {finding.what}{where}: {finding.text}")


@command(
    "export a recorded timeline as a Chrome trace, which Perfetto opens",
    arg("file", type=Path, help="timeline table (CSV, also .gz)"),
    arg("--case", help="key of the case, when it holds several"),
    arg("--repeat", type=int, help="which repeat, when it holds several"),
    arg("--out", type=Path, required=True, help="the Chrome trace (JSON)"),
)
def timeline(arguments: argparse.Namespace) -> None:
    from ddlkit import store

    line = store.read_timeline(arguments.file, arguments.case, arguments.repeat)
    text = json.dumps(line.to_chrome_trace(), allow_nan=False) + "\n"
    store.atomic_write_text(store.own_output(arguments.out, arguments.file), text)
    counts = {"ranks": len(set(line.rank)), "iterations": len(set(line.iteration))}
    _show({"spans": line.n, **counts, "out": arguments.out}, False)


# ---------------------------------------------------------------- fit, predict, plan


RANKS = arg(
    "--ranks",
    type=int,
    help="between how many ranks messages were measured: chosen, or said if the file is silent [the file's]",
)
_FORM_HELP = (
    "auto, alpha_beta, piecewise, segments, chords, table, or variants as alpha_beta:ends or piecewise:45KB "
    "[auto]"
)


@command(
    "fit a message cost to measured times",
    arg("file", type=Path, help="collectives table, CSV of bytes and seconds, or nccl-tests log"),
    arg("--form", default="auto", help=_FORM_HELP),
    arg("--collective", help="of a recorded table: which one, as all_gather [all_reduce]"),
    arg("--link", help="of a recorded table: which link, as in lab:1gbit"),
    RANKS,
    arg("--place", choices=("in_place", "out_of_place"), help="of a log: which times [both]"),
    flag("--compare", "all forms side by side, with their errors at sizes left out, and a drawing"),
    arg("--draw", type=Path, help="the drawing of --compare (PNG) [FILE-fits.png, here]"),
    JSON,
)
def fit(arguments: argparse.Namespace) -> None:
    from ddlkit.core import fit as fitting
    from ddlkit.formats import messages
    from ddlkit.report.doubts import Measured

    wanted = {name: getattr(arguments, name) for name in ("collective", "link", "ranks", "place")}
    sizes, seconds, known = messages.read_bytes_seconds(arguments.file, **wanted)
    of: dict[str, Any] = {
        "collective": known.get("collective") or "all_reduce",
        "workers": known.get("ranks"),
        "algorithm": known.get("algorithm"),
    }
    if arguments.compare:
        return _compare(arguments, sizes, seconds, of)
    if arguments.draw:
        raise UserError(f"--draw {arguments.draw}: draws what --compare compares: give both")
    found = fitting.fit(arguments.form, sizes, seconds, **of)
    description = found.to_dict()
    measured = Measured.of(sizes, known.get("backend"), known["source"])
    measured = measured._replace(on_device=messages.device_of(arguments.file))
    if "median_abs_held_out_error" not in description["fit"]:
        error = _held_out_error(found.form, sizes, seconds)
        description["fit"]["median_abs_held_out_error"] = error
    description["fit"] |= measured._asdict()
    if arguments.json:
        _show(description, True)
        return
    whole = {**description, **description["fit"]}
    # What is nested is for programs.
    nested = [k for k, v in whole.items() if isinstance(v, (list, dict)) and not _many(v)]
    _show({name: value for name, value in whole.items() if name not in nested}, False)


def _compare(arguments: argparse.Namespace, sizes: Any, seconds: Any, of: dict[str, Any]) -> None:
    """Print how well each form does, and draw them."""
    from ddlkit.report import fits, plots
    from ddlkit.store import own_output

    forms = [] if arguments.form == "auto" else [arguments.form]
    found = fits.compare(sizes, seconds, *forms, **of)
    to = arguments.draw or Path(f"{arguments.file.name.partition('.')[0]}-fits.png")
    own_output(to, arguments.file)
    off = {form: (one.sizes, one.errors()) for form, one in found.unseen.items()}
    plots.write_png(plots.cost_forms(found.fits, off, found.chosen), to)
    said = {"chosen": found.chosen, "why": found.why, "drawn": str(to)}
    if arguments.json:
        _show({"forms": json.loads(found.table.to_json(orient="index")), **said}, True)
        return
    print(fits.page(found.table))
    _show(said, False)


def _held_out_error(form: str, sizes: Any, seconds: Any) -> float | None:
    """Median over the inner sizes, each left out; None where a fit needs every size there is."""
    import numpy as np

    from ddlkit.core.fit import held_out_errors

    _, errors = held_out_errors(form, sizes, seconds)
    return float(np.median(abs(errors))) if errors.size else None


_PLANS = "none, single, ddp, buffer:25MB, mg_wfbp, cuts:3,40 or exact; a wrong one lists all"
_PLAN_HELP = f"as {_PLANS}; or a file of ddlkit plan --json"


_INPUTS = (
    arg("--profile", type=Path, required=True, help="layer profile (CSV)"),
    arg("--network", help="which network, when the profile holds several"),
    arg("--batch", type=int, help="which batch size, when the profile holds several"),
    arg("--profile-ranks", type=int, help="measured by how many ranks, when it holds several"),
    arg("--forward-s", type=float, help="forward pass, for a profile without the column forward_s"),
    arg("--dilation", type=float, default=1.0, help="compute this many times slower [1]"),
    ELEMENT,
    arg(
        "--accumulate",
        type=int,
        default=1,
        metavar="M",
        help="gradients over M of the profile's batches, sent beside the last one [1]",
    ),
    arg(
        "--collectives", type=Path, nargs="+", metavar="TABLE", help="to calibrate from: any tables"
    ),
    RANKS,
    arg("--link", help="over which link, as in lab:1gbit [the table's, if it has but one]"),
    arg("--cost", type=Path, help="in place of --collectives: message cost (JSON of ddlkit fit)"),
    arg("--in-flight", type=int, default=1, help="collectives under way at once [1]"),
    arg(
        "--copy-s-per-byte",
        type=float,
        default=0.0,
        help="of gradients into and out of messages [0]",
    ),
    arg("--samples", type=Path, help="of real training: the profile's iterations, which scatter"),
    arg("--density", type=float, help="share of gradients sent, with --selection: by all_gather"),
    arg(
        "--selection",
        type=Path,
        nargs="+",
        metavar="TABLE",
        help="recorded times to select that share, or a selection cost (JSON)",
    ),
    arg(
        "--selection-form",
        default="table",
        help="of the cost of those times: table, log, density_log, scan, or auto for the best of them at "
        "sizes left out [table]",
    ),
    JSON,
)


def _forecast(arguments: argparse.Namespace, spec: str) -> tuple[Any, list[str], Any]:
    """The forecast of the files under the plan ``spec``, what is doubtful of it, and the layer profile.

    Both what is doubtful and what a profile left open is said on standard error.
    """
    from ddlkit import store
    from ddlkit.formats import plans
    from ddlkit.model import forecast, make_plan
    from ddlkit.model.predictor import STEADY, scatter_of
    from ddlkit.report.doubts import doubts

    if bool(arguments.cost) == bool(arguments.collectives):
        raise UserError("give --collectives TABLE to calibrate from, or --cost COST.json")
    assumed: list[str] = []
    profile = _profile(arguments, assumed)
    workload = profile.workload().scaled(arguments.dilation).accumulated(arguments.accumulate)
    communication, measured = (_given if arguments.cost else _calibrated)(arguments)
    communication = _sparse(arguments, communication, workload)
    if plans.is_file(spec):
        plan = plans.read_plan(Path(spec))
    else:
        plan = make_plan(plans.with_unit(spec), workload, communication.cost)
    samples = store.load_table(arguments.samples, "samples") if arguments.samples else None
    found = forecast(
        workload,
        plan,
        communication,
        copy_s_per_byte=arguments.copy_s_per_byte,
        compute_scatter=STEADY if samples is None else scatter_of(samples),
    )
    if assumed:
        text = one_line(f"{arguments.profile}: assumed {', '.join(assumed)}")
        print(f"ddlkit: {text}", file=sys.stderr)
    cost = communication.cost
    n_bytes = cost.collective_bytes(found.iteration.group_bytes)
    doubtful = list(doubts(profile.device, cost, measured, n_bytes))
    for line in doubtful:
        print(f"ddlkit: warning: {one_line(line)}", file=sys.stderr)
    return found, doubtful, profile


def _element_bytes(arguments: argparse.Namespace) -> int | None:
    """Bytes of a number of a gradient, if said."""
    said = arguments.gradient_bytes
    return None if said is None else units.parse_element_bytes(said)


def _profile(arguments: argparse.Namespace, assumed: list[str]) -> Any:
    """The layer profile of the inputs; what it left open is added to ``assumed``."""
    from ddlkit import store

    profile = store.read_profile(
        arguments.profile,
        arguments.network,
        arguments.batch,
        ranks=arguments.profile_ranks,
        forward_s=arguments.forward_s,
        assumed=assumed,
    )
    element_bytes = _element_bytes(arguments)
    return profile if element_bytes is None else profile.sent_as(element_bytes)


def _sparse(arguments: argparse.Namespace, dense: Any, workload: Any) -> Any:
    """The same communication for messages of which a share is selected and gathered, where asked."""
    from ddlkit.core.sparse import ELEMENT_BYTES
    from ddlkit.store.readers import read_selection

    if (arguments.density is None) != (arguments.selection is None):
        raise UserError("give --density and --selection TABLE together")
    if arguments.density is None:
        return dense
    if (workload.bytes != ELEMENT_BYTES * workload.parameters).any():
        raise UserError("--density: needs a profile whose gradients have 4 bytes a parameter")
    selecting = read_selection(arguments.selection, arguments.density, arguments.selection_form)
    return dense.sparse(arguments.density, selecting)


def _given(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Communication at a cost that is given as JSON, and what is known of how it was measured."""
    from ddlkit.core.fit import costs_from_dict
    from ddlkit.core.link import Link
    from ddlkit.model import Communication
    from ddlkit.report.doubts import Measured
    from ddlkit.store.files import read_json

    advice = "write it by ddlkit fit FILE --json, or give FILE to --collectives"
    described = read_json(arguments.cost, advice)
    try:
        cost, draws = costs_from_dict(described)
        measured = Measured.read(described, cost)
    except UserError as error:
        raise UserError(f"{arguments.cost}: {error}") from error
    if cost.workers is None:
        cost = replace(cost, workers=arguments.ranks)
    elif arguments.ranks not in (None, cost.workers):
        raise UserError(
            f"{arguments.cost}: a cost of {cost.workers} workers, not {arguments.ranks}: --ranks "
            "does not carry a cost to other numbers, measure with that many"
        )
    known = Communication(cost, draws, Link(in_flight=arguments.in_flight))
    return known, measured


def _calibrated(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Communication as it was measured: the validated model's; and what is known of the messages."""
    import pandas as pd

    from ddlkit import store
    from ddlkit.formats.messages import device_of, read_collectives
    from ddlkit.model import Calibration
    from ddlkit.report.doubts import Measured
    from ddlkit.store.readers import choose

    how = {"ranks": arguments.ranks, "link": arguments.link}
    paths = store.expand_tables(arguments.collectives)
    tables = [read_collectives(path, **how) for path in paths]
    wanted = {"collective": "all_reduce" if arguments.density is None else "all_gather", **how}
    rows = pd.concat(tables, ignore_index=True)
    rows, chosen = choose(rows, tuple(wanted), wanted, Path("--collectives"))
    link, ranks = str(chosen["link"]), int(chosen["ranks"])
    known = Calibration.of(rows).between(link, ranks, in_flight=arguments.in_flight)
    devices = {device_of(path) for path in paths}
    measured = Measured.of(rows["bytes"], *rows["backend"].unique())
    return known, measured._replace(on_device=devices.pop() if len(devices) == 1 else None)


@command(
    "predict an iteration from a profile and measured collectives, or a cost",
    *_INPUTS,
    arg("--plan", default="ddp", help=f"{_PLAN_HELP} [ddp]"),
)
def predict(arguments: argparse.Namespace) -> None:
    found, doubtful, _ = _forecast(arguments, arguments.plan)
    names = ("iteration_s", "compute_s", "communication_s", "exposed_communication_s")
    result = {
        **{name: getattr(found.prediction, name) for name in (*names, "scaling_factor")},
        "interval_95_s": list(found.interval_s) if found.interval_s else None,
        "plan": arguments.plan,
        "messages": len(found.iteration.plan.ends),
        "workers": found.iteration.cost.workers,
    }
    if arguments.density:
        sizes = found.iteration.group_bytes
        result["selection_s"] = float(found.iteration.cost.selection_s(sizes).sum())
        result["selection_form"] = found.iteration.cost.selecting.form
    _show({**result, "warnings": doubtful} if arguments.json else result, arguments.json)


@command(
    "choose which gradients to fuse; planned for messages one after the other",
    *_INPUTS,
    arg("--planner", default="exact", help=f"as {_PLANS} [exact]"),
)
def plan(arguments: argparse.Namespace) -> None:
    found, doubtful, _ = _forecast(arguments, arguments.planner)
    iteration_s, chosen = found.prediction.iteration_s, found.iteration.plan
    proof = {} if chosen.least_s is None else {"no_plan_below_s": chosen.least_s}
    if arguments.json:
        _show({**chosen.to_dict(iteration_s), **proof, "warnings": doubtful}, True)
        return
    sizes, tensor = found.iteration.group_bytes, found.iteration.workload.tensor
    result = {"planner": chosen.planner, "messages": len(sizes), "iteration_s": iteration_s}
    _show({**result, **proof}, False)
    for group, members in enumerate(chosen.slices):
        first, last = tensor[members.start], tensor[members.stop - 1]
        print(f"  {group:>3}  {units.format_bytes(sizes[group]):>10}  {first} .. {last}")


# ---------------------------------------------------------------- what-if


_NOT_IN_THE_GRAPH = {"accumulate": 1, "copy_s_per_byte": 0.0, "in_flight": 1, "density": None}
"""Inputs of a forecast that training's graph does not know, and what they are where nothing is said."""


@command(
    "change tasks of training's graph (dag Fig 1), and see what limits afterwards",
    *_INPUTS,
    arg("--plan", default="ddp", help=f"{_PLAN_HELP} [ddp]"),
    arg(
        "--scale",
        action="append",
        default=[],
        metavar="WHAT=FACTOR",
        help="a kind (all_reduce=0.5), a resource (disk=0.25), layer:3=0.5 or rank:2=1.2; may be repeated",
    ),
    arg(
        "--straggler",
        action="append",
        default=[],
        metavar="RANK:FACTOR",
        help="a rank computes so many times as long; may be repeated",
    ),
    arg(
        "--strategy",
        default="Caffe-MPI",
        help="or CNTK, MXNet, TensorFlow: whose edges [Caffe-MPI]",
    ),
    arg(
        "--layer",
        action="append",
        default=[],
        metavar="NAME=FACTOR",
        help="a layer or tensor so many times as large, in time and bytes; may be repeated",
    ),
    arg("--gpus", type=int, help="so many GPUs afterwards, by a cost that can be carried there"),
    arg("--gpus-per-machine", type=int, default=1, help="that share a disk [1]"),
    arg(
        "--inputs",
        type=Path,
        metavar="TABLE",
        help="of ddlkit measure input: to read, decode, copy",
    ),
    arg("--io-s", type=float, help="to read one GPU's batch [as --inputs, else 0]"),
    arg("--decode-s", type=float, help="to decode it, where the strategy does [likewise]"),
    arg("--h2d-s", type=float, help="to copy it to the GPU [likewise]"),
    flag("--shared-disk", "all machines read from one"),
    arg("--iterations", type=int, default=10, help="that follow one another [10]"),
)
def what_if(arguments: argparse.Namespace) -> None:
    from ddlkit.core.iteration import Iteration
    from ddlkit.papers.dag import training
    from ddlkit.papers.dag.tasks import schedule

    for name, left_out in _NOT_IN_THE_GRAPH.items():
        if getattr(arguments, name) != left_out:
            raise UserError(
                f"--{name.replace('_', '-')}: the graph has no task for it: leave it out"
            )
    changes = [_change(text, "=") for text in arguments.scale]
    changes += [_change(text, ":", "rank:") for text in arguments.straggler]
    told, doubtful, profile = _forecast(arguments, arguments.plan)
    plan, cost = told.iteration.plan, told.iteration.cost
    before = Iteration(told.iteration.workload, plan, cost)
    other = training.resized(profile, dict(_change(text, "=") for text in arguments.layer))
    there = cost.workers or 1
    gpus = there if arguments.gpus is None else arguments.gpus
    if gpus < 1:
        raise UserError(f"--gpus {gpus}: there must be at least one")
    carried = cost if gpus == there else cost.at_workers(gpus)
    after = Iteration(other.workload().scaled(arguments.dilation), plan, carried)
    graph, grown = _graph(arguments, before, profile), _graph(arguments, after, other)
    found = training.WhatIf(schedule(graph), schedule(training.changed(grown, changes)))
    result = {"tasks": graph.n, "longest_path_s": graph.longest_path_s, **found.described()}
    for when, n in (("", there), ("_after", gpus)):
        rate = n * profile.batch / result[f"iteration_s{when}"]
        result |= {f"gpus{when}": n, f"samples_per_s{when}": rate}
    if arguments.json:
        _show({**result, "warnings": doubtful}, True)
        return
    for name in ("critical_path_s", "critical_path_s_after"):
        result[name] = ", then ".join(f"{s:.4g} {task}" for task, s in result[name].items())
    _show(result, False)


def _graph(arguments: argparse.Namespace, one: Any, profile: Any) -> Any:
    """The tasks of training by these arguments."""
    from ddlkit.formats.plans import read_inputs
    from ddlkit.papers import dag
    from ddlkit.papers.dag import training

    known = read_inputs(arguments.inputs, profile.batch) if arguments.inputs else {}
    said = {name: getattr(arguments, name) for name in ("io_s", "decode_s", "h2d_s")}
    shared, machine_gpus = arguments.shared_disk, arguments.gpus_per_machine
    return training.of_iteration(
        one,
        dag.strategy(arguments.strategy),
        training.Gpus.of(one.cost.workers or 1, machine_gpus, shared),
        iterations=arguments.iterations,
        forward_s=profile.forward_s * arguments.dilation,
        **{name: known.get(name, 0.0) if s is None else s for name, s in said.items()},
    )


def _change(text: str, parted_by: str, of: str = "") -> tuple[str, float]:
    """What is changed, and how many times as long it takes."""
    what, found, factor = text.rpartition(parted_by)
    try:
        return of + what, float(factor if found else "")
    except ValueError:
        raise UserError(f"{text!r}: write all_reduce=0.5 to scale, 3:1.2 for a straggler") from None


# ---------------------------------------------------------------- bench, machine


@command("how fast predicting and planning are", JSON)
def bench(arguments: argparse.Namespace) -> None:
    # "Per core" is only true on one thread, and BLAS reads this once, when NumPy loads.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    from ddlkit.run.sessions import bench as benchmark

    _show(benchmark.run(), arguments.json)


@command("what this machine is", JSON)
def machine(arguments: argparse.Namespace) -> None:
    from ddlkit.machine import describe, versions

    _show({**describe(), **versions()}, arguments.json)


# ---------------------------------------------------------------- lab


# Each of an emulated link alone, by the field of the parsed arguments.
_EMULATED: dict[str, dict[str, Any]] = {
    "delay": {"help": "of each link: a round trip passes four [0s]"},
    "jitter": {"help": "by how much a packet's delay may differ, in order [0s]"},
    "loss": {"help": "share of frames that are lost on their way: 0.1%% [0]"},
    "background": {"help": "load by others, constant as 40%% or in turns as 80%%:100ms/300ms"},
    "rank_rate": {"action": "append", "default": [], "help": "of one rank's link: 1=250mbit"},
    "rank_delay": {"action": "append", "default": [], "help": "of one rank's link: 1=5ms"},
    "change": {
        "action": "append",
        "default": [],
        "help": "what changes when, of all or of one: 5s:rate=250mbit,loss=1%%,rank=1; in order",
    },
    "queue": {"help": "what may wait for a link; more is dropped [64MiB]"},
    "burst": {"help": "what a rested link may send at once, in time of its rate, as tbf's [0s]"},
    "framing": {"type": int, "help": "bytes counted around each frame's packet; tbf's are 14 [38]"},
    "congestion": {"help": "control of TCP's: reno, cubic or bbr [reno]"},
    "seed": {"type": int, "help": "of loss and jitter [0]"},
}


@command(
    "a rate-limited network of namespaces (root, Linux)",
    arg(
        "action",
        choices=("up", "status", "crossed", "change", "down", "clean", "campaign"),
        help="make links, list labs, count what crossed, change links, take a lab down, remove dead ones, "
        "or measure a campaign",
    ),
    arg("file", type=Path, nargs="?", help="of a campaign: what to measure (YAML)"),
    arg("--ranks", type=int, default=4, help="namespaces, one per rank [4]"),
    arg("--rate", default="1gbit", help="rate of each link, both ways [1gbit]"),
    arg("--ranks-per-node", type=int, default=1, help="that share a link [1]"),
    arg("--intra-rate", help="rate of each rank's link inside a node: 10gbit"),
    arg("--engine", choices=("tbf", "emulated"), default="tbf", help="what limits the links [tbf]"),
    *(arg(f"--{name.replace('_', '-')}", **how) for name, how in _EMULATED.items()),
    arg("--label", default="", help="name of the lab [the first free ddlN]"),
    flag("--predict", "of a campaign: calibrate its labs and write down what models say; no runs"),
    *_session("of a campaign: data/recorded/<machine>/campaign-..."),
    JSON,
)
def lab(arguments: argparse.Namespace) -> None:
    from ddlkit.run.lab import network

    if (arguments.action == "campaign") != bool(arguments.file):
        raise UserError("write ddlkit lab campaign FILE.yml; the other actions take no file")
    if arguments.predict and arguments.action != "campaign":
        raise UserError("--predict needs a campaign: write ddlkit lab campaign FILE.yml --predict")
    if arguments.action == "campaign":
        _measured(arguments, str(arguments.file), predict=arguments.predict)
    elif arguments.action == "up":
        made = network.Lab(_lab_shape(arguments), arguments.label, persistent=True).up()
        namespaces = " ".join(made.namespaces)
        print(f"{made.label}: {made.ranks} ranks over {made.name}; namespaces {namespaces}")
    elif arguments.action == "status":
        for row in network.status():
            state = "up" if row["alive"] else "dead: run ddlkit lab clean"
            described = "{label}: {ranks} ranks over {link}, {owner}".format_map(row)
            print(f"{described}, {state}")
    elif arguments.action == "crossed":
        _show_crossed(network.attach(_label(arguments)).crossed(), arguments.json)
    elif arguments.action == "change":
        network.attach(_label(arguments)).change(_changes(arguments))
    elif arguments.action == "down":
        everyone = [row["label"] for row in network.status()]
        for label in [arguments.label] if arguments.label else everyone:
            network.attach(label).down()
            print(f"{label}: down")
    else:
        for label in network.clean():
            print(f"{label}: removed")


def _label(arguments: argparse.Namespace) -> str:
    """Of the lab that is meant: the one that was named, or the only one. Raises UserError."""
    from ddlkit.run.lab import network

    names = [row["label"] for row in network.status()]
    if not arguments.label and len(names) != 1:
        raise UserError(f"which lab? labs that are up: {', '.join(names) or 'none'}; use --label")
    return arguments.label or names[0]


def _changes(arguments: argparse.Namespace) -> tuple[Any, ...]:
    from ddlkit.run.lab.conditions import parse_change

    if not arguments.change and arguments.action == "change":
        raise UserError("what is to change? write for example --change 5s:rate=250mbit,rank=1")
    return tuple(map(parse_change, arguments.change))


def _lab_shape(arguments: argparse.Namespace) -> Any:
    """The lab that the arguments of ``lab up`` describe."""
    from ddlkit.run.lab import conditions
    from ddlkit.run.lab.network import LabShape

    found = None
    asked = [name for name in _EMULATED if getattr(arguments, name) not in (None, [])]
    if arguments.engine == "emulated":
        given = {name: getattr(arguments, name) for name in asked}
        given["change"] = _changes(arguments)
        found = conditions.parse(given)
    elif asked:
        option = asked[0].replace("_", "-")
        raise UserError(
            f"--{option} needs --engine emulated: links of tbf have a rate, nothing else"
        )
    return LabShape(
        arguments.ranks,
        units.parse_bits_per_s(arguments.rate),
        arguments.ranks_per_node,
        units.parse_bits_per_s(arguments.intra_rate) if arguments.intra_rate else 0.0,
        found,
    )


def _show_crossed(answer: dict[str, Any], as_json: bool) -> None:
    """What has crossed a link since it is up: a table of the ranks, and how well the link did."""
    from ddlkit.run.lab.emulated import Crossing

    if as_json:
        print(json.dumps(answer))
        return
    crossed = Crossing.since_up(answer)
    print(crossed.ranks.set_index("rank").T.map("{:.0f}".format).to_string())
    _show(crossed.judged(), False)


# ---------------------------------------------------------------- book, figures


@command(
    "run the notebooks and build the report",
    flag("--recorded", "only from data/recorded"),
    arg("--data", type=Path, help="measured tables [build/measured]"),
    arg("--reports", type=Path, help="for figures [reports with --recorded, else build/reports]"),
    arg("--only", default="", help="notebooks by number: 20,40"),
)
def book(arguments: argparse.Namespace) -> None:
    from ddlkit.report.book import build

    chosen = {name: getattr(arguments, name) for name in ("recorded", "data", "reports")}
    print(build(**chosen, only=[n for n in arguments.only.split(",") if n]))


@command(
    "list or check the catalog of figures and tables",
    flag("--check", "fail on a missing image, CSV or tolerance"),
    flag("--write", "write reports/FIGURES.md and docs/commands.md"),
    arg("--reports", type=Path, help="directory that holds figures/ [reports]"),
)
def figures(arguments: argparse.Namespace) -> int:
    from ddlkit import store
    from ddlkit.report import catalog, manual

    if arguments.write:
        store.atomic_write_text(manual.PAGE, manual.page(_parser()))
    return catalog.command(check=arguments.check, write=arguments.write, reports=arguments.reports)


if __name__ == "__main__":
    raise SystemExit(main())
