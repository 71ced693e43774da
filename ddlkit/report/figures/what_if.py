"""A recorded profile and message times as files of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit.formats import save_profile
from ddlkit.report.source import Source


def own_files(
    recording: Source, network: str, link: str, workers: int, folder: Path
) -> dict[str, Any]:
    """Write a layer profile and message times as files of one's own, which have no stamp, in a folder.

    Returns what ``ddlkit predict`` calls them: profile, collectives, ranks.
    """
    files = {"profile": folder / "profile.csv", "collectives": folder / "messages.csv"}
    save_profile(recording.profile(network), files["profile"])
    rows = recording.table("collectives")
    wanted = {"link": link, "ranks": workers, "collective": "all_reduce"}
    rows = rows[(rows[[*wanted]] == pd.Series(wanted)).all(axis=1)]
    rows[["bytes", "seconds"]].to_csv(files["collectives"], index=False)
    return {**files, "ranks": workers}
