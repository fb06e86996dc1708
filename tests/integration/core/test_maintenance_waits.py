"""If another session waits for maintenance, maintenance waits for nobody. It postpones the work at once, and no session
is ended by a deadlock."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from psycopg import errors

from tests import queues, tubes
from tests.event_keeping import lines
from tests.limits import be_patient, shorten, shorten_locks
from tests.tubes import one
from tests.waiting import until, waits

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]
Told = list[str]

EMPTIED = "select pgmb.trim_some('pgmb.events', array['{0}'::regclass], pg_current_snapshot())"
ATTACHED = """
    select substring(t from '.*in use') from pgmb.make_partitions('pgmb.events', now() + interval '5 hours') as t
"""
ATTACHED_LATER = ["postponed the partitions of events: it is in use"]
EXPIRED_LATER = ["postponed the expiry of group b: it is being changed, or events are being dispatched"]
TRIMMED = "select pubsub.trim_partition('{0}', '0')"


@dataclass(frozen=True)
class Meeting:
    """A deadlock of maintenance with another session.

    Maintenance has done ``done``. The other session holds ``held``, and then wants ``wanted``, which maintenance has
    locked. Then maintenance reaches the object that the session holds, in the step ``comes_to``, and logs ``says``. {0}
    and {1} are two partitions.
    """

    done: str
    held: str
    wanted: str
    comes_to: str
    says: Told


LOG = {
    "reads what is to be emptied": Meeting(
        EMPTIED,
        "select from {1}",
        "select from {0}",
        EMPTIED.replace("{0}", "{1}"),
        ["postponed {1}: it is in use"],
    ),
    "reads where some are to be dropped": Meeting(
        EMPTIED,
        "select from pgmb.events_default",
        "select from pgmb.events",
        "select pgmb.drop_partitions('pgmb.events', array['{1}'::regclass])",
        ["postponed dropping empty partitions of events: it is in use"],
    ),
    "reads the default one where some are to be dropped": Meeting(
        EMPTIED,
        "select from pgmb.events_default",
        "select from {0}",
        "select pgmb.drop_partitions('pgmb.events', array['{1}'::regclass])",
        ["postponed dropping empty partitions of events: it is in use"],
    ),
    "reads where some are to be attached": Meeting(
        EMPTIED, "select from pgmb.events_default", "select from {0}", ATTACHED, ATTACHED_LATER
    ),
    "publishes where some are to be attached": Meeting(
        EMPTIED,
        "lock table only pgmb.events in row exclusive mode",
        "select from {0}",
        ATTACHED,
        ATTACHED_LATER,
    ),
    "changes a group that is to expire": Meeting(
        "select pgmb.expire('a', '{{}}', now())",
        "select from pgmb.subscription_groups where id = 'b' for update",
        "select from pgmb.subscription_groups where id = 'a' for update",
        "select pgmb.expire('b', '{{}}', now())",
        EXPIRED_LATER,
    ),
    "polls while a group is to expire": Meeting(
        EMPTIED,
        "select pg_advisory_xact_lock(pgmb.dispatch_key())",
        "select from {0}",
        "select pgmb.expire('b', '{{}}', now())",
        EXPIRED_LATER,
    ),
}

QUEUE = {
    "reads what is to be emptied": Meeting(
        TRIMMED,
        "select from {1}",
        "select from {0}",
        TRIMMED.replace("{0}", "{1}"),
        ["postponed {1}: it is in use"],
    ),
    "reads where some are to be dropped": Meeting(
        TRIMMED,
        "select from revision.commit_queue_default",
        "select from revision.commit_queue",
        "select revision.drop_empty_partitions(-1)",
        ["postponed dropping empty partitions: the queue is in use"],
    ),
    "reads where some are to be added": Meeting(
        TRIMMED,
        "select from revision.commit_queue_default",
        "select from {0}",
        "select revision.maintain_partitions(10000000, 2)",
        ["postponed partitions: the queue is being written"],
    ),
}


@pytest.fixture
def watching(connect: Connect) -> Connection:
    """A database in which maintenance waits without a limit if it waits for other sessions at all."""
    connection = connect()
    be_patient(connection)
    return connection


@pytest.fixture
def maintaining(watching: Connection, connect: Connect) -> Connection:
    """Run maintenance in a long transaction. In a deadlock the other session is cancelled; it may not wait for long."""
    connection = connect(autocommit=False)
    connection.execute("set deadlock_timeout = '1h'")
    connection.execute("set statement_timeout = '20s'")
    connection.commit()
    return connection


def meet(watching: Connection, maintaining: Connection, other: Connection, meeting: Meeting) -> Told:
    """Return the log of maintenance, after the other session got all its locks."""
    with ThreadPoolExecutor(1) as pool:
        maintaining.execute(meeting.done)  # type: ignore[arg-type]
        other.execute(meeting.held)  # type: ignore[arg-type]
        going_on = pool.submit(other.execute, meeting.wanted)  # type: ignore[arg-type]
        until(watching, waits(other, behind=maintaining))
        told = lines(maintaining, meeting.comes_to)
        assert not going_on.done()
        maintaining.commit()
        going_on.result()
    other.rollback()
    return told


def between(meeting: Meeting, parts: Told) -> Meeting:
    return Meeting(
        *(each.format(*parts) for each in (meeting.done, meeting.held, meeting.wanted, meeting.comes_to)),
        [line.format(*(part.split(".")[1] for part in parts)) for line in meeting.says],
    )


@pytest.mark.parametrize("meeting", LOG.values(), ids=LOG.keys())
def test_maintenance_of_the_log_gives_up_at_once_where_it_is_waited_for_by_who(
    watching: Connection, maintaining: Connection, connect: Connect, meeting: Meeting
) -> None:
    watching.execute("insert into pgmb.subscription_groups (id) values ('a'), ('b')")
    parts = lines(
        watching, "select partition_id::text from pgmb.get_partitions_and_bounds('pgmb.events'::regclass)"
    )
    meeting = between(meeting, parts)
    assert meet(watching, maintaining, connect(autocommit=False), meeting) == meeting.says


@pytest.mark.parametrize("meeting", QUEUE.values(), ids=QUEUE.keys())
def test_maintenance_of_the_commit_queue_gives_up_at_once_where_it_is_waited_for_by_who(
    watching: Connection, maintaining: Connection, connect: Connect, meeting: Meeting
) -> None:
    meeting = between(meeting, lines(watching, "select relid::text from revision.partitions()"))
    assert meet(watching, maintaining, connect(autocommit=False), meeting) == meeting.says


def test_leftovers_are_left_at_once_where_a_reader_of_one_waits_for_another(
    watching: Connection, maintaining: Connection, connect: Connect
) -> None:
    names = [f"b0123456789abcdef_{number}_01234567" for number in (1, 2)]
    drop = "select pgchange.drop_leftovers(now() - '{}'::timestamptz)"
    for year, name in zip((2001, 2002), names, strict=True):
        watching.execute(f"create table pgchange_staging.{name} ()")
        watching.execute(
            f"comment on table pgchange_staging.{name} is "
            f"""'pgchange {{"batch_id": "b", "attempt": 1, "target": "t", "made_at": "{year}-01-01"}}'"""
        )
    meeting = Meeting(
        drop.format("2001-06-01"),
        f"select from pgchange_staging.{names[1]}",
        f"lock table pgchange_staging.{names[0]} in access share mode",
        drop.format("2002-06-01"),
        [],
    )
    other = connect(autocommit=False)
    with pytest.raises(errors.UndefinedTable):
        meet(watching, maintaining, other, meeting)
    other.rollback()
    assert lines(watching, "select name from pgchange.leftovers('0')") == [names[1]]


def test_a_tube_is_not_held_still_at_once_where_its_worker_waits_for_what_is_locked(
    watching: Connection, maintaining: Connection, connect: Connect
) -> None:
    watching.execute("create table item (id bigint primary key)")
    tubes.make(watching)
    meeting = Meeting(
        "lock table item",
        "select tube.take_lock('q', 0)",
        "select from item",
        "select tube.hold_still('q')",
        [],
    )
    with pytest.raises(errors.LockNotAvailable, match="workers of tube q are at work"):
        meet(watching, maintaining, connect(autocommit=False), meeting)


def test_a_capture_is_not_mended_where_a_writer_waits_for_another_table(
    watching: Connection, maintaining: Connection, connect: Connect
) -> None:
    shorten_locks(watching)
    for name in ("a", "b"):
        watching.execute(f"create table {name} (id bigint primary key) partition by range (id)")
        watching.execute("select revision.track(%s)", [name])
    watching.execute("create table b_1 partition of b for values from (0) to (10)")
    meeting = Meeting(
        "select revision.track('a')",
        "insert into b values (1)",
        "lock table a in row exclusive mode",
        "select revision.recapture()",
        ["public.b: postponed, it is being written"],
    )
    assert meet(watching, maintaining, connect(autocommit=False), meeting) == meeting.says


@pytest.mark.hstore
def test_a_temporary_consumer_stays_where_who_takes_from_it_waits_for_maintenance(
    watching: Connection, maintaining: Connection, connect: Connect
) -> None:
    queues.make(watching)
    maker = connect()
    name = one(maker, "select mbus.create_temporary_consumer('q')")
    maker.close()
    until(watching, f"select not mbus.lives('q {name}')")
    there = f"select exists (select from mbus.consumer where name = '{name}')"
    meeting = Meeting(
        "lock table mbus.tempq",
        f"select pg_advisory_xact_lock_shared(mbus.part_key(id, 0)) from mbus.consumer where name = '{name}'",
        "select from mbus.tempq",
        "select mbus.clear_tempq()",
        [""],
    )
    assert meet(watching, maintaining, connect(autocommit=False), meeting) == meeting.says
    assert one(watching, there)
    watching.execute("select mbus.maintain()")
    assert not one(watching, there)


def test_maintenance_that_waits_for_who_waits_for_it_would_be_noticed(
    watching: Connection, maintaining: Connection, connect: Connect
) -> None:
    shorten(watching, "pgchange.may_wait", "select not exists", "select true or not exists")
    maintaining.execute("set statement_timeout = '500ms'")
    maintaining.commit()
    other = connect(autocommit=False)
    other.execute("set deadlock_timeout = '1h'")
    meeting = between(
        QUEUE["reads what is to be emptied"], lines(watching, "select relid::text from revision.partitions()")
    )
    with pytest.raises(errors.QueryCanceled):
        meet(watching, maintaining, other, meeting)


def test_maintenance_waits_for_nobody_who_waits_while_somebody_is_about_to_look_for_a_deadlock(
    watching: Connection, maintaining: Connection, connect: Connect
) -> None:
    """If a session waits for another, a deadlock begins as soon as that other session waits for maintenance."""
    holder, other = connect(autocommit=False), connect(autocommit=False)
    holder.execute("select pg_advisory_xact_lock(1)")
    with ThreadPoolExecutor(1) as pool:
        going_on = pool.submit(other.execute, "select pg_advisory_xact_lock(1)")
        until(watching, waits(other, behind=holder))
        # The waiting session looks for deadlocks after an hour. Maintenance may not wait in the last quarter of that
        # time.
        assert one(maintaining, "select pgchange.may_wait('30 minutes')")
        assert not one(maintaining, "select pgchange.may_wait('45 minutes')")
        holder.rollback()
        going_on.result()
    assert one(maintaining, "select pgchange.may_wait('45 minutes')")
