"""Runs in a network namespace without routes: serves there and asks the service once. Prints one JSON line."""

import json
import signal
import subprocess
import sys
import time

import httpx


def main(port: str, *words: str) -> None:
    """words: arguments of `slipway`."""
    command = [sys.executable, "-m", "appliance", *words, "--host", "127.0.0.1", "--port", port]
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    service = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    try:
        while True:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if service.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"not ready: {service.stdout.read() if service.poll() is not None else 'too slow'}")
            time.sleep(0.1)
        body = {"model": "demo", "messages": [{"role": "user", "content": "What is 17 + 25?"}], "temperature": 0}
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    finally:
        service.send_signal(signal.SIGTERM)
        code = service.wait(60)
    print(json.dumps({"routes": routes, "text": reply["choices"][0]["message"]["content"], "code": code}))


main(*sys.argv[1:])
