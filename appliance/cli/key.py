"""`slipway key`: create an API key, and its line for the list of keys, which contains only a hash."""

import secrets
import sys

from appliance.config import exits
from appliance.security.keys import HASH_PREFIX, digest, parse_keys
from engine.api.errors import ConfigError

RANDOM_BYTES = 32


def key(words: list[str]) -> int:
    """Print the key, then its line with these words appended."""
    made = f"sk-{secrets.token_urlsafe(RANDOM_BYTES)}"
    line = " ".join([f"{HASH_PREFIX}{digest(made).hex()}", *words])
    try:
        parse_keys([line], "slipway key")
    except ConfigError as error:
        print(str(error).replace(", line 1", ""), file=sys.stderr)
        return exits.MANIFEST.number
    print(made)
    print(line)
    if sys.stdout.isatty():
        print("The first line is for the client and is not shown again. Add the second line to the list of keys.")
    return exits.OK.number
