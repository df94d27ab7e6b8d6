"""HTTP headers for a collector of traces, read from the place that the manifest names: `name=value` pairs, separated by
commas or line ends, with percent-encoded values, as in OTEL_EXPORTER_OTLP_HEADERS.
"""

import os
import re
from pathlib import Path
from urllib.parse import unquote

from appliance.config.gateway import SecretRef
from engine.api.errors import ConfigError
from engine.api.files import read_text

_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110: the name of a header
_VALUE = re.compile(r"[\x20-\x7e\t]*")


def read_headers(secret: SecretRef) -> dict[str, str]:
    """Read the headers of exported traces. Raise ConfigError, which never quotes a value."""
    if secret.file is None:
        place = f"observability.traces.headers: environment variable {secret.env}"
        text = os.environ.get(secret.env or "", "")
    else:
        place = f"observability.traces.headers: file {secret.file}"
        try:
            text = read_text(Path(secret.file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{place} cannot be read: {error}") from error
    return parse_headers(text, place)


def parse_headers(text: str, place: str) -> dict[str, str]:
    """Parse `name=value` pairs, separated by commas or line ends. Raise ConfigError with `place`."""
    found = check_headers(parse_pairs(text.replace("\r", "").replace("\n", ","), place), place)
    if not found:
        raise ConfigError(f"{place} contains no header; write name=value pairs, or remove observability.traces.headers")
    return found


def parse_pairs(text: str, place: str) -> dict[str, str]:
    """Return the pairs of `name=value,…` with percent-encoded values. Raise ConfigError with `place` and a number."""
    found = {}
    for number, pair in enumerate(text.split(","), 1):
        if not pair.strip():
            continue
        name, equals, value = pair.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{place}: pair {number} must have the form name=value")
        found[name.strip()] = unquote(value.strip())
    return found


def check_headers(headers: dict[str, str], place: str) -> dict[str, str]:
    """Return the headers. Raise ConfigError with `place` if HTTP does not allow one; it never quotes a value."""
    for number, (name, value) in enumerate(headers.items(), 1):
        if not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
            raise ConfigError(f"{place}: pair {number} is not a valid HTTP header; encode other characters as %XX")
    return headers
