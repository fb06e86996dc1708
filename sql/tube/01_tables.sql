-- Tubes, the tables attached to them, and the progress of each worker.
--
-- A tube is a queue of touched ids, which are stored in pods: rows with a chunk of ids each. The pods of a tube are in a table of
-- their own, in the schema that was current when the tube was made. The GRANTs on that table decide who may use the tube: INSERT
-- touches, SELECT and DELETE work. The row policies of the tables below follow these GRANTs.

create schema tube;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, tube, pg_temp;
comment on schema tube is 'Tubes: ids of rows that were touched, stored as pods that workers replay.';

select pgchange.keep_versions('tube', version => 1);

create sequence tube.seq;
comment on sequence tube.seq is
    'The numbers of the pods of all tubes. Gaps are normal. A lower number may be committed after a higher number.';

create table tube.tube (
    name text primary key check (name <> ''),
    pods regclass not null unique,
    partitions integer not null default 1 check (partitions between 1 and 999),
    predicate text,
    made_at timestamptz not null default now(),
    key regtype[] not null default '{bigint}' check (cardinality(key) between 1 and 32)
);
comment on table tube.tube is
    'Every tube: the table of its pods, the number of its workers, and its predicate. The predicate is an SQL condition over a '
    'row: a touch of the row counts only if the condition holds. It is used for tables that are attached from now on. key: the '
    'types of the columns of the ids, {bigint}, or other types, whose ids are stored as text.';

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
    'The tables attached to a tube. shard: the shard of the table''s ids. key: the columns with its ids; key_numbers: their '
    'numbers in the table with the oid number_of. A restored table has another oid, and may number its columns anew. key_types: '
    'their types. is_grouped: several rows may have the same id. predicate: the tube''s predicate when the owner of the table '
    'attached it; a later predicate needs that owner''s consent. token: a part of the names of this attachment''s functions, and '
    'of no others.';

create table tube.detached (
    tube text not null references tube.tube on delete cascade,
    tbl regclass not null,
    shard integer not null,
    primary key (tube, tbl)
);
comment on table tube.detached is
    'Tables that were detached, each with its last shard. If such a table is attached under another shard, it has moved.';

create table tube.moved (
    tube text not null references tube.tube on delete cascade,
    from_shard integer not null,
    to_shard integer not null,
    upto bigint not null,
    moved_at timestamptz not null default now()
);
comment on table tube.moved is
    'Tables that changed their shard. Newer pods of to_shard wait until the pods of from_shard up to seq upto are done, so that '
    'no id is in work twice. The open ids of a moved table are touched again under its new shard. They also stay under the old '
    'shard, because a pod does not say to which table of a shard an id belongs. So a batch of the old worker may still contain '
    'them.';

-- The table has no key, so give it a replica identity. Without either, PostgreSQL would refuse deletes under a publication for all
-- tables.
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
    'The progress of each worker, as a hint. Of the pods of its shards, those that snapshot sees are done up to seq done. Of the '
    'backfill pods, those that backfill_snapshot sees are done up to backfill_done. The remaining pods are the truth; the hint '
    'only skips over the remains of deleted pods. version counts the batches. batch is the batch in work, error the error of its '
    'last attempt, if it was reported. failures: attempts that failed by an error of the batch itself; outages: attempts that '
    'failed by another error, such as a lost server. control_attempt: how many attempts on control pods have failed in a row, '
    'also with batches in between; control_failed_at: the last of them. Each batch replaces the row by a new row, so that the '
    'newest is found at once, however many dead rows an old snapshot keeps.';

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
    'Problems of a tube. kind capture: rows for which a predicate or the capture failed, counted by statement and message. Their '
    'ids were touched all the same, unless the message says that they are unknown or lost. kind control: a control pod that was '
    'given up. kind missed: rows of a partition that was attached with rows, until a backfill that began later has ended.';

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
    'Resumable backfills. looked_at of about total rows are done, up to (last_value, last_id); done of them had ids to touch. '
    'in_nulls: the position is among the rows whose order column is null. rate: rows per second since rated_from, when '
    'rated_looked_at rows were done. The rate is measured anew after the begin, a resume and a long pause. order_type: the type '
    'of order_col at the begin; if the type changes, the order changes, too.';

create type tube.keyset as (
    in_nulls boolean, last_value text, last_id text, looked_at bigint, touched bigint, finished boolean
);
comment on type tube.keyset is
    'The position of a backfill, and how many rows its last slice read and touched.';
