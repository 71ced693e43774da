"""Advice says what the model says, and tries it on a real one; what cannot be advised on is one line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from ddlkit import cli, show, store
from ddlkit.cli import advising
from ddlkit.core import units
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.link import Link
from ddlkit.core.plan import ddp, make_plan
from ddlkit.core.workload import Workload
from ddlkit.jobs.rank import Rank, Tables
from ddlkit.measure import advise as models
from ddlkit.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.measure.given import load
from ddlkit.measure.parts import Ranks
from ddlkit.model import Communication
from ddlkit.model.advice import (
    DEFAULT,
    KEEP,
    WORTH,
    Advice,
    Gain,
    is_decided,
    is_supported,
    measured_gain,
    trial_result,
)
from ddlkit.model.contention import Contention
from forked import two_ranks
from strategies import random_workload
from workbook.common import places
from workbook.validate import accuracy

FILE = Path(__file__).with_name("given_models.py")
MIB = 2**20


def messages(alpha_s: float, beta_s: float, spread: float = 0.05) -> Communication:
    """Lines whose draws lie around one, and a term of compute and messages that drifts."""
    rng = np.random.default_rng(0)
    lines = [
        AlphaBeta(alpha_s * f, beta_s * f, workers=2)
        for f in rng.lognormal(0, spread, 100)
    ]
    term = np.array([[0.1, 0.2], [0.3, 0.4]])
    beside = Contention(np.array([1e4, 1e7]), term, np.stack([term] * 9), 1e-10)
    return Communication(
        AlphaBeta(alpha_s, beta_s, workers=2), lines, contention=beside
    )


LATE = Workload.from_arrays(0.01, [0.001] * 40, [30_000] * 40)
"""Forty small gradients within 40 ms."""


@pytest.mark.parametrize("seed", range(5))
def test_the_best_is_no_slower_and_every_option_is_judged_by_the_same_draws(
    seed: int,
) -> None:
    work = random_workload(np.random.default_rng(seed), 25)
    advice = Advice.of(work, messages(1e-3, 1e-9))
    assert advice.ranked[0].seconds == min(o.seconds for o in advice.options.values())
    own = advice.gain(advice.options[DEFAULT])
    assert (own.share, own.interval, own.slower_share) == (0, [0, 0], 0)
    for option in advice.options.values():
        gain = advice.gain(option)
        assert gain.interval[0] - 1e-9 <= gain.share <= gain.interval[1] + 1e-9
        noisy = advice.gain(option, rounds=10).interval
        assert noisy[1] - noisy[0] >= gain.interval[1] - gain.interval[0] - 1e-3
    plans = [o.iteration.plan.ends for o in advice.options.values()]
    assert len({*plans}) == len(plans) and DEFAULT in advice.options


def test_nothing_is_to_be_gained_where_messages_cost_nothing_or_there_is_one() -> None:
    for work, known in (
        (LATE, messages(1e-9, 1e-15)),
        (Workload.from_arrays(0.01, [0.01], [10**6]), messages(1e-3, 1e-9)),
    ):
        said = Advice.of(work, known).to_dict()
        assert said["advice"] == "keep the default"
        assert said["predicted_best"] == DEFAULT or said["predicted_gain"] < 0.02
    said = Advice.of(LATE, messages(1e-9, 1e-15)).to_dict()
    assert said["limited_by"] == "compute" and said["measure_next_bytes"] is None


def test_what_limits_is_told_apart() -> None:
    many = Advice.of(LATE, replace(messages(5e-3, 1e-12), contention=None), lists=False)
    assert many.limits()[0] == "start-ups"
    wide = Workload.from_arrays(0.01, [0.001] * 3, [10**7, 10**7, 10**7])
    assert (
        Advice.of(wide, replace(messages(1e-6, 1e-8), contention=None)).limits()[0]
        == "bandwidth"
    )
    huge = Workload.from_arrays(0.01, [0.001] * 3, [10**4, 10**8, 10**4])
    assert (
        "t1"
        in Advice.of(huge, replace(messages(1e-6, 1e-8), contention=None)).limits()[0]
    )
    shorter = Advice.of(wide, messages(1e-6, 1e-8)).remedies()
    assert max(shorter, key=shorter.__getitem__) == "no communication at all"
    # Each bucket has two gradients. Four of half the bytes fit into a bucket, which is
    # sent later. A faster link leaves the buckets as they are.
    even = Workload.from_arrays(0.01, [0.03] * 8, [13 * 2**20] * 8)
    shorter = Advice.of(even, replace(messages(1e-6, 1e-9), contention=None)).remedies()
    assert shorter["gradients in half the bytes"] < 0 < shorter["a link twice as fast"]
    doubtful = Advice.of(LATE, messages(5e-3, 1e-12, spread=0.5))
    assert doubtful.measure_next() in {
        *doubtful.options[DEFAULT].iteration.group_bytes,
        *doubtful.ranked[0].iteration.group_bytes,
    }


def test_contention_takes_time_only_where_messages_and_compute_slow_each_other() -> (
    None
):
    """Tokens of a link that run out lengthen messages, but are no contention."""
    work = Workload.from_arrays(0.01, [0.001] * 6, [30 * MIB] * 6)
    token_bucket = Link(burst_s=0.05, wire_s_per_byte=1e-9)
    slowed = replace(messages(1e-4, 1e-9), link=token_bucket)
    for communication, is_slowed in (
        (slowed, True),
        (replace(slowed, contention=None), False),
    ):
        _, seconds = Advice.of(work, communication).limits()
        assert (seconds["contention"] > 0) == is_slowed


def test_a_gain_that_is_rounding_is_none() -> None:
    advice = Advice.of(LATE, messages(1e-3, 1e-9))
    default = advice.options[DEFAULT]
    rounded = default.long_run_s * (1 + 1e-15)
    alike = default._replace(name="exact", long_run_s=rounded)
    gain = replace(advice, options={DEFAULT: default, "exact": alike}).gain(alike)
    assert (gain.share, gain.interval, gain.slower_share) == (0, [0, 0], 0)


def test_a_measured_gain_is_found_again_and_its_interval_narrows() -> None:
    rng, widths = np.random.default_rng(1), []
    for rounds in (10, 90):
        slow = rng.lognormal(0, 0.02, rounds)
        fast = 0.9 * rng.lognormal(0, 0.02, rounds)
        gain = measured_gain({DEFAULT: slow, "exact": fast}, "exact")
        assert gain.interval[0] < 0.1 < gain.interval[1]
        assert gain.slower_share == np.mean(fast > slow) < 0.05
        widths.append(np.ptp(gain.interval))
    assert widths[1] < widths[0] / 2


def test_a_cap_closes_every_bucket_and_is_what_ddp_takes() -> None:
    work = Workload.from_arrays(
        0.0, [1.0] * 4, [600_000, 600_000, 20_000_000, 9_000_000]
    )
    assert make_plan("ddp:25MiB", work).ends == (4,) and ddp(work).ends == (2, 4)
    assert make_plan("ddp:1B", work).ends == (1, 2, 3, 4)


MINE = """
from torch import nn, randn, randint

