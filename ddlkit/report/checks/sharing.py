"""Checks of the claims of `sharing`."""

from __future__ import annotations

from ddlkit.papers import sharing
from ddlkit.report.claims import Result, check, paper_table, percent


@check("sharing-fig02-speedup")
def _allreduce_speedup() -> Result:
    grid = paper_table("sharing", "fig02").set_index(["blocks", "threads"])["relative_time"]
    ratio = float(grid[1, 256] / grid[2, 256])
    return percent(1 - ratio), f"time saved; as a speedup it is {percent(1 / ratio - 1):.0f}%"


@check("sharing-fig04-best")
def _resnet18_gain() -> Result:
    row = _throughput("ResNet-18", 32)
    return percent(sharing.gain(row["1x256"], row["2x256"])), "from Fig 8, same network and batch"


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    def saved_ms(batch: int) -> float:
        row = _throughput("ResNet-18", batch)
        slow, fast = row["2x256"], max(row.values())
        return 1e3 * (sharing.iteration_s(batch, slow) - sharing.iteration_s(batch, fast))

    return saved_ms(16), f"from Fig 8; {saved_ms(128):.1f} ms at batch 128: not constant"


@check("sharing-best-gain")
def _best_gain() -> Result:
    rows = paper_table("sharing", "fig08").set_index(["network", "batch"])
    grid = rows.filter(regex=r"^\d+x\d+$")
    gains = {key: sharing.gain(row.max(), row["2x256"]) for key, row in grid.iterrows()}
    network, batch = max(gains, key=lambda key: gains[key])
    config = grid.loc[(network, batch)].idxmax()
    return percent(gains[network, batch]), f"best of Fig 8: {network}, batch {batch}, {config}"


def _throughput(network: str, batch: int) -> dict[str, float]:
    """Images per second by configuration, sharing Fig 8."""
    rows = paper_table("sharing", "fig08").set_index(["network", "batch"])
    row = rows.filter(regex=r"^\d+x\d+$").loc[(network, batch)]
    return {str(config): float(value) for config, value in row.items()}


@check("sharing-tab2-vit-flops")
def _vit_flops() -> Result:
    note = "count of all matrix products; the printed value is 5/3 of it"
    return sharing.vit_flops() / 1e9, note
