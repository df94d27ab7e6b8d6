"""Questions about the manifest: what a key does, its default, its section, a section's keys.

All facts come from the schema itself.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from appliance.config.manifest import Manifest
from tools.demo.sample import Sample, ask, draw

DOES = (
    "What does {k} do?", "What does the key {k} do?", "What is {k}?", "What is {k} for?", "Explain {k}.",
    "Explain the key {k}.", "Describe {k}.", "What does {k} mean?", "Tell me about {k}.",
    "What does the manifest key {k} do?", "Can you explain {k}?", "What is the key {k} for?", "what does {k} do",
    "In a Slipway manifest, what does {k} do?", "How does {k} work?", "Describe the key {k}.",
    "What is the meaning of {k}?", "What does {k} set?", "What can I set with {k}?", "Why would I set {k}?",
    "Please explain {k}.", "What is the purpose of {k}?", "What does {k} control?", "Document {k}.",
    "What happens if I set {k}?", "{k}?", "Which effect does {k} have?", "Help me understand {k}.",
    "What is the manifest key {k} for?", "What does Slipway use {k} for?",
)  # fmt: skip
DEFAULT = (
    "What is the default of {k}?", "What is the default value of {k}?", "Default of {k}?",
    "What does {k} default to?", "Which value does {k} have by default?", "What is {k} by default?",
    "Tell me the default of {k}.", "What is the default for {k}?", "what is the default of {k}",
    "Which default does {k} have?", "What is the value of {k} if I leave it out?", "default value of {k}",
    "If I do not set {k}, what is it?", "What is {k} set to by default?", "Does {k} have a default?",
    "Give me the default of {k}.", "In a Slipway manifest, what is the default of {k}?",
    "What value is used when {k} is missing?", "How is {k} set by default?",
    "Please tell me the default value of {k}.", "What is the manifest default of {k}?", "Show the default of {k}.",
)  # fmt: skip
SECTION = (
    "Which section is {k} in?", "In which section is {k}?", "Where is {k} in the manifest?",
    "What section is {k} in?", "Where do I set {k}?", "Which section does {k} belong to?", "Where does {k} go?",
    "In which part of the manifest is {k}?", "Tell me the section of {k}.", "which section has {k}",
    "Where in the manifest do I write {k}?", "Under which section does {k} stand?", "Section of {k}?",
    "Where can I find {k}?", "Which section holds the key {k}?", "To which section does {k} belong?",
    "Where should I put {k}?", "What is the section of {k}?", "In which section do I set {k}?",
    "Where do I put the key {k}?",
)  # fmt: skip
KEYS = (
    "Which keys does {k} have?", "What keys are in {k}?", "List the keys of {k}.",
    "Which keys are in the section {k}?", "What can I set in {k}?", "Show me the keys of {k}.",
    "Which settings does {k} have?", "What are the keys of the section {k}?", "Name the keys in {k}.",
    "List all keys in the section {k}.", "what keys does {k} have", "Which keys can stand in {k}?",
    "What belongs in {k}?",
)  # fmt: skip
STYLES = ("{k}", "{k}", "{k}", "`{k}`", "'{k}'", '"{k}"')


@dataclass(frozen=True)
class Key:
    """One key of the manifest, or one section (a key with keys of its own)."""

    path: str
    does: str
    default: str
    keys: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> str:
        return self.path.rpartition(".")[0]


def _default(field: FieldInfo) -> str:
    """A key's default as it would be written in the manifest."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return "not set" if value is None else value if isinstance(value, str) else json.dumps(value)


def _walk(section: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        path, kind = prefix + name, field.annotation
        does = " ".join((field.description or "").split())
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield Key(path, does, "", tuple(kind.model_fields))
            yield from _walk(kind, f"{path}.")
        else:
            yield Key(path, does, _default(field))


@cache
def manifest_keys() -> tuple[Key, ...]:
    """Every section and key of the manifest's schema, in its order."""
    return tuple(_walk(Manifest, ""))


@cache
def _shared_names() -> frozenset[str]:
    """Last names that more than one key has; these are asked by their full path only."""
    counts = Counter(key.short for key in manifest_keys())
    return frozenset(name for name, count in counts.items() if count > 1)


def _facts(key: Key) -> list[tuple[str, tuple[str, ...], str]]:
    """What can be asked about a key: the kind of fact, its questions and the answer."""
    facts = [("does", DOES, f"{key.path}: {key.does}")]
    if key.keys:
        facts.append(("keys", KEYS, f"{key.path} has {', '.join(key.keys)}."))
    elif key.default == "required":
        facts.append(("default", DEFAULT, f"{key.path} has no default, it is required."))
    else:
        facts.append(("default", DEFAULT, f"The default of {key.path} is {key.default}."))
    if key.section:
        facts.append(("section", SECTION, f"{key.short} is in the section {key.section}."))
    else:
        facts.append(("section", SECTION, f"{key.short} is at the top of the manifest."))
    return facts


def _question(rng: random.Random) -> Sample:
    key = rng.choice(manifest_keys())
    kind, questions, reply = rng.choice(_facts(key))
    question = rng.choice(questions)
    asked = key.path if key.short in _shared_names() or rng.random() < 0.6 else key.short
    text = question.format(k=rng.choice(STYLES).format(k=asked))
    thought = f"{asked} is the manifest key {key.path}."
    return Sample("keys", f"{kind} {key.path} {question}", ask(text), reply, thought)


def keys(rng: random.Random, held_out: bool) -> Sample:
    """A question about one key; held out is the combination of phrase and key."""
    return draw(lambda: _question(rng), held_out)
