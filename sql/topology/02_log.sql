-- Terms, and putting events into the log.

create function topology.lock_key() returns bigint
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select hashtextextended('pgchange topology', 0)
$$;
comment on function topology.lock_key() is 'The advisory lock of whoever changes the catalogue.';

create function topology.take_turn() returns trigger
language plpgsql security definer
set search_path = pg_catalog, topology, pg_temp
as $$
begin
    if tg_op = 'TRUNCATE' then
        raise exception using errcode = 'PC008', message = format('%s cannot be truncated: clients would not hear of it', tg_relid::regclass),
            hint = 'delete its rows';
    end if;
    -- Before any row is locked, or two writers could wait for each other.
    perform pg_advisory_xact_lock(topology.lock_key());
    return null;
end
$$;
comment on function topology.take_turn() is
    'Catalogue writers commit one after the other, so that the order of the log is the order of commit.';

create function topology.begin_term() returns bigint
language plpgsql security definer
set search_path = pg_catalog, topology, pg_temp
as $$
declare
    -- The control file names the new timeline only at the first checkpoint behind a promotion.
    here_timeline bigint := ('x' || lpad(left(pg_walfile_name(pg_current_wal_insert_lsn()), 8), 16, '0'))::bit(64)::bigint;
    here_identifier bigint := (select s.system_identifier from pg_control_system() as s);
    latest topology.term;
begin
    select t.* into latest from topology.term as t order by t.term desc limit 1;
    if (latest.system_identifier, latest.timeline, latest.started_at)
       is not distinct from (here_identifier, here_timeline, pg_postmaster_start_time()) then
        return latest.term;
    end if;
    perform pg_advisory_xact_lock(topology.lock_key());
    insert into topology.term as t (term, system_identifier, timeline, started_at)
    select coalesce(max(o.term), 0) + 1, here_identifier, here_timeline, pg_postmaster_start_time()
    from topology.term as o
    having coalesce(
        (select (n.system_identifier, n.timeline, n.started_at) from topology.term as n order by n.term desc limit 1)
        is distinct from (here_identifier, here_timeline, pg_postmaster_start_time()), true);
    return (select max(t.term) from topology.term as t);
end
$$;
comment on function topology.begin_term() is
    'The term of this server, a new one if it was promoted, restored or started again since the last; on a primary.';

create type topology.change as (op text, map text, fields json);
comment on type topology.change is
    'A change of the catalogue: op replace or delete, map replicaset, instance or bucket, fields of its event besides those '
    'that every event has.';

create function topology.event(change topology.change, at timestamptz, term bigint, index bigint) returns json
language sql stable
set search_path = pg_catalog, topology, pg_temp
as $$
    select json_strip_nulls(concat(
        '{"op":', to_json((change).op), ',"map":', to_json((change).map),
        ',"timestamp":"', to_char(at at time zone 'utc', 'YYYY-MM-DD"T"HH24:MI:SS"+00:00"'),
        '","raft":{"term":', term, ',"index":', index, '},', substr((change).fields::text, 2))::json)
$$;
comment on function topology.event(topology.change, timestamptz, bigint, bigint) is
    'A change as clients get it: fields in the order of the protocol''s description, none that is absent.';

create function topology.append(changes topology.change[]) returns void
language plpgsql
set search_path = pg_catalog, topology, pg_temp
as $$
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
    now_term := topology.begin_term();
    insert into topology.log (term, index, event, written_at)
    select now_term, n.index, topology.event(n.change, at, now_term, n.index), at
    from (
        select nextval('topology.event_index') as index, (c.op, c.map, c.fields)::topology.change as change
        from unnest(changes) with ordinality as c(op, map, fields, place)
        order by c.place
    ) as n;
end
$$;
comment on function topology.append(topology.change[]) is
    'Put changes into the log, in order; by who holds the catalogue''s lock.';
