"""Download the checkpoint, then exec the engine.

`python -m appliance.supervisor.download JOB SOCKET HEARTBEAT COMMAND…`

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
from appliance.checkpoints.progress import Progress, format_bytes, format_duration
from appliance.checkpoints.remote import SourceError
from appliance.checkpoints.remote_metadata import is_complete
from appliance.config.environment import environment
from appliance.runtime.probe import DOWNLOADING
from appliance.runtime.processes import exit_with_parent
from appliance.supervisor.environment import engine_environment
from appliance.supervisor.reaper import MARK
from engine.api.errors import EXIT_PERMANENT
from engine.api.heartbeat import HeartbeatWriter, State
from engine.api.messages import Failed, FromEngine, Loading
from engine.api.server import Connection, Server

REPORT_INTERVAL_S = 0.5
FLUSH_TIMEOUT_S = 1.0


class ProgressReporter:
    """Reports the state of the download to the gateway, over the engine's socket."""

    def __init__(self, socket: str) -> None:
        self._connection: Connection | None = None
        self._last: FromEngine = Loading(DOWNLOADING, 0.0)
        self._server = Server(socket, opened=self._opened, received=lambda *_: None, closed=self._closed)
        self._server.start()

    def report(self, message: FromEngine) -> None:
        self._last = message
        if connection := self._connection:
            connection.send([message])
            connection.flush(FLUSH_TIMEOUT_S)

    def close(self) -> None:
        self._server.close()

    def _opened(self, connection: Connection) -> None:
        self._connection = connection
        connection.send([self._last])

    def _closed(self, connection: Connection) -> None:
        if self._connection is connection:
            self._connection = None


def download(job: Job, socket: str, heartbeat: HeartbeatWriter) -> None:
    """Download the missing files of the checkpoint. Raise SourceError on failure.

    `heartbeat` is updated for as long as the download may take by its own limits, so that a slow one is not counted
    as a hung start.
    """
    try:
        store = job.spec.store(environment())
    except OSError as error:
        raise SourceError(f"model.credentials: cannot read the file: {error.strerror}") from error
    if is_complete(store, job.listing):
        return
    progress, reporter, done = Progress(job.listing.bytes, log), ProgressReporter(socket), threading.Event()
    began = time.monotonic()
    last_beat = began + job.policy.total_s + job.policy.stall_s
    log(
        f"{store.shown}: downloading {format_bytes(job.listing.bytes)} into {store.cache_directory(job.listing).folder}"
    )

    def report() -> None:
        while not done.wait(REPORT_INTERVAL_S):
            if time.monotonic() < last_beat:
                heartbeat.write(State.LOADING)
            reporter.report(Loading(DOWNLOADING, progress.fraction, progress.text()))

    thread = threading.Thread(target=report, name="download-progress", daemon=True)
    thread.start()
    try:
        fetch(store, job.listing, store.cache_directory(job.listing), job.policy, progress)
        log(f"{store.shown}: complete after {format_duration(time.monotonic() - began)}")
    except SourceError as error:
        done.set()
        thread.join()
        reporter.report(Failed(None, "source", str(error)))
        raise
    finally:
        done.set()
        thread.join()
        reporter.close()


def log(text: str) -> None:
    print(f"slipway download: {text}", file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    if len(arguments) < 4:
        print("usage: python -m appliance.supervisor.download JOB.json SOCKET HEARTBEAT COMMAND…", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    exit_with_parent()
    job = msgspec.json.decode(Path(arguments[0]).read_bytes(), type=Job)
    try:
        download(job, arguments[1], HeartbeatWriter(arguments[2]))
    except SourceError as error:
        log(f"source: {error}")
        return EXIT_PERMANENT
    os.execve(arguments[3], arguments[3:], engine_environment(environment(), MARK))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
