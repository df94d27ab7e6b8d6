"""Sources of images: no request reaches a host, an address or a file that is not allowed."""

import asyncio
import datetime
import os
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from appliance.config.sections.limits import Media
from appliance.media.sources import SourceError, Sources, is_public

NAMES = ("images.example.com", "other.example.com", "a.example.org")
BODY = b"x" * 1000


def certificate(folder: Path) -> tuple[Path, Path]:
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(each) for each in NAMES]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = folder / "cert.pem", folder / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    form = serialization.PrivateFormat.PKCS8
    files[1].write_bytes(key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption()))
    return files


class Handler(BaseHTTPRequestHandler):
    server: "Host"

    def do_GET(self) -> None:
        self.server.seen.append((self.headers["Host"], self.path))
        kind, _, rest = self.path[1:].partition("/")
        if kind == "to":
            self._reply(302, b"", Location=f"https://{rest}")
        elif kind == "large":
            self._reply(200, BODY * 3)
        elif kind == "endless":
            self.send_response(200)
            self.end_headers()
            while not self.server.stopped.wait(0.001):
                self.wfile.write(BODY)
        elif kind == "slow":
            self.server.stopped.wait(20)
        elif kind == "missing":
            self._reply(404, b"")
        else:
            self._reply(200, BODY)

    def _reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None:
        pass


class Host(ThreadingHTTPServer):
    """A host with a certificate for NAMES. `seen` has the requests."""

    def __init__(self, context: ssl.SSLContext) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.seen: list[tuple[str, str]] = []
        self.stopped = threading.Event()

    def handle_error(self, *arguments: Any) -> None:
        pass


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def host(files: tuple[Path, Path]) -> Iterator[Host]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*files)
    made = Host(context)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.stopped.set()
    made.shutdown()
    thread.join()
    made.server_close()


class World:
    """Sources whose resolver knows `addresses`; 127.0.0.1 counts as a public address."""

    def __init__(self, host: Host, files: tuple[Path, Path]) -> None:
        self.port = host.server_address[1]
        self.addresses: dict[str, list[str]] = {name: ["127.0.0.1"] for name in NAMES}
        self.asked: list[str] = []
        self.context = ssl.create_default_context(cafile=str(files[0]))

    def read(self, url: str, **limits: Any) -> bytes:
        given = {"hosts": ("images.example.com", "*.example.org"), "max_bytes": 2000, **limits}
        sources = Sources(Media(**given), self._resolve, self.context, lambda one: one == "127.0.0.1" or is_public(one))
        return asyncio.run(sources.read(url.replace("PORT", str(self.port))))[0]

    async def _resolve(self, name: str, port: int) -> Sequence[str]:
        self.asked.append(name)
        name.encode("idna")  # as getaddrinfo does
        if name not in self.addresses:
            raise OSError("no such host")
        return self.addresses[name]


@pytest.fixture
def world(host: Host, files: tuple[Path, Path]) -> World:
    return World(host, files)


def test_allowed_hosts_are_fetched_by_their_names(world: World, host: Host) -> None:
    assert world.read("https://images.example.com:PORT/a?b=c") == BODY
    assert world.read("https://a.example.org:PORT/") == BODY
    assert host.seen == [(f"images.example.com:{world.port}", "/a?b=c"), (f"a.example.org:{world.port}", "/")]


def test_a_name_is_resolved_once(world: World, host: Host) -> None:
    """A second answer of the resolver cannot redirect the connection to another address (DNS rebinding)."""
    assert world.read("https://images.example.com:PORT/") == BODY
    assert world.asked == ["images.example.com"]


@pytest.mark.parametrize(
    "url,reason",
    [
        ("https://other.example.com:PORT/", "are not fetched"),
        ("https://images.example.com.evil.com:PORT/", "are not fetched"),
        ("https://evilexample.org:PORT/", "are not fetched"),
        ("https://example.org:PORT/", "are not fetched"),
        ("https://127.0.0.1:PORT/", "are not fetched"),
        ("https://[::1]:PORT/", "are not fetched"),
        ("https://user:pass@images.example.com:PORT/", "user name"),
        ("https://images.example.com@evil.com/", "user name"),
        ("https://", "are not fetched"),
        ("https://images.example.com:99999999/", "invalid"),
        ("https://a\u0000b/", "invalid"),
        ("https://images.example.com:PORT/" + "a" * 9000, "characters"),
        ("https://images.example.com:PORT/missing", "status 404"),
        ("https://b.example.org:PORT/", "not known"),
        ("https://b..example.org:PORT/", "not known"),
        (f"https://{'b' * 64}.example.org:PORT/", "not known"),
    ],
)
def test_other_urls_are_refused(world: World, host: Host, url: str, reason: str) -> None:
    with pytest.raises(SourceError, match=reason):
        world.read(url)
    assert "missing" in url or not host.seen


@pytest.mark.parametrize(
    "addresses", [["10.0.0.1"], ["127.0.0.1", "10.0.0.1"], ["::ffff:127.0.0.2"], ["169.254.169.254"], ["x"], []]
)
def test_hosts_with_an_address_that_is_not_public_are_refused(world: World, host: Host, addresses: list[str]) -> None:
    world.addresses["images.example.com"] = addresses
    with pytest.raises(SourceError, match="not public"):
        world.read("https://images.example.com:PORT/")
    assert not host.seen


