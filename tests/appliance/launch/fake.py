"""Programs to be supervised in tests: a gateway that answers as told by files, engines that behave as told by words.

    fake.py gateway DIRECTORY PORT          /live 200; /ready 200 if DIRECTORY/ready exists, else 503
    fake.py engine DIRECTORY NAME WORD…     run | crash | permanent TEXT | escape | orphan | show

/ready has the content of DIRECTORY/phase. Each start appends the process id to DIRECTORY/NAME.pids.
"""

import http.server
import json
import os
import signal
import sys
from pathlib import Path


def gateway(directory: Path, port: int) -> None:
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

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Reply)
    if (directory / "deaf").exists():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    while True:
        signal.pause()


def started(directory: Path, name: str) -> None:
    with (directory / f"{name}.pids").open("a") as file:
        file.write(f"{os.getpid()}\n")


if __name__ == "__main__":
    kind, folder, *words = sys.argv[1:]
    if kind == "gateway":
        gateway(Path(folder), int(words[0]))
    else:
        engine(Path(folder), *words)
