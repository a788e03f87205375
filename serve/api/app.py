"""The HTTP application."""

import hmac
import time
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Lifespan, Receive, Scope, Send

from dspark_jax.tokenizer import ChatTokenizer
from serve.api.errors import ApiError
from serve.api.generate import Generate, Serving
from serve.api.metrics import Metrics
from serve.api.protocol import ChatRequest, CompletionRequest
from serve.engine.request import Engine

OUTCOMES = {429: "busy", 503: "unavailable"}


def create_app(
    engine: Engine,
    tokenizer: ChatTokenizer,
    model_name: str,
    *,
    api_key: str | None = None,
    max_body_bytes: int = 4 << 20,
    client_timeout: float = 60.0,
    metrics: Metrics | None = None,
    lifespan: Lifespan[Starlette] | None = None,
) -> Starlette:
    """An application that answers as OpenAI's API does, with `engine`.

    Args:
      model_name: what clients call the model.
      api_key: that clients must send as a bearer token; None lets everyone in.
      max_body_bytes: of a request.
      client_timeout: seconds that a client may take to send its body, or to take a chunk of its answer.
      metrics: those that the engine sets too.
      lifespan: starts and stops the engine on the event loop.

    Its `state.serving` has `draining` and `active`, see `serve.api.server`.
    """
    metrics = metrics or Metrics()
    serving = Serving(engine, tokenizer, model_name, metrics, max_body_bytes, client_timeout)
    model = {"id": model_name, "object": "model", "created": int(time.time()), "owned_by": "dspark-jax",
             "max_model_len": engine.max_length}  # fmt: skip

    async def health(request: Request) -> Response:
        state = "draining" if serving.draining else "ok" if engine.healthy else "down"
        return JSONResponse({"status": state}, 200 if state == "ok" else 503)

    async def tell_metrics(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [model]})

    async def tell_model(request: Request) -> Response:
        if request.path_params["name"] != model_name:
            raise ApiError(404, f"There is no such model, only {model_name!r}.", param="model", code="model_not_found")
        return JSONResponse(model)

    routes = [
        Route("/v1/chat/completions", Generate(serving, ChatRequest), methods=["POST"]),
        Route("/v1/completions", Generate(serving, CompletionRequest), methods=["POST"]),
        Route("/v1/models", list_models),
        Route("/v1/models/{name:path}", tell_model),
        Route("/health", health),
        Route("/metrics", tell_metrics),
    ]
    paths = {route.path for route in routes}

    async def refuse(request: Request, error: Any) -> Response:
        if isinstance(error, HTTPException):
            error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}.",
                             headers=dict(error.headers or {}))  # fmt: skip
        elif not isinstance(error, ApiError):  # its traceback is in the server's log
            error = ApiError(500, "The server failed.", code="internal")
        outcome = OUTCOMES.get(error.status, "refused" if error.status < 500 else "error")
        path = request.url.path if request.url.path in paths else "other"
        metrics.requests.labels(path, outcome).inc()
        return error.response()

    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequireKey, key=api_key)] if api_key is not None else [],
        exception_handlers={ApiError: refuse, HTTPException: refuse, Exception: refuse},
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.state.serving = serving
    return app


class RequireKey:
    """Lets into /v1 only who sends `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.expected = app, key.strip().encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            sent = Headers(scope=scope).get("authorization", "").encode("latin-1")  # the bytes as they came
            scheme, _, given = sent.partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self.expected):
                error = ApiError(401, "The API key is missing or wrong; send it as `Authorization: Bearer KEY`.",
                                 code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})  # fmt: skip
                return await error.response()(scope, receive, send)
        await self.app(scope, receive, send)