def net(device):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    x, y = randn(8, 256), randint(256, (8,))
    return model, lambda: nn.functional.cross_entropy(model(x), y)
"""


def ask(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, Any]:
    assert cli.main(["advise", *map(str, words), "--json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_a_models_file_is_measured_advised_on_and_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    out = tmp_path / "out"
    words = ["--model", f"{tmp_path / 'mine.py'}:net", "--out", out]
    # On a machine that others keep busy, the refusal of too little time is followed.
    for minutes in (0.05, 0.2, 1.0):
        given_time = ["--minutes", minutes, "--confirm-minutes", 0.05]
        status = cli.main(["advise", *map(str, words), *map(str, given_time), "--json"])
        printed = capsys.readouterr()
        if f"--minutes {60 * minutes:g}s: too short" not in printed.err:
            break
    assert status == 0, printed.err
    said = json.loads(printed.out)
    trials = store.load_table(out / "trials.csv", "trials")
    assert said["ranks"] == 2 and said["snippet"].startswith("Distrib")
    assert 6 <= said["rounds"] == trials["repeat"].nunique() <= models.LOOKS[-1]
    assert trials.groupby(["repeat", "policy"]).size().unstack().nunique().eq(1).all()
    assert DEFAULT in set(trials["policy"]) and trials["policy"].nunique() > 1
    best = said["predicted_best"]
    assert best == DEFAULT or "measured_gain" in said
    if said["predicted_advice"] != said["advice"]:
        lower, upper = said["measured_gain_interval"]
        assert said["advice"] == KEEP and (lower <= 0 or upper < WORTH)
    of_default = trials[trials["policy"] == DEFAULT].groupby("repeat")["seconds"]
    assert said["default_plan"]["measured_iteration_s"] == pytest.approx(
        of_default.median().median()
    )
    before = {
        name: (out / f"{name}.csv").read_bytes() for name in ("layers", "slowdown")
    }
    again = ask(capsys, *words[:4], "--confirm-minutes", 1e-5)
    assert again["rounds"] == 6, "too little time for ten"
    assert before == {name: (out / f"{name}.csv").read_bytes() for name in before}, (
        "kept"
    )
    untried = ask(capsys, *words[:4], "--confirm-minutes", 0)
    assert untried["decided_by"] == "prediction" and "rounds" not in untried
    assert said["decided_by"] == "trial" and untried["predicted_best"] == best
    cpu = torch.device("cpu")
    training, me = load(str(words[1]), cpu, []), Rank(0, 2, 0, cpu, "gloo", 1, out)
    me = replace(me, link="loopback")
    assert models._measured_before(me, training) == [1.0, 1.0, 1.0]
    of_more_ranks = replace(me, world_size=3)
    assert models._measured_before(of_more_ranks, training) == [0.0, 0.0, 0.0]
    over_another_link = replace(me, link="lab:1gbit")
    assert models._measured_before(over_another_link, training) == [1.0, 0.0, 0.0]
    training.network += (
        "-k2"  # as --accumulate 2 has it: nothing measured before is of that
    )
    assert models._measured_before(me, training) == [0.0, 0.0, 0.0]
    page = tmp_path / "advice.html"
    of_tables = ask(
        capsys, "--profile", out / "layers.csv", "--collectives", out / "collectives.csv",
        "--slowdown", out / "slowdown.csv", "--html", page,
    )  # fmt: skip
    text = page.read_text()
    assert "mine-net on 2 ranks" in text and ";base64," in text and "http" not in text
    assert "Exposed communication is what the exchange adds" in text
    assert "intervals of gains in the long run" in text
    assert of_tables["origin"]["date"] in text
    assert f"torch {torch.__version__}" in text
    assert (
        of_tables["default_plan"]["predicted_iteration_s"]
        == said["default_plan"]["predicted_iteration_s"]
    )


@pytest.mark.parametrize(
    ("name", "minutes", "expected"),
    [
        ("accumulates_inside", 0.1, "loss.. runs backward 4 times: .* --accumulate"),
        (
            "frozen_and_unused",
            0.1,
            "2 parameters get no gradient, such as unused.bias: set requires_grad=False",
        ),
        (
            "dict_outputs",
            0.00001,
            "--minutes .*: too short, because an iteration takes .*: give --minutes",
        ),
        ("missing", 0.1, "has no function 'missing'"),
    ],
)
def test_what_cannot_be_advised_on_is_one_line(
    name: str,
    minutes: float,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [
        "--model",
        f"{FILE}:{name}",
        "--minutes",
        str(minutes),
        "--out",
        str(tmp_path / "o"),
    ]
    assert cli.main(["advise", *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("ddlkit: error: ") and re.search(expected, error)
    # Nothing is left of an advice that was refused before anything was measured.
    assert not [*tmp_path.iterdir()]


def test_a_loss_that_fails_leaves_its_traceback_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import os\n"
        "from torch import nn, ones\n"
        "def net():\n"
        "    model = nn.Linear(2, 1)\n"
        "    def loss():\n"
        "        if 'RANK' in os.environ:\n"
        "            raise ValueError('boom')\n"
        "        return model(ones(1, 2)).sum()\n"
        "    return model, loss\n"
    )
    out = tmp_path / "new" / "o"
    words = f"--model {file}:net --minutes 6s --out {out}"
    assert cli.main(["advise", *words.split()]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    (log,) = re.findall(rf"{out}\S+log", line)
    assert "Traceback" in Path(log).read_text()
    # The logs are all that is left.
    assert [path.name for path in out.iterdir()] == ["rank-logs"]


def test_a_failed_advice_under_torchrun_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "new" / "o"
    words = ["advise", "--model", f"{FILE}:frozen_and_unused", "--minutes", "6s"]
    statuses, said = two_ranks(
        partial(cli.main, [*words, "--out", str(out)]), tmp_path, on_one_node=True
    )
    assert statuses == [2, 2]
    assert "get no gradient" in said[0]
    assert not [*tmp_path.iterdir()]


def test_what_was_there_before_a_refused_advice_stays(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").touch()
    words = f"--model {FILE}:frozen_and_unused --minutes 6s --out {tmp_path}"
    assert cli.main(["advise", *words.split()]) == 2
    assert (tmp_path / "mine.csv").exists()


def test_a_trial_supports_a_change_only_if_its_interval_lies_above_zero() -> None:
    for interval, supported, decided, words in (
        ((0.01, 0.05), True, True, "the gain was measured"),
        ((-0.01, 0.05), False, False, "no difference could be measured"),
        ((-0.01, 0.01), False, True, "the measured gain is below 2%"),
        ((0.002, 0.013), False, True, "the measured gain is below 2%"),
        ((-0.05, -0.01), False, True, "the plan was measured to be slower"),
        ((-np.inf, np.inf), False, False, "no difference could be measured"),
    ):
        gain = Gain(0.01, interval, 0.0)
        assert is_supported(gain) == supported and is_decided(gain) == decided
        assert trial_result(gain) == words


def proposing() -> Advice:
    """An advice that proposes a change: forty gradients of 300 kB, and a start-up of 1 ms."""
    work = Workload.from_arrays(0.02, [0.001] * 40, [300_000] * 40)
    return Advice.of(work, replace(messages(1e-3, 2e-9), contention=None))


def tried(slow_s: float, fast_s: float, noise: float) -> dict[str, Any]:
    """The advice of `proposing` after a trial of twelve rounds of the default and of the best plan."""
    advice = proposing()
    result = {
        "network": "net",
        "ranks": 2,
        **advice.to_dict(12, 20),
        "decided_by": "trial",
        "rounds": 12,
    }
    factors = 1 + noise * np.random.default_rng(0).standard_normal((12, 2))
    times = np.array([slow_s, fast_s]) * factors
    rounds = pd.DataFrame(times, columns=[DEFAULT, result["predicted_best"]])
    advising._add_measured_gain(result, rounds)
    advising._add_measured_iterations(result, rounds)
    reasons = advising.reasons_of_trial(result, rounds)
    result["why_intervals_are_wide"] = {"measured_gain": reasons}
    result["snippet"] = advising.snippet(advice, result["advice"])
    return result


def test_the_measured_iteration_stands_beside_the_predicted_and_a_gap_is_named() -> (
    None
):
    predicted = proposing()
    default_s = predicted.options[DEFAULT].seconds
    best_s = predicted.ranked[0].seconds
    fits = tried(default_s, best_s, noise=0.001)
    assert not fits["default_plan"]["outside_of_predicted_interval"]
    assert fits["advice"] == fits["predicted_best"]
    assert not any("do not trust" in line for line in advising.screen(fits))
    slow = tried(4.8 * default_s, 4.8 * best_s, noise=0.001)
    assert slow["default_plan"]["outside_of_predicted_interval"]
    assert slow["best_plan"]["outside_of_predicted_interval"]
    lines = "\n".join(advising.screen(slow))
    assert "is 4.8 times the predicted one and outside of its interval" in lines
    assert units.format_seconds(slow["default_plan"]["measured_iteration_s"]) in lines


@pytest.mark.parametrize(
    ("speed_up", "expected"),
    [
        (0.2, "the trial measured a gain, but the prediction failed"),
        (0.0, "in the trial no"),
    ],
)
def test_a_kept_default_says_what_the_trial_showed_though_the_prediction_failed(
    speed_up: float, expected: str
) -> None:
    slow_s = 4.8 * proposing().options[DEFAULT].seconds
    result = tried(slow_s, (1 - speed_up) * slow_s, noise=0.001)
    # The prediction alone advised to keep the default, and so does the command.
    kept = result | {"predicted_advice": KEEP, "advice": KEEP}
    headline = advising.screen(kept)[0]
    assert expected in headline


def test_a_failed_prediction_does_not_deny_plans_that_were_tried() -> None:
    """The default is predicted to be the fastest, and is much slower in the trial."""
    work = Workload.from_arrays(0.02, [0.001], [300_000])
    advice = Advice.of(work, replace(messages(1e-5, 1e-9), contention=None))
    result = {**advice.to_dict(12, 20), "network": "net", "ranks": 2, "rounds": 12}
    result |= {"decided_by": "trial", "why_intervals_are_wide": {}}
    assert result["predicted_best"] == DEFAULT
    default_s = 5 * advice.options[DEFAULT].seconds
    rounds = pd.DataFrame({DEFAULT: [default_s] * 12, "ddp:5MiB": [default_s] * 12})
    advising._add_measured_gain(result, rounds)
    advising._add_measured_iterations(result, rounds)
    result["snippet"] = ""
    title, *lines = advising.screen(result)
    assert "the prediction failed" in title and "tried" not in title
    assert any("also tried" in line for line in lines)
    assert len(advising._contradicted_predictions(result)) == 1


def test_without_a_measured_difference_the_default_is_kept_and_noise_is_named() -> None:
    predicted_s = proposing().options[DEFAULT].seconds
    result = tried(predicted_s, predicted_s, noise=0.2)
    assert (
        result["predicted_advice"] == result["predicted_best"]
        and result["advice"] == KEEP
    )
    title, *lines = advising.screen(result)
    assert title.endswith("keep the default: no difference could be measured")
    assert any("varied by" in line and "busy machine" in line for line in lines)
    text = "\n".join([title, *lines])
    assert "slower with" not in text
    assert not re.search(r"(?<!plan )\b(exact|search|mg_wfbp)\b(?! of all)", text)


def test_two_commands_do_not_measure_into_one_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    words = ["--model", f"{tmp_path / 'mine.py'}:net", "--out", str(tmp_path / "out")]
    with store.lock(tmp_path / "out" / ".lock"):
        assert cli.main(["advise", *words]) == 2
    _progress, error = capsys.readouterr().err.strip().splitlines()
    assert f"held by process {os.getpid()}" in error and "another directory" in error


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--ranks", "0"], "--ranks: 0 is too few, because one rank alone"),
        (["--ranks", "100000"], "--ranks 100000: .* at most 256"),
        (["--minutes", "0"], "--minutes 0: give a finite time above zero"),
        (["--confirm-minutes", "-1"], "--confirm-minutes -1: .* or 0 for a prediction"),
        (["--confirm-minutes", "inf"], "--confirm-minutes inf: give a finite time"),
    ],
)
def test_times_and_ranks_have_bounds(
    words: list[str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = ["--model", f"{FILE}:dict_outputs", "--out", str(tmp_path / "out")]
    assert cli.main(["advise", *model, *words]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(expected, error) and not (tmp_path / "out").exists()


def test_gpus_that_an_advice_leaves_out_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight GPUs and two ranks, none of which starts: the fake is where the ranks would."""

    def end(*arguments: Any, **options: Any) -> None:
        raise UserError("no rank starts")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(Ranks, "run", end)
    words = ["--model", f"{FILE}:dict_outputs", "--out", str(tmp_path / "out")]
    for ranks in ("2", "8"):
        assert cli.main(["advise", *words, "--ranks", ranks]) == 2
        said = capsys.readouterr().err.strip()
        assert said.endswith("no rank starts")
        assert ("2 of the 8 GPUs here: give --ranks 8" in said) == (ranks == "2")


