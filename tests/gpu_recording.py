"""A recording of a GPU that nobody measured: tables as a session on one GPU leaves them, with made-up times.

The times are those of no machine. They obey the simplest laws (compute by FLOPs, copies by bytes), so that
a test can see what a recording of a GPU changes before there is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.measure import collectives as messages
from ddlkit.measure.session import table_path
from workbook.common.source import Source
from workbook.record import contention, selection, sharing_training

NAME = "nvidia-h200"
MACHINE: dict[str, Any] = {
    "name": NAME,
    "cpu": {"model": "made up", "cores": 16, "quota_cores": 0.0},
    "memory_bytes": 2**37,
    "os": "made up",
    "kernel": "made up",
    "gpus": [{"model": "NVIDIA H200", "driver": "580.65", "memory_bytes": 2**37}],
}
FLOPS_PER_S = {"fp32": 40e12, "tf32": 300e12, "bf16": 500e12}
COPY_BYTES_PER_S = 2e12
HOST_BOUND = ("bf16", 1)
"""The precision and the multiple of the batch at which the host limits an iteration."""
ROUNDS = 8
NETWORKS = ("alexnet", "vgg16", "resnet18", "resnet50")
BATCHES = (64, 128, 32, 16)
MEASURED_CLAIMS = {
    *("dag-fig04-alexnet-most", "dag-fig04-googlenet-most"),
    *("dag-fig04-resnet50-most", "dag-finding2"),
    *("omgs-best-of-all", "omgs-eq12", "omgs-merged-message"),
    *("osf-eq4-backward", "osf-fig03-csf-least", "osf-fig03-osf-most"),
    *("osf-fig03-reduction-each", "osf-fig05-negotiate", "osf-fig05-vgg16"),
    *("osf-fig06-falls", "osf-fig09-accuracy", "osf-fig09-lower"),
    *("osf-fig10-all", "osf-fig10-small"),
}
"""The claims that measurements of this repository judge, so that a recording may move them."""
COUNTED_IN_NOTE = "omgs-tab5-omgs-resnet50"
"""A claim whose note says how many of the recordings are of GPUs."""


def scattered(seconds: float, seed: int, count: int = ROUNDS) -> np.ndarray[Any, Any]:
    """Samples around a time, which differ by about one per cent."""
    return seconds * np.random.default_rng(seed).normal(1.0, 0.01, count)


def write(recorded: Path, measured: Source) -> Path:
    """Write the recording below a directory of recordings.

    recorded : the directory of all recordings
    measured : recordings of processors, whose networks the GPU computes faster
    """
    out = recorded / NAME
    tables = [
        *_layers(measured),
        *_sharing(),
        ("contention", "made-up", _contention()),
        ("selection", "made-up", _selection()),
        ("peaks", "cuda", _peaks()),
        ("copies", "cuda", _copies()),
        ("collectives", "one-rank", _collectives("nccl", "one-rank", 1)),
        ("collectives", "gloo-cuda-p2", _collectives("gloo", "host", 2)),
        ("collectives", "loopback-p2", _collectives("gloo", "loopback", 2)),
    ]
    for schema, name, rows in tables:
        path = table_path(out, schema, name)
        store.save_table(
            rows, out, path.name, schema=schema, command=["made up"], machine=MACHINE
        )
    return out


def _layers(measured: Source) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """The layers of recorded networks, as many times faster as the GPU computes, at several batches."""
    profiles = measured.table("layers").query("ranks == 1 and precision == 'fp32'")
    profiles = profiles.drop(columns="machine")
    cases = itertools.product(("resnet50", "vgg16"), (1, 4), FLOPS_PER_S)
    for network, larger, precision in cases:
        of_network = profiles[profiles["network"] == network]
        one = of_network[of_network["batch"] == of_network["batch"].iloc[0]]
        one = one.drop_duplicates("tensor")
        flops = one["flops"].sum()
        # Larger batches use the GPU better.
        whole_s = 3 * flops * larger**0.9 / FLOPS_PER_S[precision]
        scale = whole_s / one[["forward_s", "backward_s"]].to_numpy().sum()
        rows = one.assign(
            device="cuda",
            batch=larger * int(one["batch"].iloc[0]),
            flops=one["flops"] * larger,
            precision=precision,
            ranks=1,
            threads=1,
            forward_s=one["forward_s"] * scale,
            backward_s=one["backward_s"] * scale,
            update_s=1e-4,
        )
        batch = int(rows["batch"].iloc[0])
        name = f"{network}-b{batch}-{precision}"
        yield "layers", name, rows
        # The host issues bf16 as slowly as all else, so that it limits the smaller batch there.
        quantities = {
            "unhooked_iteration": whole_s,
            "hooked_iteration": 1.02 * whole_s,
            "forward": whole_s / 3,
            "backward": whole_s / 1.6,
            "update": 1e-4,
            "issue": whole_s * (0.95 if (precision, larger) == HOST_BOUND else 0.3),
            "graph_iteration": 0.8 * whole_s,
        }
        samples = [
            pd.DataFrame(
                {
                    "network": network,
                    "device": "cuda",
                    "batch": batch,
                    "precision": precision,
                    "ranks": 1,
                    "quantity": quantity,
                    "sample": range(ROUNDS),
                    "seconds": scattered(seconds, seed),
                }
            )
            for seed, (quantity, seconds) in enumerate(quantities.items())
        ]
        yield "samples", name, pd.concat(samples, ignore_index=True)


def _sharing() -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Iterations beside the stand-in: more blocks send faster, and slow compute down."""
    for network, batch in itertools.product(NETWORKS, BATCHES):
        compute_s = 2e-4 * batch
        frames = []
        for number, setting in enumerate(
            sharing_training.sharing_settings(brief=False)
        ):
            shape = setting.last or setting.footprint
            sent_s = 0.02 / setting.footprint.blocks**0.5
            exposed_s = max(1e-4, sent_s - 0.5 * compute_s)
            slower = 1 + 0.004 * shape.blocks + 1e-5 * shape.threads
            frames.append(
                pd.DataFrame(
                    {
                        "ranks": setting.ranks,
                        "policy": setting.policy,
                        "blocks": setting.footprint.blocks,
                        "threads": setting.footprint.threads,
                        "taken_threads": setting.footprint.threads + 32,
                        "bytes_per_s_asked": setting.footprint.bytes_per_s,
                        "quantity": "iteration",
                        "buckets": 3,
                        "bytes": 10**8,
                        "bytes_per_s": 1e8 / sent_s,
                        "communication_s": sent_s,
                        "exposed_communication_s": exposed_s,
                        "overlap_share": 1 - exposed_s / sent_s,
                        "sample": range(ROUNDS),
                        "seconds": scattered(compute_s * slower + exposed_s, number),
                    }
                )
            )
        rows = pd.concat(frames, ignore_index=True)
        rows = rows.assign(
            network=network, batch=batch, device="cuda", precision="fp32"
        )
        yield "sharing", f"{network}-b{batch}-fp32", rows


