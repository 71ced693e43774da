"""What makers and authors state of devices and networks.

The values are in data/specs, each with its source.
"""

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
    """Return a table of data/specs.

    Parameters
    ----------
    name : {"devices", "networks"}
        The name of the table.

    Returns
    -------
    DataFrame
        The rows, with 0 for a number that is not known.
    """
    path = places.DATA / "specs" / f"{name}.csv"
    return SCHEMAS[name].read(files.read_text(path), str(path))


def datasheet(device: str, quantity: str) -> float:
    """Return what the maker of a device states.

    Parameters
    ----------
    device : str
        The device as nvidia-smi names it.
    quantity : str
        One of {fp32,tf32,bf16,fp16}_flops_per_s (dense, on tensor cores if these have
        the precision), or memory_bytes_per_s.

    Returns
    -------
    float
        The value in the unit of the quantity, or 0 if none is known.
    """
    rows = specs("devices")
    # A row may be for several devices, whose names are separated by bars.
    is_device = rows["device"].str.split("|").map(lambda names: device in names)
    is_wanted = is_device & (rows["quantity"] == quantity)
    # At most one row has the value. The sum of no row is 0.
    return float(rows["value"][is_wanted].sum())


@functools.cache
def _spellings() -> dict[str, tuple[str, str]]:
    """Return the name and the title of a network by each spelling of it.

    The spellings are the name and the aliases, each in lower case and without other
    characters than letters and digits (`_plain`). The title is the first alias.
    """
    spellings: dict[str, tuple[str, str]] = {}
    for row in specs("networks").itertuples():
        aliases = row.aliases.split(";")
        for text in (row.name, *aliases):
            spellings[_plain(text)] = (row.name, aliases[0])
    return spellings


def _plain(text: str) -> str:
    """Return the letters and digits of a text in lower case."""
    return re.sub("[^a-z0-9]", "", text.lower())


def network_named(text: str) -> str:
    """Return the name under which a network is measured.

    Parameters
    ----------
    text : str
        The name as a user or a paper writes it. Only its letters and digits count.

    Returns
    -------
    str

    Raises
    ------
    UserError
        If no network is known by this name.

    Examples
    --------
    >>> network_named("ResNet-101"), network_named("ViT-Base/16")
    ('resnet101', 'vit_b_16')
    """
    spellings = _spellings()
    plain = _plain(text)
    if plain in spellings:
        name, _ = spellings[plain]
        return name
    names = sorted({name for name, _ in spellings.values()})
    similar = difflib.get_close_matches(text.lower(), names, n=1)
    guess = f"did you mean {similar[0]!r}? Otherwise " if similar else ""
    raise UserError(f"unknown network {text!r}: {guess}use one of {', '.join(names)}")


def network_title(name: str) -> str:
    """Return the name of a network as it is shown.

    A name such as "googlenet_64" ends in the side of images in pixels, which are smaller than
    usual. An unknown name is returned unchanged.

    Examples
    --------
    >>> network_title("ViT-Base/16"), network_title("googlenet_64"), network_title("tiny_net")
    ('ViT-B/16', 'GoogLeNet, 64 px', 'tiny_net')
    """
    spellings = _spellings()
    plain = _plain(name)
    if plain in spellings:
        _, title = spellings[plain]
        return title
    network, _, side = name.rpartition("_")
    if side.isdigit() and _plain(network) in spellings:
        _, title = spellings[_plain(network)]
        return f"{title}, {side} px"
    return name


def link_title(link: str) -> str:
    """Return the rate and the delay of a link of the lab as they are shown.

    A delay of 0 is left out. Any other link is returned unchanged.

    Examples
    --------
    >>> link_title("lab:1gbit"), link_title("emulated:500mbit-delay1ms"), link_title("loopback")
    ('1 Gbit/s', '500 Mbit/s with 1 ms delay', 'loopback')
    """
    if not is_lab(link):
        return link
    named = read_link(link)
    rate_bits_per_s = named.rate_bits_per_s
    if rate_bits_per_s >= 1e9:
        title = f"{rate_bits_per_s / 1e9:g} Gbit/s"
    else:
        title = f"{rate_bits_per_s / 1e6:g} Mbit/s"
    if not named.delay_s:
        return title
    return f"{title} with {1e3 * named.delay_s:g} ms delay"


def measured_peaks(peaks: DataFrame) -> dict[tuple[str, str], float]:
    """Return the highest rate at which each device multiplied matrices.

    The fastest product is the one that nothing else slowed.

    Parameters
    ----------
    peaks : DataFrame
        Timed products of square matrices: the ``device``, the ``precision``, the ``side`` of
        the matrices in elements, and the ``seconds`` of a product.

    Returns
    -------
    dict of (str, str) to float
        FLOP/s by device and precision.
    """
    # Each of the side**2 elements of a product takes as many multiplications as the side, and
    # as many additions.
    flops = 2.0 * peaks["side"].astype(float) ** 3
    flops_per_s = flops / peaks["seconds"]
    return dict(flops_per_s.groupby([peaks["device"], peaks["precision"]]).max())
