"""Download the checkpoint, then exec the engine: `python -m appliance.supervisor.download JOB SOCKET PULSE COMMAND…`.

This process listens on the engine's socket and reports the progress of the download to the gateway; then it replaces
itself with COMMAND, the engine. With several engines one downloads and the others wait for it. It does not import
torch, so it starts within a tenth of a second.
"""

import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from appliance.checkpoints.download_spec import Job
from appliance.checkpoints.fetch import fetch
from appliance.checkpoints.progress import Progress, spell, spell_time
from appliance.checkpoints.remote import SourceError
from appliance.checkpoints.remote_metadata import is_whole
from appliance.config.settings import environment
from appliance.runtime.probe import DOWNLOADING
from appliance.runtime.processes import end_with_parent
from appliance.supervisor.environment import engine_environment
from appliance.supervisor.reaper import MARK
from engine.api.errors import EXIT_PERMANENT
from engine.api.heartbeat import HeartbeatWriter, State
from engine.api.messages import Failed, FromEngine, Loading
from engine.api.server import Connection, Server

TOLD_S = 0.5
LAST_WORDS_S = 1.0


class Herald:
    """Reports the state of the download to the gateway, over the engine's socket."""

    def __init__(self, socket: str) -> None:
        self._connection: Connection | None = None
        self._last: FromEngine = Loading(DOWNLOADING, 0.0)
        self._server = Server(socket, opened=self._opened, received=lambda *_: None, closed=self._closed)
        self._server.start()

    def tell(self, message: FromEngine) -> None:
        self._last = message
        if connection := self._connection:
            connection.send([message])
            connection.flush(LAST_WORDS_S)

    def close(self) -> None:
        self._server.close()

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        connection.send([self._last])

    def _closed(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None


def download(job: Job, socket: str, pulse: HeartbeatWriter) -> None:
    """Download the missing files of the checkpoint. Raise SourceError on failure. `pulse` is updated for as long as the
    download may take by its own limits, so that a slow download is not treated as a hung start."""
    try:
        store = job.order.store(environment())
    except OSError as error:
        raise SourceError(f"model.credentials: cannot be read: {error.strerror}") from error
    if is_whole(store, job.listing):
        return
    progress, herald, over = Progress(job.listing.bytes, say), Herald(socket), threading.Event()
    began = time.monotonic()
    last_beat = began + job.policy.total_s + job.policy.stall_s
    say(f"{store.shown}: {spell(job.listing.bytes)} into {store.shelf(job.listing).folder}")

    def tell() -> None:
        while not over.wait(TOLD_S):
            if time.monotonic() < last_beat:
                pulse.beat(State.LOADING)
            herald.tell(Loading(DOWNLOADING, progress.fraction, progress.text()))

    teller = threading.Thread(target=tell, name="herald", daemon=True)
    teller.start()
    try:
        fetch(store, job.listing, store.shelf(job.listing), job.policy, progress)
        say(f"{store.shown}: whole after {spell_time(time.monotonic() - began)}")
    except SourceError as error:
        over.set()
        teller.join()
        herald.tell(Failed(None, "source", str(error)))
        raise
    finally:
        over.set()
        teller.join()
        herald.close()


def say(text: str) -> None:
    print(f"slipway download: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    if len(arguments) < 4:
        print("usage: python -m appliance.supervisor.download JOB.json SOCKET PULSE COMMAND…", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    end_with_parent()
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job)
    try:
        download(job, arguments[1], HeartbeatWriter(arguments[2]))
    except SourceError as error:
        say(f"source: {error}")
        return EXIT_PERMANENT
    os.execve(arguments[3], arguments[3:], engine_environment(environment(), MARK))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
