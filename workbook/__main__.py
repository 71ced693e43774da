"""``python -m workbook``: build the book, check the figures, and record what they show."""

from __future__ import annotations

import sys

from workbook.cli import main

sys.exit(main())
