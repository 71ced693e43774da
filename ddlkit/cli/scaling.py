"""``scale``: whether a training will scale to more nodes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    arg,
    collective_name,
    command,
    count,
    group,
    share,
    show,
)
from ddlkit.cli.inputs import LONG_COMPUTE_S, print_warnings, refuse_other_kinds
from ddlkit.core import units
from ddlkit.core.errors import UserError

if TYPE_CHECKING:
    from pandas import DataFrame

    from ddlkit.model.scaling import Count, Scaling


@command(
    "Predict the step of a data-parallel training on more nodes from steps that were "
    "measured on fewer, with an interval. It says what lengthens the step, whether a wished "
    "scaling factor is met, and what to measure next.",
    *group(
        "measured",
        arg(
            "--steps",
            type=Path,
            metavar="STEPS.csv",
            required=True,
            help="The step times, with the columns gpus, nodes, job and step_s (seconds), and "
            "optionally step (its number in the job), samples (of the step, on one GPU or on "
            "all GPUs), nccl (its version) and settings (any text). The only row of a job is its "
            "mean step. Several rows of a job are its single steps, of which the first one is "
            "left out as the launch. The table needs steps on one GPU or one node, and steps on "
            "two nodes or more, all with the same number of samples per GPU.",
        ),
        arg(
            "--collectives",
            type=Path,
            nargs="+",
            metavar="LOG",
            help="Logs of nccl-tests, each on one number of nodes, or a CSV with the columns "
            "bytes, seconds, ranks and nodes.",
        ),
        arg(
            "--collective",
            type=collective_name,
            metavar="NAME",
            help="The collective of logs and CSVs that do not name it, and the one to use of "
            "those with several. A CSV that names none is of all_reduce by default.",
        ),
        arg(
            "--kernels",
            type=Path,
            metavar="SUMS.csv",
            help="The total times of GPU kernels in the training on the most GPUs, as nsys "
            "stats --report cuda_gpu_kern_sum --format csv writes them.",
        ),
        arg(
            "--kernel-steps",
            type=count,
            metavar="N",
            default=1,
            help="The number of steps in which these kernels ran. [default: 1]",
        ),
    ),
    *group(
        "gradients, from which messages are predicted: --profile or --trace, and --collectives",
        arg(
            "--profile",
            type=Path,
            metavar="FILE.csv",
            help="The layer profile: the time and the size of each parameter tensor.",
        ),
        arg(
            "--trace",
            type=Path,
            metavar="FILE",
            help="A trace from which ddlkit import reads the layers without further options.",
        ),
        arg(
            "--network",
            metavar="NAME",
            help="The network to use, if the profile holds several.",
        ),
        arg(
            "--batch",
            type=count,
            metavar="N",
            help="The batch size to use, if the profile holds several.",
        ),
    ),
    *group(
        "what is asked",
        arg(
            "--nodes",
            type=count,
            nargs="+",
            metavar="N",
            required=True,
            help="The numbers of nodes to predict for, at most ten times the largest "
            "measured one.",
        ),
        arg(
            "--wish",
            type=share,
            metavar="FACTOR",
            help="Say whether this scaling factor, above 0 and below 1 as in 0.8, is met on the "
            "largest number of nodes. The scaling factor is the step on the fewest GPUs over the step on "
            "that number of nodes. The wish is answered with yes or no if the whole likely range of the "
            "factor lies on one side of it, and is open otherwise.",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--plot",
            type=Path,
            metavar="FILE.png",
            help="Draw the scaling factor by the number of GPUs into this file. Drawing "
            "needs the extra ddlkit[plot].",
        ),
        JSON,
    ),
    example="ddlkit scale --steps steps.csv --nodes 100 --wish 0.8",
)
def scale(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit scale``."""
    _refuse_wrong_options(arguments)
    # This refuses a recorded table of a kind that its option does not take.
    refuse_other_kinds(arguments)
    from ddlkit.formats.steps import read_steps

    steps = read_steps(arguments.steps)
    result = _predicted(arguments, steps)
    if arguments.plot:
        _draw(result, arguments)
    warnings = [
        finding.text for finding in result.findings if finding.what == "warning"
    ]
    warnings += _doubts_of_unit(steps, arguments.steps)
    print_warnings(warnings)
    if arguments.json:
        show(result.to_dict(), as_json=True)
        return
    has_gradients = bool(arguments.profile or arguments.trace)
    print("\n".join(_screen(result, has_gradients=has_gradients)))


