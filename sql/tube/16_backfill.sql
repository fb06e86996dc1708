-- A whole table as pods of op B, in the order of one of its columns: in three steps, each a transaction.
--
-- First a seq is drawn; then the writers of that moment are waited for; then the rows are read. So a row that is not read, or
-- read before it changed, is touched by a pod with a higher seq, and what the downstream has not written since that seq is gone.

create function tube.check_kind(tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if (select c.relkind not in ('r', 'p') from pg_class as c where c.oid = tbl) then
        perform tube.refuse(format('%s is no longer a table', tbl), 'detach it');
    end if;
end
$$;
comment on function tube.check_kind(regclass) is
    'Refuse a view, which an owner may make of a table before PostgreSQL 16: what it calls would run with its reader''s rights.';

create function tube.check_whole(tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    perform tube.check_kind(tbl);
    if row_security_active(tbl) then
        raise insufficient_privilege using
            message = format('row security hides rows of %s from %I: they would count as gone', tbl, current_user),
            hint = 'read it as a role with bypassrls, or as its owner without force row level security';
    end if;
end
$$;
comment on function tube.check_whole(regclass) is
    'Refuse a table if row security hides rows of it from the caller: compared with a copy, they would be deleted there.';

create function tube.check_code(tbl regclass) returns void
language plpgsql stable
set search_path = pg_catalog, tube, pgchange, pg_temp
as $$
declare
    owner_name name := (select pg_get_userbyid(c.relowner) from pg_class as c where c.oid = tbl);
    code text := pgchange.code_in(tbl);
begin
    if code is not null then
        raise insufficient_privilege using
            message = format('reading %s would run code of %I with your rights: %s', tbl, owner_name, code),
            hint = format('read it as %1$I, or let %1$I take that away or attach the table with a predicate, such as true', owner_name);
    end if;
end
$$;
comment on function tube.check_code(regclass) is
    'Refuse to read a table for anybody but its owner where somebody else''s code is in its indexes, its checks and the like.';

create function tube.require_attachment(tube text, tbl regclass, shard integer) returns tube.attachment
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    found_row tube.attachment := (
        select a from tube.attachment as a where a.tube = known.name and a.tbl = require_attachment.tbl
    );
begin
    if found_row.tube is null then
        perform tube.refuse(
            format('%s is not attached to tube %I', coalesce(tbl::text, 'null'), tube),
            'attach it first, because what changes during the backfill would be missed');
    end if;
    if shard <> found_row.shard then
        perform tube.refuse(
            format('%s is attached to tube %I as shard %s, not %s', tbl, tube, found_row.shard, shard),
            'leave the shard out, or attach the table again');
    end if;
    found_row.id_column := coalesce(tube.id_column(tbl, tube), found_row.id_column);
    perform tube.check_key(tbl, found_row.id_column);
    return found_row;
end
$$;
comment on function tube.require_attachment(text, regclass, integer) is
    'An attachment, with today''s name of its column of ids; refused where there is none, or under another shard.';

create function tube.lock_backfill(tube text, tbl regclass, shard integer) returns tube.attachment
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    found_row tube.attachment;
begin
    perform tube.check_level();
    loop
        found_row := tube.require_attachment(tube, tbl, shard);
        perform pg_advisory_xact_lock(tube.backfill_key(tbl, found_row.shard));
        -- Who waited for it may have waited for a change of the shard.
        exit when found_row.shard = (tube.require_attachment(tube, tbl, shard)).shard;
    end loop;
    return found_row;
end
$$;
comment on function tube.lock_backfill(text, regclass, integer) is
    'Wait until no other backfill of a table and shard is at work, and keep others out until the transaction ends.';

create function tube.put_control(known tube.tube, attached tube.attachment, op text, type text, details jsonb) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.put_pods(
        known.pods, op, attached.shard, '{}',
        jsonb_build_object('type', type, 'tbl', tube.full_name(attached.tbl)) || details)
$$;
comment on function tube.put_control(tube.tube, tube.attachment, text, text, jsonb) is
    'Put a control pod about an attached table among the pods of a tube.';

create function tube.has_control(known tube.tube, tbl regclass, shard integer, types text[]) returns boolean
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    found_one boolean;
begin
    execute format(
        'select exists (
            select from %s as l
            where l.ids = ''{}'' and %s = %s and l.shard = $1 and l.payload ->> ''type'' = any ($2)
              and tube.table_named(l.payload ->> ''tbl'') = $3)',
        known.pods, tube.belongs('l.shard', known.partitions), tube.belongs(format('(%s)', shard), known.partitions))
    using shard, types, tbl into found_one;
    return found_one;
end
$$;
comment on function tube.has_control(tube.tube, regclass, integer, text[]) is
    'Whether there is a control pod of one of some types for a table and shard.';

create function tube.check_replayed(tube text, tbl regclass, shard integer) returns void
language plpgsql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if tube.has_control(tube.named(tube), tbl, shard, array['backfill_end']) then
        perform tube.refuse(
            format('the previous backfill of %s into tube %I has not been replayed to its end yet', tbl, tube),
            'wait until the workers of the tube have finished (with tube_replay: its run after the backfill), then start this '
            'one again; select * from pgchange.status() shows what is left');
    end if;
end
$$;
comment on function tube.check_replayed(text, regclass, integer) is
    'Refuse a backfill of a table and shard whose last one the workers have not worked off. What it finds stays so until the '
    'transaction ends where tube.lock_backfill() was called before.';

create function tube.tube_backfill_schedule(in_tube text, order_col text, shard_from integer, shard_to integer) returns integer
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(in_tube);
    each_one tube.attachment;
    scheduled integer := 0;
begin
    if coalesce(shard_from > shard_to, true) then
        perform tube.refuse(format('there are no shards from %s to %s', shard_from, shard_to), 'give the lower one first');
    end if;
    for each_one in
        select a.* from tube.attachment as a
        where a.tube = known.name and a.shard between shard_from and shard_to and not tube.is_gone(a)
        order by a.shard, a.tbl
    loop
        if not tube.has_control(known, each_one.tbl, each_one.shard, array['backfill_schedule', 'backfill_end']) then
            perform tube.put_control(
                known, each_one, 'B', 'backfill_schedule',
                jsonb_build_object('order_col', tube.check_order(each_one.tbl, order_col)));
            scheduled := scheduled + 1;
        end if;
    end loop;
    return scheduled;
end
$$;
comment on function tube.tube_backfill_schedule(text, text, integer, integer) is
    'Ask the workers for a backfill of every attached table of some shards, by a control pod each; tables that have one, or '
    'whose last backfill is not worked off, are left out. Returns how many.';

create function tube.tube_backfill_step1() returns text
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select nextval('tube.seq')::text
$$;
comment on function tube.tube_backfill_step1() is
    'Begin a backfill: the seq from which on pods count as written since. In a transaction of its own.';

create function tube.writers(tables regclass[]) returns table (transaction text)
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    with relations as (
        select d.relid::oid as relid from unnest(tables) as t(tbl) cross join lateral tube.descendants(t.tbl) as d(relid)
        union
        select t.pods::oid from tube.tube as t
        where t.name in (select a.tube from tube.attachment as a where a.tbl = any (tables))
    ), holders as (
        select distinct l.virtualtransaction
        from pg_locks as l join relations as r on r.relid = l.relation
        where l.locktype = 'relation' and l.mode = 'RowExclusiveLock' and l.granted
          and l.database = (select d.oid from pg_database as d where d.datname = current_database())
          and l.pid is distinct from pg_backend_pid()
          -- Not those that only put the pods of another backfill.
          and not exists (
              select from pg_locks as b
              where b.locktype = 'advisory' and b.virtualtransaction = l.virtualtransaction and b.objsubid = 1
                and (b.classid::bigint << 32 | b.objid::bigint) in (
                    select tube.backfill_key(a.tbl, a.shard) from tube.attachment as a))
    )
    select h.virtualtransaction from holders as h where h.virtualtransaction not like '-1/%'
    union
    select 'xid ' || l.transactionid
    from pg_locks as l join holders as h using (virtualtransaction)
    where l.locktype = 'transactionid' and l.mode = 'ExclusiveLock'
$$;
comment on function tube.writers(regclass[]) is
    'Who is writing tables or the pods of their tubes, as virtual transactions and transaction ids: a prepared transaction has '
    'only the latter. pg_stat_activity would not show these, nor to an ordinary role when anybody''s transaction began.';

create function tube.awaited(transactions text[], out names text, out xid xid, out duration interval)
language sql volatile
set search_path = pg_catalog, tube, pg_temp
as $$
    select string_agg(distinct h.name, ', '), (array_agg(h.xid order by h.duration desc nulls last, age(h.xid) desc))[1],
           -- In hours, however many they are: with days there would be a space in it.
           make_interval(secs => max(extract(epoch from h.duration))::double precision)
    from (
        select coalesce(
                   'process ' || l.pid, 'prepared transaction ' || quote_literal(p.gid), 'a prepared transaction') as name,
               x.transactionid as xid, clock_timestamp() - coalesce(a.xact_start, p.prepared) as duration
        from pg_locks as l
        left join pg_locks as x on x.virtualtransaction = l.virtualtransaction and x.pid is not distinct from l.pid
            and x.locktype = 'transactionid' and x.mode = 'ExclusiveLock'
            and (l.locktype = 'virtualxid' or x.transactionid = l.transactionid)
        left join pg_stat_activity as a on a.pid = l.pid
        left join pg_prepared_xacts as p on p.transaction = l.transactionid and l.pid is null
        where (l.locktype = 'virtualxid' and l.mode = 'ExclusiveLock' and l.virtualxid = any (transactions))
           or (l.locktype = 'transactionid' and l.mode = 'ExclusiveLock' and 'xid ' || l.transactionid = any (transactions))
    ) as h
$$;
comment on function tube.awaited(text[]) is
    'Those of some transactions that have not ended, the id of the oldest and since when it is there, as far as the caller may '
    'know that; null where all have ended.';

create function tube.wait_for_writers(tables regclass[], timeout interval) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
set intervalstyle = 'postgres'
as $$
declare
    waited text[] := array(select w.transaction from tube.writers(tables) as w);
    began timestamptz := clock_timestamp();
    told_at timestamptz;
    oldest record;
    holders text;
begin
    if timeout is null then
        perform tube.refuse('step 2 needs a timeout', 'give the longest time to wait, like ''60 seconds''');
    end if;
    loop
        begin
            oldest := tube.awaited(waited);
            holders := oldest.names;
            exit when holders is null;
            if (clock_timestamp() < told_at + interval '2 s') is not true then
                told_at := clock_timestamp();
                raise notice 'tube_backfill: await_ms=% active_tx_xid=% active_tx_duration=% waiting for %',
                    round(extract(epoch from told_at - began) * 1000), oldest.xid, oldest.duration, holders;
            end if;
            if clock_timestamp() >= began + timeout then
                raise lock_not_available using
                    message = format('tables of the backfill are still being written, after %s, by %s', timeout, holders),
                    hint = 'try again when they have ended, or with a longer timeout; nothing was changed';
            end if;
            perform pg_sleep(0.02);
        exception when query_canceled then
            -- One that comes while it looks again finds those of the look before.
            if holders is null then
                raise;
            end if;
            raise query_canceled using
                message = format('%s, while tables of the backfill are still being written by %s', sqlerrm, holders),
                hint = 'try again when they have ended, or with a longer statement_timeout; nothing was changed';
        end;
    end loop;
end
$$;
comment on function tube.wait_for_writers(regclass[], interval) is
    'Wait for those who are writing tables now, and say every 2 s for whom; an error names them when they do not end in time.';

create function tube.tube_backfill_step2(timeout interval default '60 seconds') returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.wait_for_writers(array(select distinct a.tbl from tube.attachment as a), timeout)
$$;
comment on function tube.tube_backfill_step2(interval) is
    'Wait for the transactions that are writing attached tables now, prepared ones too. In a transaction of its own.';

create function tube.clear_missed(tube text, tbl regclass, before timestamptz) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    delete from tube.fault as f
    where f.tube = clear_missed.tube and f.tbl = clear_missed.tbl and f.kind = 'missed' and f.occurred_at < before
$$;
comment on function tube.clear_missed(text, regclass, timestamptz) is
    'Tell no more of the rows that came with partitions before a backfill began that brings them.';

create function tube.tube_backfill_step3(
    step1 text, tube text, tbl regclass, order_col text, shard integer default null,
    fetch_chunk_size integer default 20000, insert_chunk_size integer default 250
) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    attached tube.attachment := tube.require_attachment(tube, tbl, shard);
    column_name name;
    pod_size integer := tube.checked_chunk(insert_chunk_size);
    chunk integer;
    at tube.keyset;
    so_far tube.progress;
    since timestamptz;
    why text;
    advice text;
begin
    if coalesce(step1 !~ '^[0-9]{1,18}$', true) or step1::bigint > (select s.last_value from tube.seq as s) then
        perform tube.refuse(format('%L is not a result of step 1', step1), 'give what tube.tube_backfill_step1() returned');
    end if;
    perform tube.check_bulk(attached.shard, fetch_chunk_size);
    perform tube.check_whole(tbl);
    attached := tube.lock_backfill(tube, tbl, shard);
    -- Not before: one that waits there with a lock on the table would keep writers from ending that the other waits for.
    column_name := tube.check_order(tbl, order_col);
    begin
        perform tube.check_replayed(tube, tbl, attached.shard);
    exception when sqlstate 'PC008' then
        get stacked diagnostics why = message_text, advice = pg_exception_hint;
        raise notice using message = 'tube_backfill: skipped: ' || why, hint = advice;
        return;
    end;
    if (tube.unfinished_backfill(known.name, tbl)).id is not null then
        perform tube.refuse(
            format('another backfill of %s into tube %I is not finished', tbl, tube),
            'let it end, or cancel it; select * from tube.backfills() shows it');
    end if;
    perform tube.clear_missed(known.name, tbl, clock_timestamp());
    -- Without an index each read sorts the table: then in few large ones.
    chunk := case when tube.has_order_index(tbl, column_name, attached.id_column) then fetch_chunk_size
                  else greatest(fetch_chunk_size, 1000000) end;
    perform tube.put_control(known, attached, 'T', 'backfill_start', jsonb_build_object('start_seq', step1));
    so_far := tube.begun(tube.estimated_rows(tbl));
    raise notice 'tube_backfill: approx_size=%', so_far.approx_size;
    loop
        since := clock_timestamp();
        at := tube.backfill_slice(known, attached, column_name, at, chunk, pod_size);
        so_far := tube.told(so_far, at.touched, since, at.finished);
        exit when at.finished;
    end loop;
    if tube.require_attachment(tube, tbl, shard) is distinct from attached then
        perform tube.refuse(
            format('the predicate or the ids of %s were changed meanwhile', tbl), 'begin again with step 1; nothing was touched');
    end if;
    perform tube.put_control(known, attached, 'B', 'backfill_end', jsonb_build_object('start_seq', step1));
end
$$;
comment on function tube.tube_backfill_step3(text, text, regclass, text, integer, integer, integer) is
    'Put all ids of an attached table, for whose rows the predicate holds, into a tube as pods of op B, in the order of '
    'order_col; then the backfill_end pod, upon which the downstream gives up what was not written since step 1. One backfill '
    'of a table and shard at a time. In a transaction of its own.';
