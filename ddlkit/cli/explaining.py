"""The command ``explain``: where the time of a training goes, by the traces of its ranks."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    arg,
    command,
    group,
    refuse_other_than_page,
    show,
)
from ddlkit.cli.converting import iteration_numbers
from ddlkit.cli.inputs import print_remarks
from ddlkit.core import units
from ddlkit.core.errors import UserError

NAME_COLUMNS = 30
"""The width of the names at the left of the lines."""
COLUMNS = 80
"""How wide a line is at most."""
MOST_LINES = 25
"""How many lines a screen has. Findings that do not fit are left to --json."""
LEAST_SHOWN_SHARE = 0.002
"""Causes that gain less than this share of the iteration are not shown."""
MOST_CAUSES = 5
"""How many causes the screen shows."""
MOST_REMEDIES = 2
"""How many remedies the screen shows."""
WHERE_TO_LOOK = {
    "input": "its data loader: workers, storage, and the cache of its machine",
    "forward": "the clock rate and the other processes of its machine, and the shape of "
    "its batches",
    "backward": "the clock rate and the other processes of its machine, and the shape of "
    "its batches",
    "update": "what it does alone after backward, such as logging or checkpoints",
}
"""Where a user should look for the delay of a rank, by phase."""
WHAT_TO_DO = {
    "delays": "compare the ranks in the drawing of --html, and look for what makes work "
    "take longer on some of them",
    "start-up": "send fewer and larger messages",
    "bandwidth": "send fewer bytes, as gradients of half precision, or use faster links",
    "contention": "give the messages processors or memory of their own",
    "copies": "try gradient_as_bucket_view=True",
    "buffers": "try broadcast_buffers=False",
}
"""What a user can do about a cause that is not the delay of a single rank."""


@command(
    "Explain where the time of a training step goes, and what each remedy would gain. "
    "Give the traces of torch.profiler of all ranks of a training with "
    "DistributedDataParallel; ddlkit trace records such traces. The iterations are "
    "replayed with one cause removed at a time.",
    *group(
        "input",
        arg(
            "traces",
            type=Path,
            nargs="+",
            metavar="FILE",
            help="The trace of each rank (also .gz), of at least 8 iterations. The trace of "
            "one rank alone may have fewer, and only bounds follow from it.",
        ),
        arg(
            "--iterations",
            type=iteration_numbers,
            metavar="NUMBERS",
            default=(),
            help="The iterations of which times and gains are printed, as in 0,2-5. The "
            "others are replayed, too, but do not count. [default: all]",
        ),
        arg(
            "--collectives",
            type=Path,
            metavar="FILE",
            help="Times of all-reduces between the same ranks while the machines are "
            "idle, as a recorded table, a CSV, or the log of a benchmark. With them, the "
            "start-up and the bandwidth of messages become separate causes, and other "
            "buckets can be compared. The traces alone tell this only if their messages "
            "have several sizes.",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--html",
            type=Path,
            metavar="FILE.html",
            help="Also write the explanation as a page with drawings, which needs no "
            "network. Drawing needs the extra ddlkit[plot].",
        ),
        JSON,
    ),
    example="ddlkit explain rank0.json rank1.json rank2.json",
)
def explain(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit explain``."""
    from ddlkit.model.explanation import SlowReferenceError
    from ddlkit.model.explanation import explain as explain_traces

    _refuse_wrong_options(arguments)
    reference = None
    if arguments.collectives:
        try:
            reference = _reference(arguments.collectives, len(arguments.traces))
        except _OtherRanksError:
            # If a trace is missing, the number of traces is wrong, and not that of the reference.
            # This refuses the traces then.
            explain_traces(arguments.traces, iterations=arguments.iterations)
            raise
    try:
        explanation = explain_traces(
            arguments.traces, iterations=arguments.iterations, reference=reference
        )
    except SlowReferenceError as error:
        raise UserError(f"--collectives {arguments.collectives}: {error}") from None
    if arguments.json:
        show(explanation.to_dict(), as_json=True)
    else:
        print("\n".join(screen(explanation)))
    if arguments.html:
        from ddlkit.show_explanation import write_explanation

        lines = [_title(explanation), *_facts(explanation), *_findings(explanation)]
        write_explanation(explanation, lines, arguments.html)
        print_remarks(notes=[f"the page was written: {arguments.html}"], warnings=[])