def _predicted(arguments: argparse.Namespace, steps: DataFrame) -> Scaling:
    """Return the prediction from measured steps and the other files that are given.

    ``steps`` has the rows of the file of --steps. An error of the prediction names the files
    of measurements.
    """
    from ddlkit.formats.benchmark_logs import SeveralTablesError
    from ddlkit.formats.kernel_sums import read_kernel_sums
    from ddlkit.formats.node_tables import read_node_tables
    from ddlkit.model.scaling import scale as predict_scaling

    collectives = None
    if arguments.collectives:
        try:
            collectives = read_node_tables(
                arguments.collectives, collective=arguments.collective
            )
        except SeveralTablesError as error:
            # ddlkit scale has no option to choose a table of a log.
            raise UserError(error.without_option) from None
    kernels = None
    if arguments.kernels:
        kernels = read_kernel_sums(arguments.kernels)
    workload = _workload(arguments)
    # `wish` is the scaling factor that the user wishes to reach, None without --wish.
    try:
        return predict_scaling(
            steps,
            arguments.nodes,
            workload=workload,
            collectives=collectives,
            kernels=kernels,
            kernel_steps=arguments.kernel_steps,
            wish=arguments.wish,
        )
    except UserError as error:
        raise UserError(f"{_measured_files(arguments)}: {error}") from error


def _refuse_wrong_options(arguments: argparse.Namespace) -> None:
    """Raise UserError for options that contradict each other or have no effect."""
    if arguments.profile and arguments.trace:
        raise UserError("--profile and --trace both give the gradients: leave one out")
    if not arguments.profile and (arguments.network or arguments.batch):
        raise UserError(
            "--network and --batch choose in a layer profile: give it by --profile, or "
            "leave them out"
        )
    for option in ("profile", "trace", "collective"):
        if getattr(arguments, option) and not arguments.collectives:
            raise UserError(
                f"--{option} has an effect with --collectives only: give times of "
                "collectives, or leave it out"
            )
    # 1 is the default.
    if arguments.kernel_steps != 1 and not arguments.kernels:
        raise UserError(
            "--kernel-steps has an effect with --kernels only: give sums of kernels, or "
            "leave it out"
        )
    if arguments.plot:
        from ddlkit.show import DRAWING, needs

        # Refused now if nothing can be drawn, and not after the files have been read.
        needs("--plot", DRAWING)
        if arguments.plot.suffix.lower() != ".png":
            raise UserError(f"--plot {arguments.plot}: name a file that ends in .png")


def _doubts_of_unit(steps: DataFrame, file: Path) -> list[str]:
    """Return a warning if steps are so long that their times are perhaps not in seconds."""
    median_s = float(steps["step_s"].median())
    # The limit for a forward and a backward pass serves for a whole step, too.
    if median_s <= LONG_COMPUTE_S:
        return []
    return [
        f"--steps {file}: the median step takes {median_s:.3g} s: check that the column "
        "step_s is in seconds"
    ]


def _measured_files(arguments: argparse.Namespace) -> str:
    """Return the files of measurements as an error names them.

    These are the file of --steps, the first of --collectives with the number of the others, and
    the file of --kernels.
    """
    files = [str(arguments.steps)]
    tables = arguments.collectives or []
    if tables:
        further = f" and {len(tables) - 1} more" if len(tables) > 1 else ""
        files.append(f"{tables[0]}{further}")
    if arguments.kernels:
        files.append(str(arguments.kernels))
    return ", with ".join(files)


def _workload(arguments: argparse.Namespace) -> Any:
    """Return the `Workload` with the gradients, None if no option gives them."""
    if arguments.profile:
        from ddlkit.store import read_profile
        from ddlkit.store.readers import NoForwardError, SeveralValuesError

        try:
            profile = read_profile(
                arguments.profile, arguments.network, arguments.batch
            )
        except SeveralValuesError as error:
            # Unlike other commands, ddlkit scale has no option --profile-ranks.
            if error.key == "ranks":
                raise UserError(error.without_option) from None
            raise
        except NoForwardError as error:
            # It has no option --forward-s either.
            raise UserError(error.without_option) from None
        return profile.workload()
    if arguments.trace:
        return _workload_of_trace(arguments.trace)
    return None


