"""``python -m ddlkit`` from a plain checkout."""

from __future__ import annotations

import sys

from ddlkit.cli import main

sys.exit(main())
