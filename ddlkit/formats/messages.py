"""Message times, from a recorded table or a foreign file.

The formats of foreign files are listed in `ddlkit.formats.readers`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError, shown
from ddlkit.formats import benchmark_logs, readers, size_time_csv
from ddlkit.formats.contract import KEYS, ONE_RANK, MessageOptions, MessageTimes
from ddlkit.store import files
from ddlkit.store.readers import choose
from ddlkit.store.sheet import check_cells
from ddlkit.store.tables import is_stamped, load_table, refuse_pack

if TYPE_CHECKING:
    from pandas import DataFrame


def read_bytes_seconds(
    path: Path | str,
    *,
    collective: str | None = None,
    link: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
    if_ranks_unknown: str = "",
) -> tuple[NDArray[np.int64], NDArray[np.float64], dict[str, Any]]:
    """Return the sizes and times of messages of one collective, link and number of ranks.

    Parameters
    ----------
    path : Path or str
        A recorded table, or a file of any format of message times.
    collective, link : str, optional
        The collective and the link to choose, or that the file does not name.
    ranks : int, optional
        The number of ranks to choose, or that the file does not state.
    place : {"in_place", "out_of_place"}, optional
        Which times of a log to take: the result over the input, or in another buffer.
    table : int, optional
        Which table of a log to take, counted from 1.
    if_ranks_unknown : str, optional
        What the user should do if the file does not say between how many ranks the times
        were measured. With the default, "", such a file is taken. With any other text, it
        is refused with this advice, even if ``ranks`` is given, because ``ranks`` may be what
        the caller needs, and not true of the file. The only exception is a log that
        `benchmark_logs` reads: its rows get the number ``ranks``, and it is taken.

    Returns
    -------
    sizes : ndarray, shape (n,)
        The sizes in bytes.
    seconds : ndarray, shape (n,)
        The times.
    known : dict of str to object
        What is known of the messages. "source" is the program that measured them, "csv"
        for a user's own table, or "recorded". Each of `KEYS` that the file has or the
        caller gives is there with its value. "place" is only there if the caller chose no
        place and the times of one place alone were taken. Its value is then a note that
        says why.

    Raises
    ------
    UserError
        If the file is wrong, has no such messages, or has messages of several kinds.
    """
    path = Path(path)
    options = MessageOptions(
        collective=collective, ranks=ranks, place=place, table=table
    )
    wanted = {"collective": collective, "link": link, "ranks": ranks}
    # ``note`` says why the times of one place alone were taken, if the caller chose none. It
    # is "" in all other cases.
    columns = "bytes, seconds and ranks" if if_ranks_unknown else "bytes and seconds"
    source, frame, note = _messages(path, options, columns=columns)
    # Readers fill the column "ranks" only if the file states the number. The reader of
    # `benchmark_logs` alone also fills it with ``ranks`` of the caller.
    if if_ranks_unknown and "ranks" not in frame:
        raise _ranks_unknown(path, if_ranks_unknown)
    # No choice of rows can help here.
    if "ranks" in frame and (frame["ranks"] == 1).all():
        raise UserError(f"{path}: {ONE_RANK}")
    # This keeps the wanted rows. ``chosen`` has, for each column of `KEYS` in the file, the
    # one value that is left.
    frame, chosen = choose(frame, KEYS, wanted, path)
    given_by_caller = {key: value for key, value in wanted.items() if value is not None}
    # What the file states replaces what the caller gives.
    known: dict[str, Any] = {"source": source, **given_by_caller, **chosen}
    if note:
        known["place"] = note
    if known.get("ranks") == 1:
        raise UserError(
            f"{path}: one rank sends no messages: choose times of two or more"
        )
    return frame["bytes"].to_numpy(), frame["seconds"].to_numpy(), known


def read_collectives(
    path: Path | str,
    *,
    collective: str | None = None,
    link: str | None = None,
    ranks: int | None = None,
    place: str | None = None,
    table: int | None = None,
    notes: list[str] | None = None,
    if_ranks_unknown: str = "give their number with --ranks",
    if_collective_unnamed: str = "all_reduce",
) -> DataFrame:
    """Return message times with the columns of a recorded table, whoever measured them.

    Parameters
    ----------
    path : Path or str
        A recorded table ``collectives``, which is returned whole, or a file of any format
        of message times.
    collective : str, optional
        The collective of a benchmark's log that does not name it, or the one by which a table
        is chosen from a log of several tables.
    link : str, optional
        The name of the link, if the file does not state it. By default "unknown".
    ranks : int, optional
        The number of ranks, if the file does not state it, or the one by which a table is
        chosen from a log of several tables.
    place : {"in_place", "out_of_place"}, optional
        Which times of a log to take: the result over the input, or in another buffer.
    table : int, optional
        Which table of a log to take, counted from 1.
    notes : list of str, optional
        A list to which a note is added if the user should know something of the rows.
    if_ranks_unknown : str, optional
        What the user should do if neither the file nor ``ranks`` says between how many
        ranks the times were measured.
    if_collective_unnamed : str, optional
        The collective of the rows of a CSV that has no column for it.

    Returns
    -------
    DataFrame
        The rows of a recorded table, or of a foreign file with the columns that it
        lacks.

    Raises
    ------
    UserError
        If the file is wrong, or if the number of ranks is unknown.
    """
    path = Path(path)
    options = MessageOptions(
        collective=collective, ranks=ranks, place=place, table=table
    )
    # ``source`` is the program that measured the times, "csv", or "recorded".
    source, frame, note = _messages(path, options)
    if source == "recorded":
        return frame
    if notes is not None and note:
        notes.append(f"{path}: {note}")
    if "ranks" not in frame and ranks is None:
        raise _ranks_unknown(path, if_ranks_unknown)
    # Columns that a file lacks get the values of the caller, or usual ones.
    assumed: dict[str, Any] = {
        "ranks": ranks,
        "link": link or "unknown",
        # Only a CSV may lack this column. The reader of a log has used ``collective``.
        "collective": if_collective_unnamed,
        # "" and 0 say that the algorithm and the rate of the link are unknown.
        "algorithm": "",
        "link_bits_per_s": 0.0,
        # All times are of one session, and no processor time was lost to other programs.
        "session": 0,
        "stolen": 0.0,
        "backend": source,
        # A sample is the time of one message, and no other message was under way.
        "messages_per_sample": 1,
        "in_flight": 1,
        # The clock was that of the processor.
        "clock": "wall",
    }
    missing = {name: value for name, value in assumed.items() if name not in frame}
    return frame.assign(**missing)


def _ranks_unknown(path: Path, advice: str) -> UserError:
    """Return the error for times of an unknown number of ranks, with advice."""
    return UserError(
        f"{path}: does not say between how many ranks its times were measured: {advice}"
    )


def _messages(
    path: Path, options: MessageOptions, columns: str = "bytes and seconds"
) -> MessageTimes:
    """Return the times of a recorded table, or of a file of any format.

    The source of a recorded table is "recorded". Raises UserError if no format fits, or
    if the file is damaged or is a pack. ``columns`` are those that a CSV needs, in words.
    """
    file = str(path)
    # A table that ddlkit recorded has a stamp, a file that says where its rows come from.
    if is_stamped(path):
        frame = load_table(path, "collectives")
        options.refuse_options_of_logs(file)
        return MessageTimes("recorded", frame)
    # A pack is a file with the rows of several recorded tables.
    refuse_pack(path)
    text = files.read_text(path)
    # This refuses a file of too many lines.
    check_cells(text, "\n", file)
    reader = readers.first_match(readers.MESSAGE_TIMES, text)
    if reader is None:
        raise _no_message_times(text, file, columns)
    return reader.read(text, file, options)


def _no_message_times(text: str, file: str, columns: str) -> UserError:
    """Return the error for a file that is of no format of message times.

    It quotes the first and the last line of the file. ``columns`` are those that a CSV needs, in
    words. JSON is refused here for reasons of its own.
    """
    size_time_csv.refuse_json(text, file)
    first_line, _, _ = text.strip().partition("\n")
    # If a run has failed, its last line often says why.
    _, _, last_line = text.rstrip().rpartition("\n")
    if benchmark_logs.is_of_nccl_tests(text):
        return UserError(
            f"{file}: is a log of nccl-tests without a table of results, which is a line of "
            "column names and rows below it: give the log of a run that did not fail; the "
            f"last line of this log is {shown(last_line)}"
        )
    problem = "has no message times that ddlkit can read"
    # The name of a test of OSU or Intel that prints no such times, or "".
    other_test = benchmark_logs.other_test(text)
    if other_test:
        problem = f"is of the test {other_test}, without average times of a collective"
    return UserError(
        f"{file}: {problem}: give a CSV with the columns {columns}, or a log of "
        "nccl-tests or another benchmark (ddlkit fit --help lists them); its first line "
        f"is {shown(first_line)}, and its last line {shown(last_line)}"
    )
