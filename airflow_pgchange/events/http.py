"""Server-sent events of the event log, as a router of FastAPI that you mount. Needs the extra ``http``."""

# No annotations from the future: FastAPI reads those of the route, which name what only its maker knows.
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
from airflow_pgchange.events.stream import Place
from airflow_pgchange.events.streams import EventStreams
from airflow_pgchange.events.subscriptions import Selection
from airflow_pgchange.feeds.checks import MOMENT, Seconds, seconds

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
"""Nobody on the way is to keep events, or to hold them back until there are many."""
RECONNECT = 2
"""Seconds to a client's next try."""


def event_router(
    streams: EventStreams,
    may_read: Callable[..., Any],
    *,
    path: str = "/{name}",
    keep_alive: Seconds = 15.0,
    send_timeout: Seconds = 30.0,
) -> APIRouter:
    """A router with one route, ``GET path``: a stream of server-sent events.

    ``may_read`` is a dependency of FastAPI that knows who asks: it returns the Selection of what that caller may see,
    such as ``topical("orders")``, or raises HTTPException. It takes ``name`` and whatever else ``path`` names. The
    router runs the streams from the start of the application to its end.

    An event has the type ``message``, and as data a JSON object with ``id``, ``topic``, ``payload`` and ``metadata``. Who
    connects again with ``Last-Event-ID`` goes on from there; the types ``gap`` and ``dropped`` say when that is not so,
    see EventStreams. ``keep_alive`` is the time between comments; a client that takes nothing for
    ``send_timeout`` is left. Refused: 400 for a foreign ``Last-Event-ID``, 503 with
    ``Retry-After`` for too many clients or a database that is away, 404 where ``may_read`` raises InvalidArgument, as
    ``topical`` does for a name that no topic can have. Raises InvalidArgument for seconds that make no
    sense, and a ``keep_alive`` that is not less than the streams' ``retention``.
    """
    sign_every = seconds("keep_alive", keep_alive, least=MOMENT)
    taken_within = seconds("send_timeout", send_timeout, least=MOMENT)
    if sign_every >= streams.retention.total_seconds():
        raise InvalidArgument(
            f"a client is told where it is every {sign_every:g} s (keep_alive), which must be less than retention, "
            f"{streams.retention}: or an idle one would be told of a gap"
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
            last = Place.parse(last_event_id) if last_event_id else None
        except InvalidArgument as error:
            raise HTTPException(400, str(error)) from error
        opened = AsyncExitStack()
        try:
            texts = await opened.enter_async_context(streams.stream(_checked(selection), last, sign_every))
        except PgChangeError as error:
            raise _refused(error) from error
        return EventResponse(texts, opened, taken_within)

    return router


class EventRoute(APIRoute):
    """A route of which nothing is found under a name that no topic can have."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(request)
            except InvalidArgument as error:
                raise HTTPException(404, str(error)) from error

        return answer


class EventResponse(StreamingResponse):
    """A stream that ends when its client is gone, or takes nothing for ``send_timeout`` seconds."""

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
                log.warning(
                    "a client of event streams took nothing for %g s, and is left", self._send_timeout
                )


async def _hinted(texts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield f"retry: {1000 * RECONNECT}\n".encode()
    try:
        async for text in texts:
            yield text
    except PgChangeError as error:
        log.warning("a stream of events ends before its time, its client connects again: %s", error)


def _checked(selection: Any) -> Selection:
    """A dependency that forgets to answer has allowed nothing."""
    if isinstance(selection, Selection):
        return selection
    raise InvalidArgument(
        f"may_read must return the Selection of what the caller may see, not {type(selection).__name__}"
    )


def _refused(error: PgChangeError) -> HTTPException:
    """What the client is told: nothing about the database."""
    if isinstance(error, TooManyClients | ServerUnavailable):
        log.warning("a stream of events was refused: %s", error)
        why = (
            str(error) if isinstance(error, TooManyClients) else "events cannot be read now: try again later"
        )
        return HTTPException(503, why, {"Retry-After": str(RECONNECT)})
    log.error("a stream of events failed: %s", error)
    return HTTPException(500, "events cannot be read: the log of the server says why")