@pytest.mark.parametrize(("backend", "count"), [("gloo", 4), ("nccl", 16)])
def test_an_advice_times_as_many_small_messages_at_once_as_the_backend_needs(
    backend: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[CollectivesSettings]()

    def part(me: Rank, settings: CollectivesSettings) -> list[Tables]:
        asked.append(settings)
        return []

    noting = replace(collectives_job, part=part)
    monkeypatch.setattr(models, "collectives_job", noting)
    cpu = torch.device("cpu")
    training = load(f"{FILE}:dict_outputs", cpu, [])
    me = Rank(0, 2, 0, cpu, backend, 1, tmp_path)
    settings = models.AdviseSettings("dict_outputs")
    assert not [*models._measure_table("collectives", me, training, settings, [])]
    assert [settings.messages_per_sample for settings in asked] == [count]


@pytest.mark.parametrize("all_bytes", [4, 32, 4092, 4096, 65536, 200_000_000])
def test_messages_of_two_sizes_are_timed_of_any_model(all_bytes: int) -> None:
    """No cost can be fitted to the times of one size, which a tiny model would give."""
    sizes = models.message_sizes(all_bytes, world_size=2)
    assert len(sizes) >= 2 and sizes == sorted(set(sizes))
    assert any(all_bytes <= size < all_bytes + 8 for size in sizes)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("0", "--ranks 0: one rank alone"), ("100000", "--ranks 100000: .* at most 256")],
)
def test_measure_bounds_ranks_as_advise_does(
    ranks: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["measure", "quick", "--ranks", ranks, "--out", str(out)]) == 2
    (error,) = capsys.readouterr().err.strip().splitlines()
    assert re.search(expected, error) and not out.exists()


