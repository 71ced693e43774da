"""The command ``advise``: from a model, or from tables, to a decision about its buckets."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit.cli.command import (
    JSON,
    LAB_LINKS,
    MODEL_FUNCTION,
    OUTPUT,
    Argument,
    arg,
    command,
    device_of_own_ranks,
    group,
    interrupt_says_kept,
    lab_rate,
    minutes,
    only_command_in,
    option_of,
    parsed_name,
    print_loading,
    print_starting,
    ranks_to_start,
    refuse_given,
    refuse_impossible_lab,
    refuse_impossible_outputs,
    refuse_other_than_page,
    refuse_unwritable,
    refuse_without_effect_in_job,
    require_lab,
    require_model_file,
    show,
    with_help,
)
from ddlkit.cli.inputs import (
    LEVEL,
    MEASURED_RANKS,
    OPTIONAL_INPUTS,
    RANKS,
    SHARDED,
    UNITS,
    assumption,
    forecast_of,
    is_sharded,
    predict_sharded,
    print_remarks,
    print_warnings,
    workload_of,
)
from ddlkit.core import units
from ddlkit.core.errors import UserError, shown
from ddlkit.jobs import LOGS
from ddlkit.jobs.assignment import ranks_started

if TYPE_CHECKING:
    from pandas import DataFrame

UNIT_SIZES = ("size:2MB", "size:10MB", "size:50MB", "size:250MB")
"""Ways to make units that are compared with those that the user asks for."""

_MODEL = f"""Measure the training of your own model, which the function FUNCTION in
FILE.py returns. {MODEL_FUNCTION} Under torchrun or srun the ranks are their
processes; otherwise --ranks processes of this machine."""


def _with_help_for_model(argument: Argument) -> Argument:
    """Return an option of a prediction with the help that it has in advise.

    Only the help of --ranks differs, because the option means something else with --model.
    """
    if argument.names != RANKS.names:
        return argument
    text = (
        "With --model: the number of processes to start on this machine. "
        f"With tables: the {MEASURED_RANKS} [default: 2 with --model, and as the file says "
        "with tables]"
    )
    return with_help(argument, text)


def _with_several_units(argument: Argument) -> Argument:
    """Return an option of sharded training with the help that it has in advise.

    Only the help of --units differs, because the option takes several ways to make units in
    advise, and one in predict.
    """
    if argument.names != ("--units",):
        return argument
    sizes = ", ".join(size.removeprefix("size:") for size in UNIT_SIZES)
    text = (
        "With --strategy fsdp: ways to choose which parameters are gathered together. "
        f"{UNITS} Separate several ways by ; as in 'blocks.*;size:25MB'. They are "
        f"compared with units of the sizes {sizes}."
    )
    return with_help(argument, text)


# Units are compared both resharded and kept whole, so that --no-reshard has no effect.
_SHARDED_OPTIONS = tuple(
    _with_several_units(argument)
    for argument in SHARDED
    if argument.names != ("--no-reshard",)
)


@command(
    "Advise on the buckets of DistributedDataParallel: what to change, how much that "
    "gains, and what limits the training. Measure your model with --model, or give "
    "tables with --profile and --collectives.",
    *group(
        "a model that is measured here",
        arg("--model", metavar="FILE.py:FUNCTION", help=_MODEL),
        arg(
            "--minutes",
            type=minutes,
            metavar="TIME",
            default=3.0,
            help="The time for measuring and predicting: minutes, as in 3, or with a "
            "unit, as in 90s. [default: 3]",
        ),
        arg(
            "--confirm-minutes",
            type=minutes,
            metavar="TIME",
            default=3.0,
            help="The most time for training under the best plans: minutes, as in 3, or "
            "with a unit, as in 90s. The trial ends earlier once it is decided, and "
            "after 96 rounds in any case. It has at least six rounds, and repeats rounds "
            "that others disturb, even beyond this time. With 0 nothing is tried, and the "
            "advice is a prediction. "
            "[default: 3]",
        ),
        arg(
            "--lab",
            metavar="RATE[,DELAY]",
            help=f"Send messages {LAB_LINKS} [default: loopback]",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--out",
            type=Path,
            metavar="DIRECTORY",
            help="With --model: write the measurements into this directory. A second "
            "run with the same model, --accumulate, --ranks and --lab continues from them, "
            "and only the trial is run anew. A run that differs in one of these replaces "
            "them. [default: a directory in advised/, named after all four]",
        ),
        arg(
            "--html",
            type=Path,
            metavar="FILE.html",
            help="Also write the advice as a page with drawings, which needs no "
            "network. Drawing needs the extra ddlkit[plot].",
        ),
        JSON,
    ),
    # Of these options, only --ranks gets another help.
    *map(_with_help_for_model, OPTIONAL_INPUTS),
    *_SHARDED_OPTIONS,
    with_help(
        LEVEL,
        "With --strategy fsdp: the share of single iterations that the interval should "
        "contain. [default: 0.95]",
    ),
    example="ddlkit advise --model mine.py:net",
)
def advise(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit advise``."""
    # Sharded training has units in place of buckets. They are predicted from tables, and
    # never measured here.
    if is_sharded(arguments):
        _refuse_model_for_sharded(arguments)
        _refuse_options_of_measuring(arguments)
        _print_units_fastest_first(arguments)
        return
    _refuse_wrong_combination(arguments)
    _refuse_impossible_page(arguments.html)
    # `result` is what is printed. `advice` is the `Advice` with all plans, for the drawings.
    if arguments.model:
        result, advice = _advice_by_measuring(arguments)
    else:
        result, advice = _advice_from_tables(arguments)
    # Of the ranks that torchrun or srun started, only rank 0 has an advice, and prints it.
    if not advice:
        return
    result["headline"] = _headline(result)
    result["snippet"] = snippet(advice, result["advice"])
    result["origin"] = origin()
    # The result has this directory only if the model was measured.
    if "measurements_directory" in result:
        directory = Path(result["measurements_directory"])
        result["origin"]["measured"] = _measured_when(directory)
    if arguments.json:
        show(result, as_json=True)
    else:
        print("\n".join(screen(result)))
    if arguments.html:
        _write_page(arguments.html, result, advice)


def _write_page(path: Path, result: dict[str, Any], advice: Any) -> None:
    """Write the page of --html, and print a note that it was written.

    ``result`` is the advice as ``ddlkit advise --json`` prints it. ``advice`` is the `Advice`,
    whose plans are drawn.
    """
    from ddlkit.show import write_advice

    write_advice(
        advice,
        [*screen(result), "", *EXPLANATIONS],
        path,
        facts=result["origin"],
        name_of_best=in_words(result["predicted_best"]),
    )
    print_remarks(notes=[f"the page was written: {path}"], warnings=[])


