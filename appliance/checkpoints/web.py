"""Byte ranges of files over HTTP, with a stall timeout and checks that the response matches the request.

RFC 9110: the response to `Range: bytes=FIRST-` is 206 with Content-Range; 200 with the whole file if the server does
not support ranges or `If-Range` names another version; 416 if the file is not longer than FIRST.
"""

import contextlib
import re
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import httpx

from appliance.checkpoints.remote import TRANSIENT, RestartFile, SourceError

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Head:
    """Metadata of a file. `version` is a strong entity tag, else the modification time, or empty."""

    size: int | None
    version: str


class HttpClient:
    """HTTP client. `headers` are sent to the host of the request only: Authorization is not sent after a redirect to
    another host."""

    def __init__(self, *, stall_s: float, headers: dict[str, str], hint: str) -> None:
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._timeout = httpx.Timeout(stall_s)
        self._stall_s = stall_s
        self._hint = hint  # advice for 401 and 403
        self._client: httpx.Client | None = None

    def head(self, url: str) -> Head:
        """Return the metadata of a file. GET is used if the server refuses HEAD, as signed URLs do."""
        with self._response(url, {}, "HEAD") as response:
            if response.status_code < 400:
                return _head(response)
        with self._response(url, {}, "GET") as response:
            self._refuse(response)
            return _head(response)

    def stream(self, url: str, start: int, stop: int | None, version: str = "") -> Iterator[bytes]:
        """Yield the bytes from `start` up to but excluding `stop`, or to the end. Raise RestartFile if the server does
        not return only this range."""
        headers = {}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
            if version:
                headers["If-Range"] = version
        with self._response(url, headers, "GET") as response:
            if response.status_code == 416:
                raise RestartFile(f"{url}: has no byte {start:,}")
            self._refuse(response)
            if response.status_code == 206:
                _check_range(response, start)
            elif start and stop is None:
                raise RestartFile(f"{url}: the file changed, or the server does not support ranges")
            yield from _body(response, start, stop)

    @contextlib.contextmanager
    def _response(self, url: str, headers: dict[str, str], method: str) -> Iterator[httpx.Response]:
        """Yield the response. Raise SourceError for network errors, also within the block."""
        if self._client is None:
            self._client = httpx.Client(follow_redirects=True, timeout=self._timeout, headers=self._headers)
            weakref.finalize(self, self._client.close)
        try:
            with self._client.stream(method, url, headers=headers) as response:
                yield response
        except httpx.TimeoutException as error:
            raise SourceError(f"{_without_query(url)}: no data for {self._stall_s:g} s", transient=True) from error
        except httpx.TooManyRedirects as error:
            raise SourceError(f"{_without_query(url)}: too many redirects") from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise SourceError(f"{_without_query(url)}: {error}") from error
        except httpx.HTTPError as error:
            raise SourceError(f"{_without_query(url)}: {error or type(error).__name__}", transient=True) from error

    def _refuse(self, response: httpx.Response) -> None:
        status = response.status_code
        if status < 300:
            return
        message = f"{_without_query(str(response.url))}: the server answered {status} {response.reason_phrase}".rstrip()
        if status in (401, 403):
            raise SourceError(f"{message}; {self._hint}")
        if status in (404, 410):
            raise SourceError(f"{message}: the file does not exist")
        raise SourceError(message, transient=status in TRANSIENT)


def _body(response: httpx.Response, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the bytes from `start` up to but excluding `stop`, from a response with the whole file or the range."""
    at = start if response.status_code == 206 else 0
    for block in response.iter_raw():  # unbuffered: with a block size, data received before an error would be lost
        cut = block[max(0, start - at) : None if stop is None else max(0, stop - at)]
        at += len(block)
        if cut:
            yield cut
        if stop is not None and at >= stop:
            return


def _head(response: httpx.Response) -> Head:
    length, tag = response.headers.get("content-length", ""), response.headers.get("etag", "")
    version = response.headers.get("last-modified", "") if not tag or tag.startswith("W/") else tag
    return Head(int(length) if length.isdigit() else None, version)


def _check_range(response: httpx.Response, start: int) -> None:
    given = response.headers.get("content-range", "")
    match = _RANGE.fullmatch(given)
    if not match or int(match[1]) != start:
        requested = f"requested bytes from {start:,}"
        raise RestartFile(
            f"{_without_query(str(response.url))}: {requested}, but the server sent {given or 'no range'}"
        )


def _without_query(url: str) -> str:
    """Return the URL without its query, which may contain a signature."""
    return url.partition("?")[0]