def _workload_of_trace(file: Path) -> Any:
    """Return the `Workload` with the gradients in the file of --trace.

    Options of ``ddlkit import`` have no effect here. If an error of reading the file advises some of
    them, it is raised with the advice to run ``ddlkit import`` first.
    """
    from ddlkit.formats import import_file

    try:
        return import_file(file).profile.workload()
    except UserError as error:
        # An option follows a blank or a parenthesis, unlike dashes in the name of a file.
        options = re.findall(r"(?<![^\s(])--[a-z][a-z-]*", str(error))
        of_import = [name for name in options if name != "--profile"]
        if not of_import:
            raise
        listed = ", ".join(dict.fromkeys(of_import))
        raise UserError(
            f"{error} (ddlkit import takes {listed}: give the profile that it writes by "
            "--profile instead of --trace)"
        ) from None


def _draw(result: Scaling, arguments: argparse.Namespace) -> None:
    """Write the drawing of a result into the file of --plot."""
    from ddlkit.show import write_scaling
    from ddlkit.store import own_output

    files_read = [arguments.steps, *(arguments.collectives or ())]
    for source in (arguments.kernels, arguments.profile, arguments.trace):
        if source:
            files_read.append(source)
    # `own_output` refuses to overwrite one of them.
    write_scaling(result, own_output(arguments.plot, *files_read))


# ---------------------------------------------------------------- one screen


def _screen(result: Scaling, *, has_gradients: bool) -> Iterator[str]:
    """Yield the lines for a person: a table, and paragraphs below it.

    ``has_gradients`` says whether the user gave the gradients. If not, the verdict asks for them.
    """
    yield from _table(result)
    yield ""
    yield from _paragraph("held out", _held_out(result))
    yield from _paragraph("lost time", _explained(result))
    yield from _paragraph("verdict", _verdict(result, has_gradients=has_gradients))
    # Each collective once, in the order of the result.
    for collective in dict.fromkeys(time.collective for time in result.collectives):
        yield from _paragraph("messages", _messages(result, collective))
    # With --wish, the result says whether the scaling factor is met that the user wishes.
    if result.wish:
        yield from _paragraph("wish", _wish(result))
    yield from _findings("advice", result, is_advice=True)
    yield from _findings("notes", result, is_advice=False)


def _table(result: Scaling) -> Iterator[str]:
    """Yield the lines of a table with a row for each number of GPUs and nodes.

    The table begins as in

          GPUs  nodes      step  (jobs, or nominal 90% interval)    scaling factor
             1      1    200 ms  measured, 1 job                    1.00
             8      2    233 ms  measured, 2 jobs, 231 ms to 235 ms 0.86 (0.85 to 0.87)

    If the cost of messages is known, a last column has two times: the step on a quiet and on
    a bad day of the network if nothing but messages lengthened it.
    """
    level = f"nominal {result.interval_level:.0%} interval"
    # These steps are None if the cost of messages or the gradients are not known.
    has_messages = any(row.only_messages_step_s is not None for row in result.counts)
    # The texts of the column that says how each step was found.
    origins = [_origin(row) for row in result.counts]
    origin_head = f"({level})"
    # A step that several jobs measured has the range of the jobs instead of an interval.
    if any(row.measured and row.jobs > 1 for row in result.counts):
        origin_head = f"(jobs, or {level})"
    width = max(map(len, [origin_head, *origins]))
    head = (
        f"{'GPUs':>6} {'nodes':>6} {'step':>9}  {origin_head:<{width}} "
        f"{'scaling factor':<20}"
    )
    if has_messages:
        head += " quiet day, bad day"
        # The name of the column is so long that it has a line of its own above the head.
        yield f"{'step if only messages lengthened it':>{len(head)}}"
    yield head.rstrip()
    for row, origin in zip(result.counts, origins, strict=True):
        yield _row(row, f"{origin:<{width}}").rstrip()


ADVICE = ("helps", "does not help", "measure")
"""The kinds of findings that say what to do."""


