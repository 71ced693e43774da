"""Commands of ddlkit that measure three sizes of messages only, where a test is about the job around them."""

from __future__ import annotations

import sys

from ddlkit import cli
from ddlkit.measure import collectives

SIZES = (1024, 64 * 1024, 1024**2)

if __name__ == "__main__":
    collectives.SIZES = SIZES
    sys.exit(cli.main())
