"""torch.cuda played on the processor: what asks for a GPU gets the processor, and is told that it is one.

Tensors "on cuda" lie in the host's memory; their storage carries the device that they are said to be on, so
views, parameters and gradients look alike. What torch refuses on a real GPU is refused here: tensors of two
devices in one operation, NumPy on a GPU's memory, an event's time before anybody waited for it, a GPU in a
process that was forked from one that used it.

Not played: a second GPU, operations that overlap with the host (only ddlkit's own kernels, and copies in a
stream of their own, run beside them), a GPU's memory and its limits, TF32, what looks at a tensor from C++.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import played_driver
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

CAPABILITY = (9, 0)
CUDA, NCCL = "13.0", (2, 28, 9)
CYCLES_PER_S = 1.5e9

Home = (
    torch.device | None
)  # of a tensor: the played GPU that it lies on, or None for the host


class _State:
    """Of this process."""

    gpus = 0
    owner = 0  # process that has used a GPU first, 0 while none has
    stream: list[Stream] = []
    settled = (
        True  # whether the null stream has waited for all that it was told to wait for
    )
    recorded = waited = (
        0  # events so far, and of these the ones that somebody has waited for
    )
    group = ""  # what the process group takes itself for


def _use() -> None:
    """CUDA begins with the first thing done on a GPU, and does not survive a fork."""
    _State.owner = _State.owner or os.getpid()
    if _State.owner != os.getpid():
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")


def _home(tensor: torch.Tensor) -> Home:
    try:
        found: Home = getattr(tensor.untyped_storage(), "played_home", None)
    except NotImplementedError:  # a tensor without storage
        return None
    return found


def _gpu(device: Any = 0) -> torch.device:
    """The played GPU. Raises RuntimeError for another one."""
    device = (
        torch.device("cuda", device)
        if isinstance(device, int)
        else torch.device(device)
    )
    if device.index or not _State.gpus:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: {device} of {_State.gpus}"
        )
    _use()
    return torch.device("cuda", 0)


# -- tensors -----------------------------------------------------------------------------------

# What may take tensors of two devices.
_MIXES = ("copy_", "to", "__get__", "__set__", "_has_compatible_shallow_copy_type")
_INDEXES = (
    "__getitem__",
    "__setitem__",
    "index",
    "index_put_",
)  # on a GPU by the host's numbers
_WAITS = (
    "item",
    "tolist",
    "__bool__",
    "__int__",
    "__float__",
    "nonzero",
    "cpu",
    "equal",
    "unique",
)


def _tensors(value: Any) -> list[torch.Tensor]:
    return [
        leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)
    ]


class _OnProcessor(TorchFunctionMode):
    """Every function of torch: devices are played on the way in, and looked at on the way out."""

    def __init__(self) -> None:
        super().__init__()
        tensor: Any = torch.Tensor
        self._looks: dict[Any, Callable[[torch.Tensor], Any]] = {
            tensor.device.__get__: lambda x: _home(x) or x.device,
            tensor.is_cuda.__get__: lambda x: _home(x) is not None,
        }

    def __torch_function__(
        self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if func in self._looks:
            return self._looks[func](args[0])
        if isinstance(func, type):  # torch.device and its like
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            with self:  # hooks run in this thread, and look at devices, too
                args += (kwargs.pop("gradient", None),)
                torch.autograd.backward(*args, **kwargs)
            return None
        return self._run(func, name, args, kwargs)

    def _run(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = _tensors([args, kwargs])
        source = _common_home(name, given)
        asked, args, kwargs = _on_host(name, args, kwargs)
        if name in ("numpy", "__array__") and source:
            raise TypeError(
                f"can't convert {source} device type tensor to numpy: use Tensor.cpu()"
            )
        if name in _WAITS and source:
            wait_for_all()
        between = name == "copy_" and _home(args[0]) != _home(args[1])
        if between or (name == "copy_" and current_stream().cuda_stream):
            return _copy_by_engine(*args[:2])
        if source and not current_stream().cuda_stream:
            _settle()
        kwargs.pop("pin_memory", None)
        target = source if asked is _NOWHERE else asked
        if func is torch.randn and target:
            found = _random(
                torch.Size(args if isinstance(args[0], int) else args[0]), kwargs
            )
        else:
            found = func(*args, **kwargs)
        if name in ("to", "cpu", "cuda") and target != source:
            found = found.clone()  # two devices share no memory
        if name != "copy_":
            _mark(found, target)
        return found


_NOWHERE: Any = object()
# Numbers that differ: a GPU makes 200 million at once, we would take seconds.
_MOST_RANDOM = 1 << 20


def _random(shape: torch.Size, how: dict[str, Any]) -> torch.Tensor:
    count = shape.numel()
    some = torch.randn(min(count, _MOST_RANDOM), **how)
    return some.repeat(-(-count // max(1, len(some))))[:count].view(shape)


def _common_home(name: str, given: list[torch.Tensor]) -> Home:
    """The GPU of an operation's tensors. Raises RuntimeError where they lie on several devices."""
    homes = {_home(tensor) for tensor in given if tensor.dim() or _home(tensor)}
    if name in _INDEXES and given:
        return _home(given[0])
    if len(homes) > 1 and name not in _MIXES:
        places = ", ".join(sorted(str(home or "cpu") for home in homes))
        raise RuntimeError(
            f"Expected all tensors to be on the same device, {name} has {places}"
        )
    return _home(given[0]) if given and name in _MIXES else next(iter(homes), None)


