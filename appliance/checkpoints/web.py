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

from appliance.checkpoints.remote import TRANSIENT, SourceError, StartOver

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Head:
    """Metadata of a file. `version` is a strong entity tag, else the modification time, or empty."""

    size: int | None
    version: str


class Web:
    """HTTP client. `headers` are sent to the host of the request only: Authorization is not sent after a redirect to
    another host."""

    def __init__(self, *, stall_s: float, headers: dict[str, str], cure: str) -> None:
        self._headers = {"Accept-Encoding": "identity", **headers}
        self._timeout = httpx.Timeout(stall_s)
        self._stall_s = stall_s
        self._cure = cure  # advice for 401 and 403
        self._client: httpx.Client | None = None

    def head(self, url: str) -> Head:
        """Return the metadata of a file. GET is used if the server refuses HEAD, as signed URLs do."""
        with self._answer(url, {}, "HEAD") as answer:
            if answer.status_code < 400:
                return _head(answer)
        with self._answer(url, {}, "GET") as answer:
            self._refuse(answer)
            return _head(answer)

    def stream(self, url: str, start: int, stop: int | None, version: str = "") -> Iterator[bytes]:
        """Yield the bytes from `start` up to but excluding `stop`, or to the end. Raise StartOver if the server does
        not return only this range."""
        headers = {}
        if start or stop is not None:
            headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
            if version:
                headers["If-Range"] = version
        with self._answer(url, headers, "GET") as answer:
            if answer.status_code == 416:
                raise StartOver(f"{url}: has no byte {start:,}")
            self._refuse(answer)
            if answer.status_code == 206:
                _check_range(answer, start)
            elif start and stop is None:
                raise StartOver(f"{url}: changed, or its server does not resume")
            yield from _body(answer, start, stop)

    @contextlib.contextmanager
    def _answer(self, url: str, headers: dict[str, str], method: str) -> Iterator[httpx.Response]:
        """Yield the response. Raise SourceError for network errors, also within the block."""
        if self._client is None:
            self._client = httpx.Client(follow_redirects=True, timeout=self._timeout, headers=self._headers)
            weakref.finalize(self, self._client.close)
        try:
            with self._client.stream(method, url, headers=headers) as answer:
                yield answer
        except httpx.TimeoutException as error:
            raise SourceError(f"{_bare(url)}: no byte for {self._stall_s:g} s", transient=True) from error
        except httpx.TooManyRedirects as error:
            raise SourceError(f"{_bare(url)}: is redirected in a circle") from error
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise SourceError(f"{_bare(url)}: {error}") from error
        except httpx.HTTPError as error:
            raise SourceError(f"{_bare(url)}: {error or type(error).__name__}", transient=True) from error

    def _refuse(self, answer: httpx.Response) -> None:
        status = answer.status_code
        if status < 300:
            return
        says = f"{_bare(str(answer.url))}: the server answered {status} {answer.reason_phrase}".rstrip()
        if status in (401, 403):
            raise SourceError(f"{says}; {self._cure}")
        if status in (404, 410):
            raise SourceError(f"{says}: there is no such file")
        raise SourceError(says, transient=status in TRANSIENT)


def _body(answer: httpx.Response, start: int, stop: int | None) -> Iterator[bytes]:
    """Yield the bytes from `start` up to but excluding `stop`, from a response with the whole file or the range."""
    at = start if answer.status_code == 206 else 0
    for block in answer.iter_raw():  # unbuffered: with a block size, data received before an error would be lost
        cut = block[max(0, start - at) : None if stop is None else max(0, stop - at)]
        at += len(block)
        if cut:
            yield cut
        if stop is not None and at >= stop:
            return


def _head(answer: httpx.Response) -> Head:
    length, tag = answer.headers.get("content-length", ""), answer.headers.get("etag", "")
    version = answer.headers.get("last-modified", "") if not tag or tag.startswith("W/") else tag
    return Head(int(length) if length.isdigit() else None, version)


def _check_range(answer: httpx.Response, start: int) -> None:
    given = answer.headers.get("content-range", "")
    match = _RANGE.fullmatch(given)
    if not match or int(match[1]) != start:
        asked = f"bytes from {start:,} were asked for"
        raise StartOver(f"{_bare(str(answer.url))}: {asked}, and the server sent {given or 'none'}")


def _bare(url: str) -> str:
    """Return the URL without its query, which may contain a signature."""
    return url.partition("?")[0]
