"""Process that renders chat templates: `python -m appliance.chat_templates.render_process MEMORY CPU_S`, with a socket
at descriptor 0.

It may use MEMORY bytes of address space beyond those of an idle process, and CPU_S seconds of CPU time per job. The
kernel ends the process after that time, even within one operation of C code. Frames have a four-byte length. Jobs are
JSON. A reply has one byte for the kind of outcome, the location, a zero byte and the text.
"""

import json
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

from appliance.chat_templates.rendering import KINDS, Outcome, render

LENGTH = struct.Struct("!I")


def received(connection: socket.socket, size: int) -> bytes:
    """Read `size` bytes. Raise EOFError if the connection ends before, TimeoutError if it has a timeout."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            raise EOFError
        data += piece
    return bytes(data)


def _limit_resources(memory: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory += pages * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _outcome(job: bytes) -> Outcome:
    try:
        source, scope = json.loads(job)
        return render(source, scope)
    except MemoryError:
        return Outcome("limit", "it takes too much memory")


def serve(connection: socket.socket, cpu_s: float) -> None:
    """Process jobs until the peer closes the connection."""
    while True:
        try:
            job = received(connection, *LENGTH.unpack(received(connection, LENGTH.size)))
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        found = _outcome(job)
        text = found.text.encode("utf-8", "surrogatepass")
        signal.setitimer(signal.ITIMER_PROF, 0)
        head = bytes([KINDS.index(found.kind)]) + found.place.encode("utf-8", "replace") + b"\0"
        connection.sendall(LENGTH.pack(len(head) + len(text)) + head + text)


def main(arguments: list[str]) -> None:
    memory, cpu_s = int(arguments[0]), float(arguments[1])
    render("{{ 1 | tojson }}", {})
    _limit_resources(memory)
    serve(socket.socket(fileno=0), cpu_s)


if __name__ == "__main__":
    main(sys.argv[1:])
