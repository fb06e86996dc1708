-- Terms, and putting events into the log.

-- The advisory lock of whoever changes the catalogue.
create function topology.lock_key() returns bigint
language sql immutable as $$
    select hashtextextended('pgchange topology', 0)
$$;

-- Keep others from changing the catalogue until this transaction ends. It waits for them at most 10 s, or as long as lock_timeout
-- says.
create function topology.hold() returns void
language plpgsql as $$
begin
    perform pgchange.lock_or_tell(topology.lock_key(), 'the catalogue was not changed');
end
$$;

-- Catalogue writers commit one after the other, so that the order of the log is the order of commit, and each sees what the one
-- before it did.
create function topology.take_turn() returns trigger
language plpgsql security definer as $$
begin
    if tg_op = 'TRUNCATE' then
        raise exception using errcode = 'PC008', message = format('%s cannot be truncated: clients would not hear of it', tg_relid::regclass),
            hint = 'delete its rows';
    end if;
    perform pgchange.check_isolation();
    -- Before any row is locked, or two writers could wait for each other.
    perform topology.hold();
    return null;
end
$$;

-- In PL/pgSQL, which keeps its plans: relays ask many times a second.

-- The term of this catalogue, a new one if its server was promoted, restored or started again since the last, or its log lies
-- elsewhere; on a primary. While another changes the catalogue a new one is only told: that one, or the next, begins it.
create function topology.begin_term() returns topology.term
language plpgsql volatile security definer as $$
declare
    latest topology.term;
    here topology.term;
begin
    select t.* into latest from topology.term as t order by t.term desc limit 1;
    here.term := latest.term;
    here.system_identifier := pgchange.cluster();
    -- The control file names the new timeline only at the first checkpoint behind a promotion.
    here.timeline := ('x' || lpad(left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), 16, '0'))::bit(64)::bigint;
    here.started_at := pg_postmaster_start_time();
    here.database := (select d.oid from pg_database as d where d.datname = current_database());
    here.log_file := pg_relation_filenode('topology.log');
    if here is distinct from latest then
        here.term := coalesce(latest.term, 0) + 1;
        -- Who has the lock begins the same term with its first event, and may take long: relays do not wait for it.
        if pg_try_advisory_xact_lock(topology.lock_key()) then
            insert into topology.term values (here.*) on conflict do nothing;
        end if;
    end if;
    return here;
end
$$;

create type topology.change as (op text, map text, fields json);
comment on type topology.change is
    'A change of the catalogue: op replace or delete, map replicaset, instance or bucket, fields of its event besides those '
    'that every event has.';

-- A change as clients get it: fields in the order of the protocol's description, none that is absent.
create function topology.event(change topology.change, at timestamptz, term bigint, index bigint) returns json
language sql stable as $$
    select json_strip_nulls(concat(
        '{"op":', to_json((change).op), ',"map":', to_json((change).map),
        ',"timestamp":"', to_char(at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"'),
        '","raft":{"term":', term, ',"index":', index, '},', substr((change).fields::text, 2))::json)
$$;

-- Put changes into the log, in order; by who holds the catalogue's lock.
create function topology.append(changes topology.change[]) returns void
language plpgsql as $$
declare
    at timestamptz := clock_timestamp();
    now_term bigint;
begin
    if cardinality(changes) = 0 then
        return;
    end if;
    -- Clients hear of a commit as soon as it shows. One that is not on disk yet may be gone after a crash, in the same term.
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
