"""Request headers that set options, for gateways that cannot change bodies, and the load report in reply headers."""

import re

import orjson
from starlette.requests import Request

from appliance.observability.log import Subject
from appliance.observability.metrics import now
from appliance.server.chat.deadlines import Deadlines
from appliance.server.chat.parsed import Served
from appliance.server.errors.api import BadRequest
from appliance.server.http.body import MAX_INPUT
from appliance.server.http.service import Service
from appliance.server.http.sessions import HEADER as SESSION
from appliance.server.http.sessions import NEW
from appliance.server.routing.placement import Placement
from engine.api.errors import RequestError

_SAGEMAKER = {
    "X-Amzn-SageMaker-Adapter-Alias": "name the adapter in X-Amzn-SageMaker-Adapter-Identifier, or in the field model.",
}
_INTEGER = re.compile(r"-?[0-9]{1,100}")


def served(service: Service, request: Request, request_id: str, model: str | None) -> Served:
    """Return the context in which a request for this model is parsed.

    Headers can set options for gateways that cannot change bodies.
    """
    _check_sagemaker(service, request)
    priority = _integer(request, "X-Vllm-Priority", "priority")
    return Served(
        service.text,
        service.config,
        request_id,
        request.headers.get("x-cache-salt"),
        None if priority is None else max(-(2**63), min(2**63 - 1, priority)),
        request.state.owner,
        1.0 if request.state.key is None else request.state.key.share,
        Deadlines(
            _integer(request, "X-TTFT-Deadline-Ms", "ttft_deadline_ms"),
            _integer(request, "X-Deadline-Ms", "deadline_ms"),
        ),
        now(),
        request.state.key is None or request.state.key.priority,
        service.adapter_of(model),
    )


def _check_sagemaker(service: Service, request: Request) -> None:
    """Raise BadRequest for a SageMaker header that requests an unsupported feature or names no open session."""
    session = request.headers.get(SESSION)
    if session and not (session == NEW and service.sessions.keep_s):
        service.sessions.check(session)
    for name, reason in _SAGEMAKER.items():
        if request.headers.get(name):
            raise BadRequest(f"{name} is not supported: {reason}", name)


def placement(request: Request) -> Placement:
    """Return the engine placement that the request's headers ask for (RT-06), with its span and its media times."""
    rank = _integer(request, "X-data-parallel-rank", "X-data-parallel-rank")
    session = request.headers.get("x-session-id", "") or request.headers.get(SESSION, "")
    subject: Subject = request.state.subject
    return Placement(rank, "" if session == NEW else session, subject.span, subject.media)


def _integer(request: Request, name: str, param: str) -> int | None:
    given = request.headers.get(name)
    if given is None:
        return None
    if not _INTEGER.fullmatch(given):
        raise RequestError(f"{name} must be an integer, got {given[:MAX_INPUT]!r}.", param)
    return int(given)


def load_header(service: Service, request: Request) -> dict[str, str]:
    """Return the `endpoint-load-metrics` header for load balancers that send `endpoint-load-metrics-format` (RT-06).

    The value is an Open Request Cost Aggregation report in TEXT or JSON format. Other formats are ignored.
    """
    wanted = request.headers.get("endpoint-load-metrics-format", "").strip().upper()
    if wanted not in ("TEXT", "JSON"):
        return {}
    load = service.router.load()
    metrics = {"kv_cache_usage_perc": round(load.kv_cache_usage, 6), "num_requests_waiting": load.waiting}
    if wanted == "JSON":
        report = orjson.dumps({"named_metrics": metrics}).decode()
    else:
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in metrics.items())
    return {"endpoint-load-metrics": f"{wanted} {report}"}
