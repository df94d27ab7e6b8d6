"""Exclude modules that an engine process does not need."""

import sys

from engine.api.config import EngineConfig


def leave_out_unused(config: EngineConfig) -> None:
    """Make `import triton` fail in this process unless its kernels are used. Call before the first import of torch.

    kernels/jit.py imports Triton where it is installed; its library takes 75 MiB of resident memory.
    """
    if config.hardware.kernels != "triton":
        sys.modules.setdefault("triton", None)  # type: ignore[arg-type]  # None: a documented way to stop an import
