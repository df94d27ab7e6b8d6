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

from appliance.checkpoints.download_spec import DownloadSpec
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.progress import Progress
from appliance.checkpoints.remote import PackedStore, Policy
from appliance.checkpoints.remote_metadata import is_complete, resolve
from engine.api.printable import printable

TERMINAL_S, LOG_S = 0.2, 10.0


def download_checkpoint(
    spec: DownloadSpec,
    policy: Policy,
    environ: Mapping[str, str],
    report: Callable[[str], None],
    during: Callable[[Progress], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Path:
    """Download the checkpoint and return its folder. `report` gets a line of progress regularly; the context manager of
    `during` is open during a download. Raise SourceError."""
    resolved = resolve(spec, policy, environ)
    store, listing = resolved.store, resolved.listing
    if is_complete(store, listing):
        return store.folder(listing) if isinstance(store, PackedStore) else resolved.cache_directory.folder
    if isinstance(store, PackedStore):
        progress = Progress(listing.bytes, report, estimate=store.expected)
    else:
        progress = Progress(listing.bytes, report)
    with during(progress):
        with _reporting(lambda: report(f"downloading {store.shown}: {progress.text()}")):
            fetch(store, listing, resolved.cache_directory, policy, progress, lambda: is_complete(store, listing))
        if isinstance(store, PackedStore):
            report(f"unpacking {store.shown}")
            store.unpack(listing, policy.min_free)
    return store.folder(listing) if isinstance(store, PackedStore) else resolved.cache_directory.folder


@contextlib.contextmanager
def on_stderr() -> Iterator[Callable[[str], None]]:
    """Yield a function that prints lines: on a terminal each replaces the previous one, elsewhere they follow each
    other."""
    terminal, printed = sys.stderr.isatty(), False

    def report(text: str) -> None:
        nonlocal printed
        printed, text = True, printable(text)
        print(f"\r\x1b[K{text}" if terminal else text, end="" if terminal else "\n", file=sys.stderr, flush=True)

    try:
        yield report
    finally:
        if printed and terminal:
            print(file=sys.stderr)


@contextlib.contextmanager
def exit_on_signals(code: int) -> Iterator[None]:
    """Let SIGTERM and SIGINT end the process at once with `code`, also as PID 1. An orderly end would wait for the
    network timeouts of other threads."""

    def end(*_: object) -> None:
        print("\nstopped; the data downloaded so far stays in the cache", file=sys.stderr, flush=True)
        os._exit(code)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _reporting(report: Callable[[], None]) -> Iterator[None]:
    """Call `report` regularly while the block runs, and once at its end."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TERMINAL_S if sys.stderr.isatty() else LOG_S):
            report()

    thread = threading.Thread(target=run, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        report()
