-- Consumers and how far each has come.

create schema pubsub;
comment on schema pubsub is 'Watermarks of consumers of the commit queue, and the claims of their batches.';

create table pubsub.installed (
    version integer not null,
    checksum text,
    installed_at timestamptz not null default now()
);
comment on table pubsub.installed is 'One row for each version of this schema that was installed here, the newest last.';
-- The installer notes its checksum by an update, which a publication refuses without an identity.
alter table pubsub.installed replica identity full;
insert into pubsub.installed (version) values (1);

create table pubsub.origin (
    system_identifier bigint not null,
    noted_at timestamptz not null default now()
);
comment on table pubsub.origin is
    'The cluster whose transaction ids this database holds. Another one means that it was restored or upgraded.';
create unique index origin_single on pubsub.origin ((true));
-- Under a publication for all tables PostgreSQL refuses to change a table without a key, unless it has an identity.
alter table pubsub.origin replica identity full;
insert into pubsub.origin (system_identifier) select system_identifier from pg_catalog.pg_control_system();

create table pubsub.watermark (
    consumer_id text not null check (consumer_id <> ''),
    branch_id bigint not null,
    txid xid8 not null generated always as (
        case when pg_snapshot_xmin(snapshot) = '1' then '0'::xid8 else pg_snapshot_xmin(snapshot) end
    ) stored,
    commit_id bigint not null default 0,
    snapshot pg_snapshot not null default '1:1:',
    partial_txid xid8,
    partial_id bigint,
    version bigint not null default 0,
    source bigint,
    in_order boolean not null default false,
    updated_at timestamptz not null default now(),
    primary key (consumer_id, branch_id),
    check ((partial_txid is null) = (partial_id is null))
);
comment on table pubsub.watermark is
    'What each consumer has processed: the commits of every transaction that snapshot sees, and those of the one transaction '
    'partial_txid up to queue id partial_id. All below txid is processed. version counts the batches, source is the cluster '
    'that the transaction ids belong to.';

create table pubsub.claim (
    consumer_id text not null,
    branch_id bigint not null,
    version bigint not null,
    from_version bigint not null,
    batch_id uuid not null,
    attempt integer not null,
    error text,
    batch jsonb not null,
    after_snapshot pg_snapshot not null,
    after_txid xid8,
    after_id bigint,
    snapshot pg_snapshot not null,
    partial_txid xid8,
    partial_id bigint,
    claimed_at timestamptz not null default clock_timestamp(),
    primary key (consumer_id, branch_id)
);
comment on table pubsub.claim is
    'The batch that each consumer claimed last, at the source of the commits: what a retry works on again, and the mark '
    'that shows whether this cluster still has all that the consumer saw. after_* is the watermark before the batch, '
    'snapshot and partial_* the one behind it: the same where the batch is a dead letter that is sent again. error is what '
    'the last attempt failed on, if it could say so.';

create table pubsub.trimmed (
    branch_id bigint not null,
    upto xid8 not null,
    commits bigint not null,
    trimmed_at timestamptz not null default now()
);
alter table pubsub.trimmed replica identity full;
comment on table pubsub.trimmed is 'History that is gone: how many commits of which branch, below which transaction.';

create view pubsub.out_of_order as
select w.consumer_id, w.branch_id, q.txid, q.commit_id
from pubsub.watermark as w
join revision.commit_queue as q on q.branch_id = w.branch_id and q.txid >= w.txid
where pg_visible_in_snapshot(q.txid, w.snapshot)
   or (q.txid = w.partial_txid and q.id <= w.partial_id);
comment on view pubsub.out_of_order is 'Commits that a consumer processed above its watermark''s txid.';
