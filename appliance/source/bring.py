"""Downloads what a manifest names, before anything is started: `slipway fetch`, and `slipway serve` for archives."""

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from appliance.source.archive import Archive
from appliance.source.fetch import fetch
from appliance.source.headers import is_whole, resolve
from appliance.source.order import Order
from appliance.source.progress import Progress
from appliance.source.remote import Policy

TERMINAL_S, LOG_S = 0.2, 10.0


def bring(order: Order, policy: Policy, environ: Mapping[str, str], say: Callable[[str], None]) -> Path:
    """The folder of the checkpoint, which is whole then. `say` gets a line of progress now and then.
    Raises SourceError."""
    resolved = resolve(order, policy, environ)
    store, listing = resolved.store, resolved.listing
    if not is_whole(store, listing):
        progress = Progress(listing.bytes, say)
        with _told(lambda: say(f"downloading {store.shown}: {progress.text()}")):
            fetch(store, listing, resolved.shelf, policy, progress, lambda: is_whole(store, listing))
        if isinstance(store, Archive):
            say(f"unpacking {store.shown}")
            store.unpack(listing)
    return store.folder(listing) if isinstance(store, Archive) else resolved.shelf.folder


def to_stderr(text: str) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"\x1b[K{text}" if sys.stderr.isatty() else text, end=end, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _told(tell: Callable[[], None]) -> Iterator[None]:
    """Calls `tell` regularly while the block runs, and once at its end."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TERMINAL_S if sys.stderr.isatty() else LOG_S):
            tell()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell()
