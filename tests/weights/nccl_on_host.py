"""``NcclLibrary`` with the real nccl4py over ``fake_nccl.c``, which moves host memory between threads or processes.

nccl4py asks for ``libnccl.so.2``, and the loader answers with a library of that soname that the process has loaded.
What the test's streams and events do, the fake does when they ask it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import subprocess
import types
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

DIRECTORY = "FAKE_NCCL_DIR"
"""An environment variable: the directory of the compiled library and of the files through which bytes travel."""
_LIBRARY = "libnccl.so.2"


def skip_if_impossible() -> None:
    """Skip the tests of a module where they can't run."""
    pytest.importorskip("nccl.core", reason="needs the packages nccl4py and cuda-bindings")
    if torch.version.cuda is not None:
        pytest.skip("this build of torch has loaded NCCL itself, which nccl4py would use", allow_module_level=True)
    if shutil.which("cc") is None:
        pytest.skip("a fake libnccl needs a C compiler (cc)", allow_module_level=True)


def compile_fake(directory: Path) -> None:
    options = ["-shared", "-fPIC", "-Wall", "-Werror", f"-Wl,-soname,{_LIBRARY}"]
    source = Path(__file__).with_name("fake_nccl.c")
    subprocess.run(["cc", *options, "-o", directory / _LIBRARY, source], check=True, timeout=60)


def load_fake(set_attribute: Callable[[Any, str, Any], None]) -> ctypes.CDLL:
    """Load the library into this process, and replace by ``set_attribute`` what needs a device."""
    path = Path(os.environ[DIRECTORY]) / _LIBRARY
    fake = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    fake.fake_count.argtypes, fake.fake_count.restype = (ctypes.c_void_p, ctypes.c_int), ctypes.c_long
    import nccl.core  # pyright: ignore[reportMissingImports]

    core: Any = nccl.core
    assert core.get_version().libnccl.path == path
    handles = itertools.count(4096)

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.cuda_stream = next(handles)

    class Event:
        def record(self, stream: Stream) -> None:
            self.handle = stream.cuda_stream
            self.count = fake.fake_count(self.handle, False)

        def query(self) -> bool:
            return fake.fake_count(self.handle, True) >= self.count

    for name, stand_in in {"Stream": Stream, "Event": Event, "device": nullcontext, "stream": nullcontext}.items():
        set_attribute(torch.cuda, name, stand_in)
    # nccl4py compares it with the index of a tensor's device, which host memory does not have.
    on_host = types.SimpleNamespace(device_id=None)
    set_attribute(core.Communicator, "device", property(lambda _: on_host))
    return fake
