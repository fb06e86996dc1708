"""A failover: the best standby of a replicaset whose master is dead becomes its master."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import class_row

from airflow_pgchange.feeds.connect import begun, connect, keep_open
from airflow_pgchange.feeds.errors import PgChangeError, Refused, ServerUnavailable, translated
from airflow_pgchange.feeds.queries import ask
from airflow_pgchange.topology.bucket_owners import at
from airflow_pgchange.topology.frames import SSL

log = logging.getLogger(__name__)

PROMOTED_WITHIN = 60
"""Seconds that a standby may take until it takes writes."""

DEAD = """
    select r.name from topology._pico_replicaset as r
    join topology._pico_instance as i on i.name = r.current_master_name
    where i.current_state ->> 0 <> 'Online' order by r.name
"""
INSTANCES = """
    select i.name, coalesce(p.address, '') as address, i.name = r.current_master_name as is_master,
           i.name = r.target_master_name and i.name <> r.current_master_name as is_chosen
    from topology._pico_replicaset as r
    join topology._pico_instance as i on i.replicaset_name = r.name
    left join topology._pico_peer_address as p on p.raft_id = i.raft_id and p.connection_type = 'pgproto'
    where r.name = {} and (i.name = r.current_master_name or i.current_state ->> 0 = 'Online')
    order by i.name = r.current_master_name, i.name
"""
"""The master is the last to be asked: it may come back while the others are."""
STATE = """
    select pg_catalog.pg_is_in_recovery(),
           case when pg_catalog.pg_is_in_recovery()
                then greatest(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn())
                else pg_catalog.pg_current_wal_lsn() end - '0/0'::pg_catalog.pg_lsn,
           case when pg_catalog.pg_is_in_recovery()
                then (select greatest(c.timeline_id, r.min_recovery_end_timeline)
                      from pg_catalog.pg_control_checkpoint() c, pg_catalog.pg_control_recovery() r)
                else ('x' || left(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()), 8))
                     ::pg_catalog.bit(32)::pg_catalog.int4 end,
           (select s.system_identifier from pg_catalog.pg_control_system() s),
           pg_catalog.pg_is_in_recovery() and pg_catalog.pg_last_wal_receive_lsn() is null
