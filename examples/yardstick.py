"""A first look at the speed of a GPU, independent of ddlkit: about 30 s on an H200.

    python examples/yardstick.py

Each line begins with OK, or with LOOK if the value lies outside of the range that is plausible on an H200.
The ranges of copies and of bf16 products were seen on one, and the others are estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
import torch.distributed as dist

DEVICE = "cuda"
HOLD_CYCLES = 4_000_000  # about 2 ms, in which the host gets ahead of the GPU
REPEATS = 10
SIDE = 8192  # of the matrices of products
COPIED_BYTES = 2**30  # on the GPU
PINNED_BYTES = 2**28  # between the host and the GPU
SELECTED_FROM = (10**3, 10**6, 10**8)  # elements
BATCH = 32  # images of each iteration
PIXELS = 224  # of each side of an image
MESSAGE_BYTES = 2**26
BEGUN_S = time.perf_counter()
PRECISIONS = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
}
"""The type of the numbers of each precision, and whether TF32 is allowed."""
out_of_range: list[str] = []
"""What was out of its plausible range so far."""


def seconds_of(action: Callable[[], object], hold: bool = True) -> float:
    """Return the median seconds of an action by the GPU's own clock.

    Parameters
    ----------
    action : callable
        The action, which takes no arguments.
    hold : bool, optional
        Whether the GPU waits until the host has issued the action, so that launches do not count.
    """
    action()
    action()
    torch.cuda.synchronize()
    samples = []
    for _ in range(REPEATS):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        if hold:
            torch.cuda._sleep(HOLD_CYCLES)
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        samples.append(begin.elapsed_time(end) / 1e3)
    return median(samples)


def say(what: str, value: float, low: float, high: float, unit: str) -> None:
    """Print a value with its plausible range, and the seconds since the start."""
    mark = "OK  "
    if not low <= value <= high:
        mark = "LOOK"
        out_of_range.append(what.strip())
    passed_s = time.perf_counter() - BEGUN_S
    print(
        f"{mark} {what:34} {value:9.4g} {unit} ({low:g}..{high:g})  {passed_s:.0f} s",
        flush=True,
    )


def allow_tf32(allowed: bool) -> None:
    """Let matrix products and convolutions use TF32 or not."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def products() -> None:
    """Look at products of matrices. Above 100 TFLOP/s in fp32, TF32 is on."""
    product("fp32", 42, 56)
    product("tf32", 340, 470)
    product("bf16", 680, 830)


def product(precision: str, low: float, high: float) -> None:
    """Look at a product of matrices in one precision, with its plausible TFLOP/s."""
    dtype, tf32 = PRECISIONS[precision]
    allow_tf32(tf32)
    left, right = torch.randn(2, SIDE, SIDE, device=DEVICE, dtype=dtype)
    product_s = seconds_of(lambda: torch.mm(left, right))
    allow_tf32(False)
    flops_per_s = 2 * SIDE**3 / product_s
    say(f"product {SIDE} {precision}", flops_per_s / 1e12, low, high, "TFLOP/s")


def copies() -> None:
    """Look at copies. Below 15 GB/s the host's memory is not pinned, and 25 GB/s are PCIe 4."""
    source, target = torch.randn(2, COPIED_BYTES // 4, device=DEVICE)
    copy_s = seconds_of(lambda: target.copy_(source))
    say(
        "copy 1 GiB, read + written", 2 * COPIED_BYTES / copy_s / 1e12, 4.0, 4.6, "TB/s"
    )
    host = torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device=DEVICE)
    to_device_s = seconds_of(lambda: device.copy_(host, non_blocking=True))
    say("h2d pinned 256 MiB", PINNED_BYTES / to_device_s / 1e9, 45, 60, "GB/s")
    to_host_s = seconds_of(lambda: host.copy_(device, non_blocking=True))
    say("d2h pinned 256 MiB", PINNED_BYTES / to_host_s / 1e9, 45, 60, "GB/s")


