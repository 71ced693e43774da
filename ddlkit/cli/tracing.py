"""The command ``trace``: traces of a model in training, for ``ddlkit explain``."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddlkit.cli.command import (
    MODEL_FUNCTION,
    MOST_RANKS,
    OUTPUT,
    arg,
    command,
    device_of_own_ranks,
    group,
    print_loading,
    print_starting,
    ranks_to_start,
    refuse_impossible_directory,
    refuse_without_effect_in_job,
    require_model_file,
    whole_number,
)
from ddlkit.core.errors import UserError
from ddlkit.jobs.assignment import ranks_started

FEWEST_ITERATIONS = 8
"""The fewest iterations from which ``ddlkit explain`` can tell chance from cause."""
FEWEST_WARMUP = 4
"""Iterations after which DDP has rebuilt its buckets, and one that uses them."""
LONGEST_ITERATION_S = 60.0
"""How long an iteration may take before the ranks count as hanging, in seconds."""

_MODEL = f"""The model, which the function FUNCTION in FILE.py returns. {MODEL_FUNCTION}
Under torchrun or srun the ranks are their processes; otherwise --ranks processes of this
machine."""


@command(
    "Record the training of a model under DistributedDataParallel with torch.profiler: "
    "a trace of whole iterations for each rank, which ddlkit explain reads.",
    *group(
        "what is recorded",
        arg("--model", metavar="FILE.py:FUNCTION", required=True, help=_MODEL),
        arg(
            "--ranks",
            type=whole_number,
            metavar="N",
            help="The number of processes to start on this machine, from 2 to "
            f"{MOST_RANKS}. [default: 2]",
        ),
        arg(
            "--iterations",
            type=whole_number,
            metavar="N",
            default=16,
            help="How many iterations are recorded, at least 8. [default: 16]",
        ),
        arg(
            "--warmup",
            type=whole_number,
            metavar="N",
            default=4,
            help="How many iterations come before, at least 4: DDP rebuilds its buckets "
            "in them. [default: 4]",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--out",
            type=Path,
            metavar="DIRECTORY",
            required=True,
            help="Write rank0.json.gz and so on into this directory, which may hold "
            "nothing but earlier traces. These are replaced.",
        ),
    ),
    example="ddlkit trace --model mine.py:net --out traces",
)
def trace(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit trace``."""
    _refuse_few(
        "--iterations",
        arguments.iterations,
        FEWEST_ITERATIONS,
        "with fewer, ddlkit explain cannot tell chance from cause",
    )
    _refuse_few(
        "--warmup",
        arguments.warmup,
        FEWEST_WARMUP,
        "DDP rebuilds its buckets in these iterations",
    )
    # Refused now, because recording first imports torch, which takes seconds.
    require_model_file(arguments.model)
    out = arguments.out
    # torchrun or srun may have started several copies of this command, each a rank.
    # Otherwise this process starts the ranks.
    ranks_of_launcher = ranks_started(os.environ)
    if ranks_of_launcher > 1:
        refuse_without_effect_in_job(arguments, ["ranks"])
        ranks = ranks_of_launcher
        # The ranks check the directory themselves, and stop together. Only rank 0 prints.
        should_print = _record_as_rank(arguments)
    else:
        ranks = ranks_to_start(arguments.ranks, default=2, program="ddlkit trace")
        _refuse_directory(out)
        _record_here(arguments, ranks)
        should_print = True
    if should_print:
        files = sorted(str(path) for path in out.glob("rank*.json.gz"))
        print(f"{ranks} ranks, {arguments.iterations} iterations: {', '.join(files)}")
        print(f"next: ddlkit explain {out}/rank*.json.gz")


def _refuse_few(option: str, number: int, fewest: int, reason: str) -> None:
    """Raise UserError, with a reason, if an option asks for too few iterations."""
    if number < fewest:
        raise UserError(f"{option} {number}: use at least {fewest}, because {reason}")


def _refuse_directory(out: Path) -> None:
    """Raise UserError if traces cannot be written, or would be mixed with other files."""
    refuse_impossible_directory("--out", out)
    if not out.exists():
        return
    # Earlier traces have these names, and may be replaced.
    others = sorted(set(out.iterdir()) - set(out.glob("rank*.json.gz")))
    if others:
        # The error names one of these files. It prefers a visible file, because a user finds
        # hidden files less easily.
        visible = [path for path in others if not path.name.startswith(".")]
        example = (visible or others)[0]
        raise UserError(
            f"--out {out}: holds other files, such as {example.name}: name a new directory"
        )


def _settings(arguments: argparse.Namespace) -> Any:
    """Return the settings of the job that records, as `TracingSettings`."""
    from ddlkit.measure.tracing import TracingSettings

    return TracingSettings(
        model=arguments.model,
        directory=str(arguments.out.resolve()),
        iterations=arguments.iterations,
        warmup=arguments.warmup,
    )


def _record_here(arguments: argparse.Namespace, ranks: int) -> None:
    """Record on ``ranks`` ranks of this machine, which this process starts."""
    print_loading(arguments.model)
    from ddlkit.measure.given import check
    from ddlkit.measure.parts import Ranks
    from ddlkit.measure.tracing import MEETING_S, tracing_job

    # Ranks take a while to start. A mistake in the model is found here before that.
    check(arguments.model)
    processes = Ranks.of(ranks, device_of_own_ranks())
    # Ranks meet once each has built its model. A large one takes longer to build than ranks
    # wait for each other by default.
    processes = replace(processes, join={**processes.join, "timeout_s": MEETING_S})
    print_starting(ranks)
    iterations = arguments.warmup + arguments.iterations
    # Ranks that take several times as long as this are ended.
    estimate_s = MEETING_S + iterations * LONGEST_ITERATION_S
    processes.run(tracing_job, _settings(arguments), estimate_s=estimate_s)


def _record_as_rank(arguments: argparse.Namespace) -> bool:
    """Record as one of the ranks that torchrun or srun started, and return whether as rank 0.

    Raises UserError on all ranks if one of them cannot write its trace.
    """
    from ddlkit.jobs.rank import agree_all, joined
    from ddlkit.measure.tracing import MEETING_S, tracing_job

    # `me` is this rank. MEETING_S is how long ranks wait until all of them have built the
    # model.
    with joined(MEETING_S) as me:
        refusal: UserError | None = None
        try:
            # Each rank may run on another node, with a directory of its own.
            _refuse_directory(arguments.out)
        except UserError as error:
            refusal = error
        # All ranks end together, because the others would wait for a rank that left alone. A
        # rank without a refusal of its own says that another has one.
        if not agree_all(refusal is None):
            raise refusal or UserError(
                f"--out {arguments.out}: another rank cannot write there"
            )
        tracing_job.run(me, _settings(arguments))
    return me.rank == 0
