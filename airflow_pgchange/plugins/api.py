"""The API of the page. Only the API server builds it. Every route checks the user's rights with the auth manager."""

from __future__ import annotations

from typing import Any

import psycopg
from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep
from airflow.providers.common.compat.sdk import AirflowNotFoundException
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from sqlalchemy.orm import Session

from airflow_pgchange import errors
from airflow_pgchange.feeds.error_translation import shorten
from airflow_pgchange.plugins import (
    actions,
    backfills,
    datamodels,
    event_log,
    guides,
    page,
    queues,
    sagas,
    topology,
)
from airflow_pgchange.plugins.access import READING, VIEW, Rights, Source, check_named, reading
from airflow_pgchange.plugins.databases import ParsedDags, Place, Places
from airflow_pgchange.plugins.dead_letters import letter, letters
from airflow_pgchange.plugins.overview import consumer as history_of
from airflow_pgchange.plugins.overview import overview, saga, view
from airflow_pgchange.plugins.page_queries import QueryCache
from airflow_pgchange.plugins.request_fields import AsciiResponse, Number, unfit
from airflow_pgchange.plugins.request_limit import RequestLimits
from airflow_pgchange.plugins.views import View

OF_A_DATABASE: dict[str, View[Any]] = {
    "backfills": backfills.VIEW,
    "events": event_log.VIEW,
    "topology": topology.VIEW,
    "queues": queues.VIEW,
    "sagas": sagas.LATEST,
}
"""The views of one database, by the names of their routes."""
FOR_GOOD = {"Cache-Control": "private, max-age=31536000, immutable", "X-Content-Type-Options": "nosniff"}
STATUS: dict[type[Exception], int] = {
    errors.InvalidArgument: 400,
    errors.PermissionDenied: 403,
    errors.UnknownConsumer: 404,
    errors.UnknownLetter: 404,
    errors.SchemaMissing: 404,
    AirflowNotFoundException: 404,
    errors.ServerUnavailable: 503,
    psycopg.errors.QueryCanceled: 504,
}
"""The HTTP status of each error. Other errors of this package, of PostgreSQL and of Airflow are a conflict (409)."""


def build() -> FastAPI:
    """Return the application that Airflow mounts."""
    app = FastAPI(
        title="PG feeds",
        description="State of the consumers of changes in PostgreSQL, and actions for people.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    query_cache, dags = QueryCache(), ParsedDags()
    app.state.dags, app.state.request_limits = dags, RequestLimits()
    for kind in (errors.PgChangeError, psycopg.Error, AirflowNotFoundException):
        app.add_exception_handler(kind, _error_response)
    app.add_exception_handler(RequestValidationError, unfit)

    def seeing(place: Place, user: Any, session: Session) -> tuple[Places, Rights]:
        places = dags.places(session)
        rights = Rights(user, places, session)
        session.close()
        if not rights.sees(place.connections):
            raise HTTPException(403, "Forbidden")
        check_named(places, place)
        return places, rights

    @app.get("/overview", dependencies=READING, tags=["reads"])
    def show_overview(user: GetUserDep, session: SessionDep) -> datamodels.Overview:
        """Every consumer of every database that DAGs name, and the findings that need attention."""
        places = dags.places(session)
        rights = Rights(user, places, session)
        # Release the metadata session before querying other databases, which may be slow.
        session.close()
        return overview(query_cache, places, rights)

    @app.get("/connections/{connection_id:path}/consumer", dependencies=READING, tags=["reads"])
    def show_consumer(
        connection_id: str,
        kind: str,
        consumer: str,
        *,
        user: GetUserDep,
        session: SessionDep,
        source: Source = None,
    ) -> datamodels.History:
        """The last hour of a consumer, and the attempts on its batches in the last day."""
        place = Place(connection_id, source)
        places, rights = seeing(place, user, session)
        return history_of(query_cache, places, place, kind, consumer, rights=rights)

    @app.get("/connections/{connection_id:path}/letters", dependencies=reading(), tags=["reads"])
    def show_letters(connection_id: str, source: Source = None) -> datamodels.Letters:
        """The dead letters of a database in groups of the same error, with the latest letters of each group."""
        return letters(query_cache, Place(connection_id, source))

    @app.get("/connections/{connection_id:path}/letters/{number}", dependencies=reading(), tags=["reads"])
    def show_letter(connection_id: str, number: Number) -> datamodels.Held:
        """The content of a dead letter."""
        return letter(query_cache, Place(connection_id), number)

    def add_view(name: str, database_view: View[Any]) -> None:
        def show(connection_id: str, user: GetUserDep, session: SessionDep) -> Any:
            _, rights = seeing(Place(connection_id), user, session)
            return view(query_cache, connection_id, rights, database_view)

        route = app.get(
            f"/connections/{{connection_id:path}}/{name}",
            dependencies=READING,
            tags=["reads"],
            response_model=type(database_view.nothing),
            description=database_view.question.__doc__,
        )
        route(show)

    for name, database_view in OF_A_DATABASE.items():
        add_view(name, database_view)

    @app.get("/connections/{connection_id:path}/sagas/{number}", dependencies=READING, tags=["reads"])
    def show_saga(
        connection_id: str, number: Number, *, user: GetUserDep, session: SessionDep, data: bool = True
    ) -> sagas.Steps:
        """The steps of a saga, and the data with which it was started."""
        _, rights = seeing(Place(connection_id), user, session)
        return saga(query_cache, connection_id, rights, number, with_data=data)

    app.include_router(actions.router)
    app.include_router(backfills.router)
    app.include_router(guides.router)

    @app.get("/openapi.json", dependencies=[VIEW], include_in_schema=False)
    def describe() -> dict[str, Any]:
        return app.openapi()

    @app.get("/page/{version}/{name}", dependencies=[VIEW], include_in_schema=False)
    def serve(version: str, name: str) -> Response:
        content = page.files().get(name)
        if content is None or version != page.version():
            raise HTTPException(404, "there is no such file in this version")
        return Response(content, media_type=page.TYPES[name[name.rindex(".") :]], headers=FOR_GOOD)

    return app


def _error_response(_: Request, error: Exception) -> AsciiResponse:
    shorten(error)
    code = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 409)
    return AsciiResponse({"detail": str(error).strip()}, status_code=code)
