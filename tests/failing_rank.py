"""Commands of ddlkit in whose ranks one fails, and in which parting after a failure takes for ever."""

from __future__ import annotations

import os
import sys
import time
from unittest.mock import patch

import torch.distributed as dist

from ddlkit import cli
from ddlkit.measure import collectives

if __name__ == "__main__":
    collectives.SIZES = (1024, 4096)
    if os.environ["FAILING"] == "sum" and os.environ["RANK"] == "1":
        right_sum = collectives.CheckedCollective.run

        def wrong_sum(checked: collectives.CheckedCollective) -> None:
            """Send as always, and damage one element of the result."""
            right_sum(checked)
            checked.buffers.view(-1)[7] += 1

        patch.object(collectives.CheckedCollective, "run", wrong_sum).start()
    # NCCL may wait here for ranks that wait for this one.
    patch.object(dist, "destroy_process_group", lambda *_: time.sleep(1e6)).start()
    sys.exit(cli.main())
