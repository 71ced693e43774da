"""A process of its own that measures, so that its death costs one point: both ends of it. No torch here.

``python -m ddlkit.run.sessions.child CONFIG`` measures point after point and writes, line by line, what
became of each. When a fault leaves the GPU unusable it ends, and its parent starts another for the rest.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.launch import end
from ddlkit.run.jobs.protocol import MISTAKE, child_environment, die_with_parent, trap
from ddlkit.run.sessions.loop import measure_points, one_line
from ddlkit.run.sessions.session import Source

SPENT = 75  # exit status: the GPU cannot be used any more by this process
POLL_S = 0.2


class Child:
    """The process, from entry to exit of the block, as its parent sees it; it does not outlive us."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()

    def __enter__(self) -> Child:
        reading, writing = os.pipe()
        config = json.dumps({**self._config, "events": writing})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, config],
                env=child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=2,  # what libraries print is no result of ours
                pass_fds=[writing],
                start_new_session=True,
            )
        finally:
            os.close(writing)
        threading.Thread(target=self._read, args=(reading,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end([self._process])

    @property
    def status(self) -> int:
        """Exit status, once it has ended; negative: the signal that killed it."""
        return int(self._process.wait())

    def events(self) -> Iterator[dict[str, Any]]:
        """What it reports; {} now and then while it reports nothing. Ends when it does."""
        while True:
            try:
                yield self._events.get(timeout=POLL_S)
            except queue.Empty:
                if self._process.poll() is not None:
                    return
                yield {}

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as stream:
            for line in stream:
                if line.endswith("\n"):  # else it died while it wrote
                    self._events.put(json.loads(line))


def main(argv: Sequence[str]) -> int:
    """The process itself. Exit status: 0, SPENT, or MISTAKE with the reason reported to the parent."""
    die_with_parent()
    trap(signal.SIGTERM)
    config = json.loads(argv[0])
    out = Path(config["out"])
    with os.fdopen(config["events"], "w") as stream:

        def emit(event: dict[str, Any]) -> None:
            stream.write(json.dumps(event) + "\n")
            stream.flush()

        try:
            usable = measure_points(
                Source(**config["source"]).points(out, config["session"]),
                out,
                emit,
                deadline_s=config["deadline_s"],
                skip=config["skip"],
                last=config["last"],
            )
        except UserError as error:
            emit({"failure": one_line(error)})
            return MISTAKE
    return 0 if usable else SPENT


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: after a fault, CUDA's own clean-up may hang.
    os._exit(status)