def _contention() -> pd.DataFrame:
    """Kernels beside the stand-in and beside copies: those of memory are slowed down most."""
    frames = []
    ways: list[Any] = [None, *contention.footprints(brief=False), *contention.COPIES]
    for number, (name, kernel) in enumerate(contention.kernels(tiny=True).items()):
        for way in ways:
            columns: dict[str, Any] = {}
            slowdown = 1.0
            if isinstance(way, str):
                columns = {"communication": f"copy_engine_{way}"}
                slowdown = 1.05
            elif way is not None:
                columns = {
                    "communication": "standin",
                    "blocks": way.blocks,
                    "threads": way.threads,
                    "taken_blocks": way.blocks,
                    "taken_threads": way.threads + 32,
                    "bytes_per_s_asked": way.bytes_per_s,
                }
                slowdown = 1 + 0.02 * way.blocks
            if columns:
                columns |= {"bytes_per_s": 1e10, "overlap_share": 1.0, "ranks": 1}
            else:
                columns = {"ranks": 1}
            seconds = scattered(1e-3 * slowdown, number)
            frames.append(contention._rows(name, kernel, columns, seconds))
    return pd.concat(frames, ignore_index=True)


def _selection() -> pd.DataFrame:
    """Selections that read their input a few times, after a start-up."""
    frames = []
    for elements, density in itertools.product(selection.ELEMENTS, selection.DENSITIES):
        for operation in selection.WAYS:
            frames.append(
                pd.DataFrame(
                    {
                        "operation": operation,
                        "device": "cuda",
                        "dtype": "float32",
                        "threads": 0,
                        "elements": elements,
                        "density": density,
                        "distribution": "normal",
                        "sample": range(ROUNDS),
                        "seconds": scattered(
                            2e-5 + 20 * elements / 4e12, elements % 97
                        ),
                    }
                )
            )
    return pd.concat(frames, ignore_index=True)


def _peaks() -> pd.DataFrame:
    frames = []
    for precision, side in itertools.product(FLOPS_PER_S, (4096, 8192)):
        seconds = scattered(2 * side**3 / FLOPS_PER_S[precision], side)
        labels = {"device": "cuda", "precision": precision, "kernel": "product"}
        frames.append(
            pd.DataFrame(
                {**labels, "side": side, "sample": range(ROUNDS), "seconds": seconds}
            )
        )
    return pd.concat(frames, ignore_index=True)


def _copies() -> pd.DataFrame:
    frames = []
    for kind, n_bytes in itertools.product(("d2d", "h2d_pinned"), (2**20, 2**30)):
        seconds = scattered(1e-5 + n_bytes / COPY_BYTES_PER_S, n_bytes % 89)
        labels = {"copy": kind, "device": "cuda", "bytes": n_bytes}
        frames.append(
            pd.DataFrame(
                {
                    **labels,
                    "copies_per_sample": 1,
                    "sample": range(ROUNDS),
                    "seconds": seconds,
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _collectives(backend: str, link: str, ranks: int) -> pd.DataFrame:
    frames = []
    for collective, power in itertools.product(
        ("all_reduce", "all_gather", "reduce_scatter"), range(10, 27)
    ):
        # NCCL's small messages are sent several at a time.
        most = messages.NCCL_MESSAGES if backend == "nccl" else 1
        count = messages.messages_at(2**power, most)
        frames.append(
            pd.DataFrame(
                {
                    "collective": collective,
                    "backend": backend,
                    "algorithm": "auto",
                    "link": link,
                    "link_bits_per_s": 0.0,
                    "ranks": ranks,
                    "messages_per_sample": count,
                    "bytes": 2**power,
                    "session": 0,
                    "sample": range(ROUNDS),
                    "seconds": scattered(1e-5 + 2**power / 4e10, power),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)
