"""Check the checkpoint's settings that every request depends on: end tokens, sampling defaults, chat template.

A mistake in one of them does not stop the start, but makes every request fail or end wrongly.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from appliance.config.problems import Problem, unread
from appliance.config.sections.engine import Sampling
from appliance.config.settings import Settings
from engine.api.errors import CheckpointError
from engine.api.files import read_text
from engine.gguf.file import root_of
from engine.models.checkpoint import Checkpoint
from engine.text.files import tokenizer_config
from engine.text.templates import chat_templates, template_file

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TEMPLATE = ("model", "chat_template")


def check_answerable(settings: Settings, checkpoint: Checkpoint, folder: Path) -> Iterator[Problem]:
    """Yield problems that would make every request fail. `folder` holds the checkpoint's small files."""
    yield from _end_tokens(settings, checkpoint)
    if settings.manifest.model.generation_config == "auto":
        yield from _sampling_defaults(settings, checkpoint)
    if checkpoint.model.head is not None and checkpoint.model.encoder is None:
        yield from _template(settings, folder)


def _problem(settings: Settings, message: str) -> Problem:
    key = settings.manifest.model.source.key
    return unread(settings.place(key), key, message)


def _end_tokens(settings: Settings, checkpoint: Checkpoint) -> Iterator[Problem]:
    vocab = checkpoint.model.embed.vocab
    files = {"config.json": checkpoint.config}
    if settings.manifest.model.generation_config == "auto":
        files["generation_config.json"] = checkpoint.generation
    for file, values in files.items():
        given = values.get("eos_token_id")
        for token in given if isinstance(given, list) else [given]:
            if isinstance(token, int) and token >= vocab:
                allowed = f"the vocabulary has the IDs 0 to {vocab - 1}, so replies would never end"
                yield _problem(settings, f"{checkpoint.path / file}: eos_token_id is {token}; {allowed}")


def _sampling_defaults(settings: Settings, checkpoint: Checkpoint) -> Iterator[Problem]:
    """Validate the defaults in generation_config.json by the manifest's rules, unless the manifest overrides them."""
    for name in Sampling.model_fields:
        value = checkpoint.generation.get(name)
        if value is None or getattr(settings.manifest.engine.sampling, name) is not None:
            continue
        wrong = _refusal(name, value)
        if wrong:
            change = f"correct the file, set engine.sampling.{name}, or set model.generation_config: ignore"
            file = checkpoint.path / "generation_config.json"
            yield _problem(settings, f"{file}: {name} is {value!r}: {wrong}; {change}")


def _refusal(name: str, value: Any) -> str:
    """Return pydantic's error message for a value of `engine.sampling`, or "" if the value is valid."""
    try:
        Sampling.model_validate({name: value})
    except ValidationError as error:
        return error.errors()[0]["msg"].lower()
    return ""


def _template(settings: Settings, folder: Path) -> Iterator[Problem]:
    own = settings.manifest.model.chat_template is None
    try:
        if own:
            found, place = chat_templates(folder), str(root_of(folder) / template_file(folder))
        else:
            path = settings.file(_TEMPLATE)
            found, place = read_text(path), str(path)
        if found is None:
            return
        special_tokens = _special_tokens(folder)
    except (CheckpointError, OSError, UnicodeDecodeError):
        return  # reported by the checks of the checkpoint's files
    from appliance.chat_templates.template import (  # importing jinja2 takes 50 ms
        ChatTemplate,
        TemplateError,
        check_template,
    )

    try:
        check_template(ChatTemplate(found, special_tokens))
    except TemplateError as error:
        message = f"{place}: {error}"
        if own:
            yield _problem(settings, f"{message} Set model.chat_template to a corrected file.")
        else:
            yield unread(settings.place(_TEMPLATE), _TEMPLATE, message)


def _special_tokens(folder: Path) -> dict[str, str]:
    config = tokenizer_config(folder)
    tokens = {name: config.get(name) for name in _SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
