"""Check that the gateway can listen as configured: address, certificate, list of API keys.

Without these checks, a mistake would show only when the gateway starts.
"""

import contextlib
import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping

from appliance.config.gateway import Tls
from appliance.config.problems import Problem, unread
from appliance.config.sections.secrets import SecretFile
from appliance.config.settings import Settings
from appliance.security.headers import parse_headers
from appliance.security.keys import parse_keys
from engine.api.errors import ConfigError
from engine.api.files import read_text

_HOST = ("endpoints", "host")
_KEYS = ("endpoints", "api_keys")
_HEADERS = ("observability", "traces", "headers")
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})")
_ADVICE = "use 0.0.0.0 or :: for all addresses of the machine, or 127.0.0.1 for local access only"


def check_endpoint(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield each problem that would prevent the gateway from listening, at its key."""
    yield from _host(settings)
    yield from _tls(settings)
    yield from _api_keys(settings, environ)
    yield from _trace_headers(settings, environ)


def check_host_here(settings: Settings) -> Iterator[Problem]:
    """Yield a notice if this machine cannot listen on the configured host. The manifest may be for another machine."""
    host = settings.manifest.endpoints.host
    if _malformed(host):
        return
    advice = f"`slipway serve` cannot listen on it here; {_ADVICE}"
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
    except (OSError, UnicodeError):
        yield unread(settings.place(_HOST), _HOST, f"{host!r} is not a known host name; {advice}")
        return
    with socket.socket(family, kind, protocol) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            yield unread(settings.place(_HOST), _HOST, f"{host!r} is not an address of this machine ({why}); {advice}")


def _host(settings: Settings) -> Iterator[Problem]:
    host = settings.manifest.endpoints.host
    if _malformed(host):
        what = f"{host!r} is neither an IP address nor a host name; {_ADVICE}"
        yield unread(settings.place(_HOST), _HOST, what)


def _malformed(host: str) -> bool:
    """Return whether the text cannot be a host address. An empty host means all addresses."""
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host.partition("%")[0])
        return False
    numeric = re.fullmatch(r"[0-9]+(\.[0-9]*)+", host) is not None
    return bool(host) and (numeric or _NAME.fullmatch(host) is None)


def _tls(settings: Settings) -> Iterator[Problem]:
    given = settings.manifest.endpoints.tls
    if given.certificate is None or given.key is None:
        return
    from appliance.security.certificate import read_certificate  # importing asyncio and ssl takes 50 ms

    files = {name: str(settings.file(("endpoints", "tls", name))) for name in ("certificate", "key")}
    try:
        read_certificate(Tls(**files, least_version=given.least_version))
    except ConfigError as error:
        key, _, what = str(error).partition(": ")
        path = tuple(key.split("."))
        yield unread(settings.place(path), path, what)


def _secret_text(settings: Settings, environ: Mapping[str, str], name: str | None) -> tuple[str, str] | None:
    """Return the place and the text of a secret. None: it is empty or unreadable, which the check of the secrets
    reports."""
    secret = settings.manifest.secrets.get(name or "")
    if secret is None:
        return None
    try:
        if isinstance(secret, SecretFile):
            path = settings.file(("secrets", str(name), "file"))
            place, text = f"file {path}", read_text(path)
        else:
            place, text = f"environment variable {secret.env}", environ.get(secret.env, "")
    except (OSError, UnicodeDecodeError):
        return None
    return (place, text) if text.strip() else None


def _trace_headers(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield the problem in the headers for the collector of traces."""
    found = _secret_text(settings, environ, settings.manifest.observability.traces.headers)
    if found is None:
        return
    place, text = found
    try:
        parse_headers(text, place)
    except ConfigError as error:
        yield unread(settings.place(_HEADERS), _HEADERS, str(error))


def _api_keys(settings: Settings, environ: Mapping[str, str]) -> Iterator[Problem]:
    """Yield problems in the list of API keys. An unreadable list is reported by the check of the secrets."""
    found = _secret_text(settings, environ, settings.manifest.endpoints.api_keys)
    if found is None:
        return
    place, text = found
    try:
        keys = parse_keys(text.splitlines(), place)
    except ConfigError as error:
        yield unread(settings.place(_KEYS), _KEYS, str(error))
        return
    if not keys:
        what = f"{place} contains no key. Write one key per line, or remove endpoints.api_keys"
        yield unread(settings.place(_KEYS), _KEYS, what)