def _on_host(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The device that an operation is asked for, and its arguments with the host in its place."""
    asked = {"cpu": None, "cuda": torch.device("cuda")}.get(name, _NOWHERE)

    def played(value: Any) -> Any:
        nonlocal asked
        named = isinstance(value, str) and value.partition(":")[0] in ("cpu", "cuda")
        if not (named or isinstance(value, torch.device)):
            return value
        device = torch.device(value)
        asked = device if device.type == "cuda" else None
        return torch.device("cpu") if asked else value

    args = tuple(map(played, args)) if name in ("to", "_to_copy") else args
    if "device" in kwargs:
        kwargs["device"] = played(kwargs["device"])
    return _gpu(asked) if isinstance(asked, torch.device) else asked, args, kwargs


def _mark(found: Any, home: Home) -> None:
    for tensor in _tensors(found) if home else ():
        storage: Any = tensor.untyped_storage()
        storage.played_home = home


class _Generator(torch._C.Generator):
    def __new__(cls, device: Any = "cpu") -> _Generator:
        if torch.device(device).type == "cuda":
            _gpu(device)
        make: Any = super().__new__
        made: _Generator = make(cls, "cpu")
        return made


# -- streams and events -------------------------------------------------------------------


class Stream:
    """A chain of the played driver's tasks; with ``null``, the caller itself."""

    def __init__(
        self, device: Any = None, priority: int = 0, *, null: bool = False
    ) -> None:
        if not null:
            _use()
        self.device = torch.device("cuda", 0)
        self.cuda_stream: int = 0 if null else _driver().played_stream_create()

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream), f"wait_stream of {other!r}"
        _State.settled = _State.settled and bool(self.cuda_stream)
        _driver().played_stream_wait(self.cuda_stream, other.cuda_stream)


class Event:
    """A time on a stream, by the host's monotonic clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        _use()
        self._timing = enable_timing
        self._at_s = ctypes.c_double()
        self._stream: Stream | None = None
        self._number = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        assert isinstance(stream, Stream), f"record in {stream!r}"
        _State.recorded += 1
        self._stream, self._number, self._at_s = (
            stream,
            _State.recorded,
            ctypes.c_double(),
        )
        if not stream.cuda_stream:
            _settle()
            self._at_s.value = time.perf_counter()
            return
        _ALIVE.append(
            self._at_s
        )  # the driver writes to it, whatever becomes of the event
        _driver().played_record(stream.cuda_stream, ctypes.addressof(self._at_s))

    def elapsed_time(self, other: Event) -> float:
        """Milliseconds."""
        for event in (self, other):
            assert event._timing, "elapsed_time of an event without timing"
            assert event._stream is not None, (
                "elapsed_time of an event that was not recorded"
            )
            assert event._number <= _State.waited, (
                "elapsed_time before anybody waited: not ready"
            )
        return (other._at_s.value - self._at_s.value) * 1e3


_ALIVE: list[object] = []  # what streams may still use


def _record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    assert isinstance(stream, Stream) and _home(tensor), f"record_stream of {stream!r}"
    _ALIVE.append(tensor)


def _copy_by_engine(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """A copy at the engine's rate; in a stream other than the null one, beside all else."""
    alike = target.shape == source.shape and target.dtype == source.dtype
    assert alike and target.is_contiguous() and source.is_contiguous(), "not played"
    _ALIVE.extend((target, source))
    places = target.data_ptr(), source.data_ptr(), target.nbytes
    _driver().played_copy(current_stream().cuda_stream, *places)
    return target


