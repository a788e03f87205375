"""The endpoints that generate: from a request's body to its answer, whole or streamed."""

import asyncio
import dataclasses
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dspark_jax.tokenizer import ChatTokenizer
from serve.api.answers import Form, usage
from serve.api.errors import ApiError
from serve.api.logprobs import TokenTexts
from serve.api.metrics import Metrics
from serve.api.prompts import prepare
from serve.api.protocol import ChatRequest, CompletionRequest
from serve.api.text import AnswerText, Piece
from serve.engine.request import Engine, QueueFull, Stream, Usage

INLINE_BYTES = 8192
"""Bodies up to this size are read and encoded on the event loop; larger ones would hold up other requests."""

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store"),
                (b"x-accel-buffering", b"no")]  # fmt: skip

log = logging.getLogger(__name__)

to_json = json.JSONEncoder(separators=(",", ":")).encode  # ASCII: some clients take U+2028 for the end of a line


@dataclasses.dataclass
class Serving:
    """What all requests share.

    Attributes:
      client_timeout: seconds that a client may take to send its body, or to take a chunk of its answer.
      draining: new requests are turned away, running ones finish.
      active: requests between their first byte and their last.
    """

    engine: Engine
    tokenizer: ChatTokenizer
    model: str
    metrics: Metrics
    max_body_bytes: int
    client_timeout: float
    draining: bool = False
    active: int = 0

    def __post_init__(self) -> None:
        self.texts = TokenTexts(self.tokenizer)


class Answer:
    """One of a request's answers while it is made."""

    def __init__(self, index: int, stream: Stream, text: AnswerText, usage: Usage):
        self.index, self.stream, self.text, self.usage = index, stream, text, usage
        self.pieces: list[Piece] = []


Emit = Callable[[Answer, Piece], Awaitable[None]]


