"""Where ranks run and over which link they talk; here the loopback interface of this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

LOCALHOST = "127.0.0.1"


class Place(Protocol):
    """Where ranks run and over which link they talk."""

    @property
    def name(self) -> str:
        """The link as it appears in tables: "loopback", "lab:1gbit"."""

    @property
    def link_bits_per_s(self) -> float:
        """Rate that the link is shaped to; 0 if it is not."""

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What that rank must find in its environment: see `rank_environment`."""

    def namespace(self, rank: int) -> Path | None:
        """File of the network namespace that the rank lives in; None for this process's own."""


def rank_environment(rank: int, ranks: int, address: str, port: int) -> dict[str, str]:
    """torchrun's variables for a rank on a machine that holds them all; a port of 0 is any free one.

    >>> rank_environment(1, 2, "127.0.0.1", 29500)["WORLD_SIZE"]
    '2'
    """
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": address, "MASTER_PORT": port}
    return {name: str(value) for name, value in (numbers | meeting).items()}


@dataclass(frozen=True)
class Loopback:
    """All ranks on this machine, talking over its loopback interface; ``port`` 0 is any free one.

    variables : what the ranks find in their environment besides
    """

    port: int = 0
    name: str = "loopback"
    link_bits_per_s: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """torchrun's variables, the interface, and ``variables``."""
        interface = "lo0" if sys.platform == "darwin" else "lo"
        numbers = rank_environment(rank, ranks, LOCALHOST, self.port)
        return {**numbers, "GLOO_SOCKET_IFNAME": interface, **self.variables}

    def namespace(self, rank: int) -> Path | None:
        """Our own."""
        return None
