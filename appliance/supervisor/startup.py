"""Progress from a start or restart until the service is ready, and the startup budget of the launcher."""

import asyncio
import shlex
from typing import Any

import msgspec

from appliance.config.gateway import GatewayConfig, Task
from appliance.runtime import listener, probe
from appliance.runtime.picture import PICTURE
from appliance.supervisor.console import Console
from appliance.supervisor.supervise import Service

_PROBE_INTERVAL_S = 0.1
_PROBE_TIMEOUT_S = 2.0
_STALE_REPLY_S = 1.0  # time after a crash in which a reply may predate it
QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 is 42."


class Startup:
    """Polls the gateway until it is ready, then waits for `restarted`."""

    def __init__(self, service: Service, console: Console) -> None:
        self._console = console
        self._budget_s = service.startup_s
        self._gateway = service.gateway
        self._host = listener.local_host(service.gateway.endpoints.host)
        self._tls = service.gateway.tls is not None
        self._url = listener.url(self._host, service.gateway.endpoints.port, tls=self._tls)
        self.gateway_up = False
        self._restarted = asyncio.Event()
        self._last_shown: object = None

    def restarted(self) -> None:
        """Record that a program ended, so that readiness is checked again."""
        self._restarted.set()

    async def watch(self) -> str:
        """Report readiness after the start and after each restart. Return only if the budget is exceeded, with what was
        missing."""
        began = asyncio.get_running_loop().time()
        missing = await self._wait(began)
        if missing is None:
            self._console.message("ready", f"{self._url} after {self._since(began)}; try:")
            self._console.plain(curl_line(self._url, self._gateway))
        while missing is None:
            await self._restarted.wait()
            self._restarted.clear()
            began = asyncio.get_running_loop().time()
            missing = await self._wait(began)
            if missing is None:
                self._console.message("ready", f"again after {self._since(began)}")
        return missing

    async def _wait(self, began: float) -> str | None:
        """Poll /ready until it returns 200, then return None. If the budget ends first, return a description of what is
        missing."""
        loop = asyncio.get_running_loop()
        missing = "the gateway does not answer"
        budgeted = began  # a download has its own limit (model.download.total_timeout)
        down = not self.gateway_up
        while loop.time() - budgeted <= self._budget_s:
            answer = await probe.get(
                self._host, self._gateway.endpoints.port, "/ready", _PROBE_TIMEOUT_S, tls=self._tls
            )
            if answer is None:
                down, missing = True, "the gateway does not answer"
            else:
                status, body = answer
                if not self.gateway_up:
                    self.gateway_up = True
                    self._console.message("gateway", f"up on {self._url} after {self._since(began)}")
                if status != 200:
                    down = True
                    readiness = probe.readiness(body)
                    missing = readiness.text()
                    budgeted = loop.time() if readiness.downloads else budgeted
                    self._show(readiness)
                elif down or loop.time() - began > _STALE_REPLY_S:
                    self._console.end_progress()
                    return None
            await asyncio.sleep(_PROBE_INTERVAL_S)
        return f"not ready after {self._budget_s:g} s (health.startup_budget): {missing}"

    def _show(self, readiness: probe.Readiness) -> None:
        """Show every change on a terminal; elsewhere print a line for each phase and each tenth of its progress."""
        step = readiness if self._console.redraws else readiness.rounded()
        if step != self._last_shown:
            self._last_shown = step
            self._console.progress(readiness.text())

    def _since(self, began: float) -> str:
        return f"{asyncio.get_running_loop().time() - began:.1f} s"


_POOLING: dict[Task, tuple[str, dict[str, Any]]] = {
    "embed": ("/v1/embeddings", {"input": QUESTION}),
    "classify": ("/classify", {"input": QUESTION}),
    "score": ("/score", {"text_1": QUESTION, "text_2": ANSWER}),
    "token_embed": ("/pooling", {"task": "token_embed", "input": QUESTION}),
    "token_classify": ("/pooling", {"task": "token_classify", "input": QUESTION}),
}


def _speech_line(url: str, gateway: GatewayConfig) -> str:
    key = ["-H", "Authorization: Bearer YOUR_KEY"] if gateway.api_keys is not None else []
    words = [
        "curl",
        f"{url}/v1/audio/transcriptions",
        *key,
        "-F",
        f"model={gateway.names[0]}",
        "-F",
        "file=@speech.wav",
    ]
    return shlex.join(words)


def _encode_line(gateway: GatewayConfig) -> tuple[str, dict[str, Any]]:
    """Return the route and body of a request for the embeddings of an item that the model reads."""
    part: dict[str, Any] = {"type": "audio_url", "audio_url": {"url": "https://example.com/speech.wav"}}
    if "image" in gateway.modalities:
        part = {"type": "image_url", "image_url": {"url": PICTURE}}
    return "/v1/media/embeddings", {"input": [part]}


def curl_line(url: str, gateway: GatewayConfig) -> str:
    """Return a request to paste into a shell, for a route that the model supports: streamed chat, a completion for an
    encoder-decoder model, or the first task of a pooling model."""
    if gateway.speech is not None:
        return _speech_line(url, gateway)
    if "encode" in gateway.tasks:
        route, fields = _encode_line(gateway)
    elif "generate" not in gateway.tasks:
        route, fields = next(_POOLING[task] for task in gateway.tasks if task in _POOLING)
    elif gateway.encoder is not None:
        route, fields = "/v1/completions", {"prompt": QUESTION, "stream": True}
    else:
        route, fields = "/v1/chat/completions", {"messages": [{"role": "user", "content": QUESTION}], "stream": True}
    body = {"model": gateway.names[0], **fields}
    key = ["-H", "Authorization: Bearer YOUR_KEY"] if gateway.api_keys is not None else []
    words = ["curl", "-N", f"{url}{route}", "-H", "Content-Type: application/json", *key]
    return shlex.join([*words, "-d", msgspec.json.encode(body).decode()])