@dataclasses.dataclass(frozen=True)
class Generate:
    """An endpoint, as an ASGI application."""

    serving: Serving
    kind: type[ChatRequest | CompletionRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.serving.active += 1
        try:
            await Exchange(self.serving, self.kind, scope, receive, send).run()
        finally:
            self.serving.active -= 1


class Exchange:
    """One request and its answers."""

    def __init__(self, serving: Serving, kind: type[ChatRequest | CompletionRequest], scope: Scope, receive: Receive,
                 send: Send):  # fmt: skip
        self.serving, self.kind, self.metrics = serving, kind, serving.metrics
        self.scope, self.receive, self.send = scope, receive, send
        self.answers: list[Answer] = []
        self.first: float | None = None

    async def run(self) -> None:
        """Answers, and leaves nothing running in the engine however it ends.

        Raises:
          ApiError: the request is refused, or failed before its answer began.
        """
        outcome, begun = "error", False
        try:
            if self.serving.draining or not self.serving.engine.healthy:
                raise ApiError(503, "The server takes no requests now.", code="unavailable", retry_after=10)
            body = await self._read_body()
            self.start = time.perf_counter()
            options = (self.kind, self.serving.model, self.serving.tokenizer, self.serving.engine.max_length)
            if len(body) <= INLINE_BYTES:
                self.job = prepare(body, *options)
            else:
                self.job = await asyncio.to_thread(prepare, body, *options)
            self._submit()
            asked = self.job.asked
            self.form = Form(
                self.kind is ChatRequest, asked.model, self.serving.texts, logprobs=asked.top is not None,
                include_usage=asked.stream_options is not None and asked.stream_options.include_usage,
            )  # fmt: skip
            begun = True
            outcome = await _unless_gone(self.receive, self._stream() if asked.stream else self._whole())
        except ClientDisconnect:
            outcome = "gone"
        finally:
            for answer in self.answers:
                answer.stream.cancel()
            if begun:
                self._record(outcome)
        self.metrics.requests.labels(self.scope["path"], outcome).inc()

    async def _read_body(self) -> bytes:
        """The body.

        Raises:
          ApiError: 413, as soon as it is known to be too long; 408, it does not come.
        """
        request, limit = Request(self.scope, self.receive), self.serving.max_body_bytes
        too_long = ApiError(413, f"The body is longer than {limit} bytes.", code="body_too_long")
        if int(request.headers.get("content-length", 0)) > limit:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(self.serving.client_timeout):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_long
        except TimeoutError as error:
            raise ApiError(408, "The body did not come in time.", code="timeout") from error
        return bytes(body)

    def _submit(self) -> None:
        """Hands the requests to the engine.

        Raises:
          ApiError: it refuses one of them; those before it are cancelled by `run`.
        """
        asked, capacity = self.job.asked, self.serving.engine.capacity
        if len(self.job.requests) > capacity:
            raise ApiError(
                400, f"The request asks for {len(self.job.requests)} answers; at most {capacity} run and wait here.",
                param="n", code="invalid_value",
            )  # fmt: skip
        for index, request in enumerate(self.job.requests):
            try:
                stream = self.serving.engine.submit(request)
            except QueueFull as error:
                raise ApiError(429, f"{error}", code="queue_full", retry_after=error.retry_after) from error
            except ValueError as error:
                raise ApiError(400, f"{error}", code="invalid_value") from error
            text = AnswerText(self.serving.tokenizer, asked.stop, asked.min_tokens)
            self.answers.append(Answer(index, stream, text, Usage(len(request.prompt))))

    async def _whole(self) -> str:
        async def keep(answer: Answer, piece: Piece) -> None:
            answer.pieces.append(piece)

        await self._follow_all(keep)
        n = self.job.asked.n
        choices = [
            (
                answer.index,
                Piece(
                    self.job.texts[answer.index // n] + "".join(piece.text for piece in answer.pieces),
                    tuple(entry for piece in answer.pieces for entry in piece.logprobs),
                ),
                str(answer.text.finish_reason),
            )
            for answer in self.answers
        ]
        body = to_json(self.form.whole(choices, self._usage()))
        await Response(body, media_type="application/json")(self.scope, self.receive, self.send)
        return "ok"

    async def _stream(self) -> str:
        async def emit(answer: Answer, piece: Piece) -> None:
            if piece:
                await self._write(self.form.chunk(answer.index, piece))
            if answer.text.finish_reason is not None:
                await self._write(self.form.closing(answer.index, answer.text.finish_reason))

        await self.send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
        outcome = "ok"
        try:
            for answer in self.answers:
                if opening := self.form.opening(answer.index, self.job.texts[answer.index // self.job.asked.n]):
                    await self._write(opening)
            await self._follow_all(emit)
            if self.form.include_usage:
                await self._write(self.form.usage_chunk(self._usage()))
            await self._write("[DONE]")
        except ApiError as error:  # the status is sent; without [DONE] no client takes the text for whole
            await self._write(error.body)
            outcome = "error"
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome

    async def _write(self, event: dict | str) -> None:
        data = event if isinstance(event, str) else to_json(event)
        try:
            async with asyncio.timeout(self.serving.client_timeout):
                await self.send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
        except TimeoutError as error:
            raise ClientDisconnect from error

    async def _follow_all(self, emit: Emit) -> None:
        """Takes all answers to their ends; the first that fails ends the others."""
        try:
            async with asyncio.TaskGroup() as group:
                for answer in self.answers:
                    group.create_task(self._follow(answer, emit))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _follow(self, answer: Answer, emit: Emit) -> None:
        last = None
        try:
            async for output in answer.stream:
                self.metrics.count(output.usage, answer.usage if last else Usage(0))
                now = time.perf_counter()
                if output.tokens and self.first is None:
                    self.first = now - self.start
                    self.metrics.time_to_first_token.observe(self.first)
                elif output.tokens and last is not None:
                    self.metrics.inter_token.observe((now - last) / len(output.tokens))
                last = now
                piece = answer.text.add(output)
                answer.usage = output.usage
                if answer.text.finish_reason in ("abort", "error"):
                    raise ApiError(500, f"The answer was broken off ({answer.text.finish_reason}).", code="broken_off")
                if answer.text.finish_reason is not None:
                    answer.stream.cancel()  # the engine knows nothing of stop strings
                    return await emit(answer, piece)
                await emit(answer, piece)
        except (ApiError, ClientDisconnect):
            raise
        except Exception as error:
            log.exception("a stream of the engine failed")
            raise ApiError(500, "The engine failed.", code="engine_failed") from error
        raise ApiError(500, "The engine broke the answer off.", code="broken_off")

    def _usage(self) -> dict:
        answers = [dataclasses.replace(a.usage, completion_tokens=a.text.tokens) for a in self.answers]
        return usage(answers[:: self.job.asked.n], answers)

    def _record(self, outcome: str) -> None:
        """A line of the log, as JSON, and what is known of a request at its end."""
        told, seconds = self._usage(), time.perf_counter() - self.start
        self.metrics.request_seconds.observe(seconds)
        if told["accept_length"] is not None:
            self.metrics.accept_length.observe(told["accept_length"])
        line = {
            "id": self.form.id, "path": self.scope["path"], "outcome": outcome, "user": self.job.asked.user,
            "answers": len(self.answers), "finish_reasons": [a.text.finish_reason for a in self.answers],
            "seconds": round(seconds, 4), "first_token_seconds": self.first and round(self.first, 4), **told,
        }  # fmt: skip
        log.info("%s", to_json(line))


async def _unless_gone(receive: Receive, work: Coroutine[None, None, str]) -> str:
    """What `work` returns; `gone` if the client leaves before, and the work is cancelled."""

    async def leave() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(leave())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else "gone"
    finally:
        working.cancel()
        leaving.cancel()
