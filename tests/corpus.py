"""Inputs that once ended in a traceback, in nonsense, or took the machine: each as small as it still did."""

from __future__ import annotations

import gzip
import json
from typing import NamedTuple

from ddlkit.store.files import MOST_BYTES
from fuzzing import CAMPAIGN, LINE, PROFILE, TIMES, Input


class Entry(NamedTuple):
    """An input that must be refused, by a line that says ``told``; it once did as ``did``."""

    name: str
    did: str
    told: str
    given: Input


def _import(data: bytes, name: str, *options: str) -> Input:
    return Input(("import", name, *options, "--out", "out.csv", "--json"), {name: data})


def _cost(text: str, *options: str) -> Input:
    text = text or json.dumps(LINE)
    words = ("predict", "--profile", "p.csv", "--cost", "c.json", *options, "--json")
    return Input(words, {"p.csv": PROFILE.encode(), "c.json": text.encode()})


def _campaign(text: str, name: str = "campaign.yml") -> Input:
    return Input(("measure", name, "--dry-run", "--out", "there"), {name: text.encode()})


def _fit(text: str, *options: str) -> Input:
    return Input(("fit", "t.csv", *options, "--json"), {"t.csv": text.encode()})


SIZED, ENDS = (
    {"from_bytes": 1e3, "to_bytes": 1e7},
    {"below": 0.1, "above": 0.1, "apart": 1.0, "at_bytes": [1e3, 1e7]},
)
"""Of a fit, and of the errors that it made where it was not fitted."""
DEEP = 100_000
"""Lists in lists."""
COLUMNS = 40_000
WORKERS = (-5, 0, float("nan"), "many", [2], True)
BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join(9 * [f'*{before}'])}]\n"
    for before, name in zip("abcdefg", "bcdefgh", strict=True)
)
WIDE = ",".join(f"c{k}" for k in range(COLUMNS))
NINE_MILLION = {
    **CAMPAIGN,
    "networks": [f"resnet18:{batch}" for batch in range(1, 301)],
    "plans": [f"buffer:{size}MB" for size in range(1, 301)],
    "stragglers": [1 + 0.01 * number for number in range(100)],
}

TRACEBACKS = [
    Entry(
        "empty first line", "IndexError", "line 1, the header", _fit("\nbytes,seconds\n" + TIMES)
    ),
    Entry("seed below 0", "ValueError", "whole numbers from 0", _cost("", "--plan", "random:-1:2")),
    Entry("deep JSON", "RecursionError", "50 deep", _cost("[" * DEEP + "]" * DEEP)),
    Entry("deep YAML", "RecursionError", "50 deep", _campaign("[" * DEEP)),
    Entry("fit of a list", "AttributeError", "fit is []", _cost(json.dumps({**LINE, "fit": []}))),
    Entry(
        *("errors in lists", "ValueError", "the cost's held_out is not what"),
        _cost(
            json.dumps(
                {**LINE, "fit": {**SIZED, "held_out": {**ENDS, "log_errors": [[0.1], [0.1]]}}}
            )
        ),
    ),
    Entry(
        "no value", "AttributeError", "--form: -- is no value", _fit("bytes,seconds\n", "--form=--")
    ),
    Entry(
        *("denormal times", "LinAlgError", "below 1e-30"),
        _fit("bytes,seconds\n1024,1e-320\n4096,1e-320\n16384,1e-320\n", "--form", "alpha_beta"),
    ),
]
NONSENSE = [
    Entry(
        *("beyond all numbers", "Infinity and NaN", "must be a finite number up to 1e+30"),
        _cost(json.dumps({**LINE, "alpha_s": 1e308, "beta_s_per_byte": 1e308})),
    ),
    *(
        Entry(
            *(f"workers {str(workers)[:5]}", "echoed", "workers is"),
            _cost(json.dumps({**LINE, "workers": workers})),
        )
        for workers in WORKERS
    ),
]
COSTLY = [
    Entry(
        "aliases", "25 s and 3.2 GB", "more than 100000 values", _campaign(f"{BOMB}rounds: *h\n")
    ),
    Entry("alias of itself", "RecursionError", "is not YAML", _campaign("rounds: &a [*a]\n")),
    Entry("wide table", "23 s", "more than 1000", _fit(f"bytes,seconds,{WIDE}\n")),
    Entry(
        *("gzip bomb", "6.2 GB", "more than 128 MiB once unpacked"),
        _import(gzip.compress(bytes(MOST_BYTES + 1), 1), "t.json.gz"),
    ),
    Entry(
        *("nine million cases", "minutes and gigabytes", "9000000 cases, the product of its lists"),
        _campaign(json.dumps(NINE_MILLION), "c.json"),
    ),
    Entry(
        *("schedule of 100,000 ranks", "hours", "use table, or alpha_beta of a ring"),
        _cost(
            '{"form": "stepped", "software_s": 1e-4, "link_s_per_byte": 8e-9, "workers": 100000}'
        ),
    ),
]
LONG = [
    Entry(
        "long name of a form", "5,000 characters", "aaa", _cost(json.dumps({"form": "a" * 5000}))
    ),
]
ENTRIES = [*TRACEBACKS, *NONSENSE, *COSTLY, *LONG]