def _refuse_wrong_options(arguments: argparse.Namespace) -> None:
    """Raise UserError if the page of --html cannot be made, or if an option has no effect."""
    has_one_trace = len(arguments.traces) == 1
    refuse_other_than_page(arguments.html)
    if arguments.html:
        from ddlkit.show import WRITING_A_PAGE, needs

        # Refused now if nothing can be drawn, and not after the traces have been read.
        needs("--html", WRITING_A_PAGE)
        if has_one_trace:
            raise UserError("--html draws all ranks: give the traces of all ranks")
    if arguments.collectives and has_one_trace:
        raise UserError(
            "--collectives has no effect on the bounds that follow from one trace: "
            "leave it out, or give the traces of all ranks"
        )


class _OtherRanksError(UserError):
    """A reference between another number of ranks than there are traces."""


def _reference(path: Path, ranks: int) -> Any:
    """Return the cost of all-reduces between ``ranks`` ranks, from a file of message times.

    The cost runs through the measured medians, so that no form has to be chosen. Raises
    _OtherRanksError for a file of times between other numbers of ranks, and UserError for a file
    that does not say between how many ranks its times were measured.
    """
    from ddlkit.core.fit import fit
    from ddlkit.formats.benchmark_logs import CutLogError, SeveralTablesError
    from ddlkit.formats.messages import read_bytes_seconds
    from ddlkit.store.readers import NoSuchRowsError, SeveralValuesError

    columns = "bytes, seconds and ranks"
    try:
        sizes, seconds, _facts_of_messages = read_bytes_seconds(
            path,
            collective="all_reduce",
            ranks=ranks,
            if_ranks_unknown=f"give a CSV with the columns {columns}",
        )
    except (SeveralValuesError, SeveralTablesError) as error:
        # ddlkit explain has no option to choose a link, or a table of a log.
        raise UserError(error.without_option) from None
    except CutLogError as error:
        raise UserError(error.with_columns(columns)) from None
    except NoSuchRowsError as error:
        if error.key == "ranks":
            raise _OtherRanksError(
                f"{path}: has times between {error.listed} ranks, and the traces are of "
                f"{ranks}: give times between {ranks} ranks, or leave --collectives out"
            ) from None
        # Only these two columns have a wanted value. ddlkit explain has no option to choose a
        # collective.
        raise UserError(
            f"{path}: has times of {error.listed}, not of all_reduce: give times of all_reduce, "
            "or leave --collectives out"
        ) from None
    try:
        # Without draws the cost has no interval, which is not needed here.
        return fit("table", sizes, seconds, draws=0, workers=ranks).cost
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


# -- the screen ------------------------------------------------------------------------


def screen(explanation: Any) -> list[str]:
    """Return an explanation as the lines that a person reads.

    Parameters
    ----------
    explanation : Explanation
        The explanation of the traces of all ranks, or of the trace of one rank alone.

    Returns
    -------
    list of str
        A title, the facts and the findings, in lines of at most `COLUMNS` columns.
        Findings that do not fit into `MOST_LINES` lines are left out, and the last line
        says how many. Facts are never left out.
    """
    lines = _wrapped(_title(explanation))
    for fact in _facts(explanation):
        lines += _wrapped(fact)
    findings = [_wrapped(finding) for finding in _findings(explanation)]
    if len(lines) + sum(map(len, findings)) > MOST_LINES:
        # Blank lines are the first that a full screen does without.
        lines = [line for line in lines if line]
    for number, lines_of_finding in enumerate(findings):
        # Unless this is the last finding, a line is kept free to say how many are left out.
        is_last = number == len(findings) - 1
        room = MOST_LINES - len(lines) - (0 if is_last else 1)
        if len(lines_of_finding) > room:
            lines.append(f"findings left out: {len(findings) - number} (give --json)")
            break
        lines += lines_of_finding
    return lines


def _wrapped(line: str) -> list[str]:
    """Return a line, wrapped into lines of at most `COLUMNS` columns.

    A line may begin with a name in a column of its own. Its further lines then begin below
    the text to the right of the name.
    """
    # `textwrap.wrap` would return no line at all.
    if not line:
        return [""]
    indent = "  "
    # A line of `_line` has two signs: the space between the column of the name and the text, and
    # the two or more spaces that pad the name. Plain text never has two spaces in a row. A name
    # that fills its column has no padding, and its line is taken for plain text. That does no
    # harm, because such a line is too short to be wrapped: its text is a time and a gain.
    has_name = line[NAME_COLUMNS : NAME_COLUMNS + 1] == " " and "  " in line
    # If the name is empty, its column has only spaces.
    if has_name or line.startswith(" "):
        indent = " " * (NAME_COLUMNS + 1)
    return textwrap.wrap(
        line, COLUMNS, subsequent_indent=indent, break_on_hyphens=False
    )


