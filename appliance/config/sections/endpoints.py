"""Address and protocol of the service: `endpoints`."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from appliance.config.key import GATEWAY, LIVE, SERVICE, Limit, Note, Switch, declare
from appliance.config.sections.values import Bytes, Count, Seconds, SecretName, Section


class EndpointTls(Section):
    certificate: str | None = declare(
        None, effect=LIVE, affects="gateway.tls", is_path=True, example="/run/secrets/tls/tls.crt"
    )
    """PEM file of the certificate and its chain; with it the port accepts only TLS."""
    key: str | None = declare(
        None, effect=LIVE, affects="gateway.tls", is_path=True, example="/run/secrets/tls/tls.key"
    )
    """PEM file of the private key, without a passphrase."""
    least_version: Literal["TLSv1.2", "TLSv1.3"] = declare("TLSv1.2", effect=LIVE, affects="gateway.tls")
    """Minimum version of TLS."""


class Responses(Section):
    keep: Seconds = declare(
        86400.0,
        effect=GATEWAY,
        clients=Note("stored responses are kept for another time"),
        example="1h",
    )
    """Retention of a stored response after its end; 0s stores none and disables background responses."""
    size: Bytes = declare(
        64 * 2**20,
        effect=GATEWAY,
        clients=Note("another number of responses is stored before the oldest are dropped"),
        example="256MiB",
    )
    """Maximum bytes of all stored responses; the oldest are deleted first. The file may have about twice the size."""
    count: Count = declare(
        10_000,
        effect=GATEWAY,
        clients=Note("another number of responses is stored before the oldest are dropped"),
        example=1000,
    )
    """Maximum number of stored responses; the oldest are deleted first."""


class Sessions(Section):
    keep: Seconds = declare(
        0.0,
        effect=GATEWAY,
        clients=Note("sessions of SageMaker are available, or end after another time"),
        example="20m",
    )
    """Lifetime of a stateful session of Amazon SageMaker, whose requests run on the same engine; 0s disables them."""
    max_open: Count = declare(
        10_000,
        effect=GATEWAY,
        clients=Limit("a new session closes the oldest one"),
        example=1000,
    )
    """Maximum number of open sessions; a new one closes the oldest."""


def _route_path(path: str) -> str:
    """Return the path of a route. Raise ValueError. The gateway removes a slash at the end of the paths of requests."""
    if not re.fullmatch(r"/([\w.~!$&'()*+,;=:@-]+(/[\w.~!$&'()*+,;=:@-]+)*)?", path, re.ASCII):
        raise ValueError("must be a path such as /score: it starts with /, does not end with it, and has no escapes")
    return path


RoutePath = Annotated[str, AfterValidator(_route_path)]


class Routes(Section):
    health: tuple[RoutePath, ...] = declare(
        (),
        effect=GATEWAY,
        clients=Note("the health of the service is reported at other paths"),
        example=["/healthz"],
        strict=False,
    )
    """More paths with the reply of GET /health, without an API key, for platforms that prescribe one."""
    predict: tuple[RoutePath, ...] = declare(
        (),
        effect=GATEWAY,
        clients=Note("predictions are served at other paths"),
        example=["/score"],
        strict=False,
    )
    """More paths for POST requests with {instances, parameters}, or with a body of POST /invocations. Existing routes
    have precedence."""


class Connections(Section):
    max: Count = declare(8192, effect=LIVE, clients=Limit("more connections get 503"), example=20000)
    """Maximum open client connections, less if the limit of open files is lower. A new one closes the one that has been
    idle longest, or gets 503 if none is idle."""
    max_idle: Count = declare(
        1024,
        effect=LIVE,
        clients=Limit("more idle connections are closed"),
        example=256,
    )
    """Maximum connections without a request in progress; the one that has been idle longest is closed first."""
    max_per_address: Count = declare(
        2048,
        effect=LIVE,
        clients=Limit("more connections of one address get 503"),
        examples=(64, 20000),
    )
    """Maximum connections of one client address or IPv6 /64 network. Raise it if clients use a single proxy."""
    max_head: Annotated[Bytes, Field(le=2**20)] = declare(
        64 * 2**10,
        effect=LIVE,
        clients=Limit("larger request heads get 431"),
        example="16KiB",
    )
    """Maximum size of request line and headers, and of trailers; larger ones get 431."""
    max_headers: Annotated[int, Field(ge=1, le=1000)] = declare(
        100,
        effect=LIVE,
        clients=Limit("more header fields get 431"),
        example=200,
    )
    """Maximum header fields of a request; more get 431."""
    head_timeout: Annotated[Seconds, Field(gt=0)] = declare(
        15.0,
        effect=LIVE,
        clients=Limit("slower request heads get 408"),
        example="5s",
    )
    """Time limit of the TLS handshake and of the request head; a later head gets 408, and a connection without any byte
    is closed."""
    body_timeout: Annotated[Seconds, Field(gt=0)] = declare(
        60.0,
        effect=LIVE,
        clients=Limit("slower request bodies get 408"),
        example="5m",
    )
    """Time limit of a request body; a later one gets 408."""


class Endpoints(Section):
    # the launcher searches for a free port and configures health checks
    host: str = declare(
        "0.0.0.0",
        effect=SERVICE,
        aliases={"TGI": "hostname", "synonyms": ("address", "bind", "listen")},
        clients=Note("the service listens on another address"),
        flags=("-H", "--host"),
        examples=("127.0.0.1", "::"),
    )
    """Address of the gateway."""
    port: Annotated[int, Field(ge=0, le=65535)] = declare(
        8000,
        effect=SERVICE,
        aliases={"NVIDIA NIM": "NIM_SERVER_PORT"},
        clients=Note("the service is reached on another port"),
        flags=("-p", "--port"),
        example=8080,
    )
    """Port of the gateway; 0 selects a free one."""
    grpc_port: Annotated[int, Field(ge=1, le=65535)] | None = declare(
        None,
        effect=GATEWAY,
        clients=Note("the Open Inference Protocol is served over gRPC on another port, or not at all"),
        example=8081,
    )
    """Port of the Open Inference Protocol over gRPC; it needs the extra `grpc`. KServe's port is 8081."""
    api_keys: SecretName | None = declare(
        None,
        effect=LIVE,
        affects="gateway.api_keys",
        aliases={"vLLM": "api_key", "synonyms": "auth"},
        example="clients",
    )
    """Name in `secrets` of a list of keys, one per line; every route except probes then requires one of them."""
    invocations_without_key: bool = declare(
        False,
        effect=LIVE,
        clients=Note("POST /invocations needs an API key or none"),
    )
    """Serve POST /invocations without an API key, because Amazon SageMaker sends none; everyone who reaches the port
    can then generate."""
    tls: EndpointTls = EndpointTls()
    """TLS of the port. Changed files are read again."""
    compat: Literal["openai", "vllm"] = declare(
        "openai",
        effect=LIVE,
        clients=Note("usage, reasoning field names, the request ID header and some errors follow another API"),
    )
    """Behaviour where the OpenAI service and vLLM differ; docs/http.md#profiles lists all differences."""
    unknown_fields: Literal["refuse", "warn", "ignore"] = declare(
        "warn",
        effect=LIVE,
        clients=Note("unknown request fields are rejected, logged or ignored"),
    )
    """Treatment of unknown request fields: reply 400, log each field once, or ignore them."""
    cors_origins: tuple[str, ...] = declare(
        (),
        effect=LIVE,
        aliases={
            "vLLM": "allowed_origins",
            "TGI": "cors_allow_origin",
            "synonyms": ("allow_origins", "cors_allowed_origins"),
        },
        example=["https://chat.example.com"],
        strict=False,
    )
    """Web origins that may call the API from a browser; * permits all."""
    keep_alive: Seconds = declare(
        75.0,
        effect=LIVE,
        clients=Note("idle connections are closed after another time"),
        examples=("65s", "10m"),
    )
    """Time after which a connection without a request is closed (set it above a load balancer's idle timeout);
    0s closes it after each reply."""
    stream_keep_alive: Seconds = declare(
        15.0,
        effect=LIVE,
        clients=Note("silent streams send keep-alive comments at another interval"),
        example="5s",
    )
    """Pause of a stream after which a comment is sent, so that proxies keep it open; 0s disables it."""
    connections: Connections = Connections()
    """Limits on client connections, applied before API keys are checked."""
    trust_request_chat_template: bool = declare(
        False,
        effect=LIVE,
        clients=Switch(off="requests with a chat_template get 400", on="requests may contain a chat_template"),
    )
    """Permit a request to contain its own chat_template."""
    responses: Responses = Responses()
    """Store of /v1/responses; it survives a restart of the service if lifecycle.journal.folder is set."""
    sessions: Sessions = Sessions()
    """Stateful sessions of Amazon SageMaker."""
    routes: Routes = Routes()
    """Routes whose paths a hosting platform prescribes."""
    docs: bool = declare(
        True,
        effect=LIVE,
        clients=Switch(off="/docs and /openapi.json get 404", on="/docs and /openapi.json are served"),
    )
    """Serve the OpenAPI description at /openapi.json and its page at /docs."""
    page: bool = declare(
        True,
        effect=LIVE,
        clients=Switch(off="the page at / gets 404", on="the page at / is served"),
    )
    """Serve a web page at /, with a playground and the status of the service. Its files need no API key."""
