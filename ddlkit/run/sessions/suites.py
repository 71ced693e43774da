"""The points of a suite: what its file says, made into what measures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ddlkit.core.errors import UserError
from ddlkit.run.lab import network as lab
from ddlkit.run.nets import registry
from ddlkit.run.sessions import kinds, lab_kinds
from ddlkit.run.sessions.grammar import (
    DEVICES,
    KINDS,
    Key,
    Suite,
    checked,
    network,
    one_of,
    read,
    read_keys,
    truth,
)
from ddlkit.run.sessions.session import Point, PointList, say
from ddlkit.run.sessions.vocabulary import Here, best_device

assert lab_kinds and kinds  # whose import registers them

# What every description of points may say besides what is the kind's own.
_COMMON = {
    "measure": Key(one_of(list(KINDS))),
    "about": Key(str, ""),  # why, for who reads the file
    "device": Key(one_of(("", *DEVICES)), ""),  # where it is measured: everywhere, if it is ""
    "by_name": Key(truth, False),  # not part of "all"
}


def points(
    *,
    out: Any,
    session: int,
    name: str,
    part: str = "all",
    device: str = "",
    networks: Sequence[str] = (),
    predict: bool = False,
) -> PointList:
    """Return the points of the suite of that name, or in that file.

    part : what of it, "all" or what points belong to, as "layers"
    device : in place of the suite's own; networks : in place of its own, of layers only, as "resnet50:32"
    predict : of campaigns: calibrate their labs and predict their cases, and replay none

    Raises UserError for a wrong file or network, and when a GPU is wanted and torch sees none.
    """
    instead: dict[str, Any] = {}
    if networks:
        instead["networks"] = [_batched(text, part) for text in networks]
    suite = read(name)
    if predict and not suite.is_campaign:
        raise UserError(f"--predict: {suite.file} is no campaign: only its cases are predicted")
    device = device or suite.device or best_device()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install a CUDA build that fits the driver, "
            "or use --suite cpu"
        )
    here = Here(device, session, out)
    lists = []
    for section in ("points", "opening", "closing"):
        made: dict[str, Point] = {}
        for point in _made(suite, section, here, part, instead, predict):
            made.setdefault(point.key, point)
        lists.append(list(made.values()))
    return PointList(*lists)


def _batched(text: str, part: str) -> tuple[str, int]:
    """Return name and batch size of a network that the user wants instead of the suite's."""
    if part != "layers":
        raise UserError(f"networks can be chosen for layers only, not for {part}")
    if ":" not in text:
        raise UserError(f"networks {text!r}: write batch sizes, too, as in resnet50:32,vgg16:16")
    named: tuple[str, int] = checked(text, network, "networks")
    registry.find(named[0])
    return named


def _made(
    suite: Suite,
    section: str,
    here: Here,
    part: str,
    instead: Mapping[str, Any],
    predict: bool,
) -> Iterator[Point]:
    """Yield the points of a section of the suite that are wanted, and possible here."""
    gathered: dict[str, list[Any]] = {}
    for position, described in enumerate(getattr(suite, section)):
        where = f"{suite.file}: {section}[{position}]"
        common = read_keys({k: v for k, v in described.items() if k in _COMMON}, _COMMON, where)
        kind = KINDS[common["measure"]]
        own = {key: value for key, value in described.items() if key not in _COMMON}
        arguments = {**read_keys(own, kind.keys, where), **instead}
        wanted = not common["by_name"] if part == "all" else part == kind.what
        if not wanted or common["device"] not in ("", here.device):
            continue
        if "networks" in instead and arguments.get("ranks", 1) > 1:
            continue
        needs_lab = (kind.lab and not kind.gathered) or any(arguments.get("rate", ""))
        if needs_lab and (reason := lab.available()):
            say(f"no lab, so no {common['measure'].replace('_', ' ')}: {reason}")
        elif kind.gathered:
            try:
                grid = kind.gathered(**arguments)
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
            gathered.setdefault(common["measure"], []).append(grid)
        else:
            yield from kind.make(here, **arguments)
    for name, grids in gathered.items():
        yield from KINDS[name].make(here, grids, str(suite.file), predict)
