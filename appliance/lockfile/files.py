"""Files of a checkpoint folder that a start reads, and the revision that they were downloaded from.

A file that is added later and would be read (a chat_template.jinja, a shard index) counts as a change.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from appliance.planning.tokenizer import DESCRIBED, PLAIN, tokenizer_name
from engine.api.files import INDEX_BYTES, read_file, read_text
from engine.formats.registry import settings_files
from engine.gguf.file import find_gguf, parts_of
from engine.models.checkpoint import INDEX, SINGLE
from engine.models.kv_scales import FILE as KV_SCALES
from engine.models.modules import module_names
from engine.models.remote import REMOTE_FILE

# Files read by name if they exist: configuration, tokenizer, templates, scales, code.
NAMED = (
    *("config.json", "generation_config.json"),
    *(*DESCRIBED, "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
    *(KV_SCALES, *(method.file for method in settings_files()), REMOTE_FILE),
)
ADDED = "added_tokens.json"
"""Extra tokens, read with tokenizer files that do not include them."""
TEMPLATES = "additional_chat_templates"
# Traces of huggingface_hub downloads: `snapshots/REVISION` in its cache, or a metadata file per file of a local folder.
_SNAPSHOTS = "snapshots"
_NOTES = Path(".cache/huggingface/download")
_REVISION = re.compile(r"[0-9a-f]{40}")


def read_names(folder: Path) -> tuple[str, ...]:
    """Return the sorted file names, relative to the folder. Shards in an index are included even if they are missing.

    Raise CheckpointError if the folder has several GGUF files.
    """
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
        yield from (part.name for part in parts_of(blocks))
    elif (folder / INDEX).is_file():
        yield INDEX
        yield from _shards(folder / INDEX)
    elif (folder / SINGLE).is_file():
        yield SINGLE


class _Index(msgspec.Struct):
    weight_map: dict[str, str] = {}


def _shards(index: Path) -> list[str]:
    """Return the shards of an index; none for a damaged index, which reading the checkpoint reports better."""
    try:
        return sorted(set(msgspec.json.decode(read_file(index, INDEX_BYTES), type=_Index).weight_map.values()))
    except (OSError, msgspec.DecodeError, RecursionError):
        return []


def revision(folder: Path) -> str | None:
    """Return the commit of the Hugging Face repository that the folder was downloaded from, or None if unknown."""
    if folder.parent.name == _SNAPSHOTS and _REVISION.fullmatch(folder.name):
        return folder.name
    try:
        first = read_text(folder / _NOTES / "config.json.metadata").split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError):
        return None
    return first if _REVISION.fullmatch(first) else None
