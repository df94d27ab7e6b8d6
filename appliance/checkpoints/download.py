"""Download the checkpoint of a manifest before anything starts: `slipway fetch`, and `slipway serve` for archives.

A download can be interrupted at any time; the next one continues from the data in the cache.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from appliance.checkpoints.download_spec import Order
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.progress import Progress
from appliance.checkpoints.remote import PackedStore, Policy
from appliance.checkpoints.remote_metadata import is_whole, resolve
from engine.api.printable import printable

TERMINAL_S, LOG_S = 0.2, 10.0


def bring(
    order: Order,
    policy: Policy,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    beside: Callable[[Progress], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Path:
    """Download the checkpoint and return its folder. `say` gets a line of progress regularly; the context manager of
    `beside` is open during a download. Raise SourceError."""
    resolved = resolve(order, policy, environ)
    store, listing = resolved.store, resolved.listing
    if is_whole(store, listing):
        return store.folder(listing) if isinstance(store, PackedStore) else resolved.shelf.folder
    if isinstance(store, PackedStore):
        progress = Progress(listing.bytes, say, estimate=store.expected)
    else:
        progress = Progress(listing.bytes, say)
    with beside(progress):
        with _told(lambda: say(f"downloading {store.shown}: {progress.text()}")):
            fetch(store, listing, resolved.shelf, policy, progress, lambda: is_whole(store, listing))
        if isinstance(store, PackedStore):
            say(f"unpacking {store.shown}")
            store.unpack(listing, policy.min_free)
    return store.folder(listing) if isinstance(store, PackedStore) else resolved.shelf.folder


@contextlib.contextmanager
def on_stderr() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines: on a terminal each replaces the previous one, elsewhere they follow each
    other."""
    terminal, said = sys.stderr.isatty(), False

    def say(text: str) -> None:
        nonlocal said
        said, text = True, printable(text)
        print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        if said and terminal:
            print(file=sys.stderr)


@contextlib.contextmanager
def ended_by_signals(code: int) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the process at once with `code`, also as PID 1. An orderly end would wait for the
    network timeouts of other threads."""

    def end(*_: object) -> None:
        print("\nstopped; what was downloaded so far stays in the cache", file=sys.stderr, flush=True)
        os._exit(code)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _told(tell: Callable[[], None]) -> Iterator[None]:
    """Call `tell` regularly while the block runs, and once at its end."""
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