def test_text_and_drawing_mean_the_same_by_exposed_communication() -> None:
    advice = Advice.of(LATE, messages(1e-3, 1e-8))
    option = advice.options[DEFAULT]
    said_s = option.summary()["exposed_communication_s"]
    # Messages slow compute down, which the spans alone do not count as exposed.
    assert said_s > 1.05 * option.iteration.timeline().exposed_communication_s()
    figure = show.advice_figure(advice, "the best plan")
    top = figure.axes[0].get_title(loc="right")
    assert top.endswith(f"exposed communication {1e3 * said_s:.3g} ms")
    assert figure.axes[1].get_title(loc="left") or figure.axes[1].get_title()


def test_a_model_or_tables_but_not_both_or_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in ([], ["--model", "x.py:f", "--profile", "p.csv"]):
        assert cli.main(["advise", *words]) == 2
        assert "give --model" in capsys.readouterr().err
    with pytest.raises(UserError, match="has no draws"):
        Advice.of(LATE, Communication(AlphaBeta(1e-3, 1e-9)))


SUITE = places.RECORDED / "cpu-2x-amd-epyc-suite"
TABLES = (
    "--profile", SUITE / "layers-resnet50-b4-fp32.csv",
    "--collectives", SUITE / "collectives-loopback-p2.csv",
)  # fmt: skip
SPARSE = ("--density", 0.01, "--selection", SUITE / "selection-*")


