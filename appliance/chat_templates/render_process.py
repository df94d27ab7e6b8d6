"""Process that renders chat templates: `python -m appliance.chat_templates.render_process MEMORY CPU_S`, a child of a
`ProcessPool`.

Jobs are JSON. A reply has one byte for the kind of outcome, the location, a zero byte and the text.
"""

import json
import socket
import sys

from appliance.chat_templates.rendering import KINDS, Outcome, render
from appliance.runtime.limited_processes import limit_resources, serve


def _outcome(job: bytes) -> Outcome:
    try:
        source, scope = json.loads(job)
        return render(source, scope)
    except MemoryError:
        return Outcome("limit", "it takes too much memory")


def _reply(job: bytes) -> bytes:
    found = _outcome(job)
    text = found.text.encode("utf-8", "surrogatepass")
    return bytes([KINDS.index(found.kind)]) + found.place.encode("utf-8", "replace") + b"\0" + text


def main(arguments: list[str]) -> None:
    memory, cpu_s = int(arguments[0]), float(arguments[1])
    render("{{ 1 | tojson }}", {})
    limit_resources(memory)
    serve(socket.socket(fileno=0), cpu_s, _reply)


if __name__ == "__main__":
    main(sys.argv[1:])
