"""The routes of the server."""

import asyncio
import base64
import hashlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trifocal.errors import one_line
from trifocal.serve.answers import Answer
from trifocal.serve.errors import ApiError
from trifocal.serve.pictures import Pictures
from trifocal.serve.service import Call, Service
from trifocal.serve.worker import Updates, Worker

MAX_BODY_BYTES = 2**23
_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_EVENTS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]

# For those whose answers have not ended when the server cancels them, as the time for that is over.
_STOPPED = ApiError(503, "the server was stopped before the answer had ended")


def _hash_of(tag: str) -> str:
    """The source of the page's only element of a kind, as a content security policy names it."""
    content = _PAGE.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


_POLICY = (
    f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')}; img-src data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def make_app(
    service: Service,
    worker: Worker,
    pictures: Pictures | None,
    *,
    api_key: str = "",
    allowed_origins: Sequence[str] = (),
) -> Starlette:
    """The server's application, which starts and stops the worker. Requests to the model need the `api_key`, if any, as
    bearer token; pages of allowed origins may use it, "*": of all.
    """

    def guarded(handler: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            scheme, _, given = request.headers.get("authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else ""
            if api_key and not hmac.compare_digest(given.encode(), api_key.encode()):
                raise ApiError(
                    401, "the API key is missing or wrong", code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )  # fmt: skip
            return await handler(request)

        return checked

    described = {"id": service.name, "object": "model", "created": 0, "owned_by": "trifocal"}
    described |= {"max_model_len": service.max_length, "chats": service.chats, "pictures": pictures is not None}

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [described]})

    async def model(request: Request) -> Response:
        service.check_name(request.path_params["name"])
        return JSONResponse(described)

    def answers(*, chat: bool) -> Callable[[Request], Awaitable[Response]]:
        async def respond(request: Request) -> Response:
            try:
                body = await _read_object(request)
                # Tokenizers and templates take their time with long texts.
                call = await run_in_threadpool(service.read, body, chat=chat)
            except RecursionError as error:
                raise ApiError(400, "the body is nested too deeply") from error
            except asyncio.CancelledError:
                return _response(_STOPPED)
            return _AnswerResponse(worker, pictures, call, Answer(service, call))

        return guarded(respond)

    async def attention(request: Request) -> Response:
        if pictures is None:
            raise ApiError(404, "this server makes no pictures")
        return JSONResponse(await run_in_threadpool(pictures.picture, request.path_params["name"]))

    async def page(request: Request) -> Response:
        return HTMLResponse(_PAGE, headers={"Content-Security-Policy": _POLICY})

    async def health(request: Request) -> Response:
        return PlainTextResponse("the model failed" if worker.failed else "ok", 503 if worker.failed else 200)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(worker.metrics.text(worker.gauges), media_type="text/plain; version=0.0.4")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker.start()
        yield
        worker.stop()

    cors = Middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return Starlette(
        routes=[
            Route("/v1/models", guarded(models)),
            Route("/v1/models/{name:path}", guarded(model)),
            Route("/v1/completions", answers(chat=False), methods=["POST"]),
            Route("/v1/chat/completions", answers(chat=True), methods=["POST"]),
            Route("/", page),
            Route("/attention/{name}", guarded(attention)),
            Route("/health", health),
            Route("/metrics", metrics),
        ],
        exception_handlers={
            ApiError: lambda request, error: _response(error),
            HTTPException: lambda request, error: _response(
                ApiError(error.status_code, str(error.detail), headers=error.headers)
            ),
            ClientDisconnect: lambda request, error: Response(status_code=400),
            Exception: lambda request, error: _response(ApiError(500, "the server failed; its log says why")),
        },
        middleware=[cors] if allowed_origins else [],
        lifespan=lifespan,
    )


class _AnswerResponse(Response):
    """Runs a call and sends its answer; a client that leaves ends it."""

    def __init__(self, worker: Worker, pictures: Pictures | None, call: Call, answer: Answer) -> None:
        self._worker, self._pictures, self._call, self._answer = worker, pictures, call, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._worker.open(self._call.requests) as updates:
            if self._pictures is not None:
                self._pictures.remember(self._answer)
            work = asyncio.create_task(self._stream(updates, send) if self._call.stream else self._whole(updates))
            gone = asyncio.create_task(_until_gone(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    return
                response = work.result()
            except asyncio.CancelledError:
                # Whoever does not read what is sent is left when the server, at its end, cancels once more.
                with suppress(asyncio.CancelledError):
                    if self._call.stream:
                        await _send_part(send, _error_event(_STOPPED), more=False)
                    else:
                        await _response(_STOPPED)(scope, receive, send)
                return
            finally:
                work.cancel()
                gone.cancel()
        if response is not None:
            await response(scope, receive, send)

    async def _whole(self, updates: Updates) -> Response:
        choices = []
        while self._answer.open:
            choices += [self._choice(update) for update in await updates.get()]
        return JSONResponse(self._answer.whole(choices))

    async def _stream(self, updates: Updates, send: Send) -> None:
        answer, begun = self._answer, set[int]()
        await send({"type": "http.response.start", "status": 200, "headers": _EVENTS})
        while answer.open:
            events = ""
            try:
                for update in await updates.get():
                    choice = self._choice(update)
                    if self._call.chat and choice["index"] not in begun:
                        begun.add(choice["index"])
                        events += answer.event(choice | {"logprobs": None, "finish_reason": None}, begins=True)
                    if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                        events += answer.event(choice)
            except ApiError as error:
                await _send_part(send, events + _error_event(error), more=False)
                return
            await _send_part(send, events)
        await _send_part(send, answer.last_events(), more=False)

    def _choice(self, update: Any) -> dict[str, Any]:
        if update.token is None:
            raise ApiError(500, "the model's output is not finite: its weights are broken")
        return self._answer.choice(update)


def _error_event(error: ApiError) -> str:
    return f"data: {json.dumps(error.body)}\n\n"


async def _send_part(send: Send, text: str, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": text.encode(), "more_body": more})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body."""
    # Browsers send no other page's request of this type without asking.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the content type must be application/json")
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body may have {MAX_BODY_BYTES:,} bytes", headers={"Connection": "close"})
    try:
        body = json.loads(content, parse_constant=_no_constant)
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {one_line(error)}") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    return body


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _response(error: Any) -> Response:
    return JSONResponse(error.body, error.status, headers=error.headers)
