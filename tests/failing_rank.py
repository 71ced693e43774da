"""Commands of ddlkit in whose ranks one fails, and in which parting after a failure takes for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from unittest.mock import patch

import torch.distributed as dist

from ddlkit import cli
from ddlkit.measure import collectives


def main(failing: str, argv: Sequence[str]) -> int:
    """Run a command, in which the sum is wrong on rank 1 if that is what shall fail."""
    collectives.SIZES = (1024, 4096)
    if failing == "sum" and os.environ["RANK"] == "1":
        right_sum = collectives.CheckedCollective.run

        def wrong_sum(checked: collectives.CheckedCollective) -> None:
            """Send as always, and damage one element of the result."""
            right_sum(checked)
            checked.buffers.view(-1)[7] += 1

        patch.object(collectives.CheckedCollective, "run", wrong_sum).start()
    # NCCL may wait here for ranks that wait for this one.
    patch.object(dist, "destroy_process_group", lambda *_: time.sleep(1e6)).start()
    return cli.main(argv)