def _refuse_wrong_combination(arguments: argparse.Namespace) -> None:
    """Raise UserError unless the options ask for one advice on buckets.

    It is either made by measuring a model, or from tables. Each way has options of its own.
    With --strategy fsdp, whose advice is on units, this function is not called.
    """
    if arguments.model and arguments.profile:
        raise UserError(
            "give --model, whose training is measured, or --profile with tables, and "
            "not both"
        )
    if not (arguments.model or arguments.profile):
        raise UserError(
            "give --model, whose training is measured, or --profile and --collectives (or "
            "--cost)"
        )
    if arguments.model:
        _refuse_options_of_tables(arguments)
    else:
        _refuse_options_of_measuring(arguments)
    # Neither advice on buckets takes --level.
    refuse_given(arguments, ["level"], "has an effect with --strategy fsdp only")


def _refuse_impossible_page(path: Path | None) -> None:
    """Raise UserError if the page of --html cannot be written, before minutes of measuring."""
    if path is None:
        return
    from ddlkit.show import WRITING_A_PAGE, needs
    from ddlkit.store import own_output

    # Drawing needs an extra of ddlkit.
    needs("--html", WRITING_A_PAGE)
    # This refuses a directory and a recorded table.
    own_output(path)
    refuse_other_than_page(path)
    refuse_unwritable("--html", path, path.parent)


_OPTIONS_OF_MEASURING = ("lab", "out", "minutes", "confirm_minutes")
"""Options that have an effect with --model alone."""

_ALSO_WITH_MODEL = ("--ranks", "--accumulate")
"""Those of `OPTIONAL_INPUTS` that have an effect with --model, too."""


