"""What makers and authors print: data/specs, each value with its source, and data/papers as transcribed.

Each folder of data/papers holds a SHA256SUMS of its CSV files, in the format of ``sha256sum -c``.
After a correction, ``sha256sum *.csv > SHA256SUMS`` there writes them anew.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

from ddlkit.core.errors import UserError
from ddlkit.store import files
from ddlkit.store.files import DATA
from ddlkit.store.sheet import SCHEMAS, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame


def _read(name: str) -> DataFrame:
    path = DATA / "specs" / f"{name}.csv"
    return SCHEMAS[name].frame(read_sheet(files.read_text(path), str(path)))


@functools.cache
def _datasheets() -> dict[tuple[str, str], float]:
    rows = _read("devices")[["device", "quantity", "value"]].itertuples(index=False)
    return {(name, quantity): value for names, quantity, value in rows for name in names.split("|")}


def datasheet(device: str, quantity: str) -> float:
    """The maker's value, in the unit that the quantity is named by; 0 where none is known.

    device : as nvidia-smi names it. quantity : {fp32,tf32,bf16,fp16}_flops_per_s (dense, without
    sparsity; on tensor cores where the precision has them) or memory_bytes_per_s.

    Raises UserError when data/specs/devices.csv is damaged or missing.
    """
    return _datasheets().get((device, quantity), 0.0)


def published_networks() -> DataFrame:
    """What is published of each network's size, one row per network; 0 where nothing is.

    aliases : other spellings, separated by ";", the one to show first
    parameters_within : how far the true number may lie off the printed one, rounded as it is
    tensors : that hold parameters
    printed_gops, flops_per_op, forward_gflops : 1e9 operations of the forward pass on one ``sample``
        as printed, how many FLOP the source means by one (2 where it counts multiply-adds), and their
        product; 1 multiply-add is 2 FLOP everywhere here

    Raises UserError when data/specs/networks.csv is damaged or missing.
    """
    return _read("networks")


@functools.cache
def _spellings() -> dict[str, str]:
    """Plain spelling -> name of the network, for every name and alias."""
    frame = published_networks()
    return {
        _plain(text): name
        for name, aliases in zip(frame["name"], frame["aliases"], strict=True)
        for text in (name, *aliases.split(";"))
    }


def _plain(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


def network_named(text: str) -> str:
    """The name under which a network is measured, however a user or a paper writes it.

    Raises UserError with the names that it may stand for when no network is written so.

    >>> network_named("ResNet-101"), network_named("ViT-Base/16")
    ('resnet101', 'vit_b_16')
    """
    known, asked = _spellings(), _plain(text)
    if asked in known:
        return known[asked]
    names = sorted(set(known.values()))
    near = [name for name in names if asked and _plain(name).startswith(asked)]
    near = near or difflib.get_close_matches(text.lower(), names, n=1)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(names)}"
    )
    raise UserError(f"unknown network {text!r}: {hint}")


@functools.cache
def network_title(name: str) -> str:
    """How a network is spelled where it is shown, whoever named it; an unknown name as it is.

    >>> network_title("ViT-Base/16"), network_title("googlenet_64"), network_title("tiny_net")
    ('ViT-B/16', 'GoogLeNet, 64 px', 'tiny_net')
    """
    whole, _, side = name.rpartition("_")
    smaller = side.isdigit() and _plain(name) not in _spellings()
    key = _spellings().get(_plain(whole if smaller else name))
    if key is None:
        return name
    frame = published_networks().set_index("name")
    first = str(frame.loc[key, "aliases"]).partition(";")[0]
    return f"{first}, {side} px" if smaller else first


def measured_peaks(peaks: DataFrame) -> dict[tuple[str, str], float]:
    """(device, precision) -> FLOP/s of the fastest product in a table ``peaks``.

    The fastest of all samples, not a median: what else runs can only make a product slower, and a peak
    is what the device can do.
    """
    rate = 2.0 * peaks["side"].astype(float) ** 3 / peaks["seconds"]
    return dict(rate.groupby([peaks["device"], peaks["precision"]]).max())


# -- the papers' numbers ----------------------------------------------------------------------

SUMS = "SHA256SUMS"


def read_transcribed(path: Path) -> bytes:
    """Content of a transcribed or taken file, compared with the SHA256SUMS beside it.

    A folder without SHA256SUMS is not guarded. Raises UserError when the file cannot be read, is
    not listed, or differs from what is listed.
    """
    data = files.read(path)
    sums = path.with_name(SUMS)
    if not sums.is_file():
        return data
    listed = _parse(files.read_text(sums), sums)
    advice = f"restore it, or check it against its source and write {SUMS} there anew"
    if path.name not in listed:
        raise UserError(f"{path} is not among what was transcribed ({SUMS}): {advice}")
    if hashlib.sha256(data).hexdigest() != listed[path.name]:
        raise UserError(f"{path} differs from what was transcribed: {advice}")
    return data


def _parse(text: str, where: Path) -> dict[str, str]:
    """File name -> SHA-256, 64 hex digits."""
    listed = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = re.fullmatch(r"(.{64})  (.+)", line)
        if not found:
            raise UserError(f"{where}, line {number}: must be a SHA-256, two spaces, a file name")
        listed[found[2]] = found[1]
    return listed
