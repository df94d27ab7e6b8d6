"""Renewal of the TLS certificate of a running server: the files are read again when they change."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from appliance.security.certificate import Certificate, read_certificate
from appliance.server.http.service import Service
from engine.api.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 5.0


@asynccontextmanager
async def watched(service: Service) -> AsyncIterator[None]:
    """Keep the service's certificate in sync with its files."""
    if service.certificate is None:
        yield
        return
    task = asyncio.create_task(_watch(service, service.certificate))
    try:
        yield
    finally:
        task.cancel()


async def _watch(service: Service, certificate: Certificate) -> None:
    reported: object = None
    while True:
        service.metrics.set("tls_certificate_end_seconds", certificate.ends_s)
        await asyncio.sleep(LOOK_S)
        if not certificate.changed:
            continue
        try:
            certificate.replace_with(await asyncio.to_thread(read_certificate, certificate.tls))
            log.info("endpoints.tls: the certificate was renewed")
            reported = None
        except (ConfigError, OSError) as error:
            if reported != str(error):  # log each error once, not on every check
                log.error("%s; the previous certificate stays in use", error)
                reported = str(error)
