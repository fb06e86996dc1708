-- The states of resumable backfills: they can be paused, resumed and cancelled. Every user of the tube may read them.

-- A backfill by its id, locked until the transaction ends. Raises an error if there is none.
create function tube.backfill_named(id bigint) returns tube.backfill
language plpgsql as $$
declare
    found_row tube.backfill;
begin
    select b.* into found_row from tube.backfill as b where b.id = backfill_named.id for update;
    if found_row.id is null then
        raise exception using errcode = 'PC002', message = format('there is no backfill %s', coalesce(id::text, 'null')),
            hint = 'list them: select * from tube.backfills()';
    end if;
    return found_row;
end
$$;

-- The unfinished backfill of a table, of which there is at most one; null if there is none.
create function tube.unfinished_backfill(tube text, tbl regclass) returns tube.backfill
language plpgsql stable as $$
begin
    return (
        select b from tube.backfill as b
        where b.tube = unfinished_backfill.tube and b.tbl = unfinished_backfill.tbl
          and b.state in ('scheduled', 'running', 'paused'));
end
$$;

-- Fail the unfinished backfills of a table, with the reason.
create function tube.fail_backfills(tube text, tbl regclass, reason text) returns void
language sql as $$
    update tube.backfill as b set
        state = 'failed', message = reason, updated_at = clock_timestamp(), finished_at = clock_timestamp()
    where b.tube = fail_backfills.tube and b.tbl = fail_backfills.tbl and b.state in ('scheduled', 'running', 'paused')
$$;

-- Change the state of a backfill, from one of the allowed states.
create function tube.set_state(id bigint, allowed text[], wanted text, message text) returns void
language plpgsql as $$
declare
    job tube.backfill := tube.backfill_named(id);
begin
    if job.state = wanted then
        return;
    end if;
    if job.state <> all (allowed) then
        perform pgchange.refuse(
            format('backfill %s is %s, so its state cannot be changed in this way', id, job.state),
            'only a scheduled or running backfill can be paused, only a paused backfill resumed, only an unfinished backfill '
            'cancelled');
    end if;
    update tube.backfill as b set
        state = wanted, message = set_state.message, updated_at = clock_timestamp(), rated_from = null,
        finished_at = case when wanted = 'cancelled' then clock_timestamp() end
    where b.id = set_state.id;
end
$$;

create function tube.backfill_pause(id bigint) returns void
language sql as $$
    select tube.set_state(id, array['scheduled', 'running'], 'paused', 'paused by ' || session_user)
$$;
comment on function tube.backfill_pause(bigint) is
    'Pause a backfill after the chunk in work, until tube.backfill_resume().';

create function tube.backfill_resume(id bigint) returns void
language plpgsql as $$
declare
    job tube.backfill := tube.backfill_named(id);
begin
    perform tube.set_state(
        id, array['paused'], case when job.looked_at = 0 and not job.in_nulls then 'scheduled' else 'running' end, null);
end
$$;
comment on function tube.backfill_resume(bigint) is 'Resume a paused backfill where it stopped.';

create function tube.backfill_cancel(id bigint) returns void
language sql as $$
    select tube.set_state(id, array['scheduled', 'running', 'paused'], 'cancelled', 'cancelled by ' || session_user)
$$;
comment on function tube.backfill_cancel(bigint) is
    'Cancel a backfill. Ids that it touched stay touched, and a downstream deletes nothing.';

create function tube.backfills()
returns table (
    id bigint, tube text, tbl regclass, shard integer, order_col name, state text, looked_at bigint, total bigint,
    percent numeric, touched bigint, rate double precision, remaining interval, message text, started_by name,
    started_at timestamptz, updated_at timestamptz, finished_at timestamptz
)
language sql stable as $$
    select b.id, b.tube, b.tbl, b.shard, b.order_col, b.state, b.looked_at, b.total,
           case when b.state = 'done' then 100 else round(least(99.9, 100.0 * b.looked_at / greatest(b.total, 1)), 1) end,
           b.done,
           case when b.rate >= 1 then round(b.rate)
                when b.rate > 0 then round(b.rate::numeric, ceil(-log(b.rate::numeric))::integer)::double precision
                else b.rate end,
           case when b.state = 'running' and b.rate > 0 then make_interval(secs => round((b.total - b.looked_at) / b.rate)) end,
           b.message, b.started_by, b.started_at, b.updated_at, b.finished_at
    from tube.backfill as b
    order by b.finished_at is not null, b.id desc
$$;
comment on function tube.backfills() is
    'Every resumable backfill, unfinished backfills first. looked_at: how many of about total rows were read. touched: how many '
    'ids were touched. rate: rows per second. remaining: the estimated time to the end.';
