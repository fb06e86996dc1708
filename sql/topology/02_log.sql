-- Terms, and appending events to the log.

-- The key of the advisory lock that every transaction takes before it changes the catalogue.
create function topology.lock_key() returns bigint
language sql immutable as $$
    select hashtextextended('pgchange topology', 0)
$$;

-- Lock the catalogue against other writers until this transaction ends. Waits at most 10 s, or as long as lock_timeout if that
-- is set.
create function topology.hold() returns void
language plpgsql as $$
begin
    perform pgchange.lock_or_tell(topology.lock_key(), 'the catalogue was not changed');
end
$$;

-- Serialize the transactions that write the catalogue. The log's order is then the order of commit, and each transaction sees
-- all earlier changes.
create function topology.take_turn() returns trigger
language plpgsql security definer as $$
begin
    if tg_op = 'TRUNCATE' then
        raise exception using errcode = 'PC008', message = format('%s cannot be truncated: clients would not hear of it', tg_relid::regclass),
            hint = 'delete its rows';
    end if;
    perform pgchange.check_isolation();
    -- Take this lock before any row lock, or two writers could deadlock.
    perform topology.hold();
    return null;
end
$$;

-- Return the current term of this catalogue, on a primary. A new term begins after a promotion, a restore or a restart of the
-- server. It also begins if the log is in another database or file. While another transaction writes the catalogue, a new term
-- is returned but not stored: that transaction or the next call stores it. The function is in PL/pgSQL, which caches its plans,
-- because relays call this many times a second.
create function topology.begin_term() returns topology.term
language plpgsql volatile security definer as $$
declare
    latest topology.term;
    here topology.term;
begin
    select t.* into latest from topology.term as t order by t.term desc limit 1;
    here.term := latest.term;
    here.system_identifier := pgchange.cluster();
    -- Take the timeline from the name of the WAL file. After a promotion the control file has the old timeline until the first
    -- checkpoint.
    here.timeline := ('x' || lpad(left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), 16, '0'))::bit(64)::bigint;
    here.started_at := pg_postmaster_start_time();
    here.database := (select d.oid from pg_database as d where d.datname = current_database());
    here.log_file := pg_relation_filenode('topology.log');
    if here is distinct from latest then
        here.term := coalesce(latest.term, 0) + 1;
        -- Do not wait: the holder of the lock may take long, and stores the same term with its first event.
        if pg_try_advisory_xact_lock(topology.lock_key()) then
            insert into topology.term values (here.*) on conflict do nothing;
        end if;
    end if;
    return here;
end
$$;

create type topology.change as (op text, map text, fields json);
comment on type topology.change is
    'A change of the catalogue. op: replace or delete; map: replicaset, instance or bucket; fields: the event''s fields besides '
    'those that every event has.';

-- The event of a change as JSON for clients: fields in the order of the protocol's manual, without nulls.
create function topology.event(change topology.change, at timestamptz, term bigint, index bigint) returns json
language sql stable as $$
    select json_strip_nulls(concat(
        '{"op":', to_json((change).op), ',"map":', to_json((change).map),
        ',"timestamp":"', to_char(at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"'),
        '","raft":{"term":', term, ',"index":', index, '},', substr((change).fields::text, 2))::json)
$$;

-- Append changes to the log in order. The caller holds the catalogue's lock.
create function topology.append(changes topology.change[]) returns void
language plpgsql as $$
declare
    at timestamptz := clock_timestamp();
    now_term bigint;
begin
    if cardinality(changes) = 0 then
        return;
    end if;
    -- Clients get an event as soon as it is visible. Without a synchronous commit, a crash could lose it within the same term.
    if current_setting('synchronous_commit') = 'off' then
        perform set_config('synchronous_commit', 'on', true);
    end if;
    now_term := (topology.begin_term()).term;
    insert into topology.log (term, index, event, written_at)
    select now_term, n.index, topology.event(n.change, at, now_term, n.index), at
    from (
        select nextval('topology.event_index') as index, (c.op, c.map, c.fields)::topology.change as change
        from unnest(changes) with ordinality as c(op, map, fields, place)
        order by c.place
    ) as n;
end
$$;
