"""By what communication's resources can be controlled here (sharing Fig 1).

The paper gave NCCL a call of its own. Since then there are variables of the environment, for all that a
process sends, and the options of a communicator; on processors the threads of gloo.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

OFFERED, ABSENT = "offered", "absent"
# Variables that NCCL reads, and since which version.
_VARIABLES = {
    "NCCL_NTHREADS": (2, 0),
    "NCCL_ALGO": (2, 0),
    "NCCL_PROTO": (2, 0),
    "NCCL_MIN_CTAS": (2, 17),
    "NCCL_MAX_CTAS": (2, 17),
    "NCCL_LAUNCH_ORDER_IMPLICIT": (2, 26),
}
_OPTIONS = ("min_ctas", "max_ctas", "cga_cluster_size")


def offered() -> pd.DataFrame:
    """Return table ``controls``: what this installation offers, level by level, and why not the rest."""
    gloo = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", None)
    no_gloo = "" if gloo else f"torch {torch.__version__} has no gloo, or hides its options"
    low, high = partial(os.setpriority, os.PRIO_PROCESS), os.sched_param(1)
    pinned = _lacks(lambda thread: os.sched_setaffinity(thread, os.sched_getaffinity(thread)))
    raised = _lacks(lambda thread: os.sched_setscheduler(thread, os.SCHED_RR, high))
    rows = [
        *(("environment", name, _lacks_nccl(since)) for name, since in _VARIABLES.items()),
        *(("communicator", name, _lacks_option(name)) for name in _OPTIONS),
        ("call", "nccl4py NCCLCollConfig", "torch does not pass it on, and nothing here needs it"),
        ("thread", "gloo threads", no_gloo),
        ("thread", "cores", pinned),
        ("thread", "lower priority", _lacks(lambda thread: low(thread, 19))),
        ("thread", "higher priority", raised),
    ]
    table = pd.DataFrame(rows, columns=["level", "control", "reason"])
    outcomes = [ABSENT if why else OFFERED for why in table["reason"]]
    table = table.assign(outcome=outcomes, reason=table["reason"].replace("", "none"))
    return table.assign(operation="none", asked_blocks=0, taken_blocks=0, taken_threads=0)


def _lacks_nccl(since: tuple[int, ...]) -> str:
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    version: tuple[int, ...] = torch.cuda.nccl.version()
    there, needed = (".".join(map(str, numbers)) for numbers in (version, since))
    return "" if version[: len(since)] >= since else f"NCCL {there} is older than {needed}"


def _lacks_option(name: str) -> str:
    if why := _lacks_nccl((2, 17)):
        return why
    options: Any = dist.ProcessGroupNCCL.Options()
    there = hasattr(options, "config") and hasattr(options.config, name)
    return "" if there else f"torch {torch.__version__} does not pass it on"


def _lacks(change: Callable[[int], object]) -> str:
    """Return why a thread may not be changed so, as tried on one that does nothing; "" if it may."""
    ended, reason = threading.Event(), ""
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        change(int(thread.native_id or 0))
    except AttributeError:
        reason = "this system has no such call"
    except OSError as error:
        reason = f"not permitted: {error.strerror}"
    ended.set()
    thread.join()
    return reason
