"""Fake programs for tests of the supervisor: a gateway controlled by files, engines controlled by arguments.

    fake.py gateway DIRECTORY LISTENER CONTROL  /live 200; /ready 200 if DIRECTORY/ready exists, else 503; with a file
                                                DIRECTORY/broken it prints that and exits permanently, unless halted
    fake.py engine DIRECTORY NAME WORD…         run | crash | permanent TEXT | escape | orphan | show |
                                                end HOW SECONDS | litter HOW | oom COUNTER

HOW is an exit code or the name of a signal. `end` waits for SECONDS, or with "ready" until the service was ready and
DIRECTORY/seen exists. `litter` leaves children that ignore SIGTERM in a separate group and a separate session, shared
memory, and a folder of ranks. `oom` increments the counter of memory kills in the file COUNTER, like the kernel, and is
killed.

/ready has the content of DIRECTORY/phase. Each start appends the process id to DIRECTORY/NAME.pids.
"""

import http.server
import json
import mmap
import os
import signal
import socketserver
import sys
import threading
import time
from pathlib import Path

from appliance.runtime.listener import receive_listener


class Control(socketserver.StreamRequestHandler):
    """Answers the restart monitor."""

    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"{}\n")
        with Path(sys.argv[2], "pings").open("ab") as file:
            file.write(b".")


def gateway(directory: Path, listener_socket: str, control: str) -> None:
    class Reply(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            ready = (directory / "ready").exists() or self.path == "/live"
            phase = directory / "phase"
            body = phase.read_bytes() if phase.exists() else b"{}"
            self.send_response(200 if ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    listener = receive_listener(listener_socket)
    server = http.server.ThreadingHTTPServer(listener.getsockname(), Reply, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    if (directory / "broken").exists() and not Path(listener_socket).with_name("halted").exists():
        started(directory, "gateway")
        print((directory / "broken").read_text(), file=sys.stderr, flush=True)
        os._exit(78)
    if (directory / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(control).unlink(missing_ok=True)
    threading.Thread(target=socketserver.UnixStreamServer(control, Control).serve_forever, daemon=True).start()
    started(directory, "gateway")
    server.serve_forever()


def engine(directory: Path, name: str, word: str, *rest: str) -> None:
    if word == "escape" and os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started(directory, f"{name}-child")
        signal.pause()
    if word == "orphan" and os.fork() == 0:
        if os.fork() == 0:
            started(directory, f"{name}-grandchild")
            signal.pause()
        os._exit(0)
    if word == "show":
        shown = {"argv": rest, "environment": dict(os.environ), "directory": os.getcwd()}
        (directory / f"{name}.show").write_text(json.dumps(shown))
    started(directory, name)
    if word == "crash":
        print(f"{name}: about to crash", file=sys.stderr)
        sys.exit(3)
    if word == "permanent":
        print(*rest, file=sys.stderr)
        sys.exit(78)
    if word == "end":
        how, after = rest
        if after == "ready":
            (directory / "ready").touch()
            while not (directory / "seen").exists():
                time.sleep(0.02)
        else:
            time.sleep(float(after))
        end(how)
    if word == "litter":
        litter(directory, name)
        end(rest[0])
    if word == "oom":
        counter = Path(rest[0])
        count = int(counter.read_text().split()[-1])
        counter.write_text(f"low 0\noom_kill {count + 1}\n")
        end("SIGKILL")
    while True:
        signal.pause()


def end(how: str) -> None:
    print(f"the end: {how}", file=sys.stderr, flush=True)
    if how.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[how])
        signal.pause()
    os._exit(int(how))


def litter(directory: Path, name: str) -> None:
    shared = Path(f"/dev/shm/{os.environ['LC_MARK']}-{os.getpid()}")
    shared.write_bytes(bytes(4096))
    with shared.open("r+b") as file:
        kept = mmap.mmap(file.fileno(), 4096)
    (Path(os.environ["SLIPWAY_REAPER"].rpartition(":")[0]) / f"{name}-ranks-x").mkdir()
    for leave in (os.setpgrp, os.setsid):
        if os.fork() == 0:
            leave()
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            kept[0] = 1
            started(directory, f"{name}-child")
            while True:
                signal.pause()
    time.sleep(1.0)  # time for both to begin, and for one check by the reaper


def started(directory: Path, name: str) -> None:
    with (directory / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    kind, folder, *words = sys.argv[1:]
    if kind == "gateway":
        gateway(Path(folder), *words)
    else:
        engine(Path(folder), *words)
