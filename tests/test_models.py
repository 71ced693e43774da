"""Any model: what a user's function gives is measured as it trains, and what cannot be is one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddlkit import cli, store
from ddlkit.cli import advising
from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.jobs import vitals
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.rank import joined
from ddlkit.measure import advise as models
from ddlkit.measure import networks as registry
from ddlkit.measure import training as trainings
from ddlkit.measure.given import Training, check, known, load
from ddlkit.measure.layers import profile_layers, profile_training
from ddlkit.measure.training import other_than_predicted
from forked import two_ranks
from places import PATIENCE_S, ROOT, free_port
from test_clock import Simulated
from test_layers import ONCE, Slow, clock
from workbook.common import places

assert clock  # a fixture: what is timed takes no time but what is added
FILE, CPU = Path(__file__).with_name("given_models.py"), torch.device("cpu")
FEW = Budget(warmup=1, min_repeats=3, max_repeats=3)
NET = [
    f"{layer}.{kind}"
    for layer in ("first", "inner", "head")
    for kind in ("weight", "bias")
]


@pytest.fixture(autouse=True)
def nothing_is_repeated_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared here does not depend on how long anything takes."""
    monkeypatch.setattr(vitals.Retries, "again", lambda self, used: False)


def given(
    name: str, budget: Budget = ONCE
) -> tuple[Training, LayerProfile, str, list[str]]:
    """A function of given_models.py, measured: training, profile, order, what is said."""
    notes: list[str] = []
    with joined(PATIENCE_S) as me:
        training = models.loaded_together(f"{FILE}:{name}", 1, me, notes)
        profile, _ = profile_training(training, "own", budget, me)
        order = models.order_compared_with_ddp(training, profile)
    return training, profile, order, [*notes, *models.remarks(training, profile)]


