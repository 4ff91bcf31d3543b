"""A CUDA device for a whole process where there is none: its tensors are torch's fake ones, without values.

``install`` replaces ``torch.cuda``'s functions, so it is for a process of its own, which must have loaded ``SHIM``,
compiled, before torch. Where the host reads the device it gets ones. So a step is made, and bytes that have arrived
differ from memory that nobody wrote.
"""

from __future__ import annotations

import ctypes
import traceback
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SHIM = "_Bool _ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE(signed char type) { return 0; }"
"""at::accelerator::isAccelerator, so that backward passes use neither streams nor threads of a device."""
_CUDA, _LAZY = 1, 17
aten = torch.ops.aten
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.addmm_, aten._grouped_mm)
_OF_VALUES = {aten.nonzero.default: lambda x, *_: (x.numel() // 2, x.ndim), aten.bincount.default: lambda *a: (a[2],)}
"""Operations whose result has a shape that depends on values: the shape that it gets here."""


def is_wait(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the host must read the result of ``func``, or its shape, from the device."""
    if func in (aten.index.Tensor, aten.index_put_.default):  # as many rows as there are True
        return any(isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1])
    if func is aten.repeat_interleave.Tensor:  # as many as the sum of the repeats
        return kwargs.get("output_size") is None
    return func in (aten._local_scalar_dense.default, aten.masked_select.default, aten.equal.default, *_OF_VALUES)


class FakeCuda(TorchDispatchMode):
    """Tensors on ``cuda`` are fake under this mode; those of the host are real.

    Attributes:
        num_flash: number of calls of flash attention.
        waits: where the host waited for the device, by the place in the source.
        copies: copies that have begun and that nobody has waited for; memory of the host that they fill, or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.num_flash = 0
        self.waits: list[str] = []
        self.copies: list[Tensor | None] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # the operations on its parts come here
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        leaves = tree_leaves((args, kwargs))
        devices = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if "cuda" not in devices and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return func(*args, **kwargs)
        self._check(func, tensors, kwargs)
        is_copy = func in (aten._to_copy.default, aten.copy_.default)
        between = is_copy and {tensor.device.type for tensor in tensors} | devices >= {"cpu", "cuda"}
        does_not_block = kwargs.get("non_blocking", False) or (func is aten.copy_.default and args[2:] == (True,))
        if is_wait(func, args, kwargs) or (between and not does_not_block):
            self._wait()
        if between and kwargs.get("device", args[0].device).type == "cpu":
            target = args[0] if func is aten.copy_.default else torch.empty(args[0].shape, dtype=kwargs["dtype"])
            self.copies.append(target)
            return target.zero_() if does_not_block else self.arrive([target]) or target
        if between and does_not_block:
            self.copies.append(None)
        if func is aten._local_scalar_dense.default:
            return torch.ones((), dtype=args[0].dtype).item() if args[0].dtype != torch.bool else False
        with self._fake:
            if func in _OF_VALUES:
                return torch.empty(_OF_VALUES[func](*args), dtype=torch.int64, device="cuda")
            return True if func is aten.equal.default else func(*args, **kwargs)

    def _check(self, func: Any, tensors: list[Tensor], kwargs: dict[str, Any]) -> None:
        """Raise for what a kernel refuses and a fake tensor does not."""
        self.num_flash += "varlen_attn" in func.name()
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if func.overloadpacket in _PRODUCTS and len(dtypes) > 1 and "out_dtype" not in kwargs:
            raise RuntimeError(f"{func}: expected one dtype, got {dtypes}")
        is_own = func.namespace in ("aten", "prim", "c10d", "fsdp", "_c10d_functional")
        if not is_own and any(tensor.device.type == "cpu" and tensor.ndim for tensor in tensors):
            raise RuntimeError(f"{func}: expected tensors on the device, got some on the host")

    def _wait(self) -> None:
        self.arrive()
        frames = [frame for frame in traceback.extract_stack() if "/async_rl/" in frame.filename]
        self.waits += [f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in frames[-1:]]

    def arrive(self, copies: list[Tensor | None] | None = None) -> None:
        """End ``copies``, or all that have begun."""
        for target in self.copies[:] if copies is None else copies:
            if target is not None:
                target.fill_(1 if target.dtype != torch.bool else 0)
        self.copies = [] if copies is None else [c for c in self.copies if not any(c is other for other in copies)]


class HostGenerator(torch.Generator):
    def __new__(cls, device: Any = None) -> HostGenerator:
        return super().__new__(cls)


def install(device: FakeCuda, *, num_ranks: int) -> None:
    """Let torch of this process see ``num_ranks`` devices."""

    class Event:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._copies: list[Tensor | None] = []

        def record(self, *args: Any) -> None:
            self._copies = device.copies[:]

        def query(self) -> bool:
            device.arrive(self._copies)
            return True

        synchronize = query

        def wait(self, *args: Any) -> None: ...

        def elapsed_time(self, other: Any) -> float:
            return 1.0

    class Stream(nullcontext[None]):
        cuda_stream, device = 0, torch.device("cuda", 0)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__()

        def record_event(self, *args: Any) -> Event:
            return Event()

        def synchronize(self) -> None:
            device.arrive()

        def wait_event(self, *args: Any) -> None: ...

        wait_stream = wait_event

    cudart = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    results: dict[str, Any] = {
        "is_available": True, "is_initialized": True, "device_count": num_ranks, "current_device": 0,
        "set_device": None, "_lazy_init": None, "get_device_name": "NVIDIA H100 80GB HBM3", "cudart": cudart,
        "get_device_capability": (9, 0), "max_memory_allocated": 1, "memory_allocated": 1, "empty_cache": None,
        "mem_get_info": (80 << 30, 80 << 30), "reset_peak_memory_stats": None, "manual_seed_all": None,
        "current_stream": Stream(), "default_stream": Stream(), "stream": nullcontext(), "device": nullcontext(),
        "is_bf16_supported": True, "_is_in_bad_fork": False, "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, result in results.items():
        setattr(torch.cuda, name, lambda *_, result=result, **__: result)
    stand_ins: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", Stream), (torch.cuda, "Event", Event),
        (torch.cuda, "synchronize", lambda *_: device.arrive()), (torch._C, "_cuda_getCurrentRawStream", lambda *_: 0),
        (Tensor, "pin_memory", lambda tensor, *_: tensor), (Tensor, "is_pinned", lambda *_: True),
        (FakeTensorMode, "avoid_device_init", True), (torch, "Generator", HostGenerator),
    ]  # fmt: skip
    for owner, name, value in stand_ins:
        setattr(owner, name, value)
    # torch has a guard of devices that does nothing, and takes it in place of one that says that it has no device.
    library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libc10.so"))
    guards = (ctypes.c_void_p * (_LAZY + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    guards[_CUDA] = guards[_LAZY]
    torch._C._ensureCUDADeviceGuardSet()
