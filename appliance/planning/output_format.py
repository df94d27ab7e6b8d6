"""Format of tool calls and reasoning: `model.format`, or the format detected from the chat template and model type."""

from collections.abc import Iterator
from pathlib import Path

from appliance.config.fix import Write
from appliance.config.problems import Problem
from appliance.config.settings import Settings
from appliance.config.suggest import suggest_name
from appliance.output_formats.formats import AUTO, PLAIN, chosen, names, recognise
from appliance.planning.choice import Choice
from engine.api.errors import CheckpointError
from engine.api.files import TEXT_BYTES, read_file
from engine.models.checkpoint import Checkpoint

_KEY = ("model", "format")


def check_format(settings: Settings) -> Iterator[Problem]:
    """Yield a problem for an unknown format name."""
    given = settings.manifest.model.format
    try:
        chosen(given, PLAIN)
    except KeyError as error:
        wrong = str(error.args[0])
        near = suggest_name(wrong, (AUTO, *names()))
        hint = f"; did you mean {near}?" if near else ""
        known = f"it is auto or one of {', '.join(sorted(names()))}"
        fix = Write(given.replace(wrong, near)) if near else None
        message = f"unknown format {wrong}{hint} {known[0].upper()}{known[1:]}"
        yield Problem(settings.place(_KEY), ".".join(_KEY), message, fix=fix, certain=False)


def model_type(checkpoint: Checkpoint) -> str:
    """Return the model type from config.json or from a GGUF file, or "" if neither has one."""
    found = checkpoint.config.get("model_type")
    return found if isinstance(found, str) else ""


def _template(settings: Settings, folder: Path) -> str | None:
    """Return the text of the chat template, or None if it is missing or unreadable. The gateway reports the error."""
    from engine.text.tokenizer import chat_templates

    if settings.manifest.model.chat_template is not None:
        return read_file(settings.file(("model", "chat_template")), TEXT_BYTES).decode(errors="replace")
    try:
        sources = chat_templates(folder)
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return None
    return "\n".join(sources.values()) if isinstance(sources, dict) else sources


def output_format(settings: Settings, checkpoint: Checkpoint, folder: Path) -> Choice[str]:
    """Return the format as the names of its parts. `folder` holds the checkpoint's small files."""
    given = settings.manifest.model.format
    template = _template(settings, folder)
    found = recognise(template, model_type(checkpoint)) if template is not None else PLAIN
    name = chosen(given, found).name
    if given != AUTO:
        return Choice(name, "" if name == given else f"model.format is {given}")
    return Choice(name, "the chat template" if template is not None else "there is no chat template")
