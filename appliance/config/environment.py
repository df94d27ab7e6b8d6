"""The environment of this process. Commands that read no manifest import this module without the schema."""

import os


def environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)