def _refuse_options_of_measuring(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option without an effect where tables are given."""
    given = _given_options(arguments, _OPTIONS_OF_MEASURING)
    # All of these are refused at once, so that the user can mend the command in one step.
    if given:
        verb, pronoun = ("has", "it") if len(given) == 1 else ("have", "them")
        raise UserError(
            f"{' and '.join(given)} {verb} an effect with --model only, because nothing is "
            f"measured if tables are given: leave {pronoun} out"
        )


def _given_options(arguments: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return those of some options that the user has given, with dashes."""
    return [option_of(name) for name in names if name in arguments.given_names]


def _refuse_options_of_tables(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option without an effect where a model is measured."""
    options = [argument.names[0] for argument in OPTIONAL_INPUTS]
    refuse_given(
        arguments,
        [parsed_name(option) for option in options if option not in _ALSO_WITH_MODEL],
        "has no effect with --model, which measures layers and messages itself",
    )


def _measured_when(out: Path) -> str:
    """Return when the messages in a directory were measured, and that directory, in words.

    An earlier command may have measured them.
    """
    from ddlkit import store

    # The stamp is a file beside the table that says when and where it was measured.
    stamp = store.load_stamp(out / "collectives.csv")
    measured = datetime.datetime.fromisoformat(stamp["time"])
    return f"{measured.astimezone(datetime.UTC):%Y-%m-%d %H:%M} UTC, into {out}/"


def origin() -> dict[str, str]:
    """Return when, how and where an advice is made.

    Returns
    -------
    dict of str to str
        The date, the command of this process, the machine and the versions of the
        software.
    """
    from ddlkit.store import machine

    description = machine.describe()
    cpu = description["cpu"]
    hardware_and_system = [
        f"{cpu['cores']} cores of {cpu['model']}",
        *(gpu["model"] for gpu in description["gpus"]),
        units.format_bytes(description["memory_bytes"]) + " of memory",
        description["os"],
    ]
    versions = {"ddlkit": machine.installed("ddlkit"), **machine.versions()}
    # "none" stands for software that is not installed.
    installed = [
        f"{name} {version}" for name, version in versions.items() if version != "none"
    ]
    now = datetime.datetime.now(datetime.UTC)
    return {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "command": shlex.join(["ddlkit", *sys.argv[1:]]),
        "machine": ", ".join(hardware_and_system),
        "versions": ", ".join(installed),
    }


def _refuse_model_for_sharded(arguments: argparse.Namespace) -> None:
    """Raise UserError unless tables are given, from which sharded training is predicted."""
    if arguments.profile and not arguments.model:
        return
    # All of these are refused at once, so that the user can mend the command in one step.
    given = _given_options(arguments, ["model", *_OPTIONS_OF_MEASURING])
    further = f", and leave {' and '.join(given)} out" if given else ""
    raise UserError(
        "advise --strategy fsdp predicts from tables: give --profile and --collectives"
        f"{further}"
    )


def _specs_of_user(text: str | None) -> list[str]:
    """Return the ways to make units that the value of --units lists, separated by semicolons.

    Raises UserError if the option is given and lists none.
    """
    if text is None:
        return []
    specs = [spec.strip() for spec in text.split(";")]
    named = [spec for spec in specs if spec]
    if not named:
        raise UserError(
            f"--units {shown(text)}: names no units: name modules, as in blocks.*, give a "
            "size, as in size:25MB, or leave it out"
        )
    return named


def _print_units_fastest_first(arguments: argparse.Namespace) -> None:
    """Print ways to divide a model into units for sharded training, the fastest first.

    They are the ways that --units lists, separated by semicolons, and those of `UNIT_SIZES`.
    Each has two rows: parameters are sharded again after the forward pass, or kept whole.
    """
    from pandas import DataFrame

    specs_of_user = _specs_of_user(arguments.units)
    warnings: list[str] = []
    # A size of the user may also be one of `UNIT_SIZES`. Each way is predicted once.
    specs = dict.fromkeys([*specs_of_user, *UNIT_SIZES])
    rows = predict_sharded(arguments, *specs, warnings=warnings)
    rows.sort(key=lambda row: float(row["iteration_s"]))
    if arguments.json:
        show({"ranked": rows, "warnings": warnings}, as_json=True)
        return
    # These are the same in every row, and would only widen the table.
    same_for_all = [
        "interval_level",
        "interval_includes",
        "compute_s",
        "ranks",
        "contention",
    ]
    table = DataFrame(rows).drop(columns=same_for_all)
    # With --assume-ring, rows may also have a column that says so.
    table = table.drop(columns="assumed", errors="ignore")
    # Either all rows have an interval or none has, because all rest on the same costs.
    if not table["iteration_interval_s"].notna().any():
        table["iteration_interval_s"] = "not known"
    print(table.to_string(index=False))
    # This text is the same for all rows.
    print(f"\nintervals include only {rows[0]['interval_includes']}")


def _advice_from_tables(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Predict from tables, and return the result to print and the `Advice`."""
    from ddlkit.model.advice import DEFAULT, Advice

    # Of this forecast, which is for PyTorch's default plan, only the text on the causes of
    # scatter that its interval includes is used. `Advice` makes the forecasts that it compares.
    notes: list[str] = []
    forecast, warnings, profile, communication = forecast_of(
        arguments, DEFAULT, notes=notes
    )
    # The intervals of gains are made from random draws of the cost.
    if not communication.draws:
        raise _cost_without_intervals(arguments)
    print_remarks(notes, warnings)
    # The workload of the forecast would include the selections of --density, which `Advice` adds
    # for each plan.
    advice = Advice.of(
        workload_of(arguments, profile),
        communication,
        copy_s_per_byte=arguments.copy_s_per_byte,
    )
    result = {
        "network": profile.network,
        "ranks": communication.cost.workers,
        **assumption(communication.is_assumed_ring),
        **advice.to_dict(),
        "decided_by": "prediction",
        # The text is empty if the interval includes all causes of scatter.
        "interval_includes": forecast.interval_includes or None,
        "warnings": warnings,
    }
    result["why_intervals_are_wide"] = {"predicted_gain": reasons_of_prediction(result)}
    return result, advice


def _cost_without_intervals(arguments: argparse.Namespace) -> UserError:
    """Return the error about messages whose cost has no intervals, which an advice needs."""
    if arguments.cost:
        return UserError(
            f"{arguments.cost}: the cost has no intervals, which an advice needs: write "
            "it by ddlkit fit --json, from times of more sizes, or of each size at least 4 "
            "times"
        )
    files = " and ".join(map(str, arguments.collectives))
    return UserError(
        f"{files}: has times of too few sizes for the intervals that an advice needs: "
        "measure at least 3 sizes, or each size at least 4 times"
    )


# ---------------------------------------------------------------- measuring the user's model


def _advice_by_measuring(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Measure, predict and try plans, and return the result to print and the `Advice`.

    On all ranks but rank 0 the result is empty and the advice is None.
    """
    # These calls refuse wrong options before the imports below load torch, which takes
    # seconds. `_launch` reads the rate of --lab again.
    refuse_impossible_lab(arguments.lab, arguments.ranks)
    require_lab(arguments.lab)
    require_model_file(arguments.model)
    measure_s, confirm_s = _measuring_times_s(arguments)
    # torchrun or srun may have started several copies of this command, each a rank.
    # Otherwise this process starts the ranks.
    ranks = ranks_started(os.environ)
    is_rank_of_launcher = ranks > 1
    if is_rank_of_launcher:
        refuse_without_effect_in_job(arguments, ["ranks", "lab"])
    else:
        ranks = ranks_to_start(
            arguments.ranks, default=2, program="ddlkit advise --model"
        )
    print_loading(arguments.model)
    from ddlkit.measure.advise import AdviseSettings

    settings = AdviseSettings(
        model=arguments.model,
        accumulate=arguments.accumulate,
        measure_s=measure_s,
        confirm_s=confirm_s,
    )
    out = arguments.out or _default_directory(arguments, ranks)
    refuse_impossible_outputs(out)
    with interrupt_says_kept(out):
        if not is_rank_of_launcher:
            return _advice_of_started_ranks(arguments, settings, ranks, out)
        is_rank_0 = _measure_as_rank(settings, out)
        # Only rank 0 has the tables.
        if not is_rank_0:
            return {}, None
        return _result_and_advice(out, ranks, with_trial=confirm_s > 0)


def _advice_of_started_ranks(
    arguments: argparse.Namespace, settings: Any, ranks: int, out: Path
) -> tuple[dict[str, Any], Any]:
    """Start ``ranks`` ranks here that measure and try plans, and return what they found.

    ``settings`` are the `AdviseSettings`. The ranks write their tables into ``out``, from
    which the returned result to print and the `Advice` are read.
    """
    from ddlkit.measure.given import check

    # Ranks take a while to start. A mistake in the model is found here before that.
    check(arguments.model)
    # These directories are made below, and removed again if nothing is measured.
    new_directories = _to_be_made(out)
    # The tables are read before another command may write into the directory.
    with only_command_in(out):
        with _removing_leftovers(out, new_directories):
            _launch(arguments, settings, ranks, out)
        # `confirm_s` is the time for trying plans, and with 0 no plan is tried.
        return _result_and_advice(out, ranks, with_trial=settings.confirm_s > 0)


_LEFTOVERS = (".lock", "job.json", LOGS)
"""What a command that has measured nothing leaves in its directory."""


def _to_be_made(directory: Path) -> list[Path]:
    """Return a directory and its parents as far as they do not exist, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


@contextlib.contextmanager
def _removing_leftovers(out: Path, made: Sequence[Path]) -> Iterator[None]:
    """Remove what the block leaves in a directory if it fails before anything is measured.

    The logs of the ranks stay if one has a traceback, and the error then names that log.

    Parameters
    ----------
    out : Path
        The directory, of which this process holds the lock.
    made : sequence of Path
        The directories that this command has made, the innermost first.

    Raises
    ------
    UserError, KeyboardInterrupt
        If the block raises it.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt) as error:
        # After an error, a traceback in a log tells the cause. An interrupt needs none.
        log = _log_with_traceback(out) if isinstance(error, UserError) else None
        # Any other file than the leftovers is a measurement. If there is one, everything stays
        # for the next run.
        names = {path.name for path in out.iterdir()}
        if names <= set(_LEFTOVERS):
            _remove_leftovers(out, made, with_logs=log is None)
        if log is None:
            raise
        raise UserError(f"{error}; all that the rank printed is in {log}") from None


def _remove_leftovers(out: Path, made: Sequence[Path], *, with_logs: bool) -> None:
    """Remove job.json, the lock and perhaps the logs from ``out``, and then empty directories.

    These files are all of `_LEFTOVERS`. ``with_logs`` says whether the logs of the ranks are
    removed, too. ``made`` has the directories that this command has made, the innermost first,
    of which those that are empty are removed.
    """
    # The command may have failed before it made some of these files.
    if with_logs:
        shutil.rmtree(out / LOGS, ignore_errors=True)
    (out / "job.json").unlink(missing_ok=True)
    # The lock goes last, so that no other command begins before the rest is gone.
    (out / ".lock").unlink(missing_ok=True)
    # Removing a directory that is not empty fails, and so ends the loop. Logs may have stayed,
    # or another command may have begun in the directory now.
    with contextlib.suppress(OSError):
        for directory in made:
            directory.rmdir()


def _log_with_traceback(out: Path) -> Path | None:
    """Return the first log of a rank that has a traceback, or None if no log has one."""
    for log in sorted((out / LOGS).rglob("*.log")):
        if "Traceback (most recent call last)" in log.read_text(errors="replace"):
            return log
    return None


def _measure_as_rank(settings: Any, out: Path) -> bool:
    """Run `advise_job` as one of the ranks of torchrun or srun, and return whether as rank 0.

    ``settings`` are the `AdviseSettings`. Rank 0 writes the tables of the job into ``out``.
    """
    from ddlkit.jobs.machines import shared_facts
    from ddlkit.jobs.rank import joined, layout
    from ddlkit.measure.advise import MEETING_S, advise_job
    from ddlkit.measure.cluster import link_of

    # These directories are made below, and removed again if nothing is measured.
    new_directories = _to_be_made(out)
    # `me` is this rank. MEETING_S is how long ranks wait until all of them have built the
    # model.
    with joined(MEETING_S) as me, only_command_in(out, me):
        # Rank 0 alone writes into the directory, and so removes what is left there.
        cleaning: AbstractContextManager[None] = contextlib.nullcontext()
        if me.rank == 0:
            # Ranks that a launcher started write no logs. Logs in the directory are those of an
            # earlier command, in which `_removing_leftovers` must not look for a traceback.
            shutil.rmtree(out / LOGS, ignore_errors=True)
            cleaning = _removing_leftovers(out, new_directories)
        with cleaning:
            shared_facts(me)  # refuses a mix of machines
            link = link_of(me, layout())
            advise_job.run(replace(me, out=out, link=link), settings)
    return me.rank == 0


def _measuring_times_s(arguments: argparse.Namespace) -> tuple[float, float]:
    """Return the seconds for measuring and for the trial, or raise UserError."""
    if not 0 < arguments.minutes < math.inf:
        raise UserError(
            f"--minutes {arguments.minutes:g}: give a finite time above zero"
        )
    if not 0 <= arguments.confirm_minutes < math.inf:
        raise UserError(
            f"--confirm-minutes {arguments.confirm_minutes:g}: give a finite time above "
            "zero, or 0 for a prediction that is not tried"
        )
    return 60 * arguments.minutes, 60 * arguments.confirm_minutes


def _default_directory(arguments: argparse.Namespace, ranks: int) -> Path:
    """Return the directory for a measurement, named after model, ranks, batches and lab.

    A second run of the same measurement thus continues from its tables.
    """
    # "p" is the number of ranks (processes), "k" the number of batches in an iteration.
    facts = [Path(arguments.model).name, f"p{ranks}", f"k{arguments.accumulate}"]
    if arguments.lab:
        facts.append(arguments.lab)
    # Characters that a file system may refuse, such as the colon of mine.py:net, become "-".
    return Path("advised") / re.sub(r"[^\w-]", "-", "-".join(facts))


def _launch(
    arguments: argparse.Namespace, settings: Any, ranks: int, out: Path
) -> None:
    """Measure and try plans by `advise_job`, in ``ranks`` processes of this machine.

    Messages go over loopback, between GPUs as NCCL chooses, or over the links of --lab.
    ``settings`` are the `AdviseSettings`. The job writes its tables into ``out``.
    """
    import torch

    from ddlkit.measure.advise import MEETING_S, advise_job
    from ddlkit.measure.parts import Ranks, ranks_in_lab

    if arguments.lab:
        rate_bits_per_s, delay_s = lab_rate(arguments.lab)
        processes, _name_of_table = ranks_in_lab(ranks, rate_bits_per_s, delay_s)
    else:
        gpus = torch.cuda.device_count()
        if gpus > ranks:
            print(unused_gpus(ranks, gpus), file=sys.stderr)
        processes = Ranks.of(ranks, device_of_own_ranks())
    # Ranks meet once each has built its model. A large one takes longer to build than ranks
    # wait for each other by default.
    processes = replace(processes, join={**processes.join, "timeout_s": MEETING_S})
    # Ranks that take several times as long as this are ended.
    estimate_s = MEETING_S + settings.measure_s + settings.confirm_s
    print_starting(ranks)
    processes.run(advise_job, settings, estimate_s=estimate_s, out=out)


def unused_gpus(ranks: int, gpus: int) -> str:
    """Return a line that says how many GPUs of this machine an advice leaves out.

    Examples
    --------
    >>> unused_gpus(ranks=2, gpus=8)
    'ddlkit: 2 ranks use 2 of the 8 GPUs here: give --ranks 8, or start it by torchrun'
    """
    return (
        f"ddlkit: {ranks} ranks use {ranks} of the {gpus} GPUs here: give --ranks "
        f"{gpus}, or start it by torchrun"
    )


def _result_and_advice(
    out: Path, ranks: int, with_trial: bool
) -> tuple[dict[str, Any], Any]:
    """Return the result to print and the `Advice`, both read from the tables in ``out``.

    ``with_trial`` says whether the user asked for a trial of the plans. If not, ``out`` may
    have the trial of an earlier command, which is not used.
    """
    from ddlkit import store
    from ddlkit.measure.advise import read_advice

    advice = read_advice(out)
    messages = store.load_table(out / "collectives.csv", "collectives")
    warnings = _warnings_of_times(messages)
    print_warnings(warnings)
    facts = {
        "network": store.read_profile(out / "layers.csv").network,
        "ranks": ranks,
        "measurements_directory": str(out),
        "warnings": warnings,
    }
    trials_path = out / "trials.csv"
    # The prediction decides unless there is a trial of this command. Even if the user asked for
    # one, it has left no table if this torch cannot use the best plans. If the default is the
    # only plan, there was nothing to compare it with.
    only_default = len(advice.options) == 1
    has_trial = with_trial and not only_default and store.has_table(trials_path)
    if not has_trial:
        result = {**facts, **advice.to_dict(), "decided_by": "prediction"}
        reasons = reasons_of_prediction(result, messages)
        result["why_intervals_are_wide"] = {"predicted_gain": reasons}
        return result, advice
    trials = store.load_table(trials_path, "trials")
    result = {**facts, **_result_of_trial(advice, trials, messages)}
    # JSON also has a warning of each measured iteration that contradicts its prediction. It was
    # not printed above, because the lines for a person say it below the plan.
    result["warnings"] = [*warnings, *_contradicted_predictions(result)]
    return result, advice


def _warnings_of_times(messages: DataFrame) -> list[str]:
    """Return warnings of message times that were disturbed, or are unusual for their sizes.

    ``messages`` is the table ``collectives`` that this command measured.
    """
    from ddlkit.model.fits import disturbed_sizes, strange_rows

    measure_again = (
        "run this command again on an idle machine, with a longer --minutes and another "
        "--out"
    )
    return [
        *disturbed_sizes(messages, remedy=measure_again),
        *strange_rows(messages, remedy=measure_again),
    ]


def _contradicted_predictions(result: Mapping[str, Any]) -> list[str]:
    """Return a warning for each plan whose measured iteration contradicts its prediction.

    ``result`` has summaries of two plans: PyTorch's default and the predicted best.
    """
    plans = [result["default_plan"]]
    # The default may itself be the predicted best.
    if result["predicted_best"] != "ddp":
        plans.append(result["best_plan"])
    warnings = []
    for plan in plans:
        # A plan that was not in the trial lacks this entry.
        if plan.get("outside_of_predicted_interval"):
            warnings.append(f"plan {plan['plan']}: {_contradiction(plan)}")
    return warnings


def _result_of_trial(
    advice: Any, trials: DataFrame, messages: DataFrame
) -> dict[str, Any]:
    """Return an advice that a trial decides, with the predicted and the measured gain.

    "why_intervals_are_wide" in the result has reasons for each of the two gains.
    ``trials`` and ``messages`` are the tables ``trials`` and ``collectives``.
    """
    # Each repeat in the table is a round of the trial, in which every plan (called policy)
    # trains for some iterations. `rounds` has a row for each round, a column for each
    # plan, and in each cell the median iteration in seconds.
    rounds = trials.pivot_table(
        values="seconds", index="repeat", columns="policy", aggfunc="median"
    )
    # The table has a row for each iteration, and each cell of `rounds` is the median of equally
    # many of them. `rounds.size` is the number of cells.
    iterations = len(trials) // rounds.size
    result: dict[str, Any] = {
        # With these numbers, `to_dict` also predicts the gain that this trial should measure.
        **advice.to_dict(rounds=len(rounds), iterations_per_round=iterations),
        "decided_by": "trial",
        "rounds": len(rounds),
        "iterations_per_round": iterations,
    }
    _add_measured_gain(result, rounds)
    _add_measured_iterations(result, rounds)
    result["why_intervals_are_wide"] = {
        "predicted_gain": reasons_of_prediction(result, messages),
        "measured_gain": reasons_of_trial(result, rounds),
    }
    return result


def _add_measured_gain(result: dict[str, Any], rounds: DataFrame) -> None:
    """Add the gains that a trial measured to ``result``, and replace its advice.

    Unless the trial supports the predicted best plan, "advice" becomes to keep the default.
    The advice before the trial stays as "predicted_advice". ``rounds`` has the seconds of an
    iteration, a row for each round and a column for each plan.
    """
    from ddlkit.model.advice import DEFAULT, KEEP, is_supported, measured_gain

    # The gain of each plan in the trial, with its interval.
    gains = {plan: measured_gain(rounds, plan) for plan in rounds}
    best = result["predicted_best"]
    result["predicted_advice"] = result["advice"]
    # The best plan is not in the trial if DDP made other buckets than the plan has. The
    # default has no gain over itself.
    has_gain = best in gains and best != DEFAULT
    if has_gain:
        _add_gain_of_best(result, gains[best])
    if not (has_gain and is_supported(gains[best])):
        result["advice"] = KEEP
    _add_largest_gain(result, gains)


def _add_gain_of_best(result: dict[str, Any], measured: Any) -> None:
    """Add to ``result`` what the predicted best plan gained in the trial.

    ``measured`` is that `Gain`. The entry "outside_of_predicted_interval" says whether the
    gain contradicts the prediction.
    """
    from ddlkit.model.advice import trial_result

    # This interval also contains the noise of the trial.
    lower, upper = result["predicted_gain_interval_in_trial"]
    result["measured_gain"] = measured.share
    result["measured_gain_interval"] = list(measured.interval)
    result["outside_of_predicted_interval"] = not lower <= measured.share <= upper
    result["trial_result"] = trial_result(measured)


def _add_largest_gain(result: dict[str, Any], gains: Mapping[str, Any]) -> None:
    """Add to ``result`` which plan gained the most in the trial, and how much.

    ``gains`` has the measured `Gain` of each plan in the trial, also that of the default,
    which is 0.
    """
    from ddlkit.model.advice import DEFAULT

    # Of plans with equal gains, the default is taken.
    largest_plan = DEFAULT
    for plan, gain in gains.items():
        if gain.share > gains[largest_plan].share:
            largest_plan = plan
    largest = gains[largest_plan]
    result["plan_of_largest_measured_gain"] = largest_plan
    result["largest_measured_gain"] = largest.share
    result["largest_measured_gain_interval"] = list(largest.interval)


def _add_measured_iterations(result: dict[str, Any], rounds: DataFrame) -> None:
    """Add the measured iteration of each plan to ``result``, and to two summaries in it.

    The summaries "default_plan" and "best_plan" also get the interval of the measured
    iteration, and whether that iteration is outside of the predicted interval. ``rounds`` has
    the seconds of an iteration, a row for each round and a column for each plan.
    """
    from ddlkit.core.fit import median_interval
    from ddlkit.model.advice import DEFAULT

    best = result["predicted_best"]
    result["measured_iteration_s_of_plans"] = rounds.median().to_dict()
    for plan, key in ((DEFAULT, "default_plan"), (best, "best_plan")):
        # The best plan is not in the trial if DDP made other buckets than the plan has.
        if plan not in rounds:
            continue
        summary = result[key]
        seconds = rounds[plan].to_numpy()
        measured_s = float(rounds[plan].median())
        lower_s, upper_s = summary["predicted_interval_s"]
        summary["measured_iteration_s"] = measured_s
        summary["measured_interval_s"] = list(median_interval(seconds))
        # The predicted interval is for single iterations, which scatter more than their
        # median. A median outside of it contradicts the prediction.
        is_inside = lower_s <= measured_s <= upper_s
        summary["outside_of_predicted_interval"] = not is_inside


# ---------------------------------------------------------------- why an interval is wide


def _is_narrow(interval: Sequence[float]) -> bool:
    """Return whether the interval of a gain needs no reason for its width."""
    from ddlkit.model.advice import WIDE

    # WIDE is the half-width from which on an interval counts as wide.
    lower, upper = interval
    return upper - lower < 2 * WIDE


def reasons_of_prediction(
    result: Mapping[str, Any], messages: DataFrame | None = None
) -> list[str]:
    """Return why the interval of a predicted gain is wide.

    Parameters
    ----------
    result : mapping
        The advice, as `Advice.to_dict` returns it.
    messages : DataFrame, optional
        Table ``collectives``, from which the cost of messages was fitted. Without it, the
        load of the machine is no reason, because it is not known.

    Returns
    -------
    list of str
        Sentences without a full stop; none if the interval is narrow.
    """
    if _is_narrow(result["predicted_gain_interval"]):
        return []
    reasons = []
    if messages is not None:
        reasons += _reasons_of_load(messages)
    # The size whose uncertain time widens the interval most. It is None only for a narrow
    # interval.
    size = units.format_bytes(result["measure_next_bytes"])
    reasons.append(f"the time of messages of {size} is the most uncertain")
    return reasons


def _reasons_of_load(messages: DataFrame) -> list[str]:
    """Return which load of the processors disturbed the times of messages, in words.

    ``messages`` is the table ``collectives``. Each of its rows has the shares of the
    processors that other programs ("others"), and other virtual machines of the host
    ("stolen"), used while a message was timed.
    """
    from ddlkit.model.calibration import OTHERS_LIMIT, STOLEN_LIMIT

    reasons = []
    others = float(messages["others"].max())
    stolen = float(messages["stolen"].max())
    if others > OTHERS_LIMIT:
        reasons.append(
            f"other programs used up to {others:.0%} of the processors while "
            "messages were timed: measure again on an idle machine, into another --out"
        )
    if stolen > STOLEN_LIMIT:
        reasons.append(
            f"the host of this virtual machine took up to {stolen:.0%} of the "
            "processors while messages were timed"
        )
    return reasons


def reasons_of_trial(result: Mapping[str, Any], rounds: DataFrame) -> list[str]:
    """Return why the interval of a measured gain is wide.

    Parameters
    ----------
    result : mapping
        The advice, with the gain that the trial measured, if it measured one.
    rounds : DataFrame
        Seconds of an iteration: a row for each round, a column for each plan.

    Returns
    -------
    list of str
        Sentences without a full stop; none if the interval is narrow.
    """
    from ddlkit.model.advice import DEFAULT, Gain, is_decided

    # There is no measured gain if the best plan is the default, or was not in the trial.
    if "measured_gain" not in result or _is_narrow(result["measured_gain_interval"]):
        return []
    reasons = []
    n_rounds = len(rounds)
    # The share of slower rounds is not in the result. It is not needed here, because
    # `is_decided` looks at the interval alone.
    measured = Gain(
        result["measured_gain"],
        result["measured_gain_interval"],
        slower_share=math.nan,
    )
    # More time gives more rounds only to a trial that is not decided. A decided one ends at once.
    if n_rounds < FEW_ROUNDS and not is_decided(measured):
        reasons.append(
            f"the trial has only {n_rounds} rounds: a longer --confirm-minutes may allow "
            "more"
        )
    default_s = rounds[DEFAULT]
    interquartile_range_s = default_s.quantile(0.75) - default_s.quantile(0.25)
    variation = float(interquartile_range_s / default_s.median())
    if variation > VARIATION_LIMIT:
        reasons.append(
            f"iterations of one plan varied by {variation:.0%} from round to round, as "
            "they do on a busy machine"
        )
    return reasons


FEW_ROUNDS = 12
"""Below this number of rounds, more rounds narrow an interval much."""
VARIATION_LIMIT = 0.05
"""On a quiet machine, the interquartile range of the default's rounds is at most this share of
their median."""


# ---------------------------------------------------------------- what a person reads


def snippet(advice: Any, chosen: str) -> str:
    """Return the line of Python that does what was advised.

    Parameters
    ----------
    advice : Advice
        The options for the buckets.
    chosen : str
        The name of the advised option, or the advice to keep the default.

    Returns
    -------
    str
        A call of DistributedDataParallel.
    """
    # The advice to keep the default is the name of no option. "ddp" is the default itself.
    if chosen not in advice.options or chosen == "ddp":
        return "DistributedDataParallel(model)"
    # "ddp:10MiB" is the plan of DDP with that bucket cap. The option bucket_cap_mb is in MiB.
    if chosen.startswith("ddp:"):
        _, _, cap = chosen.partition(":")
        cap_mib = units.parse_bytes(cap) / units.MIB
        return f"DistributedDataParallel(model, bucket_cap_mb={cap_mib:g})"
    from ddlkit.formats.export import bucket_caps_mb

    # Any other plan is a list of buckets.
    caps = bucket_caps_mb(advice.options[chosen].iteration.group_bytes)
    return f"DistributedDataParallel(model, bucket_cap_mb_list={caps})"


LIST_REMARK = (
    "  # needs torch 2.11; with unused parameters or torch.compile, "
    "check which buckets DDP made"
)
"""The comment below a line of Python with bucket_cap_mb_list."""


EXPLANATIONS = (
    "An iteration is a forward pass, a backward pass, the exchange of all gradients and an",
    "update. Exposed communication is what the exchange adds to an iteration: the iteration",
    "less its compute alone. The scaling factor is the compute alone over the iteration.",
    "A gain is the share by which an iteration is shorter than under PyTorch's default.",
    "Parentheses hold 95% intervals: of single iterations where predicted, of the median of",
    "the rounds where measured. In a round of the trial all plans train in turn.",
    "The drawing has intervals of gains in the long run. They decide whether a change is",
    "proposed. The interval of the gain that the trial should measure is wider, because it",
    "also includes the noise of the trial.",
)
"""Lines that explain the terms of an advice to a reader of the page alone."""

_LIST = "a list of buckets"
_LISTS_IN_WORDS = {
    "exact": f"{_LIST} from a search of all lists (plan exact)",
    "mg_wfbp": f"{_LIST} by the rule of MG-WFBP (plan mg_wfbp)",
    "search": f"{_LIST} from a local search (plan search)",
}


def in_words(plan: str) -> str:
    """Return what a plan is, as a person reads it.

    Parameters
    ----------
    plan : str
        The name of one of the options of an advice.

    Returns
    -------
    str
        "PyTorch's default", or the option of DistributedDataParallel that makes all
        buckets of the plan. All other plans are lists of buckets, and the words say how
        the list was found.

    Examples
    --------
    >>> in_words("ddp"), in_words("ddp:10MiB")
    ("PyTorch's default", 'bucket_cap_mb=10')
    >>> in_words("mg_wfbp")
    'a list of buckets by the rule of MG-WFBP (plan mg_wfbp)'
    """
    if plan == "ddp":
        return "PyTorch's default"
    # The option bucket_cap_mb is in MiB.
    if plan.startswith("ddp:"):
        _, _, cap = plan.partition(":")
        cap_mib = units.parse_bytes(cap) / units.MIB
        return f"bucket_cap_mb={cap_mib:g}"
    # A planner without words of its own is only named.
    return _LISTS_IN_WORDS.get(plan, f"{_LIST} (plan {plan})")


def screen(result: dict[str, Any]) -> list[str]:
    """Return an advice as the lines that a person reads.

    Parameters
    ----------
    result : dict
        The advice as ``ddlkit advise --json`` prints it.

    Returns
    -------
    list of str
        A title, and a line for each fact.
    """
    subject = str(result["network"])
    # A cost does not always say between how many ranks it holds.
    if result["ranks"] is not None:
        subject += f" on {result['ranks']} ranks"
    lines = [f"{subject}: {_headline(result)}", ""]
    # Without measured slowdowns, the predicted intervals include only some of the causes
    # by which iterations differ. This text names them, as in "the scatter and drift of
    # messages; not included: ...". It is empty if the intervals include all causes.
    causes_included = result.get("interval_includes") or ""
    cause, _, _ = causes_included.partition("; ")
    # "ddp" is the name of PyTorch's default.
    lines += _plan_lines(in_words("ddp"), result["default_plan"], only_cause=cause)
    if result["predicted_best"] != "ddp":
        lines += _best_plan_lines(result, only_cause=cause)
    # Only a trial adds this entry.
    if "measured_gain" in result:
        lines += _measured_gain_lines(result)
    lines += _also_tried_lines(result)
    lines += _largest_gain_lines(result)
    # This line is about all predicted intervals in the lines above.
    if causes_included:
        lines.append(_line("intervals include only", causes_included))
    lines += _limit_lines(result)
    lines += ["", result["snippet"]]
    if "bucket_cap_mb_list" in result["snippet"]:
        lines.append(LIST_REMARK)
    return lines


def _best_plan_lines(result: Mapping[str, Any], *, only_cause: str) -> list[str]:
    """Return lines with the predicted best plan, its predicted gain, and why that is uncertain.

    ``only_cause`` names the scatter to which the predicted interval is limited, as in "the
    scatter and drift of messages". It is empty if the interval includes all causes of scatter.
    """
    name = f"predicted best: {in_words(result['predicted_best'])}"
    reasons = result["why_intervals_are_wide"].get("predicted_gain", [])
    return [
        *_plan_lines(name, result["best_plan"], only_cause=only_cause),
        _line("predicted gain", _predicted_gain(result)),
        *_reason_lines(reasons),
    ]


def _also_tried_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a line with the measured iteration of each plan that has no other lines.

    PyTorch's default and the predicted best plan have lines of their own.
    """
    lines = []
    # Without a trial, no plan has a measured iteration.
    measured_s = result.get("measured_iteration_s_of_plans", {})
    for plan in measured_s:
        if plan not in ("ddp", result["predicted_best"]):
            iteration = units.format_seconds(measured_s[plan])
            lines.append(_line("also tried", f"{in_words(plan)}: measured {iteration}"))
    return lines


def _largest_gain_lines(result: Mapping[str, Any]) -> list[str]:
    """Return a line on the plan that gained the most in the trial, against the prediction.

    There is no such line without a trial, or if that plan is the predicted best one.
    """
    best = result["predicted_best"]
    # Only a trial adds this entry.
    plan = result.get("plan_of_largest_measured_gain", best)
    if plan == best:
        return []
    # If the default has the largest gain, which is 0, no plan gained anything over it.
    if plan == "ddp":
        return [_line("fastest in the trial", in_words("ddp"))]
    interval = result["largest_measured_gain_interval"]
    gain = _gain_with_interval(result["largest_measured_gain"], interval)
    text = (
        f"{gain} with {in_words(plan)}, the median of the gains of "
        f"{result['rounds']} rounds"
    )
    lower, upper = interval
    # If the interval contains 0, the plan perhaps gains nothing.
    if lower <= 0 <= upper:
        text += ": no difference could be measured"
    else:
        text += (
            "; not advised, because another plan was predicted to be the fastest, and the "
            "largest of several measured gains is partly due to chance"
        )
    # The line does not call this plan the fastest, because another one may have a shorter
    # median time. The plan of the largest gain has the largest median of the gains of the rounds.
    return [_line("largest measured gain", text)]


def _predicted_gain(result: Mapping[str, Any]) -> str:
    """Return the predicted gain of the best plan with its interval or intervals."""
    in_trial = result.get("predicted_gain_interval_in_trial")
    interval = result["predicted_gain_interval"]
    if in_trial is None:
        return _gain_with_interval(result["predicted_gain"], interval)
    # With a trial there is a second interval, which also contains the trial's noise.
    lower, upper = interval
    lower_in_trial, upper_in_trial = in_trial
    return (
        f"{result['predicted_gain']:+.1%} ({lower:+.1%} to {upper:+.1%}; a trial of this "
        f"length should measure {lower_in_trial:+.1%} to {upper_in_trial:+.1%})"
    )


def _measured_gain_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines with the gain of the best plan in the trial, and why it is uncertain."""
    measured = _gain_with_interval(
        result["measured_gain"], result["measured_gain_interval"]
    )
    measured += f", the median of the gains of {result['rounds']} rounds: {result['trial_result']}"
    # The measured gain was compared with the interval that was predicted for this trial, which
    # is wider than that of the predicted gain, because a trial has noise.
    if result["outside_of_predicted_interval"]:
        measured += "; outside of what a trial of this length should measure"
    reasons = result["why_intervals_are_wide"].get("measured_gain", [])
    return [_line("measured gain", measured), *_reason_lines(reasons)]


def _limit_lines(result: Mapping[str, Any]) -> list[str]:
    """Return lines that say what limits the training, what would help, and what to measure."""
    from ddlkit.model.advice import ANOTHER_PLAN, HALF_THE_BYTES

    lines = [_line("limited by", _limit(result))]
    # The time per sample is compared, because one of the remedies changes the batch.
    name = "predicted time per sample"
    for remedy, gain in result["time_per_sample_shorter_by"].items():
        # The gain of the best plan has a line of its own, unless the best plan is the default,
        # which has no gain.
        if remedy == ANOTHER_PLAN:
            continue
        change = "longer" if gain < 0 else "shorter"
        text = f"{abs(gain):.1%} {change} with {remedy}"
        if remedy == HALF_THE_BYTES and gain < 0:
            text += (
                ", of which DDP puts more into a bucket, so that messages begin later"
            )
        lines.append(_line(name, text))
        # The name stands before the first remedy alone.
        name = ""
    # The uncertain time of messages of this size widens the interval of the predicted gain most.
    # It is None if this interval is narrow.
    next_bytes = result["measure_next_bytes"]
    if next_bytes:
        size = units.format_bytes(next_bytes)
        lines.append(_line("most uncertain", f"the time of messages of {size}"))
    return lines


def _limit(result: Mapping[str, Any]) -> str:
    """Return in words what limits the training under PyTorch's default plan.

    The words include the share of the iteration that is exposed communication.
    """
    default_plan = result["default_plan"]
    exposed_s = default_plan["exposed_communication_s"]
    share = exposed_s / default_plan["predicted_iteration_s"]
    exposed = f"{share:.0%} of the iteration is exposed communication"
    if result["limited_by"] == "compute":
        return f"compute ({exposed})"
    # Otherwise a part of communication, such as the bandwidth, limits the training.
    return f"{result['limited_by']}, the largest part of communication ({exposed})"


def _reason_lines(reasons: Sequence[str]) -> list[str]:
    """Return a line for each reason why the interval in the line above is wide."""
    return [_line("", f"the interval is wide because {reason}") for reason in reasons]


def _headline(result: Mapping[str, Any]) -> str:
    """Return in a few words what to do, and whether that was tried or only predicted."""
    from ddlkit.model.advice import KEEP

    # The name of a plan other than the default, or "keep the default".
    advised = result["advice"]
    if advised == KEEP:
        return f"{advised}: {_why_keep(result)}"
    # A trial that leaves another advice than to keep the default has confirmed the plan.
    if result["decided_by"] == "trial":
        return f"use {in_words(advised)}"
    return f"{in_words(advised)} is predicted to be faster, and was not tried"


def _why_keep(result: Mapping[str, Any]) -> str:
    """Return in words why the advice is to keep PyTorch's default.

    The words also say if no plan was tried.
    """
    from ddlkit.model.advice import KEEP, WORTH

    # A trial that was run has decided, and its result also has "predicted_advice", the advice
    # before the trial. It has "trial_result" only if the predicted best plan was tried and is
    # not the default.
    had_trial = result["decided_by"] == "trial"
    # If a plan was advised before the trial, the trial did not confirm it, or could not try it.
    if had_trial and result["predicted_advice"] != KEEP:
        return str(result.get("trial_result", "the best plan could not be tried"))
    # From here on, the prediction alone already advised to keep the default, with or without a
    # trial. The entry below is true only if there was a trial, in which the iteration of the
    # default was outside of its predicted interval.
    if result["default_plan"].get("outside_of_predicted_interval"):
        return _why_keep_after_failed_prediction(result)
    not_tried = "" if had_trial else " (predicted, not tried)"
    # "ddp" is the default itself.
    if result["predicted_best"] == "ddp":
        return f"no plan is predicted to be faster{not_tried}"
    # Another plan is predicted to be faster, but perhaps by less than WORTH, from which on a
    # change is advised. If even the upper end of the interval of its gain is below WORTH, the
    # words say so without "may be".
    _, highest_gain = result["predicted_gain_interval"]
    verb = "is" if highest_gain < WORTH else "may be"
    reason = f"the predicted gain {verb} below the {WORTH:.0%} from which a change is advised"
    if "trial_result" in result:
        # Even a gain in the trial does not change the advice, which needs a predicted gain, too.
        conjunction = "although" if _is_gain_measured(result) else "and"
        return f"{reason}, {conjunction} in the trial {result['trial_result']}"
    return f"{reason}{not_tried}"


def _why_keep_after_failed_prediction(result: Mapping[str, Any]) -> str:
    """Return in words why the default is kept if its measured iteration was not predicted."""
    # If the default is predicted to be the fastest, the result of the trial, which may have had
    # other plans, does not matter.
    if result["predicted_best"] == "ddp":
        return "no plan is predicted to be faster, but the prediction failed"
    # Without this entry the best plan was not in the trial, because DDP made other buckets than
    # the plan has.
    if "trial_result" not in result:
        return "the prediction failed, and the best plan could not be tried"
    if _is_gain_measured(result):
        return (
            "the trial measured a gain, but the prediction failed, and a change is advised "
            "only if both show a gain"
        )
    return f"the prediction failed, and in the trial {result['trial_result']}"


def _is_gain_measured(result: Mapping[str, Any]) -> bool:
    """Return whether the trial of the best plan supports a change from the default to it."""
    from ddlkit.model.advice import GAIN_WAS_MEASURED

    return bool(result["trial_result"] == GAIN_WAS_MEASURED)


NAME_COLUMNS = 28
"""The width of the names at the left of an advice's lines."""


def _line(name: str, text: str) -> str:
    """Return a line with a name at its left, as wide as the names of all lines."""
    return f"{name:<{NAME_COLUMNS}} {text}"


def _plan_lines(name: str, plan: Mapping[str, Any], *, only_cause: str) -> list[str]:
    """Return lines with the iteration of a plan: predicted, measured, and its parts.

    ``name`` is what a person calls the plan, and ``plan`` its summary in the result.
    ``only_cause`` names the scatter to which the predicted interval is limited, as in "the
    scatter and drift of messages". It is empty if the interval includes all causes of scatter.
    """
    times = f"predicted {_predicted_iteration(plan, only_cause)}"
    contradiction_lines = []
    # Without a trial, or if the plan was not in it, nothing was measured.
    if "measured_iteration_s" in plan:
        measured_s = plan["measured_iteration_s"]
        measured = _seconds_with_interval(measured_s, plan["measured_interval_s"])
        times += f", measured {measured}"
        if plan["outside_of_predicted_interval"]:
            contradiction_lines.append(_line("", _contradiction(plan)))
    exposed = units.format_seconds(plan["exposed_communication_s"])
    parts = (
        f"predicted: exposed communication {exposed}, scaling factor "
        f"{plan['scaling_factor']:.2f}, number of messages {plan['message_count']}"
    )
    further_lines = [*contradiction_lines, _line("", parts)]
    # A name that is longer than its column has a line of its own.
    if len(name) > NAME_COLUMNS:
        return [name, _line("", times), *further_lines]
    return [_line(name, times), *further_lines]


def _predicted_iteration(plan: Mapping[str, Any], only_cause: str) -> str:
    """Return the predicted iteration of a plan and its interval, in words.

    ``plan`` is the summary of the plan in the result. ``only_cause`` names the scatter to which
    the interval is limited, and is empty if the interval includes all causes of scatter.
    """
    iteration_s = plan["predicted_iteration_s"]
    interval_s = plan["predicted_interval_s"]
    if not only_cause:
        return f"{_seconds_with_interval(iteration_s, interval_s)} an iteration"
    # An interval with few causes may be so narrow that both ends are rounded to the same
    # number, as if the prediction were certain. So the relative distances of the ends from the
    # prediction are printed instead.
    lower_s, upper_s = interval_s
    lower_distance = lower_s / iteration_s - 1
    upper_distance = upper_s / iteration_s - 1
    distances = f"{lower_distance:+.2%} to {upper_distance:+.2%}"
    # Percentages with two decimals hardly show distances below 0.01%. The lower one is
    # below zero.
    if max(-lower_distance, upper_distance) < 0.0001:
        distances = "less than 0.01% either way"
    return (
        f"{units.format_seconds(iteration_s)} an iteration "
        f"({distances} by {only_cause} alone)"
    )


def _contradiction(plan: Mapping[str, Any]) -> str:
    """Return in words that the measured iteration of a plan contradicts the prediction."""
    ratio = plan["measured_iteration_s"] / plan["predicted_iteration_s"]
    return (
        f"the measured iteration is {ratio:.2g} times the predicted one and outside of "
        "its interval: do not trust predictions of this training, and measure it again on "
        "an idle machine, with a longer --minutes and into another --out; if they differ "
        "again, trust only the measured times"
    )


def _seconds_with_interval(seconds: float, interval_s: Sequence[float]) -> str:
    """Return a time and its interval, as in "20 ms (18 ms to 23 ms)"."""
    lower, upper = map(units.format_seconds, interval_s)
    return f"{units.format_seconds(seconds)} ({lower} to {upper})"


def _gain_with_interval(gain: float, interval: Sequence[float]) -> str:
    """Return a gain and its interval, as in "+4.0% (+2.5% to +5.5%)"."""
    lower, upper = interval
    return f"{gain:+.1%} ({lower:+.1%} to {upper:+.1%})"
