-- The lag from which health reports a consumer, as its keeper or its DAG has set it.

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
    'The lag from which pgchange.health() reports a consumer, by its kind and name. address: the address of the consumer in dead '
    'letters, which decides who may change the limit. max_age limits the age of the oldest ready change, max_changes the number '
    'of changes that are ready or wait; null is no limit.';

-- The lag limits of a consumer: those that its keeper has set. Else the strictest of its watchers; else an hour and no number
-- of changes. The function is security definer, because row-level security shows the limits to keepers only, and everybody who
-- sees a consumer gets the same findings.
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