def test_a_redirect_to_an_allowed_host_is_followed(world: World, host: Host) -> None:
    assert world.read("https://images.example.com:PORT/to/a.example.org:PORT/b") == BODY
    assert [path for _, path in host.seen][1:] == ["/b"]
    assert world.asked == ["images.example.com", "a.example.org"]


@pytest.mark.parametrize(
    "target,reason",
    [
        ("other.example.com:PORT/", "are not fetched"),
        ("127.0.0.1:PORT/", "are not fetched"),
        ("c.example.org/", "not public"),
        ("images.example.com:PORT/to/" * 4 + "a.example.org", "redirects"),
    ],
)
def test_a_redirect_elsewhere_is_refused(world: World, target: str, reason: str) -> None:
    world.addresses["c.example.org"] = ["192.168.0.1"]
    with pytest.raises(SourceError, match=reason):
        world.read(f"https://images.example.com:PORT/to/{target}")


@pytest.mark.parametrize("path", ["large", "endless"])
def test_a_large_body_is_stopped(world: World, path: str) -> None:
    """With a declared length and without one."""
    with pytest.raises(SourceError, match="larger than 2,000 bytes"):
        world.read(f"https://images.example.com:PORT/{path}")


def test_a_slow_host_is_given_up(world: World) -> None:
    with pytest.raises(SourceError, match="within 0.2 s"):
        world.read("https://images.example.com:PORT/slow", time=0.2)


def test_an_unknown_certificate_is_refused(world: World) -> None:
    world.context = ssl.create_default_context()
    with pytest.raises(SourceError, match="cannot be fetched"):
        world.read("https://images.example.com:PORT/")


def test_frames_are_counted_before_they_are_decoded() -> None:
    """A URL of commas must not become millions of files; only videos have several."""
    sources = Sources(Media(frames=3))
    assert asyncio.run(sources.read("data:video/jpeg;base64,QQ==,Qg==,Qw==", "video")) == (b"A", b"B", b"C")
    with pytest.raises(SourceError, match="5000001 frames; the limit is 3"):
        asyncio.run(sources.read("data:video/jpeg;base64," + "," * 5_000_000, "video"))
    for kind in ("image", "audio"):
        with pytest.raises(SourceError, match="video_url"):
            asyncio.run(sources.read("data:video/jpeg;base64,QQ==,Qg==", kind))


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_public_addresses(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),
        *("100.64.0.1", "224.0.0.1", "255.255.255.255", "240.0.0.1", "192.0.2.1", "198.18.0.1"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
        *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b::a00:1"),
        *("2002:7f00:1::", "2002:a00:1::1", "", "localhost", "1", "127.1"),
    ],
)
def test_addresses_that_are_not_public(address: str) -> None:
    assert not is_public(address)


class TestFiles:
    @pytest.fixture
    def read(self, tmp_path: Path) -> Callable[[str], bytes]:
        """Read a URL, with tmp_path/allowed as the only folder."""
        (tmp_path / "allowed" / "inner").mkdir(parents=True)
        (tmp_path / "allowed" / "inner" / "a b.png").write_bytes(b"inside")
        (tmp_path / "allowed" / "large").write_bytes(BODY * 3)
        (tmp_path / "outside").write_bytes(b"outside")
        (tmp_path / "allowed-too").write_bytes(b"outside")
        (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")
        (tmp_path / "allowed" / "loop").symlink_to(tmp_path / "allowed" / "loop")
        (tmp_path / "into").symlink_to(tmp_path / "allowed")
        os.mkfifo(tmp_path / "allowed" / "pipe")
        sources = Sources(Media(folders=(str(tmp_path / "allowed"),), max_bytes=2000))
        return lambda path: asyncio.run(sources.read(f"file://{tmp_path}/{path}"))[0]

    @pytest.mark.parametrize(
        "path", ["allowed/inner/a%20b.png", "into/inner/a b.png", "allowed/../allowed/inner/a b.png"]
    )
    def test_files_in_the_folder_are_read(self, read: Callable[[str], bytes], path: str) -> None:
        assert read(path) == b"inside"

    @pytest.mark.parametrize(
        "path",
        [
            *("outside", "allowed-too", "allowed/../outside", "allowed/%2e%2e/outside", "allowed/link", "allowed/loop"),
            *("allowed/inner", "allowed/none", "allowed/pipe", "allowed/%00", "../../../etc/passwd", "allowed/"),
        ],
    )
    def test_other_files_are_refused_alike(self, read: Callable[[str], bytes], path: str) -> None:
        """The message does not tell whether a file exists."""
        with pytest.raises(SourceError, match=r"^the file is not in an allowed folder .*, or cannot be read$"):
            read(path)

    def test_a_large_file_is_refused(self, read: Callable[[str], bytes]) -> None:
        with pytest.raises(SourceError, match="larger than 2,000 bytes"):
            read("allowed/large")

    def test_hosts_are_refused(self) -> None:
        with pytest.raises(SourceError, match="host"):
            asyncio.run(Sources(Media(folders=("/",))).read("file://evil.com/etc/passwd"))


@pytest.mark.parametrize("size,fits", [(1999, True), (2000, True), (2010, False)])
def test_data_urls_have_a_limit(size: int, fits: bool) -> None:
    import base64

    url = "data:image/png;base64," + base64.b64encode(b"x" * size).decode()
    sources = Sources(Media(max_bytes=2000))
    if fits:
        assert len(asyncio.run(sources.read(url))[0]) == size
    else:
        with pytest.raises(SourceError, match="larger"):
            asyncio.run(sources.read(url))
