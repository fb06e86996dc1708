-- Consumers and how far each has come.

create schema pubsub;
comment on schema pubsub is 'Watermarks of consumers of the commit queue, and the claims of their batches.';

select pgchange.keep_versions('pubsub', version => 1);

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
    source text,
    in_order boolean not null default false,
    updated_at timestamptz not null default now(),
    primary key (consumer_id, branch_id),
    check ((partial_txid is null) = (partial_id is null))
);
comment on table pubsub.watermark is
    'What each consumer has processed: the commits of every transaction that snapshot sees, and those of the one transaction '
    'partial_txid up to queue id partial_id. All below txid is processed. version counts the batches and '
    'the moves by hand, source is the place that the transaction ids belong to.';

create view pubsub.out_of_order as
select w.consumer_id, w.branch_id, q.txid, q.commit_id
from pubsub.watermark as w
join revision.commit_queue as q on q.branch_id = w.branch_id and q.txid >= w.txid
where pg_visible_in_snapshot(q.txid, w.snapshot)
   or (q.txid = w.partial_txid and q.id <= w.partial_id);
comment on view pubsub.out_of_order is 'Commits that a consumer processed above its watermark''s txid.';
