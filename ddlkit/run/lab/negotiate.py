"""Negotiation as Horovod does it: a coordinator says when the message of a group may leave (osf Section 3.3).

Each rank reports to rank 0 that a group is ready. Once all ranks have, rank 0 answers all of them, and
the group's collective is posted when the answer comes: in every rank in the order of the answers. Both
ends work in threads of their own, so that computing goes on meanwhile.

Reports and answers are four bytes over TCP between the ranks' own addresses: in the lab they pass the
shaped links, and queue there behind the collectives' bytes.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from ddlkit.run.jobs.rank import Rank, everyones

PATIENCE_S = 30.0  # for the lines between the ranks to be made
_GROUP = struct.Struct("!I")


def meet(ranks: Rank) -> Negotiator:
    """This rank's line to the coordinator, a thread of rank 0. All ranks must call it together.

    Raises OSError where no line can be made.
    """
    address = os.environ["MASTER_ADDR"]
    door = socket.create_server((address, 0), backlog=ranks.world_size) if not ranks.rank else None
    ports = everyones([door.getsockname()[1] if door else 0])
    line = socket.create_connection((address, int(ports[0, 0])), PATIENCE_S)
    line.settimeout(None)
    lines = []
    if door:
        with door:
            lines = [door.accept()[0] for _ in range(ranks.world_size)]
        threading.Thread(target=coordinate, args=(lines,), daemon=True).start()
    for one in (line, *lines):
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Negotiator(line)


class Negotiator:
    """A rank's end of the line to the coordinator."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._open = 0
        self._post: Callable[[int], None] = lambda group: None
        self._posted: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, post: Callable[[int], None]) -> None:
        """From now on ``post`` is called, in another thread, with each group that may leave."""
        self._post, self._open = post, 0

    def report(self, group: int) -> None:
        """Report to the coordinator that this rank's part of a group is ready."""
        self._open += 1
        self._line.sendall(_GROUP.pack(group))

    def finish(self) -> None:
        """Wait until every group reported since `begin` has been posted.

        Raises what ``post`` raised, and ConnectionError when the coordinator is gone.
        """
        for _ in range(self._open):
            if error := self._posted.get():
                raise error

    def _listen(self) -> None:
        try:
            with self._line.makefile("rb") as answers:
                while answer := answers.read(_GROUP.size):
                    self._post(*_GROUP.unpack(answer))
                    self._posted.put(None)
            raise ConnectionError
        except ConnectionError:  # hung up, or died with answers unread
            self._posted.put(ConnectionError("the coordinator of the negotiation is gone"))
        except Exception as error:  # for the thread that waits in `finish`
            self._posted.put(error)


def coordinate(lines: Sequence[socket.socket]) -> None:
    """Answer until every rank has hung up.

    The groups of a rank that dies stay open: `launch` ends the others.
    """
    reports: Counter[bytes] = Counter()  # of each group
    with selectors.DefaultSelector() as desk, suppress(ConnectionError):
        for line in lines:
            desk.register(line, selectors.EVENT_READ, line)
        while desk.get_map():
            answers = b""
            for key, _ in desk.select():
                report = key.data.recv(_GROUP.size, socket.MSG_WAITALL)
                if len(report) < _GROUP.size:
                    desk.unregister(key.data)
                    continue
                reports[report] += 1
                if reports[report] == len(lines):
                    del reports[report]  # the next iteration may report it again
                    answers += report
            for line in lines if answers else ():
                line.sendall(answers)
