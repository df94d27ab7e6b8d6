"""Sources of media files: data URLs, https URLs of allowed hosts, and files in allowed folders.

A URL of a client must not make the gateway reach other services (server-side request forgery). So only https URLs of
the hosts in `limits.media.hosts` are fetched. The host's address is resolved once and checked: every address must be
public. The connection goes to that address, so a later change of the name has no effect. Targets of redirects are
checked in the same way.
"""

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx

from appliance.config.sections.limits import Media
from engine.api.files import open_file
from engine.api.media import Modality

MAX_REDIRECTS: Final = 3
MAX_URL: Final = 8192  # characters of a URL that is not a data URL

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host."""


class SourceError(Exception):
    """The file cannot be read. The message is meant for the client and has no end mark."""


class Sources:
    """Reads files of images, videos and audio. `resolve` and `context` (of TLS) have the defaults of the system."""

    def __init__(
        self,
        limits: Media,
        resolve: Resolve | None = None,
        context: ssl.SSLContext | None = None,
        is_allowed: Callable[[str], bool] | None = None,
    ) -> None:
        self._limits = limits
        self._resolve = resolve or _resolved
        self._context = context
        self._is_allowed = is_allowed or is_public

    async def read(self, url: str, kind: Modality = "image") -> tuple[bytes, ...]:
        """Return the bytes of a file, or of the frames of a video. Raise SourceError."""
        scheme = url[:8].partition(":")[0].lower()
        if scheme == "data":
            return await asyncio.to_thread(self._data, url, kind)  # 20 MB of base64 take 0.1 s
        if len(url) > MAX_URL:
            raise SourceError(f"the URL has {len(url)} characters; the limit is {MAX_URL}")
        if scheme == "file":
            return (await asyncio.to_thread(self._file, url),)
        if scheme == "https":
            return (await self._fetched(url),)
        raise SourceError("the URL must begin with data:, https: or file:")

    def _data(self, url: str, kind: Modality) -> tuple[bytes, ...]:
        head, comma, text = url.partition(",")
        if not comma or not head.lower().endswith(";base64"):
            raise SourceError("a data URL must have the form data:image/png;base64,…")
        if len(text) > self._limits.max_bytes // 3 * 4 + 8:
            raise SourceError(f"the file is larger than {self._limits.max_bytes:,} bytes (limits.media.max_bytes)")
        # The frames of a video are image files in one URL, as in vLLM: data:video/jpeg;base64,FRAME,FRAME,…
        texts = [text]
        if head.lower().startswith("data:video/") and "," in text:
            if kind != "video":
                raise SourceError("a list of frames must be in a part of type video_url")
            if (count := text.count(",") + 1) > self._limits.frames:
                raise SourceError(
                    f"the video has {count} frames; the limit is {self._limits.frames} (limits.media.frames)"
                )
            texts = text.split(",")
        try:
            return tuple(base64.b64decode(unquote(one) if "%" in one else one, validate=True) for one in texts)
        except (binascii.Error, ValueError):
            raise SourceError("the data URL is not valid base64") from None

    # Files

    def _file(self, url: str) -> bytes:
        if not self._limits.folders:
            raise SourceError("file URLs are not allowed on this server (limits.media.folders)")
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise SourceError("a file URL must not name a host")
        outside = SourceError("the file is not in an allowed folder (limits.media.folders), or cannot be read")
        folders = [Path(folder).resolve() for folder in self._limits.folders]
        try:
            with open_file(Path(unquote(parts.path)).resolve(strict=True)) as file:
                # The path of the open file: later changes of links have no effect.
                opened = Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
                if not any(opened.is_relative_to(folder) for folder in folders):
                    raise outside
                data = file.read(self._limits.max_bytes + 1)
        except (OSError, ValueError, RuntimeError):
            raise outside from None
        if len(data) > self._limits.max_bytes:
            raise SourceError(f"the file is larger than {self._limits.max_bytes:,} bytes (limits.media.max_bytes)")
        return data

    # Hosts

    async def _fetched(self, url: str) -> bytes:
        if not self._limits.hosts:
            raise SourceError("the server does not fetch URLs (limits.media.hosts). Send the file as a data: URL")
        try:
            async with asyncio.timeout(self._limits.time):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(url)
                    if isinstance(found, bytes):
                        return found
                    url = found
        except TimeoutError:
            raise SourceError(f"the file was not received within {self._limits.time:g} s") from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ssl.SSLError) as error:
            raise SourceError(f"the file cannot be fetched ({type(error).__name__})") from None
        raise SourceError(f"the URL has more than {MAX_REDIRECTS} redirects")

    async def _get(self, url: str) -> bytes | str:
        """Return the body, or the target of a redirect."""
        host, port, parsed = self._checked(url)
        address = await self._address(host, port)
        target = parsed.copy_with(host=address)
        headers = {
            "Host": host if port == 443 else f"{host}:{port}",
            "Accept": "image/*, video/*, audio/*",
            "Accept-Encoding": "identity",  # a compressed body can be a bomb
            "User-Agent": "slipway",
        }
        client = httpx.AsyncClient(
            verify=self._context or ssl.create_default_context(), trust_env=False, timeout=self._limits.time
        )
        async with (
            client,
            client.stream("GET", target, headers=headers, extensions={"sni_hostname": host}) as reply,
        ):
            if reply.is_redirect:
                return str(parsed.join(reply.headers["location"]))
            if reply.status_code != 200:
                raise SourceError(f"the file cannot be fetched: the host replied with status {reply.status_code}")
            return await self._body(reply)

    async def _body(self, reply: httpx.Response) -> bytes:
        limit, data = self._limits.max_bytes, bytearray()
        message = f"the file is larger than {limit:,} bytes (limits.media.max_bytes)"
        declared = reply.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise SourceError(message)
        async for piece in reply.aiter_raw():
            data += piece
            if len(data) > limit:
                raise SourceError(message)
        return bytes(data)

    def _checked(self, url: str) -> tuple[str, int, httpx.URL]:
        """Return host, port and the parsed URL, if its host is allowed."""
        try:
            parsed = httpx.URL(url)
        except (httpx.InvalidURL, ValueError):
            raise SourceError("the URL is invalid") from None
        host = parsed.raw_host.decode("ascii").lower().rstrip(".")
        if parsed.scheme != "https":
            raise SourceError("only https URLs are fetched")
        if parsed.userinfo:
            raise SourceError("the URL must not contain a user name or password")
        if not any(_matches(host, allowed) for allowed in self._limits.hosts):
            raise SourceError(f"files of the host {host[:200]!r} are not fetched (limits.media.hosts)")
        port = 443 if parsed.port is None else parsed.port
        if not 0 < port < 65536:
            raise SourceError("the URL is invalid: its port must be from 1 to 65535")
        return host, port, parsed

    async def _address(self, host: str, port: int) -> str:
        try:
            addresses = await self._resolve(host, port)
        except (OSError, UnicodeError):  # of a name with an empty label, or one of more than 63 characters
            raise SourceError(f"the host {host[:200]!r} is not known") from None
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise SourceError(f"the address of the host {host[:200]!r} is not public")
        return addresses[0]


def _matches(host: str, allowed: str) -> bool:
    if allowed.startswith("*."):
        return host.endswith(allowed[1:])
    return host == allowed


async def _resolved(host: str, port: int) -> Sequence[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def is_public(address: str) -> bool:
    """Return True for an address of the public internet, also if it is an IPv4 address in an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or _nat64(parsed)
        if inner is not None:
            return is_public(str(inner))
        if parsed.sixtofour is not None or parsed.teredo is not None:
            return False  # tunnels to an address inside
    return parsed.is_global and not parsed.is_multicast and not parsed.is_reserved


def _nat64(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """Return the IPv4 address within the prefix of translators, 64:ff9b::/96."""
    number = int(address)
    return ipaddress.IPv4Address(number & 0xFFFFFFFF) if number >> 32 == 0x0064_FF9B << 64 else None
