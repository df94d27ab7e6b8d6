"""Whether the gateway's address is free, asked before anything starts."""

import errno
import socket

_ANY = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class AddressTaken(Exception):
    """Nothing can listen there; the message says why and which key to change."""


def free_port(host: str, port: int) -> int:
    """`port` if the gateway can listen on it, or a free one for 0. Raises AddressTaken."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise AddressTaken(
            f"endpoints.host: {host!r} is no address of this machine ({error}); 0.0.0.0 listens on all"
        ) from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as listener:
            # As the gateway will do it: connections that linger from a former run do not count, a listener does.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                listener.bind((address[0], port, *address[2:]))
                listener.listen(1)
            except OSError as error:
                raise AddressTaken(_explain(host, port, error)) from error
            port = listener.getsockname()[1]
    return port


def _explain(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use by another process; set endpoints.port or --port (0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} is not allowed to this user; set endpoints.port or --port to 1024 or above"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"endpoints.host: {host} is no address of this machine; 0.0.0.0 listens on all of them"
    return f"cannot listen on {host} port {port}: {error.strerror}; see endpoints.host and endpoints.port"


def local_host(host: str) -> str:
    """The host under which this machine itself reaches a listener on `host`."""
    return _ANY.get(host, host)


def url(host: str, port: int, *, tls: bool = False) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
