"""The points of a suite or a campaign: what its file says, made into what measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.run.lab import network as lab
from ddlkit.run.nets import registry
from ddlkit.run.sessions import reader
from ddlkit.run.sessions.campaign import campaign_points
from ddlkit.run.sessions.kinds import KINDS, Here, best_device, kind
from ddlkit.run.sessions.reader import Campaign, Key, one_of, read_keys
from ddlkit.run.sessions.session import Point, PointList, say


@kind("campaign", lab=True)
def campaign(here: Here, file: str) -> Iterator[Point]:
    """A campaign, in a folder of its own; its file as seen from the project's root."""
    found = reader.read_campaign(store.ROOT / file)
    yield from campaign_points(found, here.out, found.folder)


# What every description of points may say besides what is the kind's own.
_COMMON = {
    "measure": Key(one_of(list(KINDS))),
    "about": Key(str, ""),  # why, for who reads the file
    "device": Key(
        one_of(("", *reader.DEVICES)), ""
    ),  # where it is measured: everywhere, if it is ""
    "by_name": Key(reader.truth, False),  # not part of "all"
}


def points(
    *,
    out: Path,
    session: int,
    name: str,
    part: str = "all",
    device: str = "",
    networks: Sequence[str] = (),
    algorithm: str = "",
    predict: bool = False,
) -> PointList:
    """The points of the suite or campaign of that name, or in that file.

    part : what of a suite, "all" or what points belong to, as "layers"
    device : in place of the suite's own; networks : in place of its own, of layers only, as "resnet50:32"
    predict : of a campaign: calibrate its labs and predict its cases, and replay none

    Raises UserError for a wrong file or network, and when a GPU is wanted and torch sees none.
    """
    instead: dict[str, Any] = {}
    if networks:
        instead["networks"] = [_batched(text, part) for text in networks]
    if algorithm:
        raise UserError(f"--algorithm {algorithm}: collectives are the library's own, leave it out")
    suite = reader.read(name)
    if isinstance(suite, Campaign):
        return PointList(campaign_points(suite, out, predict=predict))
    device = device or suite.device or best_device()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install a CUDA build that fits the driver, "
            "or use --suite cpu"
        )
    here = Here(device, session, out)
    lists = []
    for key in ("points", "opening", "closing"):
        found: dict[str, Point] = {}
        for position, described in enumerate(getattr(suite, key)):
            where = f"{suite.file}: {key}[{position}]"
            for point in _made(described, where, here, part, instead):
                found.setdefault(point.key, point)
        lists.append(list(found.values()))
    return PointList(*lists)


def _batched(text: str, part: str) -> tuple[str, int]:
    """Name and batch size of a network that the user wants instead of the suite's."""
    if part != "layers":
        raise UserError(f"networks can be chosen for layers only, not for {part}")
    if ":" not in text:
        raise UserError(f"networks {text!r}: write batch sizes, too, as in resnet50:32,vgg16:16")
    found: tuple[str, int] = reader.checked(text, reader.network, "networks")
    registry.find(found[0])
    return found


def _made(
    described: Mapping[str, Any],
    where: str,
    here: Here,
    part: str,
    instead: Mapping[str, Any],
) -> Iterator[Point]:
    """The points of one description; none if others are wanted, or if they need a lab and there is none.

    instead : arguments in place of those that the description says
    """
    common = {key: value for key, value in described.items() if key in _COMMON}
    chosen = read_keys(common, _COMMON, where)
    what, needs_lab, keys, make = KINDS[chosen["measure"]]
    own = {key: value for key, value in described.items() if key not in _COMMON}
    arguments = read_keys(own, keys, where)
    wanted = not chosen["by_name"] if part == "all" else part == what
    if not wanted or chosen["device"] not in ("", here.device):
        return
    needs_lab = needs_lab or any(arguments.get("rate", ""))
    if needs_lab and (reason := lab.available()):
        say(f"no lab, so no {chosen['measure'].replace('_', ' ')}: {reason}")
        return
    if "networks" in instead and arguments.get("ranks", 1) > 1:
        return
    # Where a description may name several, one that is wanted instead is a list of one.
    several = {name for name, value in arguments.items() if isinstance(value, (list, tuple))}
    wanted_instead = {
        name: [value] if name in several and isinstance(value, str) else value
        for name, value in instead.items()
    }
    yield from make(here, **{**arguments, **wanted_instead})
