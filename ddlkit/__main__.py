"""``python -m ddlkit`` runs the program from a clone that is not installed."""

from __future__ import annotations

import sys

from ddlkit.cli import main

sys.exit(main())