def _title(explanation: Any) -> str:
    """Return the first line: how much was traced, and whether one rank is slow."""
    return f"{_count(explanation)}: {_headline(explanation)}"


def _facts(explanation: Any) -> list[str]:
    """Return the lines between the title and the findings, which are not wrapped yet."""
    iteration_s = explanation.iteration_s
    # The replay simulates the traced iterations with all causes. Its error tells how far the
    # replays without a cause can be trusted.
    replay_error = abs(explanation.replay_s / iteration_s - 1)
    # There is no waterfall if only the trace of one rank was given.
    of_ranks = ", the mean over all ranks" if explanation.waterfall else ""
    exposed = _ms(explanation.exposed_communication_s)
    lines = [
        "",
        _line(
            "iteration",
            f"{_ms(iteration_s)} measured, {_ms(explanation.replay_s)} replayed "
            f"({replay_error:.1%} off)",
        ),
        _line("compute", _ms(explanation.compute_s) + of_ranks),
        _line(
            "exposed communication",
            f"{exposed}{of_ranks}: the part of the iteration without compute",
        ),
        "",
        *_cause_lines(explanation),
    ]
    # Below a head, as in "with    the iteration would take (gain)", are the best remedies.
    if explanation.remedies:
        lines += ["", _line("with", _head_of_gains(explanation))]
    by_gain = sorted(explanation.remedies, key=_gain_s, reverse=True)
    for remedy in by_gain[:MOST_REMEDIES]:
        lines += _remedy_lines(explanation, remedy)
    return [*lines, "", f"first: {_what_to_do_first(explanation)}"]


def _findings(explanation: Any) -> list[str]:
    """Return a line for each finding, which is not wrapped yet."""
    return [f"{finding.what}: {finding.text}" for finding in explanation.findings]


def _cause_lines(explanation: Any) -> Iterator[str]:
    """Yield lines with what the iteration would take without each cause alone.

    The last line has what it takes as one cause after the other is removed.
    """
    # Causes are sorted, the largest gain first.
    shown = [
        cause
        for cause in explanation.causes[:MOST_CAUSES]
        if cause.gain_share >= LEAST_SHOWN_SHARE
    ]
    yield _head_of_causes(explanation, any_shown=bool(shown))
    for cause in shown:
        yield _line(_name_of_cause(cause), _time_without(explanation, cause))
    # There is no waterfall if only the trace of one rank was given.
    if explanation.waterfall:
        yield _line("removed in turn", _removals_in_turn(explanation.waterfall))


def _head_of_causes(explanation: Any, *, any_shown: bool) -> str:
    """Return the head of the lines of causes, or a line that no cause is shown.

    Each of these lines has the iteration without the cause and the gain.
    """
    if not any_shown:
        least = f"{LEAST_SHOWN_SHARE:.1%}"
        return _line(
            "without any one cause", f"the iteration is less than {least} shorter"
        )
    if explanation.waterfall:
        return _line("without", _head_of_gains(explanation))
    # There is no waterfall if only the trace of one rank was given. The only cause is then
    # waiting, with bounds in place of an interval, as in "at least 90 ms (gain at most 10 ms)".
    return _line("without", "the iteration would take (gain)")


def _time_without(explanation: Any, cause: Any) -> str:
    """Return the iteration without a cause and the gain, or bounds of both, in words."""
    # There is no waterfall if only the trace of one rank was given. In such a trace, a wait for
    # messages and a wait for other ranks look alike, so that waiting is its only cause.
    if not explanation.waterfall:
        return _bounds_of_waiting(explanation, cause)
    gain = _gain_with_interval(explanation, cause)
    return f"{_ms(cause.iteration_without_s)} ({gain})"


def _bounds_of_waiting(explanation: Any, waiting: Any) -> str:
    """Return what the iteration takes at least without any waiting, and gains at most, in words.

    ``waiting`` is the cause "waiting" of the trace of one rank. Its gain is an upper bound: waits
    for slower ranks are part of it, and would remain even if messages took no time.
    """
    from ddlkit.model.explanation import most_waiting_s

    most_gained_s = most_waiting_s(waiting, explanation.iterations)
    # If the gain has an interval, the bound is its upper end.
    origin = ", the end of its 95% interval" if _has_intervals(explanation) else ""
    # If iterations scatter, the interval of the gain can end above the median iteration. The time
    # that is left is then 0.
    least_s = max(0.0, explanation.iteration_s - most_gained_s)
    return f"at least {_ms(least_s)} (gain at most {_ms(most_gained_s)}{origin})"


