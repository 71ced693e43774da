"""The command from a model, or tables of one, to a decision: which buckets, what they gain, what limits."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddlkit.cli.command import JSON, arg, command, lab_rate, require_lab, show
from ddlkit.cli.predicting import OPTIONAL, STRATEGY, forecast_of, is_sharded, sharded
from ddlkit.core import units
from ddlkit.core.errors import UserError

SIZES = [f"size:{size}MB" for size in (2, 10, 50, 250)]  # compared with what is asked
_MODEL = """whose training is measured here: the function gives (model, loss) or (model, loss, optimizer); or
torchvision:resnet50:32; under torchrun or srun in each of their ranks, else in --ranks of this machine [2]"""


@command(
    "advise on DDP's buckets: what to change, what that gains, and what limits",
    arg("--model", metavar="FILE.py:FUNCTION", help=_MODEL),
    arg(
        "--minutes",
        type=float,
        default=3.0,
        help="of a model: to measure and predict in [3]",
    ),
    arg("--confirm-minutes", type=float, default=3.0, help="to try the advice in [3]"),
    arg(
        "--lab", metavar="RATE[,DELAY]", help="over emulated links, as 1gbit [loopback]"
    ),
    arg("--out", type=Path, help="directory for what is measured [advised/...]"),
    arg("--html", type=Path, metavar="FILE", help="a page that needs no network, too"),
    *OPTIONAL,
    *STRATEGY,
    JSON,
)
def advise(arguments: argparse.Namespace) -> None:
    if is_sharded(arguments):
        return _units(arguments)
    if bool(arguments.model) == bool(arguments.profile):
        raise UserError(
            "give --model, whose training is measured, or --profile and --collectives"
        )
    if arguments.html:
        from ddlkit.show import WRITING_A_PAGE, needs

        needs("--html", WRITING_A_PAGE)
    result, advice = (_measured if arguments.model else _of_tables)(arguments)
    if advice:  # on rank 0
        result["snippet"] = snippet(advice, result["advice"])
        show(result, True) if arguments.json else print("\n".join(screen(result)))
        if arguments.html:
            from ddlkit.show import write_advice

            write_advice(advice, screen(result), arguments.html)


def _units(arguments: argparse.Namespace) -> None:
    """Print ways to make units of a profile, those of --units and some by size, the fastest first."""
    from pandas import DataFrame

    if arguments.model or not arguments.profile:
        raise UserError(
            "advise --strategy fsdp: give --profile and --collectives, no --model"
        )
    specs = [*filter(None, (arguments.units or "").split(";")), *SIZES]
    rows = sorted(sharded(arguments, *specs), key=lambda row: float(row["iteration_s"]))
    shown = DataFrame(rows).drop(columns=["level", "compute_s", "workers"])
    show({"ranked": rows}, True) if arguments.json else print(
        shown.to_string(index=False)
    )


def _of_tables(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    from ddlkit.model.advice import DEFAULT, Advice

    predicted, doubtful, profile, messages = forecast_of(arguments, DEFAULT)
    advice = Advice.of(predicted.iteration.workload, messages)
    of = {"network": profile.network, "workers": messages.cost.workers}
    return {**of, **advice.to_dict(), "warnings": doubtful}, advice


def _measured(arguments: argparse.Namespace) -> tuple[dict[str, Any], Any]:
    """Return what to show, and the advice, once all is measured; None but on rank 0."""
    lab_rate(arguments.lab)  # refused before anything else
    require_lab(arguments.lab)
    from ddlkit import store
    from ddlkit.jobs.rank import joined
    from ddlkit.measure.advise import (
        LISTS,
        MEETING_S,
        AdviseSettings,
        advise_job,
        read_advice,
    )
    from ddlkit.model.advice import DEFAULT, KEEP, WORTH, measured_gain

    seconds = [60 * arguments.minutes, 60 * arguments.confirm_minutes]
    if min(seconds) <= 0 or arguments.accumulate < 1:
        raise UserError(
            "--minutes, --confirm-minutes and --accumulate must be above zero"
        )
    settings = AdviseSettings(arguments.model, arguments.accumulate, *seconds)
    outside = int(os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)
    ranks = outside if outside > 1 else arguments.ranks or 2
    words = (
        Path(arguments.model).name,
        f"p{ranks}",
        f"k{arguments.accumulate}",
        arguments.lab,
    )
    named = re.sub(r"[^\w-]", "-", "-".join(filter(None, words)))
    out = arguments.out or Path("advised") / named
    try:
        if outside == 1:
            _launched(arguments, settings, ranks, out)
        else:
            with joined(MEETING_S) as me:
                advise_job.run(replace(me, out=out), settings)
            if me.rank:
                return {}, None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"what was measured is kept in {out}") from None
    advice, trials = read_advice(out), store.load_table(out / "trials.csv", "trials")
    rounds = trials.pivot_table("seconds", "repeat", "policy", "median")
    each = len(trials) // rounds.size
    tried = {
        name: measured_gain(rounds, name) for name in rounds
    }  # the default gains nothing
    result = {
        "network": trials["network"].iloc[0],
        "workers": ranks,
        "tables": str(out),
    }
    result |= {
        **advice.to_dict(len(rounds), each),
        "rounds": len(rounds),
        "iterations": each,
    }
    result["predicted_advice"] = result["advice"]
    if found := tried.get(result["best"]):
        low, high = result["gain_interval"]
        result |= {
            "measured_gain": found.share,
            "measured_interval": list(found.interval),
        }
        result["disagrees"] = not low <= found.share <= high
    if LISTS and not (
        found and found.interval[1] >= WORTH
    ):  # nothing is tried without lists
        result["advice"] = KEEP
    result["measured_best"] = max(
        tried, key=lambda name: (tried[name].share, name == DEFAULT)
    )
    return result, advice


def _launched(
    arguments: argparse.Namespace, settings: Any, ranks: int, out: Path
) -> None:
    """Run the job in ranks of this machine, over its loopback or emulated links."""
    from ddlkit.jobs.launch import Loopback
    from ddlkit.measure.advise import MEETING_S, advise_job
    from ddlkit.measure.parts import Ranks, ranks_in_lab

    members = Ranks(ranks, Loopback, {})
    if arguments.lab:
        members, _ = ranks_in_lab(ranks, *lab_rate(arguments.lab))
    members = replace(members, join={**members.join, "timeout_s": MEETING_S})
    members.run(
        advise_job, settings, MEETING_S + settings.measure_s + settings.confirm_s, out
    )


def snippet(advice: Any, chosen: str) -> str:
    """Return the line of Python that does what was advised."""
    if chosen not in advice.options or chosen == "ddp":
        return "DistributedDataParallel(model)"
    if chosen.startswith("ddp:"):
        cap = units.parse_bytes(chosen.partition(":")[2]) / units.MIB
        return f"DistributedDataParallel(model, bucket_cap_mb={cap:g})"
    from ddlkit.formats.export import bucket_caps_mb

    caps = bucket_caps_mb(advice.options[chosen].iteration.group_bytes)
    return f"DistributedDataParallel(model, bucket_cap_mb_list={caps})"


LISTED = "  # torch 2.11; with unused parameters, several dtypes or torch.compile see what DDP made"


def screen(result: dict[str, Any]) -> list[str]:
    """Return the lines that a person reads."""

    def share(value: float, ends: Sequence[float]) -> str:
        return f"{value:+.1%} ({ends[0]:+.1%} to {ends[1]:+.1%})"

    best, low_to_high = result["best"], result["gain_interval"]
    lines = [
        f"{result['network']} on {result['workers']} ranks: {result['advice']}",
        "",
    ]
    plans = {"PyTorch's default": "default_plan", f"best plan, {best}": "best_plan"}
    for name, of in ((name, result[key]) for name, key in plans.items()):
        took, low, high = map(
            units.format_seconds, (of["iteration_s"], *of["interval_s"])
        )
        exposed = units.format_seconds(of["exposed_communication_s"])
        more = f"exposed {exposed}, scaling factor {of['scaling_factor']:.2f}"
        lines.append(f"{name:<28} {took} an iteration ({low} to {high}), {more}")
    slower = f"slower with {result['probability_slower']:.0%}"
    lines.append(
        f"{'predicted gain':<28} {share(result['gain'], low_to_high)}; {slower}"
    )
    if "measured_gain" in result:
        said = share(result["measured_gain"], result["measured_interval"])
        verdict = "; outside of what was predicted" * result["disagrees"]
        lines.append(
            f"{'measured gain':<28} {said}, {result['rounds']} rounds{verdict}"
        )
    if (other := result.get("measured_best", best)) != best:
        lines.append(f"{'measured best':<28} {other}")
    lines.append(f"{'limited by':<28} {result['limited_by']}")
    lines += [
        f"{'':<28} {gain:+.1%} by {what}" for what, gain in result["shorter_by"].items()
    ]
    if size := result["measure_next_bytes"]:
        lines.append(f"{'measure this size next':<28} {units.format_bytes(size)}")
    return [*lines, "", result["snippet"], *[LISTED] * ("list" in result["snippet"])]
