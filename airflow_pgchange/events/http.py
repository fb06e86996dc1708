"""Server-sent events of the event log, as a FastAPI router that you include. Needs the extra ``http``."""

# Without ``from __future__ import annotations``: FastAPI must evaluate the route's annotations, which use local names.
import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

from airflow_pgchange.errors import (
    ExtraMissing,
    InvalidArgument,
    PgChangeError,
    ServerUnavailable,
    TooManyClients,
)
from airflow_pgchange.events.shutdown import on_ending
from airflow_pgchange.events.stream import StreamPosition
from airflow_pgchange.events.streams import EventStreams
from airflow_pgchange.events.subscriptions import Selection
from airflow_pgchange.feeds.argument_checks import MOMENT, Seconds, seconds

try:
    from fastapi import APIRouter, Depends, FastAPI, Header, HTTPException, Request, Response
    from fastapi.responses import StreamingResponse
    from fastapi.routing import APIRoute
    from starlette.types import Message, Receive, Scope, Send
except ImportError as error:
    raise ExtraMissing(
        f"server-sent events need {error.name}: pip install 'airflow-provider-pgchange[http]'"
    ) from error

log = logging.getLogger(__name__)

HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
"""Headers that keep proxies from caching or buffering the stream."""
RECONNECT = 2
"""Seconds before a client reconnects."""


def event_router(
    streams: EventStreams,
    may_read: Callable[..., Any],
    *,
    path: str = "/{name}",
    keep_alive: Seconds = 15.0,
    send_timeout: Seconds = 30.0,
) -> APIRouter:
    """Return a router with one route, ``GET path``: a stream of server-sent events.

    ``may_read`` is a FastAPI dependency that authorizes the caller. It returns the Selection of the events that the
    caller may see, such as ``topical("orders")``, or raises HTTPException. Its parameters are ``name`` and other
    parameters of ``path``. The streams run from the start to the end of the application.

    An event has the type ``message``. Its data is a JSON object with ``id``, ``topic``, ``payload`` and ``metadata``. A
    client that reconnects with ``Last-Event-ID`` continues after that event. If that is impossible, it gets an event of
    type ``gap`` or ``dropped``, see EventStreams. ``keep_alive`` is the time between comments on an idle stream. A client
    that reads nothing for ``send_timeout`` is disconnected.

    Responses: 400 for an invalid ``Last-Event-ID``. 503 with ``Retry-After`` for too many clients or an unavailable
    database. 404 if ``may_read`` raises InvalidArgument, as ``topical`` does for a name that no topic can have.

    Raises InvalidArgument for invalid times, and if ``keep_alive`` is not less than the streams' ``retention``.
    """
    keep_alive_seconds = seconds("keep_alive", keep_alive, least=MOMENT)
    send_seconds = seconds("send_timeout", send_timeout, least=MOMENT)
    if keep_alive_seconds >= streams.retention.total_seconds():
        raise InvalidArgument(
            f"keep_alive is {keep_alive_seconds:g} s, and must be less than retention, {streams.retention}: "
            "otherwise an idle client that reconnects would get a gap"
        )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with streams.running():
            with on_ending(streams.stop):
                yield

    router = APIRouter(lifespan=lifespan, route_class=EventRoute)

    @router.get(path, response_class=StreamingResponse)
    async def events(
        selection: Annotated[Any, Depends(may_read)],
        last_event_id: Annotated[str | None, Header()] = None,
    ) -> EventResponse:
        try:
            last = StreamPosition.parse(last_event_id) if last_event_id else None
        except InvalidArgument as error:
            raise HTTPException(400, str(error)) from error
        opened = AsyncExitStack()
        try:
            texts = await opened.enter_async_context(
                streams.stream(_checked(selection), last, keep_alive_seconds)
            )
        except PgChangeError as error:
            raise _refused(error) from error
        return EventResponse(texts, opened, send_seconds)

    return router


class EventRoute(APIRoute):
    """A route that answers 404 if a dependency raises InvalidArgument, as for a name that no topic can have."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except InvalidArgument as error:
                raise HTTPException(404, str(error)) from error

        return answer


class EventResponse(StreamingResponse):
    """A stream that ends when its client disconnects or reads nothing for ``send_timeout`` seconds."""

    def __init__(self, texts: AsyncIterator[bytes], opened: AsyncExitStack, send_timeout: float) -> None:
        super().__init__(_hinted(texts), media_type="text/event-stream", headers=HEADERS)
        self._opened = opened
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout):
                await send(message)

        async with self._opened:
            try:
                await super().__call__(scope, receive, send_soon)
            except TimeoutError:
                log.warning("closed an event stream: its client took nothing for %g s", self._send_timeout)


async def _hinted(texts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield f"retry: {1000 * RECONNECT}\n".encode()
    try:
        async for text in texts:
            yield text
    except PgChangeError as error:
        log.warning("an event stream ended early, its client will reconnect: %s", error)


def _checked(selection: Any) -> Selection:
    """Raise InvalidArgument if the dependency returned no Selection, so that a forgotten return allows nothing."""
    if isinstance(selection, Selection):
        return selection
    raise InvalidArgument(
        f"may_read must return the Selection of the events that the caller may see, not {type(selection).__name__}"
    )


def _refused(error: PgChangeError) -> HTTPException:
    """Return the response for an error. It does not reveal details of the database; the log has them."""
    if isinstance(error, TooManyClients | ServerUnavailable):
        log.warning("refused an event stream: %s", error)
        reason = (
            str(error) if isinstance(error, TooManyClients) else "events cannot be read now: try again later"
        )
        return HTTPException(503, reason, {"Retry-After": str(RECONNECT)})
    log.error("an event stream failed: %s", error)
    return HTTPException(500, "events cannot be read: the log of the server says why")