def _findings(heading: str, result: Scaling, *, is_advice: bool) -> Iterator[str]:
    """Yield the lines of the findings that are advice, or of all others, under one heading.

    Warnings are left out, because they are printed before the screen.
    """
    for finding in result.findings:
        # `what` is the kind of a finding.
        if finding.what == "warning":
            continue
        if (finding.what in ADVICE) == is_advice:
            yield from _paragraph(heading, finding.text)
            # Only the first paragraph has the heading.
            heading = ""


def _origin(row: Count) -> str:
    """Return how the step of a row was found, with the range of its jobs or its interval."""
    if row.measured:
        noun = "job" if row.jobs == 1 else "jobs"
        origin = f"measured, {row.jobs} {noun}"
    elif row.interpolated:
        origin = "interpolated"
    else:
        origin = "predicted"
    # A step that a single job measured has no range.
    if row.interval_s is None:
        return origin
    lower, upper = map(units.format_seconds, row.interval_s)
    return f"{origin}, {lower} to {upper}"


def _row(row: Count, origin: str) -> str:
    """Return the line of a row in the table of `_table`.

    ``origin`` says how the step was found, and is padded to the width of its column.
    """
    seconds = units.format_seconds
    factor = f"{row.scaling_factor:.2f}"
    # A step that a single job measured has no interval.
    if row.scaling_factor_interval:
        low, high = row.scaling_factor_interval
        factor += f" ({low:.2f} to {high:.2f})"
    line = (
        f"{row.gpus:>6} {row.nodes:>6} {seconds(row.step_s):>9}  {origin} {factor:<20}"
    )
    # The line ends with what the step would take if nothing but messages lengthened it: on a
    # day on which the network is quiet, and on a bad day, when other jobs load it. Both are None
    # if the cost of messages or the gradients are not known.
    if row.only_messages_step_s is not None and row.only_messages_bad_day_s is not None:
        line += f" {seconds(row.only_messages_step_s)}"
        # Within one node, there is no bad day of the network.
        if row.nodes > 1:
            line += f", {seconds(row.only_messages_bad_day_s)}"
    return line


