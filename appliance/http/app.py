"""The gateway's HTTP application: every route group and every middleware stands in a list here."""

from collections.abc import Sequence

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from appliance.http import chat, completions, docs, health, invocations, metrics, models, tokens
from appliance.http.middleware import Auth, BodyLimit, Drain, Errors, Load, RequestFrame, pass_on
from appliance.http.service import Service

ROUTES: tuple[tuple[str | None, APIRouter], ...] = (
    (None, health.router),
    (None, metrics.router),
    (None, models.router),
    (None, tokens.router),
    ("generate", chat.router),
    ("generate", completions.router),
    ("generate", invocations.router),
)
"""Route groups with the task of the model that they need; None: any model."""


def middleware(service: Service, keys: Sequence[str]) -> list[Middleware]:
    """Outermost first."""
    config = service.config
    return [
        Middleware(RequestFrame, service=service),
        *_cross_origin(config.cors_origins),
        Middleware(Errors, service=service),
        Middleware(Drain, service=service),
        *([Middleware(Auth, keys=keys)] if keys else []),
        Middleware(BodyLimit, limit=config.max_body_bytes),
        Middleware(Load, service=service),
    ]


def build_app(service: Service, keys: Sequence[str] = ()) -> FastAPI:
    """The application of one served model. With `keys`, every route but the probes wants one of them."""
    app = FastAPI(
        title="Slipway",
        version=service.config.version,
        # Their pages load scripts from the network; docs.py serves pages that need none.
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=middleware(service, keys),
        exception_handlers={HTTPException: pass_on, RequestValidationError: pass_on},
    )
    app.state.service = service
    for task, router in ROUTES:
        if task is None or task in service.tasks:
            app.include_router(router)
    if service.config.docs:
        app.include_router(docs.router)
    return app


def _cross_origin(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    exposed = ["X-Request-Id", "Retry-After"]
    return [
        Middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=exposed
        )
    ]
