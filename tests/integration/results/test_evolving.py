"""Tables of results follow the columns of their source, without a rewrite and without a scan."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest

from airflow_pgchange.errors import ConsumerBusy, MergeRefused, PermissionDenied
from airflow_pgchange.feeds.connections import connect as feed_connect
from airflow_pgchange.results import schema_evolution
from airflow_pgchange.results.column_comparison import SourceColumn, columns_of_frame, columns_of_table
from airflow_pgchange.results.schema_evolution import Source, evolve
from tests.waiting import until, waits

COLUMNS = (
    "select jsonb_object_agg(attname, format_type(atttypid, atttypmod) || coalesce(' ' || collname, '')) "
    "from pg_attribute left join pg_collation as c on c.oid = attcollation and collname <> 'default' "
    "where attrelid = 'copies.t'::regclass and attnum > 0"
)
TREE = "select 'copies.t'::regclass as relid union select relid from pg_partition_tree('copies.t')"
FILES = (
    f"select array_agg(pg_relation_filenode(oid) order by oid) from pg_class where oid in ({TREE}) or oid in "
    f"(select indexrelid from pg_index where indrelid in ({TREE}))"
)
SCANS = f"select sum(pg_stat_get_xact_numscans(relid))::int from ({TREE}) as t"


def one(connection, query):
    return connection.execute(query).fetchone()[0]


def nothing():
    """A check of the results that always passes."""


def source_of(connection):
    names = connection.execute(
        "select attname::text from pg_attribute where attrelid = 'public.t'::regclass and attnum > 0"
    )
    return Source("public.t", columns_of_table(connection, "public.t", [name for (name,) in names]))


def follow(connection, check=nothing):
    return evolve(connection, "copies.t", source_of(connection), check)


@pytest.fixture(scope="module")
def kept(shared_db):
    with feed_connect(shared_db) as connection:
        connection.execute("create schema moods; create type moods.mood as enum ('good', 'bad')")
        yield connection


@pytest.fixture
def results(kept):
    """A connection to a database for a test that makes ``public.t`` and its copy ``copies.t``."""
    kept.execute("create schema copies")
    yield kept
    kept.execute("drop schema copies cascade; drop table if exists public.t cascade")


PARTITIONS = (
    "partition by range (id); create table copies.low partition of copies.t for values from (0) to (10); "
    "create table copies.rest partition of copies.t default"
)


@pytest.mark.parametrize("partitions", ["", PARTITIONS], ids=["plain", "partitioned"])
def test_safe_changes_of_columns_need_no_rewrite_and_no_scan(results, partitions):
    columns = "id bigint, code varchar(5), n numeric(6,2), word varchar(5) collate \"C\" not null default 'x'"
    results.execute(
        f"create table public.t ({columns}); create table copies.t ({columns}, primary key (id)) {partitions};"
        "insert into copies.t select i, i, i, i from generate_series(1, 20) as i"
    )
    if not partitions:
        results.execute(
            "alter table copies.t add unique (code); create index on copies.t (n, word);"
            "create table copies.child (code varchar(5) references copies.t (code))"
        )
    files, scans = one(results, FILES), []

    @contextmanager
    def scans_counted():
        # After a transaction a session reports its statistics, and counts from 0 again. So count within a transaction.
        with results.transaction():
            before = one(results, SCANS)
            yield
            scans.append(one(results, SCANS) - before)

    def followed():
        with scans_counted():
            return follow(results)

    assert followed() == []
    results.execute(
        'alter table public.t add feeling moods.mood, add "we""ird" moods.mood[], add at timestamp(3), '
        "alter code type varchar(9), alter n type numeric(9,2), alter word type varchar(9)"
    )
    assert followed() == [
        'alter table "copies"."t" alter column "code" type character varying(9)',
        'alter table "copies"."t" alter column "n" type numeric(9,2)',
        'alter table "copies"."t" alter column "word" type character varying(9) collate pg_catalog."C"',
        'alter table "copies"."t" add column if not exists "feeling" moods.mood',
        'alter table "copies"."t" add column if not exists "we""ird" moods.mood[]',
        'alter table "copies"."t" add column if not exists "at" timestamp(3) without time zone',
    ]
    results.execute(
        "alter table public.t alter code type text, alter n type numeric, alter word type varchar"
    )
    assert len(followed()) == 3
    assert one(results, COLUMNS) == {
        "id": "bigint",
        "code": "text",
        "n": "numeric",
        "word": "character varying C",
        "feeling": "moods.mood",
        'we"ird': "moods.mood[]",
        "at": "timestamp(3) without time zone",
    }
    assert (one(results, FILES), scans) == (files, [0, 0, 0])
    # The figures of this test would show a scan, and a rewrite.
    with scans_counted():
        results.execute("alter table copies.t add check (n > 0)")
    assert scans[-1] > 0
    results.execute("alter table copies.t alter n type numeric(12,4)")
    assert one(results, FILES) != files


PLAIN = "id bigint, n numeric(6,2), word varchar(5)"
LONGER, INDEX = "alter word type text", "create index i on copies.t"
TRIGGER = "create trigger g before update of word on copies.t execute function tsvector_update_trigger(a, b)"
REFUSED = {
    "not null": ("add x int not null", "", '"x" of public.t is not null'),
    "default": ("add x int default 5", "", '"x" of public.t has a default'),
    "default of before": ("add x int default 5; alter table public.t alter x drop default", "", "has a default"),
    "generated": ("add x int generated always as (1) stored", "", '"x" of public.t is generated'),
    "constrained domain": ("add x short", "", "a domain with constraints"),
    "domain with a default": ("add x filled", "", '"x" of public.t has a default'),
    "wider integer": ("alter id type bigint", "alter table copies.t alter id type int",
                      r'"id" is bigint in the source and integer in the target.*run `alter .* "id" type bigint`'),
    "more decimal places": ("alter n type numeric(7,3)", "", r"rewrite .*type numeric\(7,3\)`"),
    "check": (LONGER, "alter table copies.t add check (word <> 'x')", "constraint t_word_check .*read the whole table"),
    "index of an expression": (LONGER, f"{INDEX} (lower(word))", "index i of copies.t depends on"),
    "partial index": (LONGER, f"{INDEX} (id) where word = 'x'", "index i of copies.t depends on"),
    "view": (LONGER, "create view copies.v as select word from copies.t",
             r"PostgreSQL refuses .*used by a view or rule \(.*v.*\): nothing was changed"),
    "generated from it": (LONGER, "alter table copies.t add y text generated always as (word || '!') stored",
                          "PostgreSQL refuses .*used by a generated column"),
    "trigger": (LONGER, TRIGGER, "PostgreSQL refuses .*used in a trigger definition"),
}  # fmt: skip


@pytest.fixture(scope="module")
def domains(kept):
    kept.execute("create domain short as text check (value < 'x'); create domain filled as text default 'x'")


@pytest.mark.parametrize("case", REFUSED)
def test_anything_else_is_refused_with_the_statement_and_nothing_is_half_done(results, domains, case):
    change, to_copy, told = REFUSED[case]
    results.execute(f"create table public.t ({PLAIN}); create table copies.t ({PLAIN}); {to_copy}")
    results.execute(f"alter table public.t add fine int; alter table public.t {change}")
    before = one(results, COLUMNS)
    with pytest.raises(MergeRefused, match=told) as refused:
        follow(results)
    assert "`alter table " in str(refused.value)
    assert one(results, COLUMNS) == before


def test_the_key_of_partitions_is_refused_with_postgresqls_reason(results):
    results.execute(
        "create table public.t (id bigint, word varchar(9)); "
        "create table copies.t (id bigint, word varchar(5)) partition by list (word)"
    )
    with pytest.raises(MergeRefused, match="PostgreSQL refuses .*part of the partition key"):
        follow(results)


def test_an_index_of_partitions_is_not_made_anew(results):
    results.execute(
        "create table public.t (id bigint, word varchar(9)); "
        f"create table copies.t (id bigint, word varchar(5)) {PARTITIONS}; create index i on copies.t (word)"
    )
    with pytest.raises(MergeRefused, match="index i of copies.t .*; index rest_word_idx of copies.t"):
        follow(results)


def test_a_type_that_the_results_database_lacks_is_refused_by_name(results):
    results.execute("create table copies.t (id bigint)")
    source = Source("public.t", [SourceColumn("x", "elsewhere.mood")])
    with pytest.raises(
        MergeRefused, match=r'"x" of public\.t has the type elsewhere\.mood, which the results database'
    ):
        evolve(results, "copies.t", source, nothing)


def test_a_change_is_undone_where_the_results_do_not_fit(results):
    results.execute("create table public.t (id bigint, x int); create table copies.t (id bigint)")

    def check():
        assert "x" in one(results, COLUMNS)
        raise MergeRefused("no key")

    with pytest.raises(MergeRefused, match="no key"):
        follow(results, check)
    assert one(results, COLUMNS) == {"id": "bigint"}


def test_a_frame_adds_its_columns_and_digits_and_refuses_none_that_fits_by_its_values(results):
    results.execute("create table copies.t (id int, n numeric(6,2), m numeric(6,2), word varchar(5))")
    types = {
        "id": "bigint",
        "n": "numeric(9,2)",
        "m": "numeric(38,18)",
        "word": "text",
        "d": "numeric(4,1)[]",
    }
    evolve(results, "copies.t", Source("the frame", columns_of_frame(types)), nothing)
    assert one(results, COLUMNS) == {
        "id": "integer",
        "n": "numeric(9,2)",
        "m": "numeric(6,2)",
        "word": "character varying(5)",
        "d": "numeric(4,1)[]",
    }


@pytest.mark.parametrize("newer_first", [True, False])
def test_workers_that_evolve_at_once_do_it_once_and_never_back(results, shared_db, newer_first):
    results.execute(
        "create table public.t (id bigint, word varchar(7)); create table copies.t (id bigint, word varchar(5))"
    )
    older = source_of(results)
    results.execute("alter table public.t alter word type varchar(9), add x int")
    newer = source_of(results)
    first, second = (newer, older) if newer_first else (older, newer)
    with (
        ThreadPoolExecutor(1) as pool,
        feed_connect(shared_db) as other,
        psycopg.connect(shared_db, autocommit=True) as eye,
    ):
        late = []

        def meet():
            late.append(pool.submit(evolve, other, "copies.t", second, nothing))
            until(eye, waits(other, relation="copies.t", behind=results))

        assert evolve(results, "copies.t", first, meet)
        ran = late[0].result()
    assert one(results, COLUMNS) == {"id": "bigint", "word": "character varying(9)", "x": "integer"}
    assert len(ran) == (0 if newer_first else 2)


def test_a_table_that_is_in_use_is_not_waited_for(results, shared_db, monkeypatch):
    monkeypatch.setattr(schema_evolution, "LOCK_TIMEOUT", "5ms")
    results.execute("create table public.t (id bigint, x int); create table copies.t (id bigint)")
    with psycopg.connect(shared_db) as reader:
        reader.execute("select from copies.t")
        with pytest.raises(
            ConsumerBusy, match=r"copies\.t cannot follow its source.*5ms. Nothing was changed"
        ):
            follow(results)
    assert follow(results) == ['alter table "copies"."t" add column if not exists "x" integer']


@pytest.fixture
def keeper(results):
    """The role that owns ``copies.t``, and another without rights on it."""
    results.execute(
        "create table public.t (id bigint); create table copies.t (id bigint); create role keeper; create role other;"
        "grant usage, create on schema copies to keeper; grant usage on schema copies to other;"
        "alter table copies.t owner to keeper; create domain public.theirs as text; alter domain theirs owner to other"
    )
    yield results
    results.execute("reset role; drop owned by keeper, other; drop role keeper, other")


def test_a_role_must_own_the_table_and_trust_the_type(keeper):
    keeper.execute("alter table public.t add x public.theirs; set role keeper")
    with pytest.raises(MergeRefused, match=r'"x" has the type public\.theirs, which belongs to other'):
        follow(keeper)
    keeper.execute("reset role; alter table public.t drop x, add y int; set role other")
    with pytest.raises(
        PermissionDenied,
        match=r"does not own copies\.t .*owner keeper run `alter table .* grant keeper to other",
    ):
        follow(keeper)
    keeper.execute("reset role; grant keeper to other; set role other")
    assert follow(keeper) == ['alter table "copies"."t" add column if not exists "y" integer']
