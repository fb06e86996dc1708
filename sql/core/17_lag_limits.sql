-- How far behind a consumer may be before it is a finding of health, where its keeper or its DAG has set that.

create table pgchange.lag_limit (
    kind text references pgchange.registered (kind) on delete cascade,
    consumer text,
    address jsonb not null,
    max_age interval check (max_age > interval '0'),
    max_changes bigint check (max_changes > 0),
    set_by name not null default current_user,
    set_at timestamptz not null default clock_timestamp(),
    primary key (kind, consumer)
);
comment on table pgchange.lag_limit is
    'How far behind consumers may be before pgchange.health() reports them, by their kind and name. address: what the dead letters of the '
    'consumer are known by, which says who may change the limit. max_age is for the oldest ready change, max_changes for the number of '
    'changes that are ready or wait; null is no limit.';

-- The limits of a consumer: those that its keeper has set; else the strictest that its watchers give; else an hour and no number of
-- changes. Everybody who sees a consumer gets the same findings, so this reads what row-level security shows to its keepers alone.
create function pgchange.lag_limit_of(kind text, consumer text, out max_age interval, out max_changes bigint)
language plpgsql stable security definer
set jit = off
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
as $$
begin
    select l.max_age, l.max_changes into max_age, max_changes
    from pgchange.lag_limit as l
    where l.kind = lag_limit_of.kind and l.consumer = lag_limit_of.consumer;
    if not found then
        with recursive newest as (
            (select w.watched_by, w.max_lag, w.max_backlog from pgchange.watcher as w
             where w.kind = lag_limit_of.kind and w.feed = left(lag_limit_of.consumer, 600)
             order by w.kind desc, w.feed desc, w.watched_by desc, w.version desc limit 1)
            union all
            select o.*
            from newest as n
            cross join lateral (
                select w.watched_by, w.max_lag, w.max_backlog from pgchange.watcher as w
                where w.kind = lag_limit_of.kind and w.feed = left(lag_limit_of.consumer, 600) and w.watched_by < n.watched_by
                order by w.kind desc, w.feed desc, w.watched_by desc, w.version desc limit 1) as o
        )
        select coalesce(min(n.max_lag), interval '1 hour'), min(n.max_backlog) into max_age, max_changes from newest as n;
    end if;
end
$$;
