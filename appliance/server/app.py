"""The gateway's HTTP application: lists of all route groups and middleware."""

from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route

from appliance.server.admin import docs, health, metrics, page, profile, usage, why
from appliance.server.anthropic import routes as messages
from appliance.server.cohere import routes
from appliance.server.errors.api import NotFound, TaskNotServed
from appliance.server.http.inflate import Inflate
from appliance.server.http.service import Service, service_of
from appliance.server.middleware import Allowance, Auth, BodyLimit, CrossOrigin, Drain, Errors, Load, RequestFrame
from appliance.server.openai import adapters, chat, completions, label_scores, models, tokens
from appliance.server.openai.responses import routes as responses
from appliance.server.openai.responses.store import ResponseStore
from appliance.server.platforms import invocations, kserve, multi_model, predict
from appliance.server.pooling import embeddings, encode, scoring
from appliance.server.speech import realtime
from appliance.server.speech import routes as speech

Need = str | tuple[str, ...] | None

ROUTES: tuple[tuple[Need, APIRouter], ...] = (
    (None, health.router),
    (None, metrics.router),
    (None, models.router),
    (None, profile.router),
    (None, usage.router),
    (None, adapters.router),
    (None, multi_model.router),
    (None, tokens.router),
    (None, page.router),
    ("generate", chat.router),
    ("generate", completions.router),
    ("generate", label_scores.router),
    ("generate", messages.router),
    ("generate", responses.router),
    ("transcribe", speech.router),
    ("transcribe", realtime.router),
    (("embed", "token_embed"), embeddings.embeddings),
    (embeddings.POOLING_TASKS, embeddings.pooling),
    ("classify", embeddings.classification),
    ("score", scoring.router),
    ("embed", routes.router),
    ("encode", encode.router),
    (("generate", *embeddings.POOLING_TASKS), invocations.router),
    (("generate", *embeddings.POOLING_TASKS), predict.router),
    (None, kserve.router),
    (kserve.TASKS, kserve.inference),
    ("generate", kserve.generation),
    (("generate", *embeddings.POOLING_TASKS), why.router),
)
"""Route groups with the model task that they need, or several tasks of which one is sufficient. None: any model."""


def middleware(service: Service) -> list[Middleware]:
    """Return the middleware, the outermost first."""
    return [
        Middleware(RequestFrame, service=service),
        Middleware(CrossOrigin, service=service),
        Middleware(Errors, service=service),
        Middleware(Drain, service=service),
        Middleware(Auth, service=service),
        Middleware(Allowance, service=service),
        Middleware(BodyLimit, service=service),
        Middleware(Inflate, service=service),
        Middleware(Load, service=service),
    ]


def build_app(service: Service) -> FastAPI:
    """Build the application for one served model.

    If API keys are configured, all routes except the probes require one.
    """
    app = FastAPI(
        title="Slipway",
        version=service.config.version,
        # FastAPI's pages load scripts from the network; docs.py serves pages that need none.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware(service),
        exception_handlers={HTTPException: _pass_on, RequestValidationError: _pass_on},
    )
    app.state.service = service
    reply_store = service.stored_responses
    app.state.responses = None if reply_store is None else ResponseStore(service, reply_store)
    # The routes themselves, because include_router makes copies at the first request: 2 ms of CPU time for each route.
    for router in routers(service):
        app.router.routes.extend(router.routes)
    app.state.undescribed = frozenset(
        route.path for router in _undescribed(service) for route in router.routes if isinstance(route, Route)
    )
    for need, router in ROUTES:
        if not _serves(service, need):
            app.router.routes.extend(_absent(router, need))
    return app


def _undescribed(service: Service) -> list[APIRouter]:
    """Return the groups that /openapi.json leaves out: without folders, the routes of adapters and of the profiler only
    name the key that they need."""
    absent = [] if service.config.adapter_folders else [adapters.router, multi_model.router]
    return [*absent, *([] if service.config.profiler else [profile.router])]


def _tasks(need: Need) -> tuple[str, ...]:
    return (need,) if isinstance(need, str) else need or ()


def _serves(service: Service, need: Need) -> bool:
    return need is None or any(task in service.tasks for task in _tasks(need))


def _named(task: str) -> str:
    return "embeddings of media (model.media.encoder_only)" if task == "encode" else task


def _absent(router: APIRouter, need: Need) -> list[Route]:
    """Return replacement routes for a task that the model does not support. They report which tasks it serves.

    The status is 404, or 501 with the vllm profile.
    """

    async def refuse(request: Request) -> Response:
        service = service_of(request)
        absent = NotFound if service.config.endpoints.compat == "openai" else TaskNotServed
        raise absent(
            f"The model `{service.config.names[0]}` does not support {request.url.path}, which needs a model that "
            f"serves {' or '.join(map(_named, _tasks(need)))}; it serves "
            f"{', '.join(map(_named, service.tasks)) or 'none of the tasks'}.",
            "model",
        )

    return [
        Route(route.path, refuse, methods=sorted(route.methods or ()), include_in_schema=False)
        for route in router.routes
        if isinstance(route, Route)
    ]


def routers(service: Service) -> list[APIRouter]:
    """Return the route groups of this service."""
    served = [router for need, router in ROUTES if _serves(service, need)]
    return [predict.health_routes(service), *served, docs.router, predict.predict_routes(service)]


async def _pass_on(request: Request, error: Exception) -> Any:
    """Exception handler that passes FastAPI's own errors to `Errors`.

    A route knows only its own method, so Allow is combined here for paths with several routes.
    """
    if isinstance(error, HTTPException) and error.status_code == 405:
        paths = [route for router in routers(request.app.state.service) for route in router.routes]
        found = [route for route in paths if isinstance(route, Route) and route.path_regex.match(request.url.path)]
        methods = {method for route in found for method in route.methods or ()}
        if "GET" in methods:
            methods.add("HEAD")
        if methods:
            error.headers = {"Allow": ", ".join(sorted(methods))}
    raise error
