"""Matrices that were rounded and packed at an earlier start, in one file for each checkpoint, rounding, CPU variant and
share of a rank.

Rounding an 8B model to 4 bits takes a minute or two; reading what came of it takes as long as the disk does, and pages
of the file are shared by all engines that map it. A file is only taken for exactly what it was made from: its name is a
hash of the checkpoint's files (path, size, time of change), the rounding, the tiling, the share and the layout of the
file itself.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.api.config import WeightBits
from engine.api.errors import CheckpointError
from engine.models.headers import read_headers
from engine.weights.files import Weights
from kernels.cpu.library import Tiling
from kernels.cpu.packing import Packed

VERSION = 3
FREE_SHARE = 0.5  # of the disk's free space that a file may take
_log = logging.getLogger(__name__)


class PackedFile:
    """`get` what is there, `put` what is not, and `close` writes a new file if anything was put."""

    def __init__(
        self, folder: Path, files: Iterable[Path], bits: WeightBits, tiling: Tiling, share: tuple[int, int] = (0, 1)
    ) -> None:
        """share: rank and number of ranks."""
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(set(files))]
        key = json.dumps([VERSION, bits, tiling._asdict(), share, stats])
        self.path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
        self._new: dict[str, Packed] = {}
        self._weights, self._forms = _read(self.path)

    def get(self, name: str) -> Packed | None:
        """The matrix of this name as a view of the file, or None. Copy it before `release`."""
        if name not in self._forms:
            return None
        scales = f"{name}.scales"
        kept = self._weights.read(scales).clone() if scales in self._weights.tensors else None
        return Packed(self._weights.read(name), scales=kept, **self._forms[name])

    def release(self) -> None:
        """Make the pages of all matrices read so far non-resident."""
        self._weights.release()

    def put(self, name: str, packed: Packed) -> None:
        self._new[name] = packed

    def close(self) -> None:
        """Writes what is new, and lets go of all that is held. A cache that cannot be written costs the next start some
        time and nothing else."""
        try:
            if self._new:
                self._write()
        except (OSError, SafetensorError) as error:
            _log.warning("rounded weights are not kept: %s: %s", self.path, error)
        self._weights.close()
        self._new, self._forms = {}, {}

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        room = os.statvfs(self.path.parent)
        size = sum(packed.nbytes for packed in self._new.values())
        if size > room.f_bavail * room.f_frsize * FREE_SHARE:
            raise OSError(f"{size:,} bytes are more than half of what is free there")
        tensors = {name: packed.data for name, packed in self._new.items()}
        tensors |= {f"{name}.scales": packed.scales for name, packed in self._new.items() if packed.scales is not None}
        forms = {
            name: {
                "form": one.form,
                "outputs": one.outputs,
                "inputs": one.inputs,
                "group": one.group,
                "zeros": one.zeros,
            }
            for name, one in self._new.items()
        }
        # Another engine may write the same file at the same time: each its own, and the last one stays.
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            save_file(tensors, temporary, {"forms": json.dumps(forms)})
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Weights, dict[str, dict[str, object]]]:
    """The tensors of a file, mapped, and how they are packed; nothing where it is missing or damaged."""
    nothing = Weights({}, lambda fraction: None)
    try:
        with safe_open(path, "pt") as file:
            forms = json.loads(file.metadata()["forms"])
        return Weights(read_headers(path), lambda fraction: None), forms
    except FileNotFoundError:
        return nothing, {}
    except (OSError, CheckpointError, SafetensorError, KeyError, TypeError, ValueError) as error:
        _log.warning("rounded weights are made anew: %s: %s", path, error)
        return nothing, {}
