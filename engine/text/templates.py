"""The chat templates that lie in a checkpoint."""

from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import read_text
from engine.gguf.file import find_gguf
from engine.text.files import CONFIG, read_json, tokenizer_config

SINGLE = "chat_template.jinja"
SEVERAL = "additional_chat_templates"
PROCESSOR = "chat_template.json"


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error}); copy the checkpoint again") from error


def read_templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """chat_template.jinja and additional_chat_templates/ win over tokenizer_config.json, as in transformers; then the
    template inside a GGUF file; last comes chat_template.json, which models with images brought."""
    more = {file.stem: _read(file) for file in sorted((directory / SEVERAL).glob("*.jinja"))}
    if (directory / SINGLE).is_file():
        text = _read(directory / SINGLE)
        return {"default": text, **more} if more else text
    template = config.get("chat_template")
    if template is None:
        template = read_json(directory / PROCESSOR).get("chat_template")
    if isinstance(template, list):
        try:
            template = {str(entry["name"]): str(entry["template"]) for entry in template}
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"{directory}: chat_template is a list of something else than names and templates; "
                "copy the checkpoint again"
            ) from error
    if template is not None and not isinstance(template, str | dict):
        raise CheckpointError(
            f"{directory}: chat_template is neither a text nor named texts; copy the checkpoint again"
        )
    return template


def template_file(directory: Path) -> str:
    """The name of the file that the directory's chat template is in; "" if it has none.

    That of a GGUF file counts if no other file has one.
    """
    if (directory / SINGLE).is_file():
        return SINGLE
    if read_json(directory / CONFIG).get("chat_template") is not None:
        return CONFIG
    if tokenizer_config(directory).get("chat_template") is not None:
        inside = find_gguf(directory)
        return "" if inside is None else inside.name
    return PROCESSOR if read_json(directory / PROCESSOR).get("chat_template") is not None else ""


def chat_templates(directory: Path) -> str | dict[str, str] | None:
    """The directory's chat template, or its templates by name. Raises CheckpointError naming the file."""
    return read_templates(directory, tokenizer_config(directory))
