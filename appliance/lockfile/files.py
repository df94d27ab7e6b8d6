"""Which files of a checkpoint's folder a start reads, and which revision of its source they are.

A file that appears later and would be read (a chat_template.jinja, an index of shards) is a change like any other.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from appliance.planning.tokenizer import DESCRIBED, PLAIN, tokenizer_name
from engine.api.files import INDEX_BYTES, read_file, read_text
from engine.gguf.file import find_gguf
from engine.models.checkpoint import INDEX, SINGLE
from engine.models.kv_scales import FILE as KV_SCALES
from engine.models.modules import module_names
from engine.models.quantized import MODELOPT
from engine.models.remote import REMOTE_FILE

# Read where they are there, each by its name: configuration, tokenizer, templates, scales, code.
NAMED = (
    *("config.json", "generation_config.json"),
    *(*DESCRIBED, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
    *(KV_SCALES, MODELOPT, REMOTE_FILE),
)
ADDED = "added_tokens.json"
"""Read beside a tokenizer that does not describe all."""
TEMPLATES = "additional_chat_templates"
# Of a download by huggingface_hub: `snapshots/REVISION` in its cache, or a note beside each file of a plain folder.
_SNAPSHOTS = "snapshots"
_NOTES = Path(".cache/huggingface/download")
_REVISION = re.compile(r"[0-9a-f]{40}")


def read_names(folder: Path) -> tuple[str, ...]:
    """Names of the files, relative to the folder, in order. Shards that an index names count though they are missing.
    Raises CheckpointError where the folder has several GGUF files."""
    plain = [name for name in NAMED if (folder / name).is_file()]
    tokenizer = tokenizer_name(folder)
    if tokenizer in PLAIN:
        plain += [name for name in (tokenizer, ADDED) if (folder / name).is_file()]
    modules = [name for name in module_names(folder) if (folder / name).is_file()]
    templates = [f"{TEMPLATES}/{path.name}" for path in (folder / TEMPLATES).glob("*.jinja")]
    return tuple(sorted({*plain, *modules, *templates, *_weights(folder)}))


def _weights(folder: Path) -> Iterator[str]:
    blocks = find_gguf(folder)
    if blocks is not None:
        yield blocks.name
    elif (folder / INDEX).is_file():
        yield INDEX
        yield from _shards(folder / INDEX)
    elif (folder / SINGLE).is_file():
        yield SINGLE


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


def _shards(index: Path) -> list[str]:
    """The shards an index names; none if it is damaged, which reading the checkpoint says better."""
    try:
        return sorted(set(msgspec.json.decode(read_file(index, INDEX_BYTES), type=_Index).weight_map.values()))
    except (OSError, msgspec.DecodeError, RecursionError):
        return []


def revision(folder: Path) -> str | None:
    """The commit of the Hugging Face repository that the folder was downloaded from, if the download left a trace."""
    if folder.parent.name == _SNAPSHOTS and _REVISION.fullmatch(folder.name):
        return folder.name
    try:
        first = read_text(folder / _NOTES / "config.json.metadata").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        return None
    return first if _REVISION.fullmatch(first) else None
