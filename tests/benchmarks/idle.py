"""Costs that must not grow with idle or old objects: each figure with and without them."""

from __future__ import annotations

import asyncio
import json
import statistics
from functools import partial

import psycopg

from airflow_pgchange.feeds import CommitFeed, EventFeed
from airflow_pgchange.feeds.feed import Watched
from tests.benchmarks.many import GOAL, costs, query_cost
from tests.benchmarks.measure import Report, cost_of, section
from tests.benchmarks.watch import consumers, milliseconds_a_feed, workers

FEEDS, PARTITIONS, WIDTH = 50, 1_000, 20
"""The numbers of idle consumers, of partitions of the commit queue after their last commit, and of transactions in
each."""
MESSAGES = 100_000
"""The number of messages that no selector matches."""
CLAIMS = {
    "choose()": "select pubsub.choose('idle 1', 7, pubsub.position('idle 1', 7), 100, false, true, null)",
    "passed()": "select pubsub.passed(7, pubsub.position('idle 1', 7), pubsub.point(7))",
}
PLANNED = 2
"""The goal of a claim: with many partitions its queries are planned each time, for the few that they read."""
TRIMMED = 10
"""Milliseconds of CPU to empty a partition, with as many idle consumers."""
COUNTED = 5
"""Milliseconds of CPU to count dead letters."""
NOTES = 17_280
"""The number of samples of a day, one every five seconds."""
A_LOOK = 0.3
"""The goal: milliseconds of CPU for the check of an idle worker of a tube."""
LETTERS = 1_000_000
"""Dead letters of five consumers."""
EVENTS, DAYS, SECONDS = 200_000, 100, 1.0
"""The number of events that a group has not read, the number of partitions with these events, and the goal for
health in seconds."""


def run(conninfo: str, report: Report) -> None:
    with psycopg.connect(conninfo, autocommit=True) as connection:
        selectors(connection, report)
        notes(connection, conninfo, report)
        tubes(conninfo, report)
        partitions(connection, conninfo, report)
        idle_groups(connection, conninfo, report)
        groups(connection, report)
        letters(connection, report)


def number(connection: psycopg.Connection, query: str) -> int:
    row = connection.execute(query).fetchone()
    assert row is not None
    return int(row[0])


