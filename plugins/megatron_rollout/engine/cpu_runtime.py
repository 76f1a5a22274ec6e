"""A facade over `torch.cuda` for processes without CUDA, so that megatron-core runs on the CPU unchanged.

megatron-core asks `torch.cuda` for the current device, streams, events and random states, and passes "cuda" as a
literal device. In a process without CUDA none of these exists; here each gets its CPU meaning. Installed once, in one
place (`device.setup_process`), and only where CUDA is absent: with a GPU nothing here is ever called.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

_FACTORIES = [
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "as_tensor",
    "empty_strided",
]
_KV_BUFFER_BYTES_ASSUMED_FREE = 8 << 30  # megatron-core only compares its KV buffer with the free memory
_installed = False


class Event:
    """`torch.cuda.Event`: the CPU is always done with what was asked of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.time: float | None = None

    def record(self, *args: Any) -> None:
        self.time = time.perf_counter()

    def wait(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return ((end.time or 0.0) - (self.time or 0.0)) * 1e3


class Stream:
    """`torch.cuda.Stream`: one stream, always idle."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, stream: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None: ...


def install() -> None:
    """Install the facade in this process. Does nothing a second time.

    Raises RuntimeError where CUDA is present: there the real thing must be used.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise RuntimeError("the CPU runtime must not be installed in a process that has CUDA")
    _installed = True
    _devices()
    _literals()
    _streams()
    _random_states()
    _megatron()


def _devices() -> None:
    cpu = torch.device("cpu")
    cuda: Any = torch.cuda
    cuda.current_device = lambda: cpu
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda *args, **kwargs: None
    cuda.memory_stats = lambda *args, **kwargs: defaultdict(int)
    cuda.memory_allocated = cuda.memory_reserved = cuda.max_memory_allocated = lambda *args, **kwargs: 0
    cuda.mem_get_info = lambda *args, **kwargs: (_KV_BUFFER_BYTES_ASSUMED_FREE,) * 2
    cuda.empty_cache = lambda: None
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]


def _is_cuda_literal(device: Any) -> bool:
    return device is not None and (device.type if isinstance(device, torch.device) else str(device)).startswith("cuda")


def _literals() -> None:
    """`device="cuda"` and `pin_memory=True` in factory calls, `.to("cuda")`, `.pin_memory()`, `Tensor.type()`."""

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            if _is_cuda_literal(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        create.__name__ = getattr(factory, "__name__", "factory")
        create.__wrapped__ = factory  # type: ignore[attr-defined]
        return create

    # `with torch.device(...)` looks its factories up once and remembers them: it must know the real ones
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    original_to, original_type = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)) and _is_cuda_literal(args[0]):
            args = ("cpu", *args[1:])
        if _is_cuda_literal(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return original_to(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # megatron-core's optimizers tell parameters apart by the string 'torch.cuda.FloatTensor'
        kind = original_type(self, *args, **kwargs)
        return kind.replace("torch.", "torch.cuda.", 1) if isinstance(kind, str) and "cuda" not in kind else kind

    torch.Tensor.to = to  # type: ignore[assignment,method-assign]
    torch.Tensor.type = type_  # type: ignore[assignment,method-assign]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[assignment,method-assign]


def _streams() -> None:
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = Event, Stream
    only = Stream()
    cuda.current_stream = cuda.default_stream = lambda *args, **kwargs: only
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = lambda *args, **kwargs: 0
    cuda.nvtx.range_pop = lambda *args, **kwargs: 0


def _random_states() -> None:
    """`torch.cuda`'s generator is torch's default one here; megatron-core's tracker forks that one."""
    import megatron.core.tensor_parallel.random as tp_random

    cuda: Any = torch.cuda
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None  # torch.manual_seed has seeded the only generator
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.random.get_rng_state = cuda.get_rng_state
    module: Any = tp_random
    module._get_cuda_rng_state = lambda device="cpu", clone=False, graph_safe=False: torch.get_rng_state()
    module._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)

    def add(self: Any, name: str, seed: int) -> None:
        self._is_initialized = True
        if name in self.states_:
            raise RuntimeError(f"random state {name!r} exists already")
        self.seeds_.add(seed)
        outside = torch.get_rng_state()
        torch.manual_seed(seed)
        self.states_[name] = torch.get_rng_state()
        torch.set_rng_state(outside)

    @contextlib.contextmanager
    def fork(self: Any, name: str = module._MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        if name not in self.states_:
            raise RuntimeError(f"random state {name!r} was never added")
        outside = torch.get_rng_state()
        torch.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = torch.get_rng_state()
            torch.set_rng_state(outside)

    module.CudaRNGStatesTracker.add = add
    module.CudaRNGStatesTracker.fork = fork


def _megatron() -> None:
    import megatron.core.inference.communication_utils as communication
    import megatron.core.inference.contexts.dynamic_context as dynamic_context

    communication._is_cuda = lambda tensor: None  # type: ignore[assignment]  # pipeline sends assert CUDA tensors
    dynamic_context.triton_append_key_value_cache = None  # the fallback writes the KV cache with index_put
