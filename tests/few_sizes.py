"""Commands of ddlkit that measure three sizes of messages only, where a test is about the job around them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddlkit import cli
from ddlkit.measure import collectives

SIZES = (1024, 64 * 1024, 1024**2)


def main(argv: Sequence[str] | None = None) -> int:
    collectives.SIZES = SIZES
    return cli.main(argv)


if __name__ == "__main__":
    sys.exit(main())