def small_kernels() -> None:
    """Look at how fast kernels are issued, and how fast they follow one another."""
    small = torch.zeros(1024, device=DEVICE)
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    for _ in range(2000):
        small.add_(1)
    issue_s = (time.perf_counter() - begun_s) / 2000
    torch.cuda.synchronize()
    say("issue of one kernel", issue_s * 1e6, 2, 8, "us")

    def many() -> None:
        for _ in range(200):
            small.add_(1)

    say("add_ of 4 KiB, in a row", seconds_of(many) / 200 * 1e6, 1.2, 6, "us")


def selections() -> None:
    """Look at the selection of the largest thousandth."""
    few, many, most = SELECTED_FROM
    selection(few, 4, 30)
    selection(many, 25, 150)
    selection(most, 600, 2500)


def selection(elements: int, low: float, high: float) -> None:
    """Look at the selection from so many elements, with its plausible microseconds."""
    magnitudes = torch.randn(elements, device=DEVICE).abs_()
    k = max(1, elements // 1000)
    topk_s = seconds_of(lambda: torch.topk(magnitudes, k, sorted=False))
    say(f"topk of {elements:.0e}, 0.1%", topk_s * 1e6, low, high, "us")


def trainings() -> None:
    """Look at ResNet-50. If the host needs over 0.9 of an iteration to issue it, the host limits."""
    training("fp32", 19, 34)
    training("tf32", 9, 16)
    training("bf16", 8, 20)


def training(precision: str, low: float, high: float) -> None:
    """Look at an iteration of ResNet-50 in one precision, with its plausible milliseconds."""
    import torchvision

    allow_tf32(PRECISIONS[precision][1])
    network = torchvision.models.resnet50().to(DEVICE)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9)
    images = torch.randn(BATCH, 3, PIXELS, PIXELS, device=DEVICE)
    labels = torch.randint(1000, (BATCH,), device=DEVICE)
    issues_s = []

    def step() -> None:
        begun_s = time.perf_counter()
        in_bf16 = torch.autocast(DEVICE, torch.bfloat16)
        with in_bf16 if precision == "bf16" else nullcontext():
            loss = torch.nn.functional.cross_entropy(network(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        issues_s.append(time.perf_counter() - begun_s)

    step_ms = seconds_of(step, hold=False) * 1e3
    allow_tf32(False)
    say(f"ResNet-50 b{BATCH} {precision}", step_ms, low, high, "ms")
    say("    of that issued by the host", median(issues_s) * 1e3, 6, 18, "ms")


def one_rank_collectives() -> None:
    """Look at collectives of one rank, which send nothing."""
    dist.init_process_group(
        "nccl",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
        device_id=torch.device(DEVICE, 0),
    )
    message = torch.ones(MESSAGE_BYTES // 4, device=DEVICE)
    reduce_s = seconds_of(lambda: dist.all_reduce(message))
    say("1-rank all_reduce 64 MiB (nothing)", reduce_s * 1e6, 1, 15, "us")
    gathered = torch.empty_like(message)
    gather_s = seconds_of(lambda: dist.all_gather_into_tensor(gathered, message))
    say("1-rank all_gather 64 MiB (a copy)", gather_s * 1e6, 28, 60, "us")
    dist.destroy_process_group()


def main() -> None:
    """Look at everything."""
    if not torch.cuda.is_available():
        raise SystemExit(f"yardstick: torch {torch.__version__} sees no GPU")
    torch.zeros(1, device=DEVICE)
    torch.cuda.synchronize()
    print(
        f"context {time.perf_counter() - BEGUN_S:.1f} s; torch {torch.__version__}, "
        f"{torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}, "
        f"NCCL {torch.cuda.nccl.version()}",
        flush=True,
    )
    for look in (
        products,
        copies,
        small_kernels,
        selections,
        trainings,
        one_rank_collectives,
    ):
        look()
    names = ", ".join(out_of_range) or "none"
    print(
        f"yardstick: {len(out_of_range)} values are out of range: {names}", flush=True
    )


if __name__ == "__main__":
    main()
