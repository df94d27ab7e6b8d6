"""TLS of the gateway: real connections, certificates that are renewed under open streams, and files that are wrong."""

import asyncio
import ssl
import threading

import httpx
import pytest

from appliance.config.gateway import Tls
from appliance.runtime import probe
from appliance.security.certificate import read_certificate
from appliance.server import certificate_renewal
from engine.api.errors import ConfigError
from tests.appliance.certificates import write_certificate
from tests.appliance.conftest import until


def tls(folder, name: str = "a") -> Tls:
    return Tls(certificate=str(folder / f"{name}.crt"), key=str(folder / f"{name}.key"))


@pytest.fixture
def gateway(start_gateway, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(certificate_renewal, "LOOK_S", 0.02)
    write_certificate(tmp_path, "a")
    return start_gateway(engine, tls=tls(tmp_path))


def trusting(folder, name: str) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / f"{name}.crt"))


def reached(gateway, context: ssl.SSLContext) -> bool:
    url = gateway.url.replace("127.0.0.1", "localhost")
    try:
        return httpx.get(f"{url}/ready", verify=context).status_code == 200
    except httpx.ConnectError:
        return False


def test_only_clients_that_trust_the_certificate_connect(gateway, tmp_path):
    assert reached(gateway, trusting(tmp_path, "a"))
    assert not reached(gateway, ssl.create_default_context())


def test_clients_without_tls_get_no_reply(gateway):
    with pytest.raises(httpx.TransportError):
        httpx.get(gateway.url.replace("https", "http") + "/ready")


def test_own_probe_uses_tls(gateway):
    address = httpx.URL(gateway.url)
    answer = asyncio.run(probe.get(address.host, address.port, "/ready", 30.0, tls=True))
    assert answer is not None and answer[0] == 200


def test_renewed_certificate_is_used_and_open_streams_continue(gateway, engine, tmp_path):
    engine.holding = True
    pieces: list[str] = []
    body = {"prompt": [1], "max_tokens": 2, "stream": True}
    with gateway.client.stream("POST", "/test/generate", json=body) as reply:
        reading = threading.Thread(target=lambda: pieces.extend(reply.iter_text()))
        reading.start()
        until("it runs", lambda: len(engine.open) == 1)
        before = trusting(tmp_path, "a")
        write_certificate(tmp_path, "a")
        after = trusting(tmp_path, "a")
        until("new connections get the new certificate", lambda: reached(gateway, after))
        assert not reached(gateway, before)
        engine.give(2)
        reading.join()
    assert "".join(pieces).count("data: ") >= 2


def test_an_unusable_certificate_is_reported_and_the_previous_one_stays(gateway, tmp_path, caplog):
    before = trusting(tmp_path, "a")
    (tmp_path / "a.crt").write_text("-----BEGIN CERTIFICATE-----\nhalf of i")
    until("it is told", lambda: any("contains no PEM certificate" in each.getMessage() for each in caplog.records))
    assert reached(gateway, before)
    told = [each for each in caplog.records if "contains no PEM" in each.getMessage()]
    write_certificate(tmp_path, "a")
    until("a good one is taken", lambda: reached(gateway, trusting(tmp_path, "a")))
    assert len(told) == 1, "once, not at every look"


def test_expiry_time_is_a_metric(gateway, tmp_path):
    ends = read_certificate(tls(tmp_path)).ends_s
    until("it is told", lambda: gateway.metric("slipway_tls_certificate_end_seconds") == ends)


def test_expired_certificate_is_logged_and_used(tmp_path, caplog):
    write_certificate(tmp_path, "old", days=-1)
    assert read_certificate(tls(tmp_path, "old")).ends_s > 0
    assert "expired" in caplog.text and "renew it" in caplog.text


def test_error_names_the_wrong_file_and_the_reason(tmp_path):
    write_certificate(tmp_path, "a")
    write_certificate(tmp_path, "b")
    write_certificate(tmp_path, "locked", passphrase=b"word")
    (tmp_path / "text").write_text("no certificate")
    a_crt, a_key = str(tmp_path / "a.crt"), str(tmp_path / "a.key")
    for given, words in (
        (Tls(certificate=str(tmp_path / "none"), key=a_key), ("endpoints.tls.certificate", "cannot be read")),
        (Tls(certificate=a_crt, key=str(tmp_path / "none")), ("endpoints.tls.key", "cannot be read")),
        (Tls(certificate=str(tmp_path / "text"), key=a_key), ("endpoints.tls.certificate", "no PEM")),
        (Tls(certificate=a_crt, key=str(tmp_path / "b.key")), ("endpoints.tls.key", "is not the private key of")),
        (Tls(certificate=a_crt, key=str(tmp_path / "text")), ("endpoints.tls.key", "is not the private key of")),
        (tls(tmp_path, "locked"), ("endpoints.tls.key", "without a passphrase")),
    ):
        with pytest.raises(ConfigError) as refused:
            read_certificate(given)
        assert all(word in str(refused.value) for word in words), str(refused.value)
