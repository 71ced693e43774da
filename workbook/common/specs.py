"""What makers and authors print of devices and networks (data/specs, each value with its source)."""

from __future__ import annotations

import difflib
import functools
import re

from pandas import DataFrame

from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import is_lab, read_link
from ddlkit.store import files
from ddlkit.store.sheet import SCHEMAS
from workbook.common import places


@functools.cache
def specs(name: str) -> DataFrame:
    """Return a table of data/specs: devices or networks; 0 where a number is not known."""
    path = places.DATA / "specs" / f"{name}.csv"
    return SCHEMAS[name].read(files.read_text(path), str(path))


def datasheet(device: str, quantity: str) -> float:
    """Return the maker's value, in the unit that the quantity is named by; 0 where none is known.

    device : as nvidia-smi names it; quantity : {fp32,tf32,bf16,fp16}_flops_per_s (dense, on tensor cores
        where the precision has them) or memory_bytes_per_s
    """
    rows = specs("devices")
    named = rows["device"].str.split("|").map(lambda names: device in names)
    return float(rows["value"][named & (rows["quantity"] == quantity)].sum())


@functools.cache
def _spellings() -> dict[str, tuple[str, str]]:
    """Return the name and the title of the network by every plain spelling, its names and aliases."""
    spellings: dict[str, tuple[str, str]] = {}
    for row in specs("networks").itertuples():
        aliases = row.aliases.split(";")
        spellings |= {
            _plain(text): (row.name, aliases[0]) for text in (row.name, *aliases)
        }
    return spellings


def _plain(text: str) -> str:
    return re.sub("[^a-z0-9]", "", text.lower())


def network_named(text: str) -> str:
    """Return the name under which a network is measured, however a user or a paper writes it.

    >>> network_named("ResNet-101"), network_named("ViT-Base/16")
    ('resnet101', 'vit_b_16')
    """
    spellings, plain = _spellings(), _plain(text)
    if plain in spellings:
        return spellings[plain][0]
    names = sorted({name for name, _ in spellings.values()})
    near = difflib.get_close_matches(text.lower(), names, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
    raise UserError(f"unknown network {text!r}: {advice}")


def network_title(name: str) -> str:
    """Return how a network is spelled where it is shown; an unknown name as it is.

    >>> network_title("ViT-Base/16"), network_title("googlenet_64"), network_title("tiny_net")
    ('ViT-B/16', 'GoogLeNet, 64 px', 'tiny_net')
    """
    spellings, (whole, _, side) = _spellings(), name.rpartition("_")
    if _plain(name) in spellings:
        return spellings[_plain(name)][1]
    smaller = side.isdigit() and _plain(whole) in spellings
    return f"{spellings[_plain(whole)][1]}, {side} px" if smaller else name


def link_title(link: str) -> str:
    """Return the rate and the delay of a lab's link as they are shown; any other link as it is.

    >>> link_title("lab:1gbit"), link_title("emulated:500mbit-delay1ms"), link_title("loopback")
    ('1 Gbit/s', '500 Mbit/s with 1 ms delay', 'loopback')
    """
    if not is_lab(link):
        return link
    named = read_link(link)
    rate = named.rate_bits_per_s
    title = f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"
    if not named.delay_s:
        return title
    return f"{title} with {1e3 * named.delay_s:g} ms delay"


def measured_peaks(peaks: DataFrame) -> dict[tuple[str, str], float]:
    """Return FLOP/s of the fastest product, which nothing slowed, in ``peaks`` by (device, precision)."""
    rate = 2.0 * peaks["side"].astype(float) ** 3 / peaks["seconds"]
    return dict(rate.groupby([peaks["device"], peaks["precision"]]).max())