def partitions(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure consumers whose branch has no commits in many partitions that are full of another branch's commits."""
    for (partition,) in connection.execute("select relid from revision.partitions()").fetchall():
        connection.execute(f"drop table {partition}")
    xmax = "pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    begin = number(connection, f"select {xmax} + 50")
    end = begin + PARTITIONS * WIDTH
    connection.execute("select revision.add_partitions(%s)", [[begin, begin + WIDTH, end + 10**9]])
    connection.execute("select pubsub.burn_xids(%s)", [begin])
    connection.execute("insert into revision.branch (id, type) values (7, 'archive')")
    connection.execute("insert into revision.commit_queue (commit_id, branch_id) values (1, 7)")
    connection.execute(
        "insert into pubsub.watermark (consumer_id, branch_id, snapshot, source) "
        "select 'idle ' || n, 7, pg_current_snapshot(), revision.here() from generate_series(0, %s - 1) as n",
        [FEEDS],
    )
    connection.execute("vacuum analyze")
    feeds: list[Watched] = [CommitFeed(f"idle {n}", 7) for n in range(FEEDS)]
    with section(f"{FEEDS} idle consumers of commits: {PARTITIONS:,} partitions since / none"):
        before = costs(connection, conninfo, feeds) | claims(connection)
        connection.execute(f"drop table revision.commit_queue_{begin + WIDTH}")
        edges = range(begin + WIDTH, end + 1, WIDTH)
        for n in range(0, PARTITIONS, 100):
            connection.execute("select revision.add_partitions(%s)", [list(edges[n : n + 101])])
        while (reached := number(connection, f"select {xmax}")) < end - 1:
            connection.execute("select pubsub.burn_xids(%s)", [min(reached + 2_000, end - 2)])
        connection.execute(
            "insert into revision.commit_queue (commit_id, branch_id, txid) "
            "select n, 0, n::text::xid8 from generate_series(%s::bigint, %s::bigint, 10) as n",
            [begin, end - WIDTH],
        )
        connection.execute("select revision.maintain_partitions()")
        connection.execute("vacuum analyze")
        after = costs(connection, conninfo, feeds) | claims(connection)
        for name, cost in before.items():
            report.say(f"{name}, none", cost, "ms CPU")
            report.say(name, after[name] / cost, "x", most=PLANNED if name in CLAIMS else GOAL)
        trim = (
            "select count(*) from pubsub.trim_commit_queue(interval '0') as told where told like 'trimmed %'"
        )
        with connection.transaction(force_rollback=True):
            trimmed: list[int] = []
            spent = cost_of(connection, lambda: trimmed.append(number(connection, trim)))
            report.say("trimming a partition", spent.cpu / trimmed[0] * 1000, "ms CPU", most=TRIMMED)


def claims(connection: psycopg.Connection) -> dict[str, float]:
    """Milliseconds of the server's CPU: functions that read the commits behind one position."""
    return {name: query_cost(connection, query, 15) for name, query in CLAIMS.items()}


def idle_groups(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Groups of the event log that got no event for many partitions."""
    with connection.transaction():
        settings = {"partition_interval": "1 day", "partition_retention_period": f"{PARTITIONS + 1} days"}
        for name, value in settings.items():
            connection.execute("update pgmb.config set value = %s where id = %s", [value, name])
    connection.execute(
        "insert into pgmb.subscription_groups (id, last_read_event_id, source) select 'idle ' || n, "
        "pgmb.create_event_id(now() - make_interval(days => %s), 0), pgmb.here() from generate_series(0, %s - 1) as n",
        [PARTITIONS, FEEDS],
    )
    connection.execute("insert into pgmb.subscriptions (group_id) select id from pgmb.subscription_groups")
    connection.execute("vacuum analyze")
    feeds: list[Watched] = [EventFeed(f"idle {n}") for n in range(FEEDS)]
    with section(f"{FEEDS} idle groups of events: {PARTITIONS:,} partitions since / none"):
        before = costs(connection, conninfo, feeds)
        for day in range(PARTITIONS, 0, -50):
            spans = connection.execute(
                "select array_agg(tstzrange(day, day + interval '1 day') order by day) "
                "from generate_series(date_trunc('day', now()) - make_interval(days => %s), "
                "date_trunc('day', now()) - make_interval(days => %s), interval '1 day') as day",
                [day, day - 49],
            ).fetchall()[0][0]
            for table in ("pgmb.events", "pgmb.dispatched"):
                connection.execute(
                    "select pgmb.prepare_partition(%s, d) from unnest(%s::tstzrange[]) as d", [table, spans]
                )
                connection.execute(
                    "select pgmb.attach_partitions(%s, %s::tstzrange[], '{}', true)", [table, spans]
                )
        connection.execute("select pgmb.make_partitions('pgmb.dispatched')")
        connection.execute("vacuum analyze")
        after = costs(connection, conninfo, feeds)
        for name, cost in before.items():
            report.say(f"{name}, none", cost, "ms CPU")
            report.say(name, after[name] / cost, "x", most=GOAL)
    with connection.transaction():
        connection.execute("delete from pgmb.subscription_groups")
        connection.execute(
            "update pgmb.config set value = '60 minutes' where id = 'partition_retention_period'"
        )
    for table in ("pgmb.events", "pgmb.dispatched"):
        while connection.execute("select pgmb.drop_emptied(%s)", [table]).fetchall():
            pass


def letters(connection: psycopg.Connection, report: Report) -> None:
    with section(f"{LETTERS:,} dead letters"):
        connection.execute(
            "insert into pgchange.letter (kind, consumer, address, content, changes, reason, attempts) "
            "select 'queue', 'queue:' || n %% 5, '{}', '{}', 1, 'given up', 1 from generate_series(1, %s) as n",
            [LETTERS],
        )
        connection.execute("vacuum analyze")
        told = "select * from pgchange.letters_health()"
        report.say("letters_health()", query_cost(connection, told), "ms CPU", most=COUNTED)


def selectors(connection: psycopg.Connection, report: Report) -> None:
    """Measure a consumer of messages whose selector matches no message, so that nothing wakes it."""
    connection.execute("select mbus.create_queue('unwanted', 16)")
    connection.execute(
        "select mbus.create_consumer('none', 'unwanted', %s)", ["(t.properties -> 'kind') = 'rare'"]
    )
    lag = "select mbus.lag('unwanted', 'none', 1)"
    with section(f"lag of a consumer that does not want {MESSAGES:,} messages / there are none"):
        none = query_cost(connection, lag, 25)
        connection.execute("select mbus.postn_unwanted(array_fill('n=>1'::hstore, array[%s]))", [MESSAGES])
        connection.execute("vacuum analyze")
        report.say("no messages", none, "ms CPU")
        report.say("before maintenance", query_cost(connection, lag) / none, "x")
        connection.execute("select mbus.maintain_queue('unwanted')")
        report.say("after maintenance", query_cost(connection, lag, 25) / none, "x", most=GOAL)


def tubes(conninfo: str, report: Report) -> None:
    """Measure idle workers, each of another tube, and as many idle consumers of commits."""

    def a_look(feeds: list[Watched]) -> float:
        return statistics.median(asyncio.run(milliseconds_a_feed(conninfo, feeds)) for _ in range(3))

    with section(f"a look at {FEEDS} idle feeds, ms of CPU a feed"):
        report.say("a worker of a tube", a_look(workers(conninfo, FEEDS)), "ms CPU", most=A_LOOK)
        report.say("a consumer of commits", a_look(consumers(FEEDS)), "ms CPU")


def notes(connection: psycopg.Connection, conninfo: str, report: Report) -> None:
    """Measure the samples that a triggerer records of its feeds in a day while a transaction stays open."""
    seen = json.dumps([{"feed": f"commits:idle {n}/0", "kind": "commit", "ready": 0} for n in range(FEEDS)])
    queries = {
        "a note": "select pgchange.note_watchers(%s)",
        "watchers()": "select * from pgchange.watchers() where %s <> ''",
    }

    def asked(query: str) -> None:
        for _ in range(20):
            connection.execute(query, [seen])

    def noted() -> dict[str, float]:
        return {name: cost_of(connection, partial(asked, query)).cpu for name, query in queries.items()}

    noted()
    first = noted()
    with (
        section(f"watchers of {FEEDS} feeds: {NOTES:,} notes under an old snapshot / the first"),
        psycopg.connect(conninfo) as old,
    ):
        old.execute("set transaction isolation level repeatable read")
        old.execute("select 1")
        for _ in range(NOTES):
            connection.execute(queries["a note"], [seen])
        last = noted()
        for name, cost in first.items():
            report.say(f"{name}, the first", cost / 20 * 1000, "ms CPU")
            report.say(name, last[name] / cost, "x", most=2)


def groups(connection: psycopg.Connection, report: Report) -> None:
    """Measure a group that does not read. Its events were dispatched recently, and are in many old partitions."""
    connection.execute("update pgmb.config set value = '1 day' where id = 'partition_interval'")
    connection.execute("insert into pgmb.subscription_groups (id) values ('idle')")
    connection.execute("insert into pgmb.subscriptions (group_id) values ('idle')")
    days = connection.execute(
        "select array_agg(tstzrange(day, day + interval '1 day') order by day) "
        "from generate_series(date_trunc('day', now()) - make_interval(days => %s), "
        "date_trunc('day', now()) - interval '1 day', interval '1 day') as day",
        [DAYS],
    ).fetchall()[0][0]
    connection.execute(
        "select pgmb.prepare_partition('pgmb.events', d) from unnest(%s::tstzrange[]) as d", [days]
    )
    connection.execute("select pgmb.attach_partitions('pgmb.events', %s::tstzrange[], '{}', true)", [days])
    connection.execute("select pgmb.poll_for_events()")
    with section(f"{EVENTS:,} events that a group has not read, in {DAYS} partitions"):
        connection.execute(
            "insert into pgmb.events (id, topic, payload) "
            "select pgmb.create_event_id(date_trunc('day', now()) - make_interval(secs => n * %s), n), 't', '{}' "
            "from generate_series(1, %s) as n",
            [DAYS * 86400 / (EVENTS + 1), EVENTS],
        )
        while number(connection, "select pgmb.poll_for_events()"):
            pass
        connection.execute("vacuum analyze")
        report.say(
            "health()", query_cost(connection, "select * from pgmb.health()") / 1000, "s CPU", most=SECONDS
        )
        trim = "select * from pgmb.trim_partitions('pgmb.events')"
        report.say("emptying old partitions", query_cost(connection, trim, 1) / 1000, "s CPU", most=SECONDS)