"""
"""A standby that was restarted counts what it receives from the beginning of a segment: it may have replayed more. It
begins to count when it has replayed all that it has, also where nobody is there to send it more. Its control file has a
new timeline some minutes later than it, at most."""

KNOCK = struct.pack("!II", 8, SSL)
"""Asks for encryption, which every server answers before anything else, and none minds."""
ANSWERED_WITHIN = 10.0
"""Seconds that an answer may take."""


@dataclass(frozen=True)
class Member:
    """An instance as the catalogue has it, its address empty where that is unknown: whether it is the master, or was
    chosen to be it by a failover that has not ended."""

    name: str
    address: str
    is_master: bool
    is_chosen: bool


@dataclass(frozen=True)
class Standby:
    """An instance that answers: whether it takes writes already, and how much of the log it has, in bytes, of which
    timeline, of which cluster; more of it than that where it is still replaying what it had when it was started."""

    name: str
    server: str
    promoted: bool
    received: int
    timeline: int
    cluster: int
    replaying: bool


def fail_over_all(catalogue: str, instances: str) -> None:
    """Fail over every replicaset whose master is not Online, each for itself: one that cannot be helped holds up no
    other.

    Raises an ExceptionGroup of what ``fail_over`` raised, once all have been tried.
    """
    troubles: list[Exception] = []
    with connect(catalogue, primary=True) as connection:
        # Each instance that is dead may keep us waiting.
        keep_open(connection)
        for replicaset in without_master(connection):
            try:
                fail_over(connection, instances, replicaset)
            except (PgChangeError, psycopg.Error) as error:
                troubles.append(error)
    if troubles:
        raise ExceptionGroup("; ".join(map(str, troubles)), troubles)


def without_master(catalogue: psycopg.Connection[Any]) -> list[str]:
    """The replicasets whose master is not Online."""
    with translated():
        return [name for (name,) in catalogue.execute(DEAD)]


def fail_over(catalogue: psycopg.Connection[Any], instances: str, replicaset: str) -> str:
    """Promote the standby that has most of the log, unless one was promoted already, and record it as the master; its
    name. Who is to be it is recorded first, so that doing it again after a failure goes on where that ended;
    ``catalogue`` is in no transaction.

    Raises Refused where the old master still takes writes, or may, where a standby is there and does not say how much
    of the log it has, or does not know yet, or was chosen before and does not answer, where those that answer are not of
    one cluster, where several take writes already, where one has more of the log than the one that was promoted or
    chosen, and where who has most of it may have left the others' history; ServerUnavailable where no standby answers.
    """
    members = _members(catalogue, replicaset)
    there = _standbys(replicaset, members, instances)
    best = _best(replicaset, there, next((one.name for one in members if one.is_chosen), None))
    _record(catalogue, "choose_master", replicaset, best)
    if not best.promoted:
        with connect(best.server) as connection, _within(PROMOTED_WITHIN + ANSWERED_WITHIN, connection):
            query = sql.SQL("select pg_catalog.pg_promote(true, {})").format(PROMOTED_WITHIN)
            if not ask(connection, query):
                raise ServerUnavailable(
                    f"{best.name} was not promoted within {PROMOTED_WITHIN} s: see its log"
                )
    _record(catalogue, "set_master", replicaset, best)
    log.info("%s is the master of replicaset %s now", best.name, replicaset)
    return best.name


def _members(catalogue: psycopg.Connection[Any], replicaset: str) -> list[Member]:
    """Those that are to be asked. Raises Refused where one cannot be."""
    with translated(), catalogue.cursor(row_factory=class_row(Member)) as cursor:
        members = cursor.execute(sql.SQL(INSTANCES).format(replicaset)).fetchall()
    homeless = [one.name for one in members if not one.address]
    if homeless:
        raise Refused(
            f"{', '.join(homeless)} of replicaset {replicaset} has no address in the catalogue, and cannot be asked: "
            "topology.set_address() gives it one"
        )
    return members


def _standbys(replicaset: str, members: Sequence[Member], instances: str) -> list[Standby]:
    """Those that may be promoted, the old master never. Raises Refused where that or another one may take writes, or have
    most of the log, and does not say so."""
    found = {one.name: _found(one, instances) for one in members}
    whole = [one for one in found.values() if isinstance(one, Standby)]
    if len({one.cluster for one in whole}) > 1:
        raise Refused(
            f"{', '.join(one.name for one in whole)} of replicaset {replicaset} are not of one cluster: "
            "topology.set_address() corrects where they are"
        )
    for old in [one.name for one in members if one.is_master]:
        was = found.pop(old)
        if isinstance(was, Standby):
            was = "still takes writes" if was.promoted else None
        if was is not None:
            raise Refused(
                f"{old}, the master of replicaset {replicaset}, is not Online in the catalogue and {was}: "
                "stop it, or set its state to Online"
            )
    for chosen in [one.name for one in members if one.is_chosen]:
        found[chosen] = found[chosen] or "was chosen to be the master, and does not answer"
    unheard = [f"{name} {why}" for name, why in found.items() if isinstance(why, str)]
    if unheard:
        raise Refused(
            f"of replicaset {replicaset} {', '.join(unheard)}, and may take writes, or have most of the log: mend that, "
            "or stop it and set its state to Offline to go on without it"
        )
    there = [standby for standby in found.values() if isinstance(standby, Standby)]
    if not there:
        raise ServerUnavailable(
            f"no standby of replicaset {replicaset} answers: start one, and set its state to Online in the catalogue"
        )
    return there


def _record(catalogue: psycopg.Connection[Any], what: str, replicaset: str, standby: Standby) -> None:
    query = sql.SQL("select topology.{}({}, {})").format(sql.Identifier(what), replicaset, standby.name)
    with begun(catalogue), translated():
        catalogue.execute(query)


def _best(replicaset: str, there: Sequence[Standby], chosen: str | None) -> Standby:
    """Who is to be the master: the one that was promoted, else the one that was chosen, else the one that has most of the
    log. Raises Refused where only a person knows."""
    writing = [standby.name for standby in there if standby.promoted]
    if len(writing) > 1:
        raise Refused(
            f"{', '.join(writing)} of replicaset {replicaset} take writes already: stop all but the one that is to be "
            "the master, and set their state to Offline"
        )
    best = max(there, key=lambda standby: (standby.promoted, standby.name == chosen, standby.received))
    most = max(there, key=lambda standby: standby.received)
    if best.promoted:
        # It has gone on writing since, and a standby of its own has followed.
        best = _asked(best.name, best.server) or best
    others = [one for one in there if one is not best or one.received < most.received]
    replaying = [one.name for one in others if one.replaying]
    if replaying:
        raise Refused(
            f"{', '.join(replaying)} of replicaset {replicaset} was started and has not replayed all that it has of the "
            "log, which may be most of it: try again, or stop it and set its state to Offline to go on without it"
        )
    if best.received < most.received:
        # One that was promoted goes on where the others end. This may be an older master, which somebody started again.
        first = "takes writes already" if best.promoted else "was chosen to be the master"
        raise Refused(
            f"{best.name} of replicaset {replicaset} {first} and has less of the log than {most.name}: "
            f"stop the one that is not to be the master, and set its state to Offline"
        )
    newest = max(there, key=lambda standby: standby.timeline)
    if best.timeline < newest.timeline:
        # The log of an older master goes on where the others did not follow, so that its length says nothing.
        raise Refused(
            f"{best.name} of replicaset {replicaset} has most of the log, but of an older timeline than {newest.name}: "
            "if it was the master before, stop it, and set its state to Offline; if not, try again in some minutes"
        )
    return best


def _found(member: Member, instances: str) -> Standby | str | None:
    """An instance as it is now; why it may answer others where it does not answer us; None where nobody is there. One
    that is full, or starts, or cannot start a process, or wants another encryption, has let in others."""
    found = _asked(member.name, at(instances, member.address))
    if found is not None:
        return found
    return "answers, but does not let us in" if _answers(member.address) else None


def _answers(address: str) -> bool:
    """Whether anything comes back from there: a proxy takes connections also for who is dead. libpq would not tell a
    server without memory for another process from none, and would ask as its environment wants."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWERED_WITHIN) as knocking:
            knocking.sendall(KNOCK)
            return knocking.recv(1) != b""
    except (OSError, ValueError):  # Plain SQL may have written a port that is no number.
        return False


def _asked(name: str, server: str) -> Standby | None:
    """An instance as it is now; None where it does not answer."""
    try:
        with connect(server) as connection, _within(ANSWERED_WITHIN, connection), translated():
            row = connection.execute(STATE).fetchone()
    except ServerUnavailable as error:
        log.info("%s does not answer: %s", name, error)
        return None
    except UnicodeError as error:
        raise Refused(
            f"{name} has an address that can be none: topology.set_address() corrects it"
        ) from error
    in_recovery, received, timeline, cluster, replaying = row or (False, 0, 0, 0, False)
    return Standby(name, server, not in_recovery, int(received or 0), timeline, cluster, replaying)


@contextmanager
def _within(seconds: float, connection: psycopg.Connection[Any]) -> Iterator[None]:
    """End the connection after so many seconds: a server whose disk hangs lets us in, and may never answer."""
    with socket.socket(fileno=os.dup(connection.fileno())) as ours:
        timer = threading.Timer(seconds, ours.shutdown, [socket.SHUT_RDWR])
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            timer.join()