def _removals_in_turn(waterfall: Sequence[tuple[str, float]]) -> str:
    """Return what the iteration takes as one cause after the other is removed.

    ``waterfall`` has the name of each removed cause, and the seconds of the iteration without
    it and all causes before it. Its first entry is the iteration with all causes. Removals
    after which the printed time stays the same share a step with the next one that changes it.
    Removals at the end that change nothing are left out. An example of the result is "without
    delays of slower ranks 90 ms, then contention with messages and copies into and out of
    buckets 80 ms".
    """
    steps = []
    (_, iteration_s), *removals = waterfall
    last_printed = _ms(iteration_s)
    # The names of the causes that were removed since the last step.
    names: list[str] = []
    for cause, seconds in removals:
        names.append(_NAMES_OF_CAUSES.get(cause, cause))
        if _ms(seconds) != last_printed:
            last_printed = _ms(seconds)
            steps.append(f"{_all_of(names)} {last_printed}")
            names = []
    # If no removal changes the printed time, there are no steps, and ``names`` has all causes.
    if not steps:
        return f"still {last_printed} without {_all_of(names)}"
    return "without " + ", then ".join(steps)


def _all_of(names: Sequence[str]) -> str:
    """Return names as a list in words, such as "delays, copies and contention"."""
    *firsts, last = names
    return f"{', '.join(firsts)} and {last}" if firsts else last


def _count(explanation: Any) -> str:
    """Return how many ranks were traced, and how many iterations count, in words.

    ``ranks`` of the explanation is 0 if there is only the trace of one rank, which does not
    name the number of ranks.
    """
    ranks = f"{explanation.ranks} ranks" if explanation.ranks else "one rank of several"
    plural = "" if explanation.iterations == 1 else "s"
    return f"{ranks}, {explanation.iterations} iteration{plural}"


def _headline(explanation: Any) -> str:
    """Return in a few words whether one rank is slow."""
    # The rank and the phase for which the others wait, None if there is no such rank.
    culprit = explanation.straggler
    if culprit is not None:
        return (
            f"the other ranks wait for rank {culprit['rank']}, which is slow in "
            f"{culprit['phase']}"
        )
    # There is no waterfall if only the trace of one rank was given.
    if not explanation.waterfall:
        return "the trace of one rank gives bounds only"
    # The text is not empty if a rank costs much, but does not meet all conditions for a straggler.
    if explanation.why_no_straggler:
        return f"no rank is called a straggler, because {explanation.why_no_straggler}"
    return "no one rank is much slower than the others"


def _what_to_do_first(explanation: Any) -> str:
    """Return what the user should look at or try first.

    It is looked for in this order, which is a choice and not measured: a straggler, a remedy with
    a sure gain, a rank that may be a straggler, and a cause with a sure gain. The first that
    there is counts.
    """
    # The rank and the phase for which the others wait, None if there is no such rank.
    culprit = explanation.straggler
    if culprit is not None:
        phase = culprit["phase"]
        return (
            f"look at the phase {phase} of rank {culprit['rank']}. "
            f"Check {WHERE_TO_LOOK[phase]}"
        )
    # There is no waterfall if only the trace of one rank was given.
    if not explanation.waterfall:
        return "give the traces of all ranks"
    sure_remedies = _with_sure_gain(explanation, explanation.remedies)
    if sure_remedies:
        best = max(sure_remedies, key=_gain_s)
        return f"try {best.setting}"
    # A cause has a rank if it is the delay of this rank alone. The largest gain comes first.
    delays = [cause for cause in explanation.causes if cause.rank is not None]
    # The text `why_no_straggler` is not empty if a rank costs much, but does not meet all
    # conditions for a straggler.
    if explanation.why_no_straggler and delays:
        rank, phase = delays[0].rank, delays[0].phase
        return (
            f"look at the phase {phase} of rank {rank}, although this rank is not surely "
            f"a straggler. Check {WHERE_TO_LOOK[phase]}"
        )
    sure_causes = _with_sure_gain(explanation, explanation.causes)
    if sure_causes:
        return _what_to_do_about(sure_causes[0])
    if _lacks_reason_of_exposed(explanation):
        return (
            f"measure messages: they are exposed for {_ms(explanation.exposed_communication_s)} an "
            "iteration, and --collectives, measured on the idle machines, tells why"
        )
    return "nothing: no single cause surely costs more than 3% of the iteration"


