"""API keys, read from the place that the manifest names, at the start and at each reload.

Each line has one key, in clear text or as `sha256:HEX`, the digest of its bytes. Optional fields after it give its name
and limits: `name=alice requests_per_minute=60 tokens_per_minute=100000 share=4 priority=yes adapters=yes usage=yes
profile=yes`. `#` begins a comment. `slipway key` creates a key and its line.
"""

import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.config.gateway import SecretRef
from engine.api.errors import ConfigError
from engine.api.files import read_text

HASH_PREFIX = "sha256:"
UNNAMED = "unnamed"
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
MAX_COUNT = 2**53


@dataclass(frozen=True)
class ApiKey:
    """One API key."""

    digest: bytes  # SHA-256 of the key
    name: str = ""
    requests_per_minute: int | None = None  # None: the limit of `limits.per_key`
    tokens_per_minute: int | None = None  # None: the limit of `limits.per_key`
    share: float = 1.0  # weight with `engine.scheduling.policy: fair`: engine time relative to a key with 1
    priority: bool = False  # whether its requests may have a priority below 0
    adapters: bool = False  # whether it may load and unload LoRA adapters
    usage: bool = False  # whether it may read the usage of other keys
    profile: bool = False  # whether it may start and stop the profiler

    @property
    def owner(self) -> str:
        """Return the identifier of the key's owner. It cannot be used as a key."""
        return self.digest.hex()[:16]

    @property
    def shown(self) -> str:
        """Return the name for metrics and logs."""
        return self.name or UNNAMED


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(secret: SecretRef | None) -> list[ApiKey]:
    """Read the keys. Raise ConfigError with the place if it cannot be read, has an invalid line, or has no key."""
    if secret is None:
        return []
    place, lines = _lines(secret)
    keys = parse_keys(lines, place)
    if not keys:
        raise ConfigError(f"{place} contains no key; write one key per line, or remove endpoints.api_keys")
    return keys


def clear_key(secret: SecretRef) -> str:
    """Return the first key of a list that is in clear text, for Slipway's own requests; "" if all are hashed. Raise
    ConfigError if the list cannot be read."""
    words = (line.split()[0] for line in _lines(secret)[1] if line.strip())
    return next((word for word in words if not word.startswith(("#", HASH_PREFIX))), "")


def _lines(secret: SecretRef) -> tuple[str, list[str]]:
    """Return the name of the list for messages, and its lines."""
    if secret.file is None:
        text = os.environ.get(secret.env or "", "")
        return f"endpoints.api_keys: environment variable {secret.env}", text.splitlines()
    place = f"endpoints.api_keys: file {secret.file}"
    try:
        return place, read_text(Path(secret.file)).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place} cannot be read: {error}") from error


def parse_keys(lines: Sequence[str], place: str) -> list[ApiKey]:
    """Parse the lines. Raise ConfigError with `place` and the line's number; messages never contain a part of a key."""
    keys: list[ApiKey] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        key = _parse(words, f"{place}, line {number}")
        if any(other.digest == key.digest for other in keys):
            raise ConfigError(f"{place}, line {number}: this key is already on an earlier line")
        if key.name and any(other.name == key.name for other in keys):
            raise ConfigError(f"{place}, line {number}: name={key.name} is already on an earlier line")
        keys.append(key)
    return keys


def _parse(words: Sequence[str], place: str) -> ApiKey:
    key, *rest = words
    settings: dict[str, Any] = {}
    for position, word in enumerate(rest, 2):
        if word.startswith("#"):
            break
        name, equals, value = word.partition("=")
        if not equals or name not in _FIELDS:
            raise ConfigError(f"{place}: word {position} must be one of {', '.join(f'{each}=…' for each in _FIELDS)}")
        if name in settings:
            raise ConfigError(f"{place}: {name} occurs twice")
        settings[name] = _FIELDS[name](value, f"{place}: {name}={value}")
    if not key.startswith(HASH_PREFIX):
        return ApiKey(digest(key), **settings)
    if not _DIGEST.fullmatch(key.removeprefix(HASH_PREFIX)):
        raise ConfigError(f"{place}: {HASH_PREFIX} must be followed by the 64 hexadecimal digits of the key's SHA-256")
    return ApiKey(bytes.fromhex(key.removeprefix(HASH_PREFIX)), **settings)


def _name(value: str, place: str) -> str:
    if not _NAME.fullmatch(value):
        raise ConfigError(f"{place}: must be 1 to 64 letters, digits and . _ @ -")
    return value


def _count(value: str, place: str) -> int:
    if not value.isascii() or not value.isdecimal() or not 1 <= int(value) <= MAX_COUNT:
        raise ConfigError(f"{place}: must be a whole number of at least 1")
    return int(value)


def _share(value: str, place: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = 0.0
    if not 0.01 <= share <= 100:
        raise ConfigError(f"{place}: must be a number from 0.01 to 100")
    return share


def _yes_or_no(value: str, place: str) -> bool:
    if value not in ("yes", "no"):
        raise ConfigError(f"{place}: must be yes or no")
    return value == "yes"


_FIELDS: dict[str, Callable[[str, str], Any]] = {
    "name": _name,
    "requests_per_minute": _count,
    "tokens_per_minute": _count,
    "share": _share,
    "priority": _yes_or_no,
    "adapters": _yes_or_no,
    "usage": _yes_or_no,
    "profile": _yes_or_no,
}
