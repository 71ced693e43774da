"""The papers' equations: limits, bounds that simulation never breaks, counts that torchvision confirms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ddlkit.core import plan
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import Scan
from ddlkit.core.strategies import IterationTimes
from ddlkit.core.workload import Workload
from ddlkit.measure import networks
from strategies import costs, workloads
from workbook.common import networks as published
from workbook.dag import equations as dag
from workbook.omgs import equations as omgs
from workbook.osf import equations as osf
from workbook.record import zoo as zoo


@given(workloads(), st.integers(1, 10**9), st.floats(0, 1), st.floats(0, 1e-6))
def test_repaired_fusion_is_the_simulated_buffer(
    workload: Workload, capacity: int, alpha_s: float, slope: float
) -> None:
    workload = replace(workload, forward_s=workload.forward_s + 0.1, update_s=0.0)
    layers, cost = osf.of_workload(workload), AlphaBeta(alpha_s, slope)
    simulated = predict(workload, plan.buffer(workload, capacity), cost).scaling_factor
    fused = osf.osf_fused(workload.forward_s, *layers, cost, capacity, literal=False)
    assert fused == pytest.approx(simulated)


@pytest.mark.parametrize(
    "ours, theirs", [("VGG16", "vgg16"), ("ResNet152", "resnet152")]
)
def test_tensor_counts_are_torchvisions(ours: str, theirs: str) -> None:
    with torch.device("meta"):
        module = networks.build(theirs)
        image = torch.empty(1, 3, 224, 224)
        with FlopCounterMode(display=False) as counter:
            module.eval()(image)
    assert published.parameters(ours) == tuple(p.numel() for p in module.parameters())
    assert 2 * published.multiply_adds(ours) == counter.get_total_flops()


@given(st.integers(2, 64), st.floats(1e6, 1e10), st.floats(1e-6, 1e-2))
def test_a_ring_is_found_from_its_ends(
    workers: int, rate: float, step_s: float
) -> None:
    overhead_s = 2 * (workers - 1) * step_s
    sizes = np.repeat([1e3, 3e5, 1e8], 3)
    seconds = osf.update_s(sizes, workers, rate, overhead_s=overhead_s)
    ring = osf.ring_from_ends(sizes, seconds, workers)
    assert ring.beta_s_per_byte == pytest.approx(
        2 * (workers - 1) / workers / rate, rel=1e-6
    )
    assert ring(3e5) == pytest.approx(seconds[3])
    if (
        overhead_s > 1e-6 * seconds[-1]
    ):  # else it drowns in the rounding of the largest message
        assert osf.bandwidth_delay_bytes(ring) == pytest.approx(
            rate * 2 * step_s, rel=1e-3
        )


@given(workloads(), costs())
def test_three_papers_and_the_simulation_tell_one_iteration(
    workload: Workload, cost: MessageCost
) -> None:
    """Without fusion, selection and input: dag Eq 4, osf Eqs 8-10 repaired, and core.iteration."""
    workload = replace(workload, forward_s=workload.forward_s + 0.1)
    alone = predict(workload, plan.none(workload), cost)
    times = IterationTimes.of_workload(workload, cost)
    assert dag.wait_free_iteration_s(times) + workload.update_s == pytest.approx(
        alone.iteration_s
    )
    _, backward_s = osf.of_workload(workload)
    value = osf.osf(
        workload.forward_s, backward_s, times.communication_s.tolist(), first=0
    )
    computed_s = workload.compute_s - workload.update_s
    assert computed_s / value + workload.update_s == pytest.approx(alone.iteration_s)


@given(workloads(max_tensors=12), st.floats(0, 1), st.floats(1e-12, 1e-6), st.data())
def test_an_omgs_merging_is_the_simulated_plan_when_selecting_is_free(
    workload: Workload, alpha_s: float, slope: float, data: st.DataObject
) -> None:
    flags = np.array(
        [False, *data.draw(st.tuples(*[st.booleans()] * (workload.n - 1)))]
    )
    backward_s, elements = workload.backward_s[::-1], workload.parameters[::-1]
    costs = Scan(0.0, 0.0), alpha_s, slope, workload.forward_s
    instance = omgs.Instance(backward_s, elements.astype(float), *costs)
    even = replace(workload, bytes=workload.parameters)
    merged = FusionPlan("merged", tuple((np.flatnonzero(~flags[::-1]) + 1).tolist()))
    simulated = (
        predict(even, merged, AlphaBeta(alpha_s, slope)).iteration_s - even.update_s
    )
    assert float(omgs.merged_iteration_s(instance, flags)) == pytest.approx(simulated)
    own = omgs.of_planning(workload, AlphaBeta(alpha_s, slope), 1e-10)
    found = plan.make_plan("omgs:1e-10s", workload, AlphaBeta(alpha_s, slope))
    assert found.ends == omgs.plan_of(omgs.find_merged_layers(own), "omgs").ends
