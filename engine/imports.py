"""Exclude modules that an engine process does not need."""

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

from engine.api.config import EngineConfig

META = "torch._meta_registrations"


def leave_out_unused(config: EngineConfig) -> None:
    """Make `import triton` fail in this process unless its kernels are used, and import torch without the shapes of its
    operations on meta tensors. torch.compile uses both. Call before the first import of torch.

    kernels/jit.py imports Triton where it is installed; its library takes 75 MiB of resident memory. The operations on
    meta tensors take a quarter of the time of importing torch, and 18 MiB.
    """
    if config.hardware.kernels != "triton" and not config.hardware.torch_compile:
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # None: a documented way to stop an import
        sys.modules.setdefault(META, ModuleType(META))


def load_meta_operations() -> None:
    """Import what `leave_out_unused` replaced: transformers builds models of meta tensors."""
    if not hasattr(sys.modules.get(META), "register_meta"):
        sys.modules.pop(META, None)
        importlib.import_module(META)


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Import without garbage collections. Imports create no garbage, and traversing their objects again and again takes
    a tenth of the time of importing torch. The objects are not freed before the process ends, so later collections
    leave them out; extension modules report objects that are never freed as leaks."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)
