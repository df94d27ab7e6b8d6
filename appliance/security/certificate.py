"""TLS certificate of the gateway: one TLS context for the whole process, whose certificate is replaced in place.

Open connections keep their certificate. The files are checked every few seconds, because renewal tools only write the
files. If a new certificate cannot be used, that is logged and the previous one is kept.
"""

import contextlib
import datetime
import logging
import ssl
from pathlib import Path

from appliance.config.gateway import Tls
from engine.api.errors import ConfigError
from engine.api.files import TEXT_BYTES, read_file

log = logging.getLogger(__name__)

VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate with its TLS contexts. `ends_s` is the end of its validity, in seconds since 1970. `stamp` changes
    when the files change."""

    def __init__(self, tls: Tls, ends_s: float, stamp: Stamp) -> None:
        """Raise OSError or ValueError if the files are not usable."""
        self.tls = tls
        self.context = _context(tls, "http/1.1")
        self.http2 = _context(tls, "h2")
        self.ends_s = ends_s
        self.stamp = stamp

    def replace_with(self, other: "Certificate") -> None:
        """Use the other certificate for new connections. Raise OSError if its files have changed since they were
        read."""
        for context in (self.context, self.http2):
            context.load_cert_chain(other.tls.certificate, other.tls.key)
            context.minimum_version = VERSIONS[other.tls.least_version]
        self.tls, self.ends_s, self.stamp = other.tls, other.ends_s, other.stamp

    @property
    def changed(self) -> bool:
        """Return whether the files differ from those that were read. A file that is missing during its replacement does
        not count."""
        with contextlib.suppress(OSError):
            return _stamp(self.tls) != self.stamp
        return False


def _stamp(tls: Tls) -> Stamp:
    found = [Path(name).stat() for name in (tls.certificate, tls.key)]
    return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)


def read_certificate(tls: Tls) -> Certificate:
    """Read the certificate and its key. Raise ConfigError with the file and the problem: unreadable, not PEM, wrong
    key. An expired certificate is logged and used: clients decide whether to accept it, and refusing to start would not
    help."""
    from cryptography import x509  # 30 ms that a gateway without TLS should not spend

    for name in ("certificate", "key"):
        try:
            read_file(Path(getattr(tls, name)), TEXT_BYTES)
        except OSError as error:
            raise ConfigError(f"endpoints.tls.{name}: {getattr(tls, name)} cannot be read: {error.strerror}") from error
    stamp = _stamp(tls)
    try:
        found = x509.load_pem_x509_certificate(read_file(Path(tls.certificate), TEXT_BYTES))
    except ValueError as error:
        raise ConfigError(
            f"endpoints.tls.certificate: {tls.certificate} contains no PEM certificate: {error}"
        ) from error
    ends = found.not_valid_after_utc
    if ends < datetime.datetime.now(datetime.UTC):
        log.error(
            "endpoints.tls.certificate: %s expired on %s UTC; renew it", tls.certificate, f"{ends:%Y-%m-%d %H:%M}"
        )
    try:
        return Certificate(tls, ends.timestamp(), stamp)
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", "") or str(error)
        raise ConfigError(
            f"endpoints.tls.key: {tls.key} is not the private key of {tls.certificate}, as PEM without a passphrase "
            f"({reason.lower().replace('_', ' ')})"
        ) from error


def _context(tls: Tls, protocol: str) -> ssl.SSLContext:
    """Return the TLS context for a protocol by its name in ALPN."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = VERSIONS[tls.least_version]
    context.set_alpn_protocols([protocol])
    context.load_cert_chain(tls.certificate, tls.key, password=_no_password)
    return context


def _no_password() -> str:
    raise ValueError("the key has a passphrase")
