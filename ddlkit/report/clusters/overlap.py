"""Models of two numbers: what computing takes alone, and what all bytes take on the wire alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from ddlkit.core import plan
from ddlkit.core.iteration import LinearScenarios
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats.clusters import EXTERNAL, triosim


@dataclass(frozen=True, eq=False)
class Overlap:
    """An iteration that is a maximum of straight lines: max over k of compute[k] C + wire[k] W.

    C : seconds that computing takes alone; W : seconds that all gradients take on the link alone
    compute, wire : (m,) shares, at least 0; of all models here the largest of each is at most 1
    """

    compute: Floats
    wire: Floats

    def iteration_s(self, compute_s: Floats, wire_s: Floats) -> Floats:
        """(n,) of as many iterations."""
        lines = np.outer(compute_s, self.compute) + np.outer(wire_s, self.wire)
        return np.asarray(lines.max(axis=1))

    def wire_s(self, compute_s: Floats, iteration_s: Floats) -> Floats:
        """(n,) the W with which the iteration is as long as that; 0 where computing alone takes as long.

        Infinite where no W makes it longer than computing.
        """
        shown_s, sent = np.asarray(iteration_s), self.wire > 0
        left_s = shown_s[:, None] - np.outer(compute_s, self.compute[sent])
        longest_s = np.min(left_s / self.wire[sent], axis=1, initial=np.inf)
        alone_s = np.asarray(compute_s) * self.compute.max()
        return np.where(shown_s > alone_s, longest_s, 0.0)


def overlapped(workload: Workload, sent: plan.FusionPlan) -> Overlap:
    """The workbook's model without a start-up time: messages leave when ready, one after the other."""
    coefficients = LinearScenarios.of(workload, sent).coefficients
    return Overlap(coefficients[0] / workload.compute_s, coefficients[2] / workload.bytes.sum())


@cache
def resnet50() -> Workload:
    """ResNet-50 in the shape that TrioSim traced on an H100, batch 128, float32."""
    operators = triosim.read_operators(EXTERNAL / "triosim" / "resnet50-h100-b128.csv.gz")
    return triosim.layer_profile(operators, "resnet50", 128).workload()


def models() -> dict[str, Overlap]:
    """Models on trial for ResNet-50 with PyTorch's buckets, by name."""
    one, none = np.ones(1), np.zeros(1)
    return {
        "compute_only": Overlap(one, none),
        "no_overlap": Overlap(one, one),
        "perfect_overlap": Overlap(np.array([1.0, 0.0]), np.array([0.0, 1.0])),
        "workbook": overlapped(resnet50(), plan.ddp(resnet50())),
    }
