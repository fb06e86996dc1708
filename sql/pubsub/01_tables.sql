-- Consumers of the commit queue and their progress.

create schema pubsub;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, pubsub, revision, pg_temp;
comment on schema pubsub is 'Watermarks of consumers of the commit queue, and the claims of their batches.';

select pgchange.keep_versions('pubsub', version => 1);

create table pubsub.watermark (
    consumer_id text not null check (consumer_id <> ''),
    branch_id bigint not null,
    txid bigint not null default 0,
    commit_id bigint not null default 0,
    snapshot pg_snapshot not null default '1:1:',
    partial_txid xid8,
    partial_id bigint,
    version bigint not null default 0,
    source text,
    in_order boolean not null default false,
    updated_at timestamptz not null default now(),
    primary key (consumer_id, branch_id),
    check ((partial_txid is null) = (partial_id is null))
);
comment on table pubsub.watermark is
    'The commits that each consumer has processed: those of every transaction that snapshot sees, and those of the transaction '
    'partial_txid up to queue id partial_id. All commits below txid are processed. version counts batches and manual moves. '
    'source: the place to which the transaction ids belong.';

-- Set the txid of a watermark: the oldest transaction that its snapshot does not see. A trigger does this, and not a generated
-- column, so that a manual change raises an error with the right call. Older manuals advised to set txid after a restore.
create function pubsub.follow_snapshot() returns trigger
language plpgsql as $$
begin
    -- A new watermark's snapshot is 1:1:, which sees nothing.
    new.txid := coalesce(nullif(pg_catalog.pg_snapshot_xmin(new.snapshot)::pg_catalog.text::pg_catalog.int8, 1), 0);
    return new;
end
$$;

create trigger txid_follows before insert or update of snapshot on pubsub.watermark
    for each row execute function pubsub.follow_snapshot();
create trigger txid_kept before update of txid on pubsub.watermark
    for each statement execute function revision.refuse_txid();

create view pubsub.out_of_order as
select w.consumer_id, w.branch_id, q.txid, q.commit_id, q.key
from pubsub.watermark as w
join revision.commit_queue as q on q.branch_id = w.branch_id and q.txid >= w.txid::text::xid8
where pg_visible_in_snapshot(q.txid, w.snapshot)
   or (q.txid = w.partial_txid and q.id <= w.partial_id);
comment on view pubsub.out_of_order is
    'Commits that a consumer has processed although their txid is not below that of its watermark.';
