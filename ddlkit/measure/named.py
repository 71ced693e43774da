"""Networks and batch sizes as a user writes them.

There is no torch here, so that commands can check their arguments at once.
"""

from __future__ import annotations

from typing import Any

from ddlkit.core.errors import shown

DEFAULT_BATCH = 4
MOST_BATCH = 10**9
_TORCHVISION = "torchvision:"


def network_of(value: Any) -> tuple[str, int]:
    """Read the name and the batch size of a network.

    Parameters
    ----------
    value : str
        ``"NAME"`` or ``"NAME:BATCH"``. A value of another type is read as its text. The
        name of a network of torchvision may begin with ``"torchvision:"``.

    Returns
    -------
    name : str
        The name, which may be unknown.
    batch : int
        The batch size, by default `DEFAULT_BATCH`.

    Raises
    ------
    ValueError
        If there is no name, or if the batch size is not a number from 1 to
        `MOST_BATCH`. The message is to stand after the value and a colon.

    Examples
    --------
    >>> network_of("resnet50:8"), network_of("resnet50")
    (('resnet50', 8), ('resnet50', 4))
    >>> network_of("torchvision:resnet34:8")
    ('torchvision:resnet34', 8)
    """
    text = str(value)
    # The colon of this prefix is part of the name.
    prefix = _TORCHVISION if text.startswith(_TORCHVISION) else ""
    short_name, colon, digits = text.removeprefix(prefix).partition(":")
    name = prefix + short_name
    if not short_name:
        raise ValueError(
            "must be a network, with its batch size as in resnet50:4 or without"
        )
    if not colon:
        return name, DEFAULT_BATCH
    # `isdecimal` alone would also take the digits of other scripts.
    if not (digits.isascii() and digits.isdecimal()):
        raise ValueError(
            f"the batch size {shown(digits)} is not a whole number of at least 1"
        )
    # This is a float, because `int` refuses thousands of digits.
    batch = float(digits)
    if not 1 <= batch <= MOST_BATCH:
        raise ValueError(f"must have a batch of 1 to {MOST_BATCH} samples")
    return name, int(batch)
