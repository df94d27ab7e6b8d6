"""Chromium for tests of the page.

Headless Chromium sometimes stops responding, and playwright waits for some responses without a timeout. A browser that
hangs is killed, which ends the wait, and its test is retried once with a new browser. Failures of the page itself are
not retried."""

import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from appliance.runtime.processes import descendants

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
STILL_S = 100.0  # in which a test is over, if the browser moves
# It looks for nothing but the page.
OPTIONS = (
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A microphone that beeps, without a question for permission.
    "--use-fake-device-for-media-stream",
    "--use-fake-ui-for-media-stream",
)


class StoodStill(Exception):
    """The browser did, and was killed."""


class Chromium:
    """A browser that starts on first use and starts again after it was killed."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._browser: Any = None

    def context(self, **wanted: Any) -> Any:
        if self._browser is None or not self._browser.is_connected():
            self._browser = self._session.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        return self._browser.new_context(**wanted)

    def close(self) -> None:
        if self._browser is not None and self._browser.is_connected():
            with suppress(StoodStill), self.watched(STILL_S):
                self._browser.close()

    @contextmanager
    def watched(self, limit_s: float) -> Iterator[None]:
        """Kill the browser and raise StoodStill if the body takes longer than `limit_s`."""
        over = threading.Event()

        def kill() -> None:
            over.set()
            for pid in pids():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, kill)
        timer.start()
        try:
            yield
        except Exception as error:
            if over.is_set():
                raise StoodStill(f"Chromium did not end within {limit_s:.0f} s what it was asked for") from error
            raise
        finally:
            timer.cancel()
            timer.join()


def pids() -> list[int]:
    """Return the process ids of all browsers that this process started."""
    return [pid for pid in descendants(os.getpid()) if b"chrom" in _program(pid)]


def _program(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0", 1)[0]
    except OSError:
        return b""


class Pages:
    """Opens the page and waits until it is ready. `faults`: browser errors, and requests to other hosts."""

    def __init__(self, chromium: Chromium, url: str) -> None:
        self.chromium, self._url = chromium, url
        self._contexts: list[Any] = []
        self.faults: list[str] = []

    def __call__(
        self, width: int = 1280, height: int = 800, scheme: str = "light", url: str = "", view: str = ""
    ) -> Any:
        url = url or self._url
        context = self.chromium.context(viewport={"width": width, "height": height}, color_scheme=scheme)
        self._contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: request.url.startswith(url) or self.faults.append(request.url))
        page.on("console", lambda line: line.type == "error" and self.faults.append(line.text))
        page.goto(f"{url}/{view}")
        page.wait_for_selector("#phase.good")
        return page

    def close(self) -> None:
        while self._contexts:
            context = self._contexts.pop()
            if context.browser.is_connected():
                context.close()

    def forget(self) -> None:
        """Clear the faults, and close the pages if the browser still responds."""
        self.faults.clear()
        with suppress(StoodStill), self.chromium.watched(STILL_S):
            self.close()


def in_browser(test: Callable[..., None], limit_s: float = STILL_S) -> Callable[..., None]:
    """Wrap a test that opens pages: close them afterwards, and retry once if the browser hung."""

    @functools.wraps(test)
    def run(open_page: Pages, **given: Any) -> None:
        try:
            attempt(open_page, given)
        except StoodStill:
            open_page.forget()
            attempt(open_page, given)
        assert not [fault for fault in open_page.faults if "status of 40" not in fault]

    def attempt(open_page: Pages, given: dict[str, Any]) -> None:
        with open_page.chromium.watched(limit_s):
            test(open_page=open_page, **given)
            open_page.close()

    return run
