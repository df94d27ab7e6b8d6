"""The API keys, read from where the manifest says, at the start and at each reload."""

import os
from pathlib import Path

from appliance.gateway.config import SecretRef
from engine.api.errors import ConfigError


def read_keys(secret: SecretRef | None) -> list[str]:
    """The API keys, one a line. Raises ConfigError naming the place if it cannot be read or has none."""
    if secret is None:
        return []
    if secret.file is not None:
        place = f"file {secret.file}"
        try:
            text = Path(secret.file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"endpoints.api_keys: {place} cannot be read: {error}") from error
    else:
        place = f"environment variable {secret.env}"
        text = os.environ.get(secret.env or "", "")
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise ConfigError(f"endpoints.api_keys: {place} holds no key; write one a line, or drop endpoints.api_keys")
    return keys
