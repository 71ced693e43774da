"""The command ``advise``: from a model, or from tables, to a decision about its buckets."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddlkit.cli.command import (
    JSON,
    LAB_LINKS,
    MODEL_FUNCTION,
    OUTPUT,
    arg,
    command,
    group,
    lab_rate,
    number,
    require_lab,
    require_model_file,
    show,
)
from ddlkit.cli.inputs import (
    OPTIONAL_INPUTS,
    SHARDED,
    forecast_of,
    is_sharded,
    predict_sharded,
    print_warnings,
)
from ddlkit.core import units
from ddlkit.core.errors import UserError

UNIT_SIZES = ("size:2MB", "size:10MB", "size:50MB", "size:250MB")
"""Ways to make units that are compared with those that the user asks for."""

_MODEL = f"""Measure the training of your own model, which the function FUNCTION in
FILE.py returns. {MODEL_FUNCTION} Under torchrun or srun the ranks are their
processes; otherwise --ranks processes of this machine, 2 by default."""


@command(
    "Advise on the buckets of DistributedDataParallel: what to change, how much that "
    "gains, and what limits the training. Measure your model with --model, or give "
    "tables with --profile and --collectives.",
    *group(
        "a model that is measured here",
        arg("--model", metavar="FILE.py:FUNCTION", help=_MODEL),
        arg(
            "--minutes",
            type=number,
            metavar="MINUTES",
            default=3.0,
            help="The time for measuring and predicting, in minutes. [default: 3]",
        ),
        arg(
            "--confirm-minutes",
            type=number,
            metavar="MINUTES",
            default=3.0,
            help="The time for training under the best plans, in minutes. [default: 3]",
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
            "run continues from them. [default: a directory in advised/, named "
            "after the model]",
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
    *OPTIONAL_INPUTS,
    *SHARDED,
    example="ddlkit advise --model mine.py:net",
)
def advise(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit advise``."""
    if is_sharded(arguments):
        _rank_units(arguments)
        return
    if arguments.model and arguments.profile:
        raise UserError(
            "give --model, whose training is measured, or --profile with tables, and "
            "not both"
        )
    if not (arguments.model or arguments.profile):
        raise UserError(
            "give --model, whose training is measured, or --profile and --collectives"
        )
    if arguments.html:
        from ddlkit.show import WRITING_A_PAGE, needs

        needs("--html", WRITING_A_PAGE)
    if arguments.model:
        result, advice = _advice_by_measuring(arguments)
    else:
        result, advice = _advice_from_tables(arguments)
    # Only rank 0 has an advice.
    if not advice:
        return
    result["snippet"] = snippet(advice, result["advice"])
    if arguments.json:
        show(result, as_json=True)
    else:
        print("\n".join(screen(result)))
    if arguments.html:
        from ddlkit.show import write_advice

        write_advice(advice, screen(result), arguments.html)


def _rank_units(arguments: argparse.Namespace) -> None:
    """Print ways to make units for sharded training, the fastest first.

    They are the ways that --units lists, and units of some sizes.
    """
    from pandas import DataFrame

    if arguments.model or not arguments.profile:
        raise UserError(
            "advise --strategy fsdp: give --profile and --collectives, no --model"
        )
    asked = [spec for spec in (arguments.units or "").split(";") if spec]
    rows = predict_sharded(arguments, *asked, *UNIT_SIZES)
    rows.sort(key=lambda row: float(row["iteration_s"]))
    if arguments.json:
        show({"ranked": rows}, as_json=True)
        return
    not_shown = ["level", "interval_holds", "compute_s", "workers"]
    table = DataFrame(rows).drop(columns=not_shown)
    print(table.to_string(index=False))
    print(f"\nintervals hold only {rows[0]['interval_holds']}")


