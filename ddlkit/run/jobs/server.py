"""What multiprocessing's fork server imports: torch, once for all ranks of all launches.

Only the fork server may import this module: it makes the process die with its launcher, at any moment, and
with it all ranks. Nothing here may ask for a GPU: a process that has opened one cannot be forked and use it.
"""

import os
import signal

from ddlkit.run.jobs.protocol import PARENT, die_with_parent

die_with_parent()
os.environ[PARENT] = str(os.getpid())  # of the ranks
os.setsid()  # Ctrl-C in the terminal, and its end, reach only the launcher
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

from ddlkit.run.jobs import worker  # noqa: E402

for name in ("collectives", "layers", "training", "replay"):  # and torch with them
    worker.find(name)
