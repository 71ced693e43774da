"""A training loop that two or more ranks of this machine run, to see when its gradients become ready."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch.distributed as dist

from ddlkit.jobs.launch import Loopback, launch
from ddlkit.jobs.rank import Rank, Tables, job

TIMEOUT_S = 120.0
"""How long all ranks together may take, in seconds. Importing torch takes most of it."""
Loop = Callable[[int], Sequence[tuple[str, float]]]
"""A training loop. It takes its rank and returns the name and the time of each gradient that became ready."""


@dataclass(frozen=True)
class LoopSettings:
    """The loop, as ranks read it.

    Attributes
    ----------
    source : str
        The source text of the loop and of all functions that it calls. The text needs no
        other names than those that it defines itself.
    name : str
        The name of the loop.
    """

    source: str
    name: str


@job(LoopSettings, "timeline")
def loop_job(me: Rank, settings: LoopSettings) -> Iterator[Tables]:
    """Run a training loop on this rank, and yield a span for each gradient of all ranks.

    The spans are rows of table ``timeline``. A span ends when the gradient is ready. Every rank
    yields the same table.
    """
    # A rank is a process of its own, which cannot import a function of a notebook. The loop
    # therefore comes as source text, which is run in a namespace of its own.
    namespace: dict[str, Any] = {}
    exec(settings.source, namespace)
    loop: Loop = namespace[settings.name]
    # The name of each gradient of this rank, and the time at which it was ready.
    ready = [*loop(me.rank)]
    # The names and times of all ranks. `all_gather_object` puts those of each rank in place of a
    # None.
    ready_by_rank: list[Any] = [None] * me.world_size
    dist.all_gather_object(ready_by_rank, ready)
    yield {"timeline": pd.DataFrame(_spans(ready_by_rank))}


def _spans(
    ready_by_rank: Sequence[Sequence[tuple[str, float]]],
) -> Iterator[dict[str, Any]]:
    """Yield a row of table ``timeline`` for each gradient.

    A span begins when the gradient before was ready. The first span of a rank has no length,
    because a loop does not tell when its backward pass began.

    Parameters
    ----------
    ready_by_rank : sequence
        For each rank, the name of each gradient and the time in seconds at which it was ready. The
        gradients are in the order in which they became ready.
    """
    for rank, ready in enumerate(ready_by_rank):
        # The first span begins when it ends.
        _, previous_ready_s = ready[0]
        for tensor, ready_s in ready:
            yield {
                "case": "loop",
                "repeat": 0,
                "task": tensor,
                "kind": "backward",
                "stream": "compute",
                "rank": rank,
                "iteration": 0,
                # -1 stands for no group of gradients that share a message.
                "group": -1,
                "origin": "measured",
                "start_s": previous_ready_s,
                "end_s": ready_s,
                "bytes": 0,
            }
            previous_ready_s = ready_s


def watch(
    loop: Loop, ranks: int = 2, calls: Sequence[Callable[..., Any]] = ()
) -> pd.DataFrame:
    """Run a training loop on ranks of this machine and return when each gradient became ready.

    Parameters
    ----------
    loop : callable
        A function that takes its rank, trains, and returns the name and the time in seconds of each
        gradient, in the order in which they became ready. Ranks are processes of their own, which
        get the source text of the function. The function must therefore import what it needs
        itself.
    ranks : int, optional
        The number of ranks.
    calls : sequence of callable, optional
        Functions of the caller that the loop calls. These, too, must import what they need
        themselves.

    Returns
    -------
    DataFrame
        One row for each rank and gradient, in the order in which they became ready. The columns are
        ``rank``, ``tensor`` (the name of the gradient) and ``after_first_s``, the seconds since the
        rank's first gradient was ready.

    Raises
    ------
    UserError
        If a rank fails or takes too long. No rank outlives the call.
    """
    # The functions may be indented where they are defined.
    functions = [*calls, loop]
    texts = [textwrap.dedent(inspect.getsource(function)) for function in functions]
    settings = LoopSettings("\n".join(texts), loop.__name__)
    tables = launch(
        loop_job,
        settings,
        ranks=ranks,
        place=Loopback(),
        join={"backend": "gloo"},
        timeout_s=TIMEOUT_S,
    )
    spans = tables["timeline"]
    # The first span of a rank has no length, and lies where the first gradient was ready.
    first_s = spans.groupby("rank")["start_s"].transform("first")
    return pd.DataFrame(
        {
            "rank": spans["rank"],
            "tensor": spans["task"],
            "after_first_s": spans["end_s"] - first_s,
        }
    )
