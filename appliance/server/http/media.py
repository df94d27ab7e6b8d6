"""Loading of a request's media, before its prompt is rendered."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from starlette.requests import Request

from appliance.config.gateway import GatewayConfig
from appliance.media.part import LoadedMedia, MediaPart
from appliance.observability.log import MediaLoad, Subject
from appliance.observability.metrics import now
from appliance.server.chat.media import only
from appliance.server.http.disconnect import until_disconnect
from appliance.server.http.pipeline import Call
from appliance.server.http.service import service_of
from engine.api.errors import RequestError


async def load_media(request: Request, parts: Iterable[MediaPart]) -> LoadedMedia:
    """Return the processed media. Raise RequestError that names the field of an item.

    `parts` is not read for a model that accepts only text: its prompts refuse media.
    """
    service = service_of(request)
    loader = service.media
    found = list(parts) if loader is not None else []
    if loader is None or not found:
        return {}
    _check_kinds(found, service.config)
    stages: list[tuple[float, float]] = []

    def record(fetch_s: float, process_s: float) -> None:
        stages.append((fetch_s, process_s))
        service.metrics.media_loaded(fetch_s, process_s)

    start_s = now()
    loaded = await until_disconnect(request, loader.load(found, request.state.owner, record))
    subject: Subject = request.state.subject
    request.state.subject = replace(subject, media=MediaLoad(start_s, tuple(stages)))
    if subject.span is not None:
        cached = sum(not process_s for _, process_s in stages)
        subject.span.add_media(start_s, now(), len(stages), cached)
    return loaded


def _check_kinds(parts: Sequence[MediaPart], config: GatewayConfig) -> None:
    """Raise RequestError for an item that the model does not accept."""
    for part in parts:
        if part.embeddings and part.kind not in config.embedded_modalities:
            raise RequestError(
                f"{part.where}: embeddings of the type {part.kind} are not accepted (model.media.accept_embeddings).",
                part.where,
            )
        if not part.embeddings and part.kind not in config.modalities:
            accepted = only(config.modalities) if config.modalities else "text, and embeddings of media"
            raise RequestError(f"{part.where}: {part.kind} is not supported; the model accepts {accepted}.", part.where)


async def with_media(call: Call, parts: Iterable[MediaPart]) -> Call:
    """Return the call with its media. Raise the errors of `load_media`."""
    return replace(call, context=replace(call.context, media=await load_media(call.request, parts)))
