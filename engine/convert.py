"""Write a checkpoint with weights of 4 or 8 bits: `python -m engine.convert JOB.json`, which `slipway convert` runs.

The result is a folder in Hugging Face's layout, in the format `pack-quantized` of compressed-tensors, which other
engines read too. Its numbers are those to which `quantization.weights` rounds while it loads the source. Matrices are
read, rounded and written one at a time, so memory does not grow with the checkpoint. SHA256SUMS has a checksum of every
file, in the form that `sha256sum -c` checks.
"""

import hashlib
import json
import shutil
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import torch
from torch import Tensor

from engine.api.errors import EXIT_PERMANENT, CheckpointError, EngineError
from engine.api.files import read_json_object
from engine.formats.compressed_tensors import written_numbers, written_settings, written_tensors
from engine.formats.layers import pattern
from engine.formats.load_time import LOAD_FORMATS
from engine.gguf.file import find_gguf
from engine.lowering.footprint import head_bits, quantization_group
from engine.models.checkpoint import INDEX, Checkpoint, read_checkpoint
from engine.models.kv_scales import is_kv_scale
from engine.models.sources import join, linear_paths, sources
from engine.models.stored import matrix_roles
from engine.weights.files import TORCH_DTYPES, Weights
from engine.weights.quantized import QuantizedWeights

SUMS = "SHA256SUMS"
PLAIN_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken", ".md")
_TYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_BITS = {"int8": 8, "int4": 4}
_SCALES = {"int8": "BF16", "int4": "F16"}


