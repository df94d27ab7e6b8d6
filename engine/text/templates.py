"""Chat templates in a checkpoint."""

from pathlib import Path
from typing import Any

from engine.api.errors import CheckpointError
from engine.api.files import read_text
from engine.gguf.file import find_gguf
from engine.text.default_templates import default_template
from engine.text.files import CONFIG, read_json, tokenizer_config
from engine.text.tekken import tekken_version

SINGLE = "chat_template.jinja"
SEVERAL = "additional_chat_templates"
PROCESSOR = "chat_template.json"


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as text ({error}); copy the checkpoint again") from error


def read_templates(directory: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template or named templates. Precedence as in transformers: chat_template.jinja with
    additional_chat_templates/, tokenizer_config.json, the GGUF file, chat_template.json of multimodal models; then the
    default of the architecture."""
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
                f"{directory}: chat_template must be a list of objects with name and template; "
                "copy the checkpoint again"
            ) from error
    if template is not None and not isinstance(template, str | dict):
        raise CheckpointError(f"{directory}: chat_template must be a text or named texts; copy the checkpoint again")
    if template is None:
        return default_template(read_json(directory / "config.json"), lambda: tekken_version(directory))
    return template


def template_file(directory: Path) -> str:
    """Return the name of the file with the directory's chat template, or "".

    A GGUF file is used if no other file has one.
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
    """Return the directory's chat template, or its templates by name. Raises CheckpointError with the file's name."""
    return read_templates(directory, tokenizer_config(directory))