def _with_sure_gain(explanation: Any, changes: Sequence[Any]) -> list[Any]:
    """Return those of some causes or remedies whose gain is surely large enough to count.

    The gain of removing a cause, or of a remedy, is sure if even the lower end of its
    interval is above 3% of the iteration.
    """
    from ddlkit.model.explanation import LEAST_SHARE

    least_s = LEAST_SHARE * explanation.iteration_s
    return [change for change in changes if change.gain_interval_s[0] > least_s]


def _what_to_do_about(cause: Any) -> str:
    """Return what the user should do about the cause of the largest gain."""
    action = WHAT_TO_DO[cause.cause]
    # Only the delay of a single rank has a rank.
    if cause.rank is not None:
        action = (
            f"look at the phase {cause.phase} of that rank. "
            f"Check {WHERE_TO_LOOK[cause.phase]}"
        )
    return f"the largest single cause is {_name_of_cause(cause)}: {action}"


def _lacks_reason_of_exposed(explanation: Any) -> bool:
    """Return whether much communication is exposed, and no cause can say why."""
    from ddlkit.model.explanation import LEAST_SHARE

    # Only with --collectives is the bandwidth of messages a cause. Otherwise no cause contains
    # what messages cost.
    if any(cause.cause == "bandwidth" for cause in explanation.causes):
        return False
    least_s = LEAST_SHARE * explanation.iteration_s
    return bool(explanation.exposed_communication_s > least_s)


def _gain_s(remedy: Any) -> float:
    """Return by how many seconds a remedy shortens the iteration, to sort remedies."""
    return float(remedy.gain_s)


_NAMES_OF_CAUSES = {
    "delays": "delays of slower ranks",
    "waiting": "any waiting",
    "start-up": "start-up of messages",
    "bandwidth": "the bytes of messages",
    "contention": "contention with messages",
    "copies": "copies into and out of buckets",
    "buffers": "broadcasts of buffers",
}
"""What a cause is, as a person reads it, by the name in the JSON document."""


def _name_of_cause(cause: Any) -> str:
    """Return what a cause is, as a person reads it."""
    # Only the delay of a single rank has a rank.
    if cause.rank is not None:
        return f"the delay of rank {cause.rank} ({cause.phase})"
    return _NAMES_OF_CAUSES[cause.cause]


def _remedy_lines(explanation: Any, remedy: Any) -> Iterator[str]:
    """Yield a setting of DDP in one line or two, and what the iteration then would take."""
    gain = _gain_with_interval(explanation, remedy)
    times = f"{_ms(remedy.iteration_with_s)} ({gain})"
    # If the gain is an upper bound, the iteration may take longer than this time.
    if remedy.is_upper_bound:
        times = f"{_ms(remedy.iteration_with_s)} at best ({gain})"
    # A name that is longer than its column has a line of its own.
    if len(remedy.setting) > NAME_COLUMNS:
        yield remedy.setting
        yield _line("", times)
    else:
        yield _line(remedy.setting, times)


def _has_intervals(explanation: Any) -> bool:
    """Return whether there are enough iterations for intervals of gains."""
    from ddlkit.model.ranks import LEAST_ITERATIONS

    return bool(explanation.iterations >= LEAST_ITERATIONS)


def _head_of_gains(explanation: Any) -> str:
    """Return what the column of `_gain_with_interval` says."""
    gain = "gain, 95% interval" if _has_intervals(explanation) else "gain"
    return f"the iteration would take ({gain})"


def _gain_with_interval(explanation: Any, change: Any) -> str:
    """Return the gain of ``change``, a removed `Cause` or a `Remedy`, with its interval."""
    # Too few iterations allow no interval.
    if not _has_intervals(explanation):
        return _ms(change.gain_s)
    lower, upper = (_ms(seconds) for seconds in change.gain_interval_s)
    # Both ends have a unit, which is said once if it is the same.
    lower_number, _, lower_unit = lower.partition(" ")
    if upper.endswith(f" {lower_unit}"):
        lower = lower_number
    return f"{_ms(change.gain_s)}, {lower} to {upper}"


def _ms(seconds: float) -> str:
    return units.format_seconds(seconds)


def _line(name: str, text: str) -> str:
    """Return a line with a name at its left, as wide as the names of all lines."""
    return f"{name:<{NAME_COLUMNS}} {text}"