@pytest.mark.parametrize(
    "more",
    [(), SPARSE, ("--copy-s-per-byte", 1e-9), (*SPARSE, "--accumulate", 2)],
    ids=["dense", "sparse", "copied", "sparse and accumulated"],
)
def test_advise_and_predict_agree_on_every_plan(
    more: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    advised = ask(capsys, *TABLES, *more)
    default, best = advised["default_plan"], advised["best_plan"]
    predicted_s = {}
    for plan in (DEFAULT, "ddp:10MiB", advised["predicted_best"]):
        words = ["predict", *TABLES, *more, "--plan", plan, "--json"]
        assert cli.main([*map(str, words)]) == 0
        predicted = json.loads(capsys.readouterr().out)
        predicted_s[plan] = predicted["iteration_s"]
        for summary in (default, best):
            if summary["plan"] == plan:
                assert summary["predicted_iteration_s"] == pytest.approx(
                    predicted["iteration_s"]
                )
                for key in ("exposed_communication_s", "scaling_factor"):
                    assert summary[key] == pytest.approx(predicted[key])
    for plan, seconds in predicted_s.items():
        gain = advised["gains_of_plans"][plan]["predicted_gain"]
        assert gain == pytest.approx(1 - seconds / predicted_s[DEFAULT], abs=1e-9)
    # Without communication, an iteration lacks what is exposed of it, and nothing else.
    shorter = advised["time_per_sample_shorter_by"]
    assert shorter["no communication at all"] == pytest.approx(
        default["exposed_communication_s"] / default["predicted_iteration_s"]
    )
    assert shorter["a link twice as fast"] <= shorter["no communication at all"]


def test_a_time_of_copies_is_refused_where_a_slowdown_has_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tables = [
        f"--{option} {ADVISED / table}-decoder-loopback.csv"
        for option, table in (
            ("profile", "layers"), ("collectives", "collectives"), ("slowdown", "slowdown"),
        )
    ]  # fmt: skip
    for program in ("predict", "advise"):
        words = f"{program} {' '.join(tables)} --copy-s-per-byte 0"
        assert cli.main(words.split()) == 2
        (error,) = capsys.readouterr().err.strip().splitlines()
        assert "--copy-s-per-byte has no effect with --slowdown" in error


def test_tables_of_other_ranks_or_another_link_do_not_count(tmp_path: Path) -> None:
    rows = store.load_table(SUITE / "collectives-loopback-p2.csv", "collectives")
    store.save_table(rows, tmp_path, "collectives", schema="collectives", command=[])
    cpu = torch.device("cpu")
    me = Rank(0, 2, 0, cpu, "gloo", 1, tmp_path, link="loopback")
    assert models._is_between_these_ranks(me, "collectives")
    assert not models._is_between_these_ranks(me, "slowdown")
    for other in (replace(me, world_size=3), replace(me, link="lab:1gbit")):
        assert not models._is_between_these_ranks(other, "collectives")


def test_an_advice_says_that_a_ring_is_assumed_only_where_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for ranks in (2, 4):
        advised = ask(capsys, *TABLES, "--ranks", ranks, "--assume-ring")
        assert ("assumed" in advised) == (ranks != 2)


def test_sharded_advice_refuses_a_model_and_its_options_at_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = "advise --strategy fsdp --model mine.py:net --minutes 10s"
    assert cli.main(words.split()) == 2
    assert "leave --model and --minutes out" in capsys.readouterr().err
    assert cli.main(["advise", "--strategy", "fsdp", "--minutes", "3"]) == 2
    assert "leave --minutes out" in capsys.readouterr().err
    for strategy in ("", "--strategy fsdp"):
        words = (
            f"advise {strategy} --profile p.csv --collectives c.csv --out x --lab 1gbit"
        )
        assert cli.main(words.split()) == 2
        error = capsys.readouterr().err
        assert "--out" in error and "--lab" in error
    assert cli.main(["advise", "--model", "mine.py:net", "--units", "a"]) == 2
    assert "give that as well" not in capsys.readouterr().err
    words = "advise --strategy fsdp --profile p.csv --collectives c.csv --units ;"
    assert cli.main(words.split()) == 2
    assert "--units ';'" in capsys.readouterr().err


ADVISED = places.DATA / "advised"
NAMED = {"mobilenet-1gbit", "resnet18-1gbit", "decoder-300mbit", "decoder-1gbit"}
NAMED |= {"squeezenet-300mbit", "squeezenet-1gbit"}


def as_recorded(pair: str) -> dict[str, Any]:
    """What was predicted of a recorded pair, and measured: a row of data/advised.csv."""
    advice = models.read_advice(ADVISED, f"-{pair}")
    trials = store.load_table(ADVISED / f"trials-{pair}.csv", "trials")
    rounds = trials.pivot_table("seconds", "repeat", "policy", "median")
    tried = {name: measured_gain(rounds, name) for name in rounds}
    best = next(o for o in advice.ranked if o.name != DEFAULT and o.name in tried)
    said = advice.gain(best, len(rounds), len(trials) // rounds.size)
    found = tried[best.name]
    advised = best is advice.ranked[0] and advice.gain(best).interval[0] >= WORTH
    most = max(gain.share for gain in tried.values())
    follows = found.share if advised else 0.0
    numbers = {
        **{"gain": said.share, "low": said.interval[0], "high": said.interval[1]},
        **{"measured": found.share, "measured_low": found.interval[0]},
        **{"measured_high": found.interval[1], "most": most},
        "regret": (1 - follows) / (1 - most) - 1,
    }
    of = {"pair": pair, **trials[["network", "link"]].iloc[0], "rounds": len(rounds)}
    rounded = {name: float(f"{value:.6g}") for name, value in numbers.items()}
    return {
        **of,
        "plan": best.name,
        **rounded,
        "advised": advised,
        "named": pair in NAMED,
    }


def test_recorded_advice_reaches_what_was_frozen(
    request: pytest.FixtureRequest,
) -> None:
    """Twelve pairs of a network and a link: data/advised.csv by their tables, reports/goals.csv by it.

    Without ``--long`` only every third pair is predicted anew.
    """
    names = {
        path.stem.partition("-")[2]
        for path in store.list_tables(ADVISED, "trials-*.csv")
    }
    pairs = sorted(names)
    all_of_them = request.config.getoption("--long") or request.config.getoption(
        "--write"
    )
    chosen = pairs if all_of_them else pairs[::3]
    table = pd.DataFrame([as_recorded(name) for name in chosen])
    frozen = places.DATA / "advised.csv"
    if request.config.getoption("--write"):
        table.to_csv(frozen, index=False, lineterminator="\n")
    kept = pd.read_csv(frozen)
    again = kept[kept["pair"].isin(chosen)].reset_index(drop=True)
    pd.testing.assert_frame_equal(table, again, rtol=1e-3, atol=1e-4)
    goals = pd.read_csv(places.ROOT / "reports" / "goals.csv", keep_default_na=False)
    rows = goals[goals["campaign"] == "advised"].set_index("goal")
    for goal in accuracy.goals("advise"):
        now, row = goal.judged(kept), rows.loc[goal.goal]
        assert float(row["reached"]) == pytest.approx(now["reached"], rel=1e-5)
        assert (row["wanted"], row["held"]) == (now["wanted"], str(now["holds"]))
    assert kept["pair"].tolist() == pairs and len(pairs) == 12
    assert set(kept.loc[kept["named"], "pair"]) == NAMED