@pytest.mark.parametrize(
    ("name", "n_bytes"),
    [
        *(
            ("dict_outputs", {4}),
            ("autocast", {4}),
            ("pure_bf16", {2}),
            ("several_dtypes", {2, 4}),
        ),
        *(
            ("tied", {4}),
            ("reentrant", {4}),
            ("not_reentrant", {4}),
            ("accumulates_inside", {4}),
        ),
    ],
)
def test_gradients_become_ready_in_the_order_in_which_ddp_rebuilds(
    name: str, n_bytes: set[int]
) -> None:
    training, profile, order, notes = given(name)
    assert sorted(profile.tensor) == sorted(
        {*NET} - {"head.weight" if name == "tied" else ""}
    )
    assert training.precision == {2: "bf16", 4: "fp32", 6: "bf16+fp32"}[sum(n_bytes)]
    assert "ready under DDP in the order of the layer profile" in order
    assert set(profile.gradient_bytes // profile.parameters) == n_bytes
    assert (profile.flops > 0).any() and profile.forward_s.sum() > 0
    assert ("no optimizer is given, so SGD with momentum is used" in notes) == (
        name != "dict_outputs"
    )
    assert isinstance(training.optimizer, torch.optim.AdamW) == (name == "dict_outputs")
    assert any("itself, times: 4;" in note for note in notes) == (
        name == "accumulates_inside"
    )


def test_what_ddp_could_not_train_is_said() -> None:
    _, profile, order, notes = given("frozen_and_unused")
    assert profile.tensor == tuple(NET[2:])
    assert "find_unused_parameters" in order
    assert (
        "2 tensors get no gradient and have no row: unused.weight, unused.bias" in notes
    )
    assert given("parts_alone")[2].startswith(
        "not compared: loss() does not call the model itself"
    )


def test_profiles_of_known_networks_are_as_recorded() -> None:
    paths = store.list_tables(
        places.RECORDED / "cpu-2x-amd-epyc-suite", "layers-*resnet18-b4-fp32*"
    )
    recorded = store.read_profile(paths[0])
    profile, _ = profile_layers("resnet18", 4, budget=ONCE, threads=1)
    for column in ("tensor", "layer", "parameters", "gradient_bytes", "flops"):
        assert list(getattr(profile, column)) == list(getattr(recorded, column))
    assert ((profile.forward_s > 0) == (recorded.forward_s > 0)).all()


# -- when, by a clock that only layers move ------------------------------------------------------


def measured(
    model: nn.Module, loss: Callable[[], Any], accumulate: int = 1
) -> LayerProfile:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = Training("mine", model, loss, optimizer, accumulate=accumulate)
    training.try_out()
    profile, samples = profile_training(training, "fp32", FEW)
    median = samples.groupby("quantity")["seconds"].median()
    assert median["hooked_iteration"] == pytest.approx(median["unhooked_iteration"])
    return profile


def row(clock: Simulated) -> tuple[nn.Sequential, Tensor]:
    return nn.Sequential(
        *(Slow(clock, k / 1e3, 2 * k / 1e3) for k in (1, 2, 4))
    ), torch.ones(2, 4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_checkpointing_computes_anew_is_backward(
    clock: Simulated, reentrant: bool
) -> None:
    model, x = row(clock)

    def loss() -> Any:
        return model[2](
            checkpoint(model[1], model[0](x), use_reentrant=reentrant)
        ).sum()

    profile = measured(model, loss)
    assert profile.tensor == ("0.weight", "1.weight", "2.weight")
    assert profile.forward_s == pytest.approx([0.001, 0.002, 0.004])
    assert profile.backward_s == pytest.approx([0.002, 0.004 + 0.002, 0.008])


@pytest.mark.parametrize("inside", [False, True])
def test_of_accumulated_gradients_the_last_time_counts(
    clock: Simulated, inside: bool
) -> None:
    model, x = row(clock)

    def loss() -> Any:
        return (
            [model(x).sum().backward() for _ in range(3)] if inside else model(x).sum()
        )

    profile = measured(model, loss, accumulate=1 if inside else 3)
    assert profile.backward_s == pytest.approx([0.002, 0.004, 0.008])
    assert profile.forward_s == pytest.approx(
        np.array([1, 2, 4]) / 7 * (3 * 0.007 + 2 * 0.014)
    )


def test_of_shared_and_frozen_layers_time_is_where_it_belongs(clock: Simulated) -> None:
    """A shared tensor is ready when its first use is; who has no gradient counts to the one before."""
    model, x = row(clock)
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    profile = measured(model, lambda: model(x).sum())
    assert profile.tensor == ("0.weight",)
    assert profile.forward_s == pytest.approx([0.007])
    assert profile.backward_s == pytest.approx([0.014])


# -- compiled ------------------------------------------------------------------------------------


def test_what_is_compiled_is_profiled_as_ddp_splits_it() -> None:
    training, profile, order, notes = given("compiled", FEW)
    assert (
        training.ddp
        and "ready under DDP in the order of the layer profile" in order
        and len(profile.tensor) == 16
    )
    assert (
        profile.forward_s[0] > 0
        and not profile.forward_s[1:].any()
        and not profile.flops.any()
    )
    first = profile.backward_s[-1] / profile.backward_s.sum()
    assert first < models.TOO_LATE and "compiled: " in notes[-1], (
        "a first bucket of 1 MiB"
    )
    assert given("one_bucket", FEW)[-1][-1].endswith("of backward: nothing can overlap")


def test_what_inductor_compiles_is_measured(
    request: pytest.FixtureRequest, require_compiler: None
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("compiles for half a minute: --long")
    _, profile, order, _ = given("by_inductor", FEW)
    assert (
        len(profile.tensor) == 16
        and "ready under DDP in the order of the layer profile" in order
    )


# -- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "no_scalar",
            r"loss\(\) returns a tensor of shape \(16, 64\): return a scalar",
        ),
        (
            "no_scalar_on_device",
            r"loss\(\) returns a tensor of shape \(16, 64\): return a scalar",
        ),
        (
            "no_parameter",
            r"loss\(\) returns a scalar that depends on no trained parameter",
        ),
        (
            "nothing",
            r"nothing must return \(model, loss\) or \(model, loss, optimizer\), but returns None$",
        ),
        ("computed_loss", r"the second value is a tensor: return a function loss\(\)"),
        ("nobody", "has no function 'nobody': its functions are "),
        *(
            ("two_optimizers", "third value is a list, .* optimizer"),
            ("optimizers_in_a_row", "returns 2 values after the loss: give one .*$"),
            ("no_parameters_at_all", "no parameter of the model needs a gradient"),
            ("all_frozen", "no parameter of the model needs a gradient"),
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(name: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        given(name)
    with pytest.raises(UserError, match=line):
        check(f"{FILE}:{name}")


def test_what_is_wrong_is_seen_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    started: list[object] = []
    monkeypatch.setattr(advising, "_launch", lambda *words: started.append(words))
    for name in ("no_scalar", "two_optimizers", "all_frozen", "nobody"):
        words = ["advise", "--model", f"{FILE}:{name}", "--out", str(tmp_path)]
        assert cli.main(words) == 2
        *progress, error = capsys.readouterr().err.strip().splitlines()
        assert "error" in error
        assert not any("error" in line for line in progress)
    assert not started


@pytest.mark.parametrize(
    "name",
    [
        *("dict_outputs", "tied", "frozen_and_unused", "autocast", "pure_bf16"),
        *("several_dtypes", "reentrant", "not_reentrant", "accumulates_inside"),
        *("one_bucket", "parts_alone", "fails_within", "reads_its_loss"),
    ],
)
def test_the_check_refuses_nothing_that_only_values_could_show(name: str) -> None:
    """What fails here for want of values, or is broken otherwise, is for the ranks."""
    check(f"{FILE}:{name}")


def test_a_network_that_torchvision_lacks_is_seen_by_the_check() -> None:
    for network in ("resnet18:8", "regnet_y_400mf:8", "inception_v3:2"):
        check(f"torchvision:{network}")
    with pytest.raises(UserError, match="torchvision has no network 'resnet19'"):
        check("torchvision:resnet19")
    with pytest.raises(UserError, match="'fcn_resnet50' does not classify images"):
        check("torchvision:fcn_resnet50")


def test_the_networks_that_are_listed_for_an_unknown_one_can_be_given_as_they_stand() -> (
    None
):
    for unknown in ("torchvision:densenet12", "densenet12"):
        with pytest.raises(UserError, match="use one of ") as caught:
            registry.require(unknown)
        _, _, listed = str(caught.value).partition("use one of ")
        # After the names, the error says what else may be given, or how many names there are more.
        names = re.split(", or | and ", listed)[0].split(", ")
        for name in names:
            registry.require(name)


def test_a_model_on_two_devices_is_refused() -> None:
    with pytest.raises(UserError, match="parameters are on cpu and meta: each rank"):
        given("on_two_devices")


def test_a_sparse_gradient_is_refused_with_what_ddp_sends_of_it() -> None:
    # Three rows are touched: 3 x 8 values of 4 bytes, and 3 indices of 8 bytes.
    line = (
        r"gradient of table.weight is sparse: DDP sends 120 B \(indices and values of 3 "
        r"rows\) in a message of its own, not the 1.562 KiB of the parameter"
    )
    with pytest.raises(UserError, match=line):
        given("sparse_gradients")


@pytest.mark.parametrize("name", ["several_dtypes", "dict_outputs"])
def test_buckets_that_ddp_made_otherwise_are_one_line(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, profile, _, _ = given(name)
    assert set(profile.dtype) == set(training.precision.split("+"))
    assert other_than_predicted(training, profile) == []
    total = training.gradient_bytes
    monkeypatch.setattr(trainings, "rebuilt_bytes", lambda _: [total - 8, 8])
    (line,) = other_than_predicted(training, profile)
    assert line.startswith("DDP made 2 buckets (") and "are predicted: " in line


def test_an_error_of_the_users_is_shown_without_our_frames(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import beside\n\n\ndef net():\n    return beside.net()\n")
    (tmp_path / "beside.py").write_text("import nowhere\n")
    for spec, where in (
        (f"{mine}:net", "import nowhere"),
        (f"{FILE}:fails_within", "model(x)"),
    ):
        assert (
            cli.main(["measure", "layers", "--model", spec, "--out", str(tmp_path)])
            == 2
        )
        said = capsys.readouterr().err
        assert where in said and "/ddlkit/" not in said
        assert said.splitlines()[-1].startswith(
            f"ddlkit: error: {spec.partition(':')[0]}"
        )
    assert {path.name for path in tmp_path.iterdir()} == {"mine.py", "beside.py"}, (
        "nothing written"
    )


def test_a_network_of_torchvision_needs_torchvision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lacking() -> Any:
        raise UserError("torchvision cannot be imported")

    monkeypatch.setattr(registry, "import_torchvision", lacking)
    with pytest.raises(UserError, match="^torchvision cannot be imported$"):
        load("torchvision:resnet50:32", CPU, [])
    with pytest.raises(
        UserError, match="^batch 0 of torchvision:resnet50: must be at least 1$"
    ):
        known("torchvision:resnet50", 0, CPU, model=nn.Linear(1, 1))
    for spec in ("torchvision:resnet50:8:8", "mine.py"):
        with pytest.raises(UserError, match="^model .*: name a file and its function"):
            load(spec, CPU, [])


# -- several ranks -------------------------------------------------------------------------------


def ended_agents(*what: object) -> tuple[list[int], list[str]]:
    """The exit statuses of two agents of torchrun, of one rank each, and what they print."""
    where = [
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(free_port()),
    ]
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *where,
        "-m",
        "ddlkit",
        *map(str, what),
    ]
    common = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    how: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    nodes = [{**os.environ, **common, "PET_NODE_RANK": str(rank)} for rank in range(2)]
    started = [subprocess.Popen(agent, env=node, **how) for node in nodes]
    said = [agent.communicate(timeout=2 * PATIENCE_S)[0] for agent in started]
    return [agent.returncode for agent in started], said


def test_ranks_that_torchrun_counts_measure_together(tmp_path: Path) -> None:
    """By the variables that torchrun gives each of two ranks; torchrun itself is in the test below."""
    words = ["measure", "layers", "--model", f"{FILE}:tied"]
    words += ["--out", str(tmp_path), "--budget", "0.3s"]
    statuses, said = two_ranks(partial(cli.main, words), tmp_path)
    assert statuses == [0, 0], said
    assert [
        "ready under DDP in the order of the layer profile" in each for each in said
    ] == [
        True,
        False,
    ]
    profile = store.read_profile(
        tmp_path / "layers-given_models-tied-b1-r2.csv", ranks=2
    )
    assert len(profile.tensor) == 5


@pytest.mark.alone
@pytest.mark.rehearsal
def test_two_agents_of_torchrun_are_advised_together(tmp_path: Path) -> None:
    """On a machine that others keep busy, the refusal of too little time is followed."""
    words = ["advise", "--model", f"{FILE}:pure_bf16", "--out", tmp_path]
    for minutes in (0.05, 0.2, 1.0):
        given_time = ["--minutes", minutes, "--confirm-minutes", 1e-5]
        statuses, said = ended_agents(*words, *given_time)
        if f"--minutes {60 * minutes:g}s: too short" not in "".join(said):
            break
    assert statuses == [0, 0], said
    # A trial follows only if another plan than the default is predicted to be faster.
    assert ["limited by" in each for each in said] == [True, False]
    messages = store.load_table(tmp_path / "collectives.csv", "collectives")
    assert set(messages["ranks"]) == {2}


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_NTASKS"])
def test_ranks_meet_that_torchrun_or_slurm_count(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "2")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(UserError, match="^RANK is not set in this rank's environment"):
        given("tied")


def test_models_that_differ_between_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = [1.0, 6.0, 12739.0]
    monkeypatch.setattr(models, "everyones", lambda mine: np.array([mine, other]))
    differ = "rank 0's has 6 tensors of 12480 elements, rank 1's has 6 tensors of 12739 elements"
    with pytest.raises(
        UserError, match=f"dict_outputs: models differ between ranks: {differ}"
    ):
        given("dict_outputs")
