"""Hostile files in chat requests to a running service."""

import base64
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.appliance.media.hostile import Hostile, hostile
from tests.e2e.conftest import Appliance

SEED = int(os.environ.get("FUZZ_SEED", "20260"))
SPARE_BYTES = 300 << 20


def check_hostile_files(service: Appliance, model: str, count: int, fields: Sequence[str]) -> Counter[tuple[str, int]]:
    """Send this many files, four at a time, and return the numbers of replies by kind of file and status.

    Assert that each file gets a reply or an error that names its field, that no process of the service ends but those
    that decode files, and that the memory of the others stays bounded."""

    def status(file: Hostile) -> tuple[str, int]:
        kind = file.field.partition("_")[0]
        url = f"data:{kind}/octet-stream;base64," + base64.b64encode(file.data).decode()
        parts = [{"type": file.field, file.field: {"url": url}}, {"type": "text", "text": "What is this?"}]
        body = {"model": model, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        reply = service.client.post("/v1/chat/completions", json=body)
        if reply.status_code != 200:
            assert reply.json()["error"]["param"].startswith("messages"), reply.text
        return file.kind, reply.status_code

    before, memory = service.pids(), _peak_memory(service)
    with ThreadPoolExecutor(4) as threads:
        found = Counter(threads.map(status, hostile(count, SEED, fields)))
    print({f"{kind}: {code}": number for (kind, code), number in sorted(found.items())})
    assert {code for _, code in found} == {200, 400} and sum(found.values()) == count
    assert all(found[kind, 400] for kind in ("cut", "noise", "of another kind"))
    assert service.pids() == before
    assert _peak_memory(service) < memory + SPARE_BYTES
    return found


def _peak_memory(service: Appliance) -> int:
    """Return the sum of the largest memory that the service's processes had, without those that decode files."""
    found = 0
    for pid in service.pids().values():
        (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        found += int(line.split()[1]) * 1024
    return found
