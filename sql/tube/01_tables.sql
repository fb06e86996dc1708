-- Tubes, the tables attached to them, and how far each worker has come.
--
-- A tube's pods live in a table of its own, made in the schema that was current. Its GRANTs are the tube's: INSERT touches,
-- SELECT and DELETE work. The rows below follow them.

create schema tube;
comment on schema tube is 'Tubes: what was touched in tables, as pods of ids that workers replay.';

create table tube.installed (
    version integer not null,
    checksum text,
    installed_at timestamptz not null default now()
);
comment on table tube.installed is 'One row for each version of this schema that was installed here, the newest last.';
insert into tube.installed (version) values (1);

create sequence tube.seq;
comment on sequence tube.seq is 'Numbers the pods of all tubes. Gaps are normal; a lower number may be committed later.';

create table tube.tube (
    name text primary key check (name <> ''),
    pods regclass not null unique,
    partitions integer not null default 1 check (partitions between 1 and 999),
    predicate text,
    made_at timestamptz not null default now()
);
comment on table tube.tube is
    'Every tube: the table of its pods, the number of workers that share it, and the predicate over a row that says whether '
    'touching the row counts.';

create table tube.attachment (
    tube text not null references tube.tube on update cascade on delete cascade,
    tbl regclass not null,
    shard integer not null,
    id_column name not null,
    id_number smallint not null,
    attached_at timestamptz not null default now(),
    primary key (tube, tbl)
);
comment on table tube.attachment is 'The tables that touch a tube, each with its shard and the column that holds its ids.';

create table tube.moved (
    tube text not null references tube.tube on update cascade on delete cascade,
    from_shard integer not null,
    to_shard integer not null,
    upto bigint not null,
    moved_at timestamptz not null default now()
);
comment on table tube.moved is
    'Tables that changed their shard: newer pods of to_shard wait until those of from_shard up to seq upto are done, so that '
    'no id is in work twice.';

create table tube.worker (
    tube text not null references tube.tube on update cascade on delete cascade,
    worker integer not null,
    version bigint not null default 0,
    snapshot pg_snapshot not null default '1:1:',
    done bigint not null default 0,
    backfill_snapshot pg_snapshot not null default '1:1:',
    backfill_done bigint not null default 0,
    batch jsonb,
    attempt integer not null default 0,
    claimed_at timestamptz,
    updated_at timestamptz not null default now(),
    primary key (tube, worker)
);
comment on table tube.worker is
    'A hint for each worker: of its shards'' pods those that snapshot sees are done up to seq done, and of backfill pods those '
    'that backfill_snapshot sees up to backfill_done. The pods that are there are the truth; the hint saves stepping over what '
    'was deleted. version counts the batches, batch is the one in work.';

create table tube.fault (
    id bigint generated always as identity primary key,
    tube text not null,
    tbl regclass not null,
    ids bigint not null,
    message text not null,
    occurred_at timestamptz not null default pg_catalog.statement_timestamp()
);
comment on table tube.fault is
    'Statements for which a predicate or the capture failed, and of how many rows. Their ids were touched all the same; where '
    'ids is 0 they could not be told.';
