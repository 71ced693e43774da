"""Inputs that once ended in a traceback, in nonsense, or took the machine: each as small as it still did."""

from __future__ import annotations

import gzip

from ddlkit.store.files import MOST_BYTES
from fuzzing import LINE, TIMES, Input, asked


def _campaign(text: str) -> Input:
    return Input(
        ("campaign", "c.yml", "--dry-run", "--out", "there"), {"c.yml": text.encode()}
    )


def _fit(text: str, *options: str) -> Input:
    return Input(("fit", "t.csv", *options, "--json"), {"t.csv": text.encode()})


ENDS = {
    "growth_below": 0.1,
    "growth_above": 0.1,
    "gap_power": 1.0,
    "at_bytes": [1e3, 1e7],
}
ERRORS = {
    "from_bytes": 1e3,
    "to_bytes": 1e7,
    "held_out": {**ENDS, "normalized_log_errors": [[0.1], [0.1]]},
}
WIDE = ",".join(f"c{k}" for k in range(40_000))
NINE_MILLION = f"""measure: campaign
networks: {[f"resnet18:{batch}" for batch in range(1, 301)]}
plans: {[f"buffer:{size}MB" for size in range(1, 301)]}
stragglers: {[1 + 0.01 * number for number in range(100)]}
points: [{{workers: [2], rates: 1gbit}}]
"""
TINY = "bytes,seconds\n1024,1e-320\n4096,1e-320\n16384,1e-320\n"
RING = {
    "form": "stepped",
    "software_s": 1e-4,
    "link_s_per_byte": 8e-9,
    "workers": 100_000,
}
PACKED = {"t.gz": gzip.compress(bytes(MOST_BYTES + 1), 1)}

ENTRIES: dict[str, tuple[str, Input]] = {
    # once a traceback
    "empty first line": ("line 1, the header", _fit("\nbytes,seconds\n" + TIMES)),
    "seed below 0": ("a whole number from 0", asked(LINE, "--plan", "random:-1:2")),
    "deep JSON": ("50 deep", asked(LINE, **{"c.json": "[" * 100_000 + "]" * 100_000})),
    "deep YAML": ("50 deep", _campaign("[" * 100_000)),
    "fit of a list": ("fit is []", asked({**LINE, "fit": []})),
    "errors in lists": (
        "the cost's draws are not what",
        asked({**LINE, "fit": ERRORS}),
    ),
    "no value": ("--form: -- is not a value", _fit("bytes,seconds\n", "--form=--")),
    "denormal times": ("at least 1e-30", _fit(TINY, "--form", "alpha_beta")),
    # once nonsense
    "beyond all numbers": (
        "must be a finite number up",
        asked({**LINE, "alpha_s": 1e308}),
    ),
    "no ranks": ("the number of ranks is", asked({**LINE, "workers": 0})),
    "ranks, or not": ("the number of ranks is", asked({**LINE, "workers": True})),
    "ranks by two names": ("twice", asked({**LINE, "ranks": 4})),
    # once minutes and gigabytes
    "alias of itself": ("is not YAML", _campaign("rounds: &a [*a]\n")),
    "wide table": ("more than 1000", _fit(f"bytes,seconds,{WIDE}\n")),
    "gzip bomb": (
        "128 MiB once unpacked",
        Input(("import", "t.gz", "--out", "o"), PACKED),
    ),
    "nine million cases": (
        "9000000 cases, the product of its lists",
        _campaign(NINE_MILLION),
    ),
    "schedule of 100,000 ranks": ("use table, or alpha_beta of a ring", asked(RING)),
    "long name of a form": ("aaa", asked({"form": "a" * 5000})),
}
"""By what is wrong: a word of the line that refuses it, and the input."""
