"""The environment of this process. Commands that read no manifest import this module without the schema."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()


def environment() -> dict[str, str]:
    """Return a copy of the process environment."""
    return dict(os.environ)


@contextmanager
def without_empty_variables(prefix: str, *more: str) -> Iterator[None]:
    """Hide the empty variables with a prefix, and `more` variables, from a library that reads the environment."""
    with _lock:
        names = [name for name, text in os.environ.items() if name in more or (not text and name.startswith(prefix))]
        hidden = {name: os.environ.pop(name) for name in names}
        try:
            yield
        finally:
            os.environ.update(hidden)