def _advice_from_tables(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Predict from tables, and return the result to print and the `Advice`."""
    from ddlkit.model.advice import DEFAULT, Advice

    forecast, warnings, profile, communication = forecast_of(arguments, DEFAULT)
    if not communication.draws:
        raise UserError(
            f"{arguments.cost} is a cost without draws, so that an advice has no "
            "intervals: give --collectives, or write the cost by ddlkit fit --json"
        )
    advice = Advice.of(forecast.iteration.workload, communication)
    result = {
        "network": profile.network,
        "workers": communication.cost.workers,
        **advice.to_dict(),
        "interval_holds": forecast.interval_holds,
        "warnings": warnings,
    }
    return result, advice


# ---------------------------------------------------------------- measuring the user's model


def _advice_by_measuring(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Measure, predict and try plans, and return the result to print and the `Advice`.

    On all ranks but rank 0 the result is empty and the advice is None.
    """
    # Refused before the imports below load torch, which takes seconds.
    lab_rate(arguments.lab)
    require_lab(arguments.lab)
    require_model_file(arguments.model)
    from ddlkit.jobs.rank import joined
    from ddlkit.measure.advise import MEETING_S, AdviseSettings, advise_job

    measure_s = 60 * arguments.minutes
    confirm_s = 60 * arguments.confirm_minutes
    if min(measure_s, confirm_s) <= 0:
        raise UserError("--minutes and --confirm-minutes must be above zero")
    settings = AdviseSettings(
        model=arguments.model,
        accumulate=arguments.accumulate,
        measure_s=measure_s,
        confirm_s=confirm_s,
    )
    # torchrun or srun may have started several copies of this command, each a rank.
    # Otherwise this process starts the ranks.
    ranks_outside = _ranks_started_outside()
    if ranks_outside > 1:
        ranks = ranks_outside
    else:
        ranks = arguments.ranks or 2
    out = arguments.out or _default_directory(arguments, ranks)
    try:
        if ranks_outside > 1:
            with joined(MEETING_S) as me:
                advise_job.run(replace(me, out=out), settings)
            if me.rank != 0:
                return {}, None
        else:
            _launch(arguments, settings, ranks, out)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was measured is kept in {out}") from None
    return _with_trials(out, ranks)


def _ranks_started_outside() -> int:
    """Return how many ranks torchrun or srun started, 1 if neither did."""
    return int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def _default_directory(arguments: argparse.Namespace, ranks: int) -> Path:
    """Return a directory for what decides the measurements: model, ranks, batches and lab."""
    facts = [Path(arguments.model).name, f"p{ranks}", f"k{arguments.accumulate}"]
    if arguments.lab:
        facts.append(arguments.lab)
    return Path("advised") / re.sub(r"[^\w-]", "-", "-".join(facts))


def _launch(
    arguments: argparse.Namespace, settings: Any, ranks: int, out: Path
) -> None:
    """Run the job in ranks of this machine, over its loopback or over emulated links."""
    from ddlkit.jobs.launch import Loopback
    from ddlkit.measure.advise import MEETING_S, advise_job
    from ddlkit.measure.parts import Ranks, ranks_in_lab

    if arguments.lab:
        rate_bits_per_s, delay_s = lab_rate(arguments.lab)
        members, _ = ranks_in_lab(ranks, rate_bits_per_s, delay_s)
    else:
        members = Ranks(ranks, place=Loopback, join={})
    # A large model takes longer to build than ranks may take to meet by default.
    members = replace(members, join={**members.join, "timeout_s": MEETING_S})
    estimate_s = MEETING_S + settings.measure_s + settings.confirm_s
    members.run(advise_job, settings, estimate_s=estimate_s, out=out)


def _with_trials(out: Path, ranks: int) -> tuple[dict[str, Any], Any]:
    """Return the result to print of the tables in ``out``, and the `Advice`."""
    from ddlkit import store
    from ddlkit.measure.advise import LISTS, read_advice
    from ddlkit.model.advice import DEFAULT, KEEP, WORTH, measured_gain
    from ddlkit.model.fits import strange_rows

    advice = read_advice(out)
    messages = store.load_table(out / "collectives.csv", "collectives")
    warnings = [*strange_rows(messages)]
    print_warnings(warnings)
    trials = store.load_table(out / "trials.csv", "trials")
    # The median iteration of each policy (columns) in each round (rows).
    rounds = trials.pivot_table(
        values="seconds", index="repeat", columns="policy", aggfunc="median"
    )
    iterations = len(trials) // rounds.size
    # The default is among the policies, with a gain of 0.
    gains = {policy: measured_gain(rounds, policy) for policy in rounds}
    result = {
        "network": trials["network"].iloc[0],
        "workers": ranks,
        "tables": str(out),
        **advice.to_dict(len(rounds), iterations),
        "rounds": len(rounds),
        "iterations": iterations,
        "warnings": warnings,
    }
    result["predicted_advice"] = result["advice"]
    measured = gains.get(result["best"])
    if measured:
        lower, upper = result["gain_interval"]
        result["measured_gain"] = measured.share
        result["measured_interval"] = list(measured.interval)
        result["disagrees"] = not lower <= measured.share <= upper
    # Without bucket_cap_mb_list (before torch 2.11) the best plan could not be tried, so that the
    # prediction decides alone.
    confirmed = measured is not None and measured.interval[1] >= WORTH
    if LISTS and not confirmed:
        result["advice"] = KEEP

    # If the default and another policy have the same gain, the default is best.
    def merit(policy: str) -> tuple[float, bool]:
        return gains[policy].share, policy == DEFAULT

    result["measured_best"] = max(gains, key=merit)
    return result, advice


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
    if chosen not in advice.options or chosen == "ddp":
        return "DistributedDataParallel(model)"
    if chosen.startswith("ddp:"):
        cap_bytes = units.parse_bytes(chosen.partition(":")[2])
        cap_mib = cap_bytes / units.MIB
        return f"DistributedDataParallel(model, bucket_cap_mb={cap_mib:g})"
    from ddlkit.formats.export import bucket_caps_mb

    caps = bucket_caps_mb(advice.options[chosen].iteration.group_bytes)
    return f"DistributedDataParallel(model, bucket_cap_mb_list={caps})"


LIST_REMARK = (
    "  # needs torch 2.11; with unused parameters, several dtypes or torch.compile, "
    "check which buckets DDP made"
)


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
    best = result["best"]
    lines = [
        f"{result['network']} on {result['workers']} ranks: {result['advice']}",
        "",
    ]
    holds = result.get("interval_holds", "")
    lines.append(_plan_line("PyTorch's default", result["default_plan"], holds))
    lines.append(_plan_line(f"best plan, {best}", result["best_plan"], holds))
    predicted = _gain(result["gain"], result["gain_interval"])
    slower = f"slower with a probability of {result['probability_slower']:.0%}"
    lines.append(_line("predicted gain", f"{predicted}; {slower}"))
    if "measured_gain" in result:
        measured = _gain(result["measured_gain"], result["measured_interval"])
        text = f"{measured}, {result['rounds']} rounds"
        if result["disagrees"]:
            text += "; outside of the predicted interval"
        lines.append(_line("measured gain", text))
    measured_best = result.get("measured_best", best)
    if measured_best != best:
        lines.append(_line("measured best", measured_best))
    # What was not measured makes every interval above too narrow.
    if holds:
        lines.append(_line("intervals hold only", holds))
    lines.append(_line("limited by", result["limited_by"]))
    for remedy, gain in result["shorter_by"].items():
        lines.append(_line("", f"{gain:+.1%} by {remedy}"))
    next_bytes = result["measure_next_bytes"]
    if next_bytes:
        lines.append(_line("measure this size next", units.format_bytes(next_bytes)))
    lines += ["", result["snippet"]]
    if "bucket_cap_mb_list" in result["snippet"]:
        lines.append(LIST_REMARK)
    return lines


def _line(name: str, text: str) -> str:
    return f"{name:<28} {text}"


def _plan_line(name: str, plan: dict[str, Any], interval_holds: str) -> str:
    lower_s, upper_s = plan["interval_s"]
    times = [plan["iteration_s"], lower_s, upper_s, plan["exposed_communication_s"]]
    iteration, lower, upper, exposed = map(units.format_seconds, times)
    interval = f"{lower} to {upper}"
    if interval_holds:
        # Two ends that round to the same number would look like a measured interval.
        spread = (upper_s - lower_s) / plan["iteration_s"]
        interval = f"messages alone spread it by {spread:.2%}"
    return _line(
        name,
        f"{iteration} an iteration ({interval}), {exposed} exposed communication, "
        f"scaling factor {plan['scaling_factor']:.2f}",
    )


def _gain(share: float, interval: Sequence[float]) -> str:
    lower, upper = interval
    return f"{share:+.1%} ({lower:+.1%} to {upper:+.1%})"