def _paragraph(heading: str, text: str) -> Iterator[str]:
    """Yield a text in lines of a terminal, with its heading in a column at the left."""
    import textwrap

    # The heading is padded to 10 columns and a space. Further lines begin below the text.
    yield from textwrap.wrap(
        text,
        width=96,
        initial_indent=f"{heading:<10} ",
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _held_out(result: Scaling) -> str:
    """Return how well the step on the most measured GPUs is predicted from steps on fewer."""
    held_out = result.held_out
    # The prediction needs steps on fewer GPUs, but on two nodes or more. Without such steps,
    # `held_out` is None.
    if held_out is None:
        return (
            "only one number of nodes above one was measured, so that the prediction cannot be tried "
            "on a measured one"
        )
    return (
        f"the step on {_gpus(held_out.gpus)} is predicted from those on fewer GPUs alone as "
        f"{units.format_seconds(held_out.predicted_s)}, and was measured as "
        f"{units.format_seconds(held_out.measured_s)} ({_signed(held_out.relative_error)}). "
        "This single error says little about the error on more nodes, and no interval is made from it"
    )


def _signed(error: float) -> str:
    """Return an error as a percentage with its sign. An error that rounds to 0 has none."""
    text = f"{error:+.1%}"
    return "0.0%" if text in ("+0.0%", "-0.0%") else text


def _explained(result: Scaling) -> str:
    """Return a sentence on what lengthens the step on the most GPUs that were measured."""
    explained = result.explained
    most_gpus = _gpus(explained.gpus)
    fewest_gpus = _gpus(result.smallest.gpus)
    if explained.loss_s <= 0:
        return f"a step on {most_gpus} is not longer than on {fewest_gpus}"
    longer = (
        f"a step on {most_gpus} is longer than on {fewest_gpus} by "
        f"{units.format_seconds(explained.loss_s)}"
    )
    other_causes = "waiting or input"
    # Messages may have any part in the loss if nothing is known of them.
    if explained.messages_at_most_s is None:
        other_causes = "messages, waiting or input"
    # The parts of the loss that have a cause. What is left of the loss is added to them below.
    parts = _parts_with_cause(explained)
    if not parts:
        return f"{longer}. Whether this is {other_causes} is not known"
    if explained.unexplained_s > 0:
        unexplained = units.format_seconds(explained.unexplained_s)
        parts.append(f"{unexplained} is not explained ({other_causes})")
    *firsts, last = parts
    listed = f"{', '.join(firsts)}, and {last}" if firsts else last
    return f"{longer}: {listed}"


def _parts_with_cause(explained: Any) -> list[str]:
    """Return in words why a step is longer on many GPUs: by messages, and by scatter of ranks.

    ``explained`` is the `Explained` of a result. Its ``loss_s`` is how much longer the step is
    than on the fewest GPUs. A cause of which nothing was measured is left out.
    """
    parts = []
    # The most that messages explain. None if neither the kernels of messages were measured nor
    # their cost is known.
    at_most_s = explained.messages_at_most_s
    if at_most_s is not None:
        at_most = units.format_seconds(at_most_s)
        # Without NCCL's kernels, the most that messages add is what they add on a bad day.
        if explained.kernels_s is None:
            at_most += " on a bad day"
        if at_most_s < explained.loss_s:
            parts.append(f"messages explain at most {at_most}")
        else:
            parts.append(f"messages, which add up to {at_most}, may explain all of it")
    # Every step waits for the slowest rank, so ranks whose steps scatter lengthen it. None
    # if the steps give only means of jobs, which do not tell the scatter.
    if explained.scatter_s is not None:
        scatter = units.format_seconds(explained.scatter_s)
        parts.append(f"the scatter of single ranks would explain up to {scatter}")
    return parts


def _verdict(result: Scaling, *, has_gradients: bool) -> str:
    """Return whether compute hides the messages, or what is missing to know it, in words.

    ``has_gradients`` says whether the user gave the gradients.
    """
    from ddlkit.model.scaling import NOT_KNOWN

    verdict = result.verdict_on_messages
    if verdict != NOT_KNOWN:
        return f"messages alone on {_nodes(result.asked_nodes)}: {verdict}"
    # If the user asks for one node, tables of several nodes do not help, because the cost of
    # messages on one node does not follow from them.
    if result.asked_nodes == 1:
        return (
            "whether messages are hidden on 1 node: not known without the gradients and a table of "
            "all-reduces on 1 node"
        )
    known_collectives = {time.collective for time in result.collectives}
    has_all_reduces = "all_reduce" in known_collectives
    # The verdict needs the gradients and the times of all-reduces, and one of them or both are
    # missing here, because otherwise the verdict would be known.
    if has_all_reduces and not has_gradients:
        return (
            "whether messages are hidden: not known without the gradients: add --profile or "
            "--trace"
        )
    if has_gradients:
        return (
            "whether messages are hidden: not known without tables of all-reduces: add them "
            "to --collectives"
        )
    return (
        "whether messages are hidden: not known without tables of all-reduces and the "
        "gradients"
    )


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{number} nodes"


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def _messages(result: Scaling, collective: str) -> str:
    """Return the times of a collective for the smallest, a middle and the largest listed size."""
    # The times are in the order of their sizes, and all for the same GPUs and nodes.
    times = [time for time in result.collectives if time.collective == collective]
    # Within one node no other traffic slows messages down, so that there is no bad day.
    has_bad_day = times[0].nodes > 1
    # The heading says what the second time of each size means, which stands in parentheses.
    legend = ""
    if has_bad_day:
        legend = " (on a bad day, when other jobs load the network)"
    listed = []
    # With fewer than three sizes, two of these positions are equal.
    positions = sorted({0, len(times) // 2, len(times) - 1})
    for position in positions:
        time = times[position]
        text = f"{units.format_bytes(time.bytes)} {units.format_seconds(time.seconds)}"
        if has_bad_day:
            text += f" ({units.format_seconds(time.bad_day_s)})"
        listed.append(text)
    return f"{collective} on {_gpus(times[0].gpus)}{legend}: {', '.join(listed)}"


def _wish(result: Scaling) -> str:
    wish = result.wish
    assert wish is not None
    return (
        f"a scaling factor of {wish.factor:g} on {_nodes(wish.nodes)}: {wish.answer}, "
        f"because {wish.reason}"
    )
