"""Cache of matrices that were quantized and packed: one file for each checkpoint, number format, CPU variant and rank.

Quantizing an 8B model to 4 bits takes one to two minutes; reading the result is limited by the disk, and its pages are
shared by all engines that map the file. A file is used only for exactly the same inputs: its name is a hash of the
checkpoint's files (path, size, modification time), the number format, the tiling, the rank and the layout version.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from engine.api.errors import CheckpointError
from engine.models.headers import read_headers
from engine.weights.files import Weights
from kernels.cpu.library import Tiling
from kernels.cpu.packing import Packed

VERSION = 5
FREE_SHARE = 0.5  # maximum share of the disk's free space for a file
_log = logging.getLogger(__name__)


class PackedFile:
    """Matrices by name: `get` cached ones, `put` new ones. `close` writes a new file if there are new ones."""

    def __init__(
        self, folder: Path, files: Iterable[Path], kind: str, tiling: Tiling, share: tuple[int, int] = (0, 1)
    ) -> None:
        """kind: number format, in full. share: rank and number of ranks."""
        stats = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(set(files))]
        key = json.dumps([VERSION, kind, tiling._asdict(), share, stats])
        self.path = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"
        self._new: dict[str, Packed] = {}
        self.weights, self._forms = _read(self.path)

    @property
    def has_matrices(self) -> bool:
        """Return whether the cache had a file of these matrices."""
        return bool(self._forms)

    def get(self, name: str) -> Packed | None:
        """Return a matrix as a view of the file, or None. It must be copied before `release`."""
        if name not in self._forms:
            return None
        form = dict(self._forms[name])
        scale_type = getattr(torch, str(form.pop("scale_type")))
        return Packed(self.weights.read(name), scale_type=scale_type, **form)

    def release(self) -> None:
        """Make the pages of all matrices read so far non-resident."""
        self.weights.release()

    def put(self, name: str, packed: Packed) -> None:
        self._new[name] = packed

    def close(self) -> None:
        """Write new matrices and release everything. If the cache cannot be written, a warning is logged, and the next
        start takes longer."""
        try:
            if self._new:
                self._write()
        except (OSError, SafetensorError) as error:
            _log.warning("quantized weights are not cached: %s: %s", self.path, error)
        self.weights.close()
        self._new, self._forms = {}, {}

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        room = os.statvfs(self.path.parent)
        size = sum(packed.nbytes for packed in self._new.values())
        if size > room.f_bavail * room.f_frsize * FREE_SHARE:
            raise OSError(f"{size:,} bytes are more than half of the free space")
        tensors = {name: packed.data for name, packed in self._new.items()}
        forms = {
            name: {
                "form": one.form,
                "outputs": one.outputs,
                "inputs": one.inputs,
                "group": one.group,
                "zeros": one.zeros,
                "scale_type": str(one.scale_type).removeprefix("torch."),
            }
            for name, one in self._new.items()
        }
        # Several engines may write the same file: each writes its own temporary file, and the last one is kept.
        temporary = self.path.with_suffix(f".{os.getpid()}")
        try:
            save_file(tensors, temporary, {"forms": json.dumps(forms)})
            temporary.replace(self.path)
        finally:
            temporary.unlink(missing_ok=True)


def _read(path: Path) -> tuple[Weights, dict[str, dict[str, object]]]:
    """Return the mapped tensors of a file and their packing; empty if it is missing or damaged."""
    nothing = Weights({}, lambda fraction: None)
    try:
        with safe_open(path, "pt") as file:
            forms = json.loads(file.metadata()["forms"])
        return Weights(read_headers(path), lambda fraction: None), forms
    except FileNotFoundError:
        return nothing, {}
    except (OSError, CheckpointError, SafetensorError, KeyError, TypeError, ValueError) as error:
        _log.warning("quantized weights are recomputed: %s: %s", path, error)
        return nothing, {}
