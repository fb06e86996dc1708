"""Access rights. Every route asks Airflow's auth manager. A request that changes something must come from Airflow's own
pages."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.base_auth_manager import BaseAuthManager
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, ConnectionDetails
from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep, requires_access_connection, requires_access_view
from airflow.configuration import conf
from airflow.models.connection import Connection
from fastapi import Depends, HTTPException, Query, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from sqlalchemy.orm import Session

from airflow_pgchange.plugins.audit import noted
from airflow_pgchange.plugins.databases import ParsedDags, Place, Places
from airflow_pgchange.plugins.request_limit import limited

Source = Annotated[
    str | None,
    Query(description="The connection of the database with the changes, if it is a different database."),
]

Method = Literal["GET", "PUT"]
"""The right to read, and the right to edit."""

VIEW = Depends(requires_access_view(AccessView.PLUGINS))
"""A route with this dependency works only for users who may see plugins."""

READING = [VIEW, limited("reads")]
"""The dependencies of each route that reads from a database."""


class Rights:
    """The rights of a user to the connections that DAGs name: which the user may see, read and edit."""

    def __init__(self, user: GetUserDep, places: Places, session: Session) -> None:
        self._user = user
        self._manager: BaseAuthManager[Any] = get_auth_manager()
        readable = self._manager.get_authorized_dag_ids(user=user, method="GET", session=session)
        self._dags = {connection: sorted(dags & readable) for connection, dags in places.dags.items()}
        self._teams = _teams(list(places.dags))
        self._readable = readable
        self._decided: dict[tuple[Method, str], bool] = {}

    def seen(self) -> list[str]:
        """The connections whose lag and state the user may see.

        That needs the right to read the connection itself, or one of the DAGs that use it.
        """
        return sorted(name for name, dags in self._dags.items() if dags or self.may("GET", [name]))

    def sees(self, connections: Collection[str]) -> bool:
        """Whether the user may see the lag and state of consumers that use all these connections."""
        return set(connections) <= set(self.seen())

    def dags(self, connection: str) -> list[str]:
        return self._dags[connection]

    def readable(self, dags: Collection[str]) -> list[str]:
        return sorted(self._readable.intersection(dags))

    def may(self, method: Method, connections: Collection[str]) -> bool:
        """Whether the user may read or edit all these connections."""
        return all(self._may_one(method, name) for name in connections)

    def _may_one(self, method: Method, name: str) -> bool:
        if (method, name) not in self._decided:
            details = ConnectionDetails(conn_id=name, team_name=self._teams.get(name))
            self._decided[method, name] = self._manager.is_authorized_connection(
                method=method, details=details, user=self._user
            )
        return self._decided[method, name]


def _teams(connections: list[str]) -> dict[str, str | None]:
    if not conf.getboolean("core", "multi_team", fallback=False):
        return {}
    return dict(Connection.get_conn_id_to_team_name_mapping(connections))


def source_allowed(method: Method) -> Any:
    """Return a dependency: the user has the same right to the connection ``source``, if the request names it."""

    def check(user: GetUserDep, source: Source = None) -> None:
        if source is None:
            return
        details = ConnectionDetails(conn_id=source, team_name=_teams([source]).get(source))
        if not get_auth_manager().is_authorized_connection(method=method, details=details, user=user):
            raise HTTPException(403, "Forbidden")

    return Depends(check)


def check_named(places: Places, place: Place) -> None:
    """Raise HTTPException 404 for a connection that no DAG names.

    Otherwise a user who may edit connections could make the API server connect to any address.
    """
    if not places.has(place):
        raise HTTPException(
            404,
            "no DAG names this connection, or no DAG names it together with this source: name it in a DAG, or in "
            "the option [pgchange] connections",
        )


def _named(request: Request, connection_id: str, session: SessionDep, source: Source = None) -> None:
    dags: ParsedDags = request.app.state.dags
    places = dags.places(session)
    # Release the metadata connection first, because the rest of the request may be slow.
    session.close()
    check_named(places, Place(connection_id, source))


NAMED = Depends(_named)
"""A route with this dependency works only for connections that a DAG names. The API server connects to no others."""

BEARER = HTTPBearer(auto_error=False)
"""The token in a request's header, read as Airflow reads it. Without a token, the cookie identifies the user."""


def from_our_pages(
    request: Request, token: Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]
) -> None:
    """Raise HTTPException 403 for a request that another site makes the browser send (CSRF).

    A request with a token passes, because no other site knows the token.
    """
    if token is not None:
        return
    site = request.headers.get("sec-fetch-site")
    if site is None:
        origin = request.headers.get("origin")
        allowed = origin is not None and origin in _our_origins(request)
    else:
        allowed = site == "same-origin"
    if not allowed:
        raise HTTPException(403, "this request was not sent by one of Airflow's own pages")


def _our_origins(request: Request) -> set[str]:
    """The origin of ``[api] base_url``, or that of the request if the option is not set."""
    parts = urlsplit(conf.get("api", "base_url", fallback="") or str(request.base_url))
    return {f"{parts.scheme}://{parts.netloc}"}


def reading() -> list[Any]:
    """The dependencies of a route that shows payloads and errors."""
    return [*READING, Depends(requires_access_connection("GET")), source_allowed("GET"), NAMED]


def acting(event: str, body: type[BaseModel] | None = None) -> list[Any]:
    """The dependencies of a route that changes something.

    The user and the request are written to the audit log before the action. ``body`` is the model of the route's
    parameter ``payload``.
    """
    return [
        VIEW,
        Depends(from_our_pages),
        Depends(requires_access_connection("PUT")),
        source_allowed("PUT"),
        NAMED,
        limited("actions"),
        noted(event, body),
    ]