class Job(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Source, target and formats of a conversion."""

    source: str  # folder of a checkpoint
    target: str  # folder to make
    weights: str = "int4"  # int8, int4 or stored: format of all matrices that no entry of `layers` matches
    head: str = "auto"  # format of the head. auto: as `quantization.head` has it
    group_size: int = 0  # inputs that share a scale; 0: as `quantization.group_size: auto` has it
    layers: dict[str, str] = {}  # regular expression of paths → format; the first that matches counts
    shard_bytes: int = 4 << 30
    trust_remote_code: bool = False


class Report(msgspec.Struct, kw_only=True):
    """Sizes and numbers of the new checkpoint."""

    source_bytes: int
    bytes: int
    matrices: dict[str, int]  # number by format
    files: int


@dataclass(frozen=True)
class _Out:
    """A tensor of the new checkpoint. part: of a quantized matrix, the last component of its name; "": it is copied.
    follows: it is in the same file as the tensor before it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str  # path of the matrix, or name of the tensor
    part: str = ""
    follows: bool = False

    @property
    def bytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * torch.empty(0, dtype=TORCH_DTYPES[self.dtype]).element_size()


def convert(job: Job, progress: Callable[[float], None] = lambda fraction: None) -> Report:
    """Write the checkpoint. Raises CheckpointError if the source cannot be read or converted, or the target exists."""
    target = Path(job.target).absolute()  # so that it has a name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"{target}: exists already; name a new folder")
    checkpoint = _readable(job)
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        report = _Conversion(job, checkpoint).write(partial, progress)
        if target.exists():
            target.rmdir()
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _readable(job: Job) -> Checkpoint:
    checkpoint = read_checkpoint(job.source, job.trust_remote_code)
    if reason := refusal(checkpoint):
        raise CheckpointError(f"{checkpoint.path}: {reason}")
    return checkpoint


def refusal(checkpoint: Checkpoint) -> str:
    """Return why a checkpoint cannot be converted, or ""."""
    if find_gguf(checkpoint.path) is not None:
        return "a GGUF file is not converted, because it is served as it is; use the checkpoint that it was made from"
    if checkpoint.model.transposed or checkpoint.model.foreign is not None:
        return (
            f"{checkpoint.architecture} is not converted, because its matrices are stored transposed or only "
            "transformers can read them; use quantization.weights"
        )
    return ""


class _Conversion:
    def __init__(self, job: Job, checkpoint: Checkpoint) -> None:
        self._job, self._checkpoint = job, checkpoint
        model = checkpoint.model
        self._shapes = sources(model)
        self._formats = dict(self._chosen())
        untied = model.head is not None and model.head.tied and model.head.name in self._formats
        self._tied = join(model.root, model.embed.name) if untied else ""

    def write(self, folder: Path, progress: Callable[[float], None]) -> Report:
        checkpoint, tensors = self._checkpoint, self._checkpoint.tensors
        self._weights = Weights(tensors, progress)
        self._reader: Weights | QuantizedWeights = self._weights
        if checkpoint.quantization is not None:
            self._reader = QuantizedWeights(self._weights, checkpoint.quantization, self._shapes)
        outs = list(self._outs())
        shards = _shards(outs, self._job.shard_bytes)
        names = [
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
            for number in range(1, len(shards) + 1)
        ]
        sums = {name: self._write_shard(folder / name, shard) for name, shard in zip(names, shards, strict=True)}
        total = sum(one.bytes for one in outs)
        if len(shards) > 1:
            where = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        (folder / "config.json").write_text(json.dumps(self._config(outs), indent=2) + "\n")
        self._copy_others(folder)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = str(path.relative_to(folder))
            if name not in sums:
                sums[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items())))
        found = [*self._formats.values()]
        return Report(
            source_bytes=sum(info.bytes for info in tensors.values()),
            bytes=total,
            matrices={one: found.count(one) for one in dict.fromkeys(found)},
            files=len(sums),
        )

    def _chosen(self) -> Iterator[tuple[str, str]]:
        """Yield each matrix that is quantized, with its format."""
        model, roles = self._checkpoint.model, matrix_roles(self._checkpoint.model)
        entries = [(pattern(text, "layers"), format) for text, format in self._job.layers.items()]
        for path in dict.fromkeys([*linear_paths(model), *([model.head.name] if model.head is not None else [])]):
            role = roles.get(path, "projection")
            default = self._head_format() if role == "head" else self._job.weights
            format = next((format for entry, format in entries if entry.fullmatch(path)), default)
            if role != "exact" and format != "stored":
                yield path, format

    def _head_format(self) -> str:
        head = self._checkpoint.model.head
        if head is None or head.bias:
            return "stored"
        return str(head_bits(self._job.weights, self._job.head))  # type: ignore[arg-type]

    def _group(self, format: str) -> int:
        return self._job.group_size or quantization_group(format, self._checkpoint.model)  # type: ignore[arg-type]

    def _outs(self) -> Iterator[_Out]:
        """Yield the tensors to write, the parts of a matrix one after another."""
        checkpoint = self._checkpoint
        quantization = checkpoint.quantization
        restored = {} if quantization is None else quantization.formats
        consumed = {path for path in (*self._formats, *restored) if path != self._tied}
        for path, format in self._formats.items():
            rows, inputs = self._shapes[f"{self._matrix(path)}.weight"]
            group, bits = self._group(format), _BITS[format]
            parts = written_tensors(rows, inputs, bits, group, _SCALES[format])
            for at, (last, (dtype, shape)) in enumerate(parts.items()):
                yield _Out(f"{path}.{last}", dtype, shape, path, last, follows=at > 0)
        for path in restored:
            if path not in self._formats:
                yield _Out(f"{path}.weight", self._dtype, self._shapes[f"{path}.weight"], f"{path}.weight")
        modules = _module_files(checkpoint)
        for name, info in checkpoint.tensors.items():
            path, _, last = name.rpartition(".")
            is_kept = path not in consumed or last == "bias" or is_kv_scale(checkpoint.model, name)
            if is_kept and info.file not in modules:
                yield _Out(name, info.dtype, info.shape, name)

    @property
    def _dtype(self) -> str:
        """Type of matrices that are dequantized and stay so."""
        return {"float32": "F32", "float16": "F16"}.get(self._checkpoint.dtype, "BF16")

    def _matrix(self, path: str) -> str:
        """Return the path of the matrix that is read for `path`."""
        head = self._checkpoint.model.head
        return self._tied if self._tied and head is not None and path == head.name else path

    def _write_shard(self, path: Path, outs: list[_Out]) -> str:
        """Write a safetensors file. Return its SHA-256."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for one in outs:
            header[one.name] = {"dtype": one.dtype, "shape": one.shape, "data_offsets": [at, at + one.bytes]}
            at += one.bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256()
        with path.open("wb") as file:
            _put(file, digest, struct.pack("<Q", len(text)) + text)
            parts: dict[str, Tensor] = {}
            for one in outs:
                if one.part:
                    parts = parts if one.follows else self._parts(one.source)
                    tensor = parts[one.part]
                else:
                    tensor = self._reader.read(one.source)
                made = tensor.to(TORCH_DTYPES[one.dtype]).reshape(one.shape).contiguous()
                _put(file, digest, made.flatten().view(torch.uint8).numpy().tobytes() if made.numel() else b"")
                self._reader.release()
        return digest.hexdigest()

    def _parts(self, path: str) -> dict[str, Tensor]:
        """Return the tensors of a quantized matrix."""
        format = self._formats[path]
        weight = self._reader.read(f"{self._matrix(path)}.weight")
        found = LOAD_FORMATS[format].quantize(weight, self._group(format))
        return written_numbers(found)

    def _config(self, outs: list[_Out]) -> dict[str, Any]:
        config = read_json_object(self._checkpoint.path / "config.json")
        text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
        if self._tied:
            for one in (config, text):
                one["tie_word_embeddings"] = False
        by_format: dict[tuple[int, int], list[str]] = {}
        for path, format in self._formats.items():
            by_format.setdefault((_BITS[format], self._group(format)), []).append(path)
        plain = [
            one.name.removesuffix(".weight") for one in outs if one.name.endswith(".weight") and len(one.shape) == 2
        ]
        config["quantization_config"] = written_settings(by_format, plain)
        return config

    def _copy_others(self, folder: Path) -> None:
        """Copy all files but the configuration and the weights of the transformer."""
        root, weights = self._checkpoint.path, _module_files(self._checkpoint)
        written = {"config.json", INDEX, SUMS, "quantize_config.json", "quant_config.json", "hf_quant_config.json"}
        for path in root.rglob("*"):
            name = path.relative_to(root)
            hidden = any(part.startswith(".") for part in name.parts)
            is_copied = path in weights or path.suffix in PLAIN_SUFFIXES and str(name) not in written
            if path.is_file() and not hidden and is_copied:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, folder / name)


def _module_files(checkpoint: Checkpoint) -> frozenset[Path]:
    """Return the weight files of the modules after the transformer, which are copied."""
    return frozenset(file for _, file in checkpoint.modules.files) if checkpoint.modules is not None else frozenset()


def _put(file: BinaryIO, digest: Any, data: bytes) -> None:
    file.write(data)
    digest.update(data)


def _shards(outs: list[_Out], most: int) -> list[list[_Out]]:
    """Divide the tensors into files with at most `most` bytes of tensors, or one matrix that is larger. The parts of a
    matrix are in one file."""
    wholes: list[list[_Out]] = []
    for one in outs:
        if one.follows:
            wholes[-1].append(one)
        else:
            wholes.append([one])
    found: list[list[_Out]] = [[]]
    size = 0
    for whole in wholes:
        added = sum(one.bytes for one in whole)
        if found[-1] and size + added > most:
            found.append([])
            size = 0
        found[-1] += whole
        size += added
    return found


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m engine.convert JOB.json", file=sys.stderr)
        return 2
    shown = -1

    def progress(fraction: float) -> None:
        nonlocal shown
        if int(20 * fraction) > shown:
            shown = int(20 * fraction)
            print(f"{5 * shown} % read", file=sys.stderr, flush=True)

    try:
        report = convert(msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job), progress)
    except EngineError as error:
        print(error, file=sys.stderr)
        return EXIT_PERMANENT
    print(msgspec.json.encode(report).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
