"""Sharing: a machine that behaves as the model is foretold without error; figures keep every cell."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import cast

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import packed
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.resources import Resources, Shared
from ddlkit.core.workload import LayerProfile
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.figures import (
    sharing_again,
    sharing_buckets,
    sharing_grid,
    sharing_measured,
    sharing_panels,
    sharing_predicted,
    sharing_recorded,
    sharing_shown,
    sharing_uneven,
    sharing_verdicts,
)
from ddlkit.report.figures.sharing_again import KEYS
from ddlkit.report.panels import Panel
from ddlkit.report.panels import numbers as heat_map_numbers
from ddlkit.report.papers.sharing import DEFAULT, throughput
from ddlkit.report.source import Source, rounds_apart

LINK = "lab:4gbit"
WAYS = {
    "t1-free-idle": (3e-9, 0.0, 1.0),
    "t1-free-nice10": (2e-9, 0.1, 0.5),
    "t2-free-normal": (1.5e-9, 0.6, 0.2),
    "t2-free-raised": (1e-9, 1.0, 0.0),
}
"""Seconds a byte, slowdown of computing and of messages."""
TRAINED = (*WAYS, "t1-free-nice10+t2-free-raised")
NETWORKS = {"resnet18_64": 4, "vgg16_cifar": 6, "squeezenet1_1": 5}
BATCHES = (2, 4, 8)
ROUNDS = range(6)


def profile(network: str, batch: int) -> LayerProfile:
    n = NETWORKS[network]
    sizes = np.arange(1, n + 1) * 1_000_000
    return LayerProfile.from_flops(
        network, batch, [f"t{i}" for i in range(n)], sizes, np.full(n, 1e6 * n),
        peak_flops_per_s=1e9, utilisation=0.5,
    )  # fmt: skip


@dataclass
class Machine:
    """The layers of a recording, and what the model itself says of its training as if it was measured."""

    def profiles(self) -> dict[tuple[str, int], LayerProfile]:
        return {(name, batch): profile(name, batch) for name in NETWORKS for batch in BATCHES}

    def layers(self) -> pd.DataFrame:
        return pd.concat(
            pd.DataFrame({"flops": one.flops, "parameters": one.parameters}).assign(
                network=one.network, batch=one.batch
            )
            for one in self.profiles().values()
        )


def ways() -> dict[tuple[str, str], Resources]:
    return {
        (LINK, name): Resources(name, AlphaBeta(1e-4, per_byte), s, m)
        for name, (per_byte, s, m) in WAYS.items()
    }


def messages() -> pd.DataFrame:
    rows = [
        {"link": LINK, "configuration": name, "bytes": size, "parts": parts, "repeat": repeat,
         "seconds": float(way.cost(size)) * (1 + 0.01 * repeat)}
        for (_, name), way in ways().items()
        for size, parts in ((4e6, 1), (25e6, 4), (64e6, 1))
        for repeat in ROUNDS
    ]  # fmt: skip
    return pd.DataFrame(rows).astype({"bytes": int})


def kernels() -> pd.DataFrame:
    rows = [
        {"link": LINK, "kernel": kernel, "configuration": name, "repeat": repeat, "overlap_share": 1.0,
         "kernel_alone_s": 0.01, "kernel_beside_s": 0.01 * (1 + s),
         "messages_alone_s": 0.1, "messages_beside_s": 0.1 * (1 + m)}
        for name, (_, s, m) in WAYS.items()
        for kernel in ("relu", "linear")
        for repeat in ROUNDS
    ]  # fmt: skip
    return pd.DataFrame(rows)


def training(known: dict[tuple[str, str], Resources]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Tables of iterations and spans as the model plays them, a slower machine in every later round."""
    iterations, spans = [], []
    for (network, batch), one in Machine().profiles().items():
        for name in TRAINED:
            told = sharing_predicted.shared(one.workload(), "none", name, LINK, known)
            assert told is not None
            cell = {
                "network": network,
                "batch": batch,
                "plan": "ddp",
                "link": LINK,
                "configuration": name,
            }
            iterations += [_iteration(told, repeat) | cell for repeat in ROUNDS]
            spans += [row | cell for row in _spans(told)]
    return pd.DataFrame(iterations), pd.DataFrame(spans)


