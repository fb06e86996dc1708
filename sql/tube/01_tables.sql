-- Tubes, the tables attached to them, and how far each worker has come.
--
-- A tube's pods live in a table of its own, made in the schema that was current. Its GRANTs are the tube's: INSERT touches,
-- SELECT and DELETE work. The rows below follow them.

create schema tube;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, tube, pg_temp;
comment on schema tube is 'Tubes: what was touched in tables, as pods of ids that workers replay.';

select pgchange.keep_versions('tube', version => 1);

create sequence tube.seq;
comment on sequence tube.seq is 'Numbers the pods of all tubes. Gaps are normal; a lower number may be committed later.';

create table tube.tube (
    name text primary key check (name <> ''),
    pods regclass not null unique,
    partitions integer not null default 1 check (partitions between 1 and 999),
    predicate text,
    made_at timestamptz not null default now(),
    key regtype[] not null default '{bigint}' check (cardinality(key) between 1 and 32)
);
comment on table tube.tube is
    'Every tube: the table of its pods, the number of workers that share it, and the predicate over a row that says whether '
    'touching the row counts, for tables that are attached from now on. key has the types of the columns of its ids: {bigint}, or others '
    'whose ids travel as text.';

create table tube.attachment (
    tube text not null references tube.tube on delete cascade,
    tbl regclass not null,
    shard integer not null,
    key name[] not null,
    key_numbers smallint[] not null,
    key_types regtype[] not null,
    is_grouped boolean not null,
    predicate text,
    token text not null unique,
    attached_at timestamptz not null default now(),
    number_of oid not null,
    primary key (tube, tbl)
);
comment on table tube.attachment is
    'The tables that touch a tube, each with its shard, the columns that hold its ids, by their names and by the numbers that they had in '
    'the table whose number is number_of (a restored table has another one, and may number its columns anew), their types, whether '
    'several rows may have one id (is_grouped), and the tube''s '
    'predicate as it was when the table''s owner attached it: a later one needs that owner''s consent. token is in the names of its functions and of no '
    'others.';

create table tube.detached (
    tube text not null references tube.tube on delete cascade,
    tbl regclass not null,
    shard integer not null,
    primary key (tube, tbl)
);
comment on table tube.detached is
    'Tables that were attached once, and under which shard: attached under another one, they moved.';

create table tube.moved (
    tube text not null references tube.tube on delete cascade,
    from_shard integer not null,
    to_shard integer not null,
    upto bigint not null,
    moved_at timestamptz not null default now()
);
comment on table tube.moved is
    'Tables that changed their shard: newer pods of to_shard wait until those of from_shard up to seq upto are done, so that '
    'no id is in work twice. What is undone of a table is touched again under its new shard, but stays under the old one too: '
    'pods do not say of which of a shard''s tables their ids are, so a batch of the old worker may still have them.';

-- Under a publication for all tables PostgreSQL refuses to delete from a table without a key, unless it has an identity.
alter table tube.moved replica identity full;

create table tube.worker (
    tube text not null references tube.tube on delete cascade,
    worker integer not null,
    version bigint not null default 0,
    snapshot pg_snapshot not null default '1:1:',
    done bigint not null default 0,
    backfill_snapshot pg_snapshot not null default '1:1:',
    backfill_done bigint not null default 0,
    batch jsonb,
    attempt integer not null default 0,
    failures integer not null default 0,
    outages integer not null default 0,
    error text,
    claimed_at timestamptz,
    updated_at timestamptz not null default now(),
    control_attempt integer not null default 0,
    control_failed_at timestamptz,
    leased_by text,
    leased_until timestamptz,
    primary key (tube, worker, version)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table tube.worker is
    'A hint for each worker: of its shards'' pods those that snapshot sees are done up to seq done, and of backfill pods those '
    'that backfill_snapshot sees up to backfill_done. The pods that are there are the truth; the hint saves stepping over what '
    'was deleted. version counts the batches, batch is the one in work, error what its last attempt failed on, if it could say '
    'so; failures is how many attempts failed by an error of the batch itself, outages how many by another one, such as a lost '
    'server. control_attempt is how often in a row some of its control pods failed, whatever batches came between, the last time at '
    'control_failed_at. Each batch puts a new row in the place of the last, so that the newest is found at once, however many '
    'dead ones an old snapshot keeps.';

create table tube.fault (
    id bigint generated always as identity primary key,
    tube text not null,
    tbl regclass not null,
    kind text not null default 'capture' check (kind in ('capture', 'control', 'missed')),
    ids bigint not null,
    message text not null,
    occurred_at timestamptz not null default pg_catalog.clock_timestamp()
);
create index fault_by_tube on tube.fault (tube, kind, tbl);
comment on table tube.fault is
    'Of kind capture: rows for which a predicate or the capture failed, counted by statement and message. Their ids were touched '
    'all the same, unless the message says that they could not be told, or are lost. Of kind control: a control pod that was '
    'given up. Of kind missed: rows that came with a partition, until a backfill that began later has ended.';

create table tube.backfill (
    id bigint generated always as identity primary key,
    tube text not null references tube.tube on delete cascade,
    tbl regclass not null,
    shard integer not null,
    order_col name not null,
    order_type text not null,
    chunk_size integer not null check (chunk_size between 1 and 1000000),
    start_seq bigint not null,
    state text not null default 'scheduled'
        check (state in ('scheduled', 'running', 'paused', 'done', 'cancelled', 'failed')),
    in_nulls boolean not null default false,
    last_value text,
    last_id text,
    looked_at bigint not null default 0,
    done bigint not null default 0,
    total bigint not null,
    rate double precision,
    rated_from timestamptz,
    rated_looked_at bigint,
    message text,
    started_by name not null default session_user,
    started_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp(),
    finished_at timestamptz
);
create unique index backfill_unfinished on tube.backfill (tube, tbl) where state in ('scheduled', 'running', 'paused');
comment on table tube.backfill is
    'Backfills that go on where they stopped: looked_at rows of about total are behind (last_value, last_id), the last with '
    'in_nulls among the rows without an order; done of them had ids to touch. rate is rows a second since rated_from, when '
    'rated_looked_at were behind: since it was begun, resumed or, after a long rest, taken up again. order_type is the type of '
    'order_col when it began: values of another have another order.';

create type tube.keyset as (
    in_nulls boolean, last_value text, last_id text, looked_at bigint, touched bigint, finished boolean
);
comment on type tube.keyset is
    'Where a backfill stands, and how many rows its last slice looked at and touched.';