def wait_for_all(device: Any = None) -> None:
    _use()
    _driver().played_synchronize()
    _State.waited = _State.recorded
    _ALIVE.clear()


def _settle() -> None:
    """Have the null stream, which is the caller, wait for what it was told to wait for."""
    if not _State.settled:
        _State.settled = True
        _driver().played_stream_synchronize(0)


def _spin(cycles: int) -> None:
    _settle()
    time.sleep(cycles / CYCLES_PER_S)


def current_stream(device: Any = None) -> Stream:
    return _State.stream[-1]


@contextlib.contextmanager
def stream(chosen: Stream | None) -> Iterator[None]:
    assert chosen is None or isinstance(chosen, Stream), f"stream of {chosen!r}"
    _State.stream.append(chosen or current_stream())
    try:
        yield
    finally:
        _State.stream.pop()


@functools.cache
def _driver() -> ctypes.CDLL:
    return played_driver.library()


# -- the rest of torch.cuda --------------------------------------------------------------------

_PROPERTIES = types.SimpleNamespace(
    name="Played GPU",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=8 << 30,
    shared_memory_per_block_optin=played_driver.SHARED_BYTES,
)


def _properties(device: Any = None) -> types.SimpleNamespace:
    _gpu(device or 0)
    return _PROPERTIES


def _nothing(*_: Any, **__: Any) -> None: ...


_CUDA: dict[str, Any] = {
    "is_available": lambda: _State.gpus > 0,
    "device_count": lambda: _State.gpus,
    "is_initialized": lambda: _State.owner == os.getpid(),
    "_lazy_init": _use,
    "current_device": lambda: _gpu().index,
    "set_device": _gpu,
    "get_device_properties": _properties,
    "get_device_capability": lambda device=None: CAPABILITY,
    "synchronize": wait_for_all,
    "Stream": Stream,
    "Event": Event,
    "stream": stream,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _State.stream[0],
    "empty_cache": _nothing,
    "manual_seed_all": _nothing,  # the host's generator is seeded beside it
    "_sleep": _spin,
}


# -- ranks: gloo in NCCL's place ---------------------------------------------------------------


def _join(real: Callable[..., None], backend: str | None = None, **how: Any) -> None:
    """`init_process_group`."""
    device = how.pop("device_id", None)
    _State.group = backend or ""
    if backend == "nccl":
        assert device is not None and device.type == "cuda", (
            f"nccl without its GPU: {device}"
        )
        local = int(os.environ.get("LOCAL_WORLD_SIZE", how["world_size"]))
        assert local <= _State.gpus, (
            f"{local} ranks on {_State.gpus} GPUs: NCCL would refuse"
        )
        _use()
    real("gloo" if backend == "nccl" else backend, **how)


def _collective(real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def checked(*args: Any, **how: Any) -> Any:
        homes = [_home(tensor) for tensor in _tensors([args, how])]
        if _State.group == "nccl":
            assert all(homes), (
                f"{real.__name__} by NCCL of a tensor in the host's memory"
            )
        return real(*args, **how)

    return checked


def _install_ranks() -> None:
    module: Any = dist
    backend = module.get_backend
    module.is_nccl_available = lambda: True
    module.init_process_group = functools.partial(_join, module.init_process_group)
    module.get_backend = lambda group=None: _State.group or backend(group)
    for name in (
        "all_reduce",
        "broadcast",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
    ):
        setattr(module, name, _collective(getattr(module, name)))


def install(gpus: int) -> None:
    """Play that many GPUs from now on, in this process and in those forked from it."""
    target: Any = torch
    _State.gpus = gpus
    for name, played in _CUDA.items():
        setattr(target.cuda, name, played)
    _State.stream = [Stream(null=True)]
    target.cuda.nccl.version = lambda: NCCL
    target.version.cuda = CUDA
    target.Generator = _Generator
    target.Tensor.record_stream = _record_stream
    autocast = target.autocast.__init__

    @functools.wraps(autocast)
    def on_host(self: Any, device_type: str, *args: Any, **how: Any) -> None:
        autocast(self, "cpu" if device_type == "cuda" else device_type, *args, **how)

    target.autocast.__init__ = on_host
    _install_ranks()
    _OnProcessor().__enter__()