def _iteration(told: Shared, repeat: int) -> dict[str, object]:
    slower, exposed = 1 + 0.05 * repeat, told.iteration_s - told.workload.compute_s
    begins, ends = told.played_s
    under_way = float((ends - begins).sum())
    return {
        "repeat": repeat, "iteration": 0, "openmp": 1, "link_bits_per_s": 4e9,
        "iteration_s": slower * told.iteration_s, "compute_s": slower * told.workload.compute_s,
        "communication_s": slower * under_way, "exposed_communication_s": slower * exposed,
        "overlap_s": slower * (under_way - exposed),
    }  # fmt: skip


def _spans(told: Shared) -> list[dict[str, object]]:
    begins, ends = told.played_s
    done = told.link.computed_s(told.workload.ready_s[-1:], begins, ends)[0]
    first = [
        ("backward", 0.0, done),
        *(("all_reduce", b, e) for b, e in zip(begins, ends, strict=True)),
    ]
    return [
        {"task": f"{kind} {k}", "kind": kind, "stream": kind, "rank": 0, "iteration": 0, "group": -1,
         "origin": "measured", "start_s": begin, "end_s": end, "bytes": 0}
        for k, (kind, begin, end) in enumerate(first)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    return training(sharing_predicted.known_resources(messages(), kernels()))


def test_what_messages_and_kernels_show_is_what_a_configuration_takes() -> None:
    known = sharing_predicted.known_resources(messages(), kernels())
    for key, way in ways().items():
        assert known[key].slowdown == pytest.approx(way.slowdown)
        assert known[key].message_slowdown == pytest.approx(way.message_slowdown)
        assert known[key].cost(4e6) == pytest.approx(float(way.cost(4e6)) * 1.025)


def test_a_machine_that_is_the_model_is_foretold_without_error(
    tables: tuple[pd.DataFrame, pd.DataFrame], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for rounds that a slower machine has: computing is that of the same rounds, messages are not."""
    iterations, _ = tables
    steady = iterations[iterations["repeat"] == 0].assign(plan="none")
    known = sharing_predicted.known_resources(messages(), kernels())
    monkeypatch.setattr(sharing_predicted, "FITTED_ON", ("vgg16_cifar",))
    cells = sharing_predicted.cells(steady, Machine(), known, {})  # type: ignore[arg-type]
    assert cells["copied"].equals(cells["term"])
    assert len(cells) == len(NETWORKS) * len(BATCHES) * len(TRAINED)
    np.testing.assert_allclose(cells["term"], cells["measured_s"], rtol=1e-9)
    np.testing.assert_allclose(cells["fitted"], cells["measured_s"], rtol=1e-9)
    assert (cells["none"] <= cells["measured_s"] + 1e-12).all()
    assert set(cells.loc[~cells["held_out"], "network"]) == {"vgg16_cifar"}
    two = sharing_predicted.two_groups(cells)
    np.testing.assert_allclose(two["term"], two["measured"], rtol=0, atol=1e-9)
    assert len(two) == len(NETWORKS) * len(BATCHES)
    found = sharing_predicted.errors(cells).set_index("model")
    assert found.loc["term", "largest"] < 1e-9 < found.loc["none", "mean"] * -1


def test_what_buckets_take_by_themselves_makes_iterations_longer(
    tables: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    """By at most both copies of all bytes; and by both exactly, where one message follows all computing."""
    rows = [(name, 10**6, 0.1, 0.1 + 2e-3 * n) for name in NETWORKS for n in (1, 2, 3)]
    table = pd.DataFrame(rows, columns=["network", "bytes", "alone_s", "bucketed_s"])
    copied = sharing_predicted.copies(table)
    assert copied == pytest.approx(dict.fromkeys(NETWORKS, 2e-9))
    known = sharing_predicted.known_resources(messages(), kernels())
    for plan in ("none", "single"):
        steady = tables[0][tables[0]["repeat"] == 0].assign(plan=plan)
        cells = sharing_predicted.cells(steady, Machine(), known, copied)  # type: ignore[arg-type]
        n_bytes = cells["network"].map(
            {name: profile(name, 1).workload().bytes.sum() for name in NETWORKS}
        )
        longer = (cells["copied"] - cells["term"]) / (4e-9 * n_bytes)
        assert (longer > 0).all() and (longer <= 1 + 1e-9).all()
        assert plan == "none" or longer.to_numpy() == pytest.approx(1.0)


@pytest.mark.parametrize("bits_per_s", [0.0, 1e8, 1e9, 1e12])
def test_no_paced_message_is_faster_than_its_link(bits_per_s: float) -> None:
    """And none faster than measured; a link without a rate, or one of any, leaves all as it was."""
    rows = messages().assign(ranks=2, link_bits_per_s=bits_per_s)
    known = sharing_predicted.known_resources(rows, kernels())
    paced = sharing_predicted.known_resources(rows, kernels(), paced=True)
    assert paced.keys() == known.keys()
    sizes = np.geomspace(4e6, 64e6, 7)
    least_s = wire_s_per_byte("all_reduce", 2, bits_per_s) * sizes if bits_per_s else 0 * sizes
    for key, way in paced.items():
        assert (way.cost(sizes) >= (1 - 1e-12) * np.maximum(least_s, known[key].cost(sizes))).all()
        assert (way.slowdown, way.message_slowdown) == (
            known[key].slowdown,
            known[key].message_slowdown,
        )
        if bits_per_s in (0.0, 1e12):
            assert np.array_equal(way.cost(sizes), known[key].cost(sizes))


def test_training_on_a_paced_link_is_never_foretold_shorter(
    tables: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    """And to the last bit the same where the pace is what was measured."""
    rows = messages().assign(ranks=2, link_bits_per_s=4e9)
    known = sharing_predicted.known_resources(rows, kernels())
    steady = tables[0][tables[0]["repeat"] == 0].assign(plan="none")
    for paced in (known, None, sharing_predicted.known_resources(rows, kernels(), paced=True)):
        cells = sharing_predicted.cells(steady, Machine(), known, {}, paced)  # type: ignore[arg-type]
        assert (cells["paced"] >= cells["copied"] * (1 - 1e-12)).all()
        if paced is None or paced is known:
            assert cells["paced"].equals(cells["copied"])
        else:
            assert (cells["paced"] > cells["copied"]).any()


COPY_S_PER_BYTE = 5e-10


@dataclass
class Session:
    """A later session on a machine that is the model, but for a share by which training lasts longer.

    sway : by which bases are too long and too short in turn
    """

    share: float = 0.0
    sway: float = 0.0

    def profiles(self) -> dict[tuple[str, int], LayerProfile]:
        return Machine().profiles()

    def table(self, name: str) -> pd.DataFrame:
        kinds = {
            "layers": Machine().layers,
            "sharing_messages": lambda: messages().assign(ranks=2, link_bits_per_s=0.0),
            "sharing_kernels": self.kernels,
            "sharing_copies": self.copies,
            "sharing_unsent": lambda: self.trained[1],
            "sharing_iterations": lambda: self.trained[0],
            "sharing_periods": self.periods,
        }
        return kinds[name]()

    rounds = table

    def periods(self) -> pd.DataFrame:
        rows, unsent = self.trained
        at = rows["configuration"].map(TRAINED.index)
        swaying = 1 + self.sway * (1 - 2 * (at % 2))
        bases = unsent[["bucketed_s", "first_post_s"]].mul(swaying, axis=0)
        return rows.assign(empty_s=bases["bucketed_s"], first_post_s=bases["first_post_s"])

    def kernels(self) -> pd.DataFrame:
        """Of all networks one was the kernel itself; it loses as kernels do."""
        networks = kernels().assign(kernel="squeezenet1_1:2")
        return pd.concat([kernels(), networks], ignore_index=True)

    def copies(self) -> pd.DataFrame:
        rows = [(name, 10**6, 0.1, 0.1 + 2e6 * COPY_S_PER_BYTE) for name in NETWORKS]
        return pd.DataFrame(rows, columns=["network", "bytes", "alone_s", "bucketed_s"])

    @cached_property
    def trained(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Iterations and, before each, one whose buckets nobody sends; rounds compute at other speeds."""
        rows, unsent = [], []
        known = sharing_predicted.known_resources(messages(), kernels())
        for (network, batch), one in self.profiles().items():
            for name, (repeat, slower) in product(TRAINED, enumerate((1.0, 1.02, 0.97, 1.0, 1.1))):
                work = one.workload().scaled(slower)
                told = sharing_predicted.shared(work, "ddp", name, LINK, known)
                assert told is not None
                told = replace(told, copy_s_per_byte=COPY_S_PER_BYTE)
                values = (network, batch, "ddp", LINK, name)
                names = ("network", "batch", "plan", "link", "configuration")
                cell = dict(zip(names, values, strict=True)) | {"repeat": repeat, "iteration": 0}
                took_s = (1 + self.share) * told.iteration_s
                rows.append(cell | {"iteration_s": took_s, "openmp": 1})
                both_s = 2 * COPY_S_PER_BYTE * float(work.bytes.sum())
                post_s = told.computing.ready_s[told.plan.ends[0] - 1]
                unsent.append(
                    cell | {"bucketed_s": work.compute_s + both_s, "first_post_s": post_s}
                )
        return pd.DataFrame(rows), pd.DataFrame(unsent)


@pytest.mark.parametrize("share", [0.0, 0.03])
@pytest.mark.parametrize("paired", [False, True])
def test_a_session_that_is_the_model_is_foretold_from_iterations_without_messages(
    share: float, paired: bool
) -> None:
    """Whatever the rounds' speeds; what lasts longer is surely seen, by all cells or held-out ones alone."""
    told, trained = (cast(Source, Session(late)) for late in (0.0, share))
    grid = sharing_again.met(told, trained) if paired else sharing_again.unsent(trained)
    cells = grid.cells
    assert len(cells) == len(NETWORKS) * len(BATCHES) * len(TRAINED)
    off = 1 / (1 + share) - 1
    np.testing.assert_allclose(cells["paced"], off, atol=1e-4 if paired else 1e-9)
    assert (cells["none"] <= cells["paced"] + 1e-12).all()
    assert (cells["perfect_overlap"] <= cells["no_overlap"] + 1e-12).all()
    same = cells["network"] == "squeezenet1_1"
    assert cells.loc[same, "networks"].equals(cells.loc[same, "paced"])
    assert cells.loc[~same, "networks"].isna().all() and set(cells["held_out"]) == {True, False}
    found = sharing_again.errors(cells).set_index("model")
    assert found.loc["paced", "mean"] == pytest.approx(off, abs=1e-4)
    assert found.loc["networks", "cells"] == same.sum()
    for held_out, count in ((True, same.sum()), (False, len(cells))):
        sure = grid.sure("paced", held_out)
        assert sure.cells == count and sure.noise < 2e-3
        assert sure.mean == pytest.approx(off, abs=1e-4)
        assert (sure.mean_upper < -1e-9) == (share > 0)


@pytest.mark.parametrize("share", [0.0, 0.03])
def test_bases_on_both_sides_of_a_cell_make_up_for_a_machine_that_sways(share: float) -> None:
    """But for the last cell of a round, which has none after it; `met` has none after any."""
    trained = cast(Source, Session(share, sway=0.1))
    grid = sharing_again.steady(trained)
    off = 1 / (1 + share) - 1
    cells = grid.cells[grid.cells["configuration"] != TRAINED[-1]]
    for model in ("paced", "posted"):
        np.testing.assert_allclose(cells[model], off, atol=1e-9)
    poor = sharing_again.met(trained, trained).cells
    assert (poor["paced"] - off).abs().median() > 0.01
    assert sharing_again.chosen(grid) == "paced", "the simpler one of two that say the same"
    late = replace(grid, post=1.05 * grid.post) if grid.post is not None else grid
    assert (late.cells["posted"] >= grid.cells["posted"] - 1e-12).all()
    assert (late.cells["posted"] > grid.cells["posted"]).any()


def test_a_round_whose_last_post_comes_too_late_for_the_mean_rank_silences_one_model_of_one_cell() -> (
    None
):
    """Ranks have starts of their own: the last one's post may come after the mean iteration's end."""
    grid = sharing_again.steady(cast(Source, Session()))
    assert grid.post is not None
    post = grid.post.copy()
    post.iloc[0, 0] = 1.01 * grid.base.iloc[0, 0]
    cells, usual = replace(grid, post=post).cells, grid.cells
    silent = cells["posted"].isna()
    assert cells.loc[silent, KEYS].to_numpy().tolist() == [list(post.columns[0])]
    assert cells.loc[~silent].equals(usual.loc[~silent])
    assert cells["paced"].equals(usual["paced"])
    assert sharing_again.chosen(replace(grid, post=post)) == "paced"


@given(st.integers(1, 3), st.floats(0.2, 0.6), st.floats(0.5, 2.0), st.floats(0.0, 1e-9))
def test_layers_are_stretched_until_they_post_and_last_as_long_as_a_base(
    first: int, early: float, base_s: float, each_s: float
) -> None:
    work = profile("resnet18_64", 4).workload()
    told = sharing_again.posted(work, first, early * base_s, base_s, each_s)
    assert told is not None
    computing = packed(told, each_s)
    assert computing.ready_s[first - 1] == pytest.approx(early * base_s)
    out_s = each_s * work.bytes.sum()
    assert computing.compute_s + out_s == pytest.approx(base_s)
    uniform = work.scaled((base_s - 2 * out_s) / work.compute_s)
    post_s = float(packed(uniform, each_s).ready_s[first - 1])
    same = sharing_again.posted(work, first, post_s, base_s, each_s)
    assert same is not None
    np.testing.assert_allclose(same.backward_s, uniform.backward_s, rtol=1e-6, atol=1e-12)


def buckets_of(bucket_s: tuple[float, float], byte_s: tuple[float, float]) -> pd.DataFrame:
    """A machine on which each takes that long until the last post, and after it; rounds of other speeds."""
    rows = []
    for network, n_bytes, counts in (("small", 10**6, (1, 1, 5)), ("large", 10**8, (1, 10, 40))):
        for cap, count in enumerate(counts):
            into, out = (b * count + c * n_bytes for b, c in zip(bucket_s, byte_s, strict=True))
            for repeat in ROUNDS:
                alone_s = 0.2 * (1 + 0.1 * repeat)
                rows.append(
                    {"network": network, "cap_bytes": 9 - cap, "buckets": count, "bytes": n_bytes,
                     "repeat": repeat, "alone_backward_s": 0.9 * alone_s, "alone_s": alone_s,
                     "posted_s": 0.9 * alone_s + into, "bucketed_s": alone_s + into + out}
                )  # fmt: skip
    return pd.DataFrame(rows)


@pytest.mark.parametrize("bucket_s", [(0.0, 0.0), (3e-4, 1e-4), (0.0, 5e-4)])
def test_what_a_bucket_and_a_byte_take_is_found_by_few_buckets_and_many(
    bucket_s: tuple[float, float],
) -> None:
    byte_s = (3e-10, 2e-10)
    found = sharing_buckets.taken(buckets_of(bucket_s, byte_s))
    for of, (first, second) in (("bucket", bucket_s), ("byte", byte_s)):
        own = found[found["of"] == of]
        assert own["seconds"].to_numpy() == pytest.approx(
            [first, second, first + second], abs=1e-12
        )
    assert (found["lower"] <= found["seconds"] + 1e-12).all()
    assert (found["seconds"] <= found["upper"] + 1e-12).all()


def test_a_round_s_drift_cancels_and_the_default_gains_nothing(
    tables: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    gains = sharing_measured.throughputs(tables[0])
    assert (gains["rounds"] == len(ROUNDS)).all()
    np.testing.assert_allclose(gains["lower"], gains["upper"], atol=1e-9)
    default = gains[gains["configuration"] == "t2-free-normal"]
    assert (default["gain"] == 0).all()


def test_parts_of_an_iteration_add_up_to_it(tables: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    one = tables[0][tables[0]["repeat"] == 0]
    parts = sharing_measured.breakdown(one)
    names = ["computation_only_s", "overlap_s", "communication_only_s"]
    np.testing.assert_allclose(parts[names].sum(axis=1), parts["iteration_s"])


def test_hidden_is_what_at_most_the_last_message_outlasts() -> None:
    cell = {
        "network": "n",
        "batch": 1,
        "plan": "ddp",
        "link": "l",
        "configuration": "t2-free-normal",
    }
    rows = [("backward", 0.0, 10.0), ("all_reduce", 1.0, 5.0), ("all_reduce", 9.0, 12.0)]
    spans = pd.DataFrame(
        [
            {"task": f"{k} {n}", "kind": k, "start_s": b, "end_s": e, "rank": 0, **cell}
            for n, (k, b, e) in enumerate(rows)
        ]
    )
    assert sharing_measured.hidden(spans).all()
    twice = pd.concat([spans, spans], ignore_index=True)
    assert sharing_measured.hidden(twice).all()  # of two sessions the first, not both at once
    spans.loc[1, "end_s"] = 11.0
    assert not sharing_measured.hidden(spans).any()


def test_each_later_look_at_the_same_conclusions_is_surer() -> None:
    """By Bonferroni's rule, as if all looks before had been at the same cells."""
    later = sharing_verdicts.LATER_LOOKS.values()
    levels = [sharing_verdicts.LEVEL, sharing_verdicts.LATER_LEVEL, *(level for _, level in later)]
    np.testing.assert_allclose(levels, [1 - 0.05 / k for k in range(1, 5)], atol=1e-4)
    here = sharing_panels.recorded("")
    assert here is not None
    names = ["first", "second", *sharing_verdicts.LATER_LOOKS]
    assert here.looks().groupby("look", sort=False).size().to_dict() == dict.fromkeys(names, 5)


def test_conclusions_are_judged_by_the_side_of_their_whole_interval(
    tables: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    found = sharing_verdicts.verdicts(*tables, Machine().layers())
    assert len(found) == 5
    for row in found.itertuples():
        sides = {"carries over": row.upper < 0, "does not": row.lower > 0}
        assert sides.get(row.verdict, not any(sides.values()))
        assert not row.lower > row.value + 1e-12 or np.isnan(row.value)


def trained_twice(slower: float) -> list[pd.DataFrame]:
    """One cell of two recordings, each with the default; the machine of the second one is slower."""
    took_s = {"t1-free-idle": (1.2,), "t2-free-normal": (1.0, 1.0), "t4-free-normal": (0.0, 0.9)}
    return [
        pd.DataFrame(
            {"network": "n", "batch": 1, "plan": "ddp", "link": "l", "configuration": name,
             "repeat": repeat, "iteration_s": speed * seconds[at] * (1 + 0.01 * repeat)}
            for name, seconds in took_s.items()
            for repeat in range(5)
            if len(seconds) > at and seconds[at]
        )
        for at, speed in enumerate((1.0, slower))
    ]  # fmt: skip


@given(st.floats(0.5, 2.0))
def test_what_two_recordings_have_of_a_cell_is_compared_within_each(slower: float) -> None:
    """However fast the machine was in either; and odd rounds stay odd."""
    parts = trained_twice(slower)
    rows = rounds_apart(parts)
    gains = sharing_measured.throughputs(rows).set_index("configuration")["gain"]
    assert gains["t1-free-idle"] == pytest.approx(1 / 1.2 - 1)
    assert gains["t4-free-normal"] == pytest.approx(1 / 0.9 - 1)
    assert rows.groupby("configuration")["repeat"].nunique()["t2-free-normal"] == 10
    assert (rows["repeat"] % 2).tolist() == [one % 2 for part in parts for one in part["repeat"]]


def test_what_was_never_trained_beside_the_default_is_compared_with_its_median() -> None:
    """As NCCL's threads, which the environment of a process decides."""
    rows = trained_twice(1.0)[0]
    apart = rounds_apart([own for _, own in rows.groupby("configuration")])
    gains = sharing_measured.throughputs(apart).set_index("configuration")["gain"]
    assert gains["t1-free-idle"] == pytest.approx(1 / 1.2 - 1) and gains["t2-free-normal"] == 0


def test_who_knows_how_long_each_lasts_loses_nothing_to_the_best() -> None:
    """Where the machine is the model; no chooser gains on the best, since no round is luckier."""
    grid = sharing_again.steady(cast(Source, Session()))
    lost = grid.regrets().set_index("chooser")
    assert lost.loc["paced", "mean"] == pytest.approx(0, abs=1e-3)
    assert (lost[["mean", "largest"]] >= -1e-9).all(axis=None)
    assert lost.loc["default", ["more", "lower", "upper"]].eq(0).all()
    np.testing.assert_allclose(lost["more"], lost["mean"] - lost.loc["default", "mean"], atol=1e-12)
    assert (lost["mean"] >= lost.loc["paced", "mean"]).all() and lost["mean"].max() > 0.01
    gains = grid.gains()
    np.testing.assert_allclose(gains["paced"], gains["took"], atol=1e-9)
    assert (
        not gains["configuration"].eq("t2-free-normal").any() and gains["took"].abs().max() > 0.01
    )


def in_orders(later: float) -> pd.DataFrame:
    """Iterations in three orders of buckets; t1 gains with falling ones alone; odd rounds are ``later``."""
    took_s = {
        sharing_uneven.EQUAL: 1.0,
        **dict(zip(sharing_uneven.ORDERS.values(), (0.9, 1.2), strict=True)),
    }
    falling = sharing_uneven.ORDERS["falling"]
    rows = [
        {"network": "n", "batch": 1, "plan": plan, "link": LINK, "configuration": name, "repeat": repeat,
         "compute_s": 0.1, "iteration_s": (later if repeat % 2 else 1.0) * seconds
         / (1.25 if name == "t1-free-idle" and plan == falling else 1.0)}
        for plan, seconds in took_s.items()
        for name in ("t1-free-idle", "t2-free-normal")
        for repeat in range(16)
    ]  # fmt: skip
    return pd.DataFrame(rows)


@given(st.floats(1.0, 2.0))
def test_orders_of_buckets_are_compared_within_rounds(later: float) -> None:
    rows, work = in_orders(later), profile("resnet18_64", 8).workload()
    found = sharing_uneven.orders(rows, work, {}, {})
    for configuration, falling in (("t2-free-normal", 0.9), ("t1-free-idle", 0.9 / 1.25)):
        own = found[found["configuration"] == configuration].set_index("order")
        for order, ratio in (("falling", falling), ("rising", 1.2)):
            ends = own.loc[order, ["measured", "lower", "upper"]].tolist()
            assert ends == pytest.approx([ratio] * 3)
    assert found["foretold"].isna().all(), "of resources that nobody knows"
    more = sharing_uneven.shifts(rows).set_index("order")
    assert more.loc["falling", ["equal", "uneven", "more"]].tolist() == pytest.approx(
        [0, 0.25, 0.25]
    )
    assert more["differs"].to_dict() == {"falling": True, "rising": False}


def test_where_messages_take_no_time_their_order_is_foretold_to_matter_to_nobody() -> None:
    here = sharing_panels.recorded("")
    uneven = here.beside("uneven") if here is not None else None
    assert uneven is not None
    work = sharing_predicted.workloads(uneven)[sharing_uneven.NETWORK]
    free = {(LINK, "t2-free-normal"): Resources("t2-free-normal", AlphaBeta(0.0, 1e-12), 0.0, 0.0)}
    found = sharing_uneven.orders(in_orders(1.0), work, free, {})
    found = found[found["configuration"] == "t2-free-normal"]
    assert found["foretold"].tolist() == pytest.approx([1.0, 1.0], abs=1e-3)


def test_what_the_luckiest_gains_is_judged_in_other_rounds() -> None:
    """A configuration that is fast in even rounds only is chosen by them and judged by the odd ones."""
    rows = [
        {"network": "n", "batch": 1, "plan": "ddp", "link": "l", "configuration": name, "repeat": repeat,
         "iteration_s": 1.0 if name == "t2-free-normal" else 0.5 if repeat % 2 == 0 else 2.0}
        for name in ("t1-free-idle", "t2-free-normal")
        for repeat in ROUNDS
    ]  # fmt: skip
    (gain,) = sharing_verdicts.gains_apart(pd.DataFrame(rows))
    assert gain == pytest.approx((-0.5 + 0.0) / 2)


def test_grids_keep_every_cell() -> None:
    printed = paper_table("sharing", "fig02")
    grid = sharing_measured.paper_grid(printed, "relative_time")
    for row in printed.itertuples():
        assert grid.loc[row.blocks, row.threads] == row.relative_time
    ours = sharing_measured.figure2(messages())
    table = sharing_measured.as_grid(ours, "ratio")
    assert table.notna().to_numpy().sum() == len(WAYS)
    for row in ours.itertuples():
        threads, _, rest = row.configuration.partition("-")
        assert table.loc[threads, rest] == row.ratio


def test_without_a_default_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(UserError, match="measure a default"):
        sharing_measured.default_of(pd.DataFrame({"configuration": ["t1-free-idle"]}))


def test_the_paper_s_figures_are_drawn_without_any_recording() -> None:
    assert len(sharing_panels.missing(None)) == 8
    for panels in (
        sharing_panels.figure2(None),
        sharing_panels.figure4(None),
        sharing_panels.figure8(None),
    ):
        numbers = heat_map_numbers(panels)
        assert set(numbers["panel"]) == set(panels) and numbers["value"].notna().all()
    assert len(sharing_panels.figure3(None)[0]) == 5
    again = sharing_panels.figure8(None)["paper"].grid
    assert again[DEFAULT].eq(0).all() and again.shape == throughput().shape


def test_what_is_learned_on_two_batches_is_judged_on_the_others() -> None:
    """The line through both meets them; every model is judged on the same cells."""
    cells = sharing_grid.judged()
    known = cells[cells["fitted"]].dropna()
    np.testing.assert_allclose(known["own"], known["measured"])
    assert set(cells.loc[~cells["fitted"], "batch"]) == set(sharing_grid.FORETOLD)
    assert sharing_grid.errors(cells)["cells"].nunique() == 1
    printed = int(throughput().notna().to_numpy().sum())
    assert len(cells) == printed


def test_a_model_s_timeline_is_as_long_as_its_grid_says() -> None:
    grid = sharing_grid.fitted("both")
    names = list(sharing_grid.relative_times().index)
    all_s = grid.iteration_s("ResNet-18", np.array([32.0]))[0]
    for name, seconds in zip(names, all_s, strict=True):
        told = grid.iteration("ResNet-18", 32, name)
        assert told.prediction.iteration_s == pytest.approx(seconds)
        assert told.timeline().duration_s == pytest.approx(seconds)


def test_recorded_training_is_said_with_and_without_the_term() -> None:
    cases = sharing_recorded.in_all()
    assert (cases["term"] >= cases["none"] - 1e-12).all() and (cases["slowdown"] > 0).all()
    rates = cases.set_index("link")["slowdown"].groupby("link").first()
    assert rates["lab:500mbit"] < rates["loopback"]


def test_every_time_that_the_text_prints_stands_beside_the_model_in_figures_5_to_7() -> None:
    printed = {key: value for key, value in prose("sharing").items() if key.startswith("fig0")}
    told = sharing_shown.printed_of_figure7()
    kept = sharing_shown.with_printed(sharing_panels.figure7(None), told)
    columns = [name for name in kept if name.startswith("printed ")]
    values = sorted(kept[columns].stack().dropna())
    wanted = [value for key, value in printed.items() if re.match(r"fig07-.+-(default|best)$", key)]
    assert values == sorted([*wanted, *2 * [printed["fig07-alexnet-computation-only"]]])
    saved = sharing_shown.saved()
    kept = sharing_shown.with_saved(sharing_panels.figure6(None), saved)
    assert kept["saved printed [ms]"].dropna().tolist() == [3.97, 6.92]
    assert saved.loc[16, "model"] == pytest.approx(
        1e3 * (kept.iloc[0, 2:5].sum() - kept.iloc[1, 2:5].sum()), rel=1e-6
    )
    parts = sharing_shown.printed_parts().set_index("task")["printed_s"]
    assert {f"fig05c-{name}": 1e3 * value for name, value in parts.items()} == pytest.approx(
        {
            key: value
            for key, value in printed.items()
            if key in {f"fig05c-{name}" for name in parts.index}
        }
    )


def test_headings_say_what_is_found() -> None:
    grid = pd.DataFrame(
        [[1.0, -2.0, 0.0]], ["resnet18_64, 8"], ["t1-free-idle", "t4-free-normal", "t2-free-normal"]
    )
    sure = Panel(grid, (None, "t2-free-normal"), grid - 0.5, grid + 0.5)
    named = sharing_shown.named({"lab:4gbit": sure._replace(lower=grid, upper=grid)})
    assert named["lab:4gbit"].grid.index.tolist() == ["ResNet-18, 64 px, 8"]
    assert named["lab:4gbit"].default == (None, "t2 normal")
    assert sharing_shown.gains({"lab:4gbit": sure}, between=" ") == {
        "lab:4gbit": "Processor, 4 Gbit/s 1 of 3 better, 1 worse"
    }
    bars = pd.DataFrame({"overlap": [3.0, 2.0, 1.0, 1.0, 1.0, 2.0]}, [
        "vgg16_cifar, default", "vgg16_cifar, best: t1-free-idle",
        "8, default", "8, best: default", "16, default", "16, best: b2",
    ])  # fmt: skip
    ((heading, (shown, said)),) = sharing_shown.pairs({"here, nvlink": bars}).items()
    assert (
        heading == "Nvlink: best wins 1 of 2"
        and said == "left: default; right: best of other rounds"
    )
    assert shown.index[::2].tolist() == ["VGG-16 t1 idle", "batch 8 default", "batch 16 b2"]


def test_of_controls_those_that_fared_alike_share_a_row_and_all_that_limit_are_there() -> None:
    for here in (None, sharing_panels.recorded("")):
        table, whole = sharing_shown.controls(here), sharing_panels.figure1(here)
        limits = set(whole["control"]) - {"NCCL_ALGO", "NCCL_PROTO", "NCCL_LAUNCH_ORDER_IMPLICIT"}
        names = ", ".join(table["what limits it"])
        assert len(table) < len(whole) + 1 and all(one in names for one in limits)
