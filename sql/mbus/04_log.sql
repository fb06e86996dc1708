-- What is made for each queue: its log, and functions of its own that carry its name.

-- Whether every consumer can receive a message with these headers and times. A malformed consume_after would fail the consumer and not
-- the poster. At the ends of time there are moments that some time zones do not have.
create function mbus.is_receivable(headers hstore, delayed_until timestamptz, expires timestamptz) returns boolean
language plpgsql immutable as $$
begin
    return array_position((headers -> 'consume_after')::text[], null) is null
       and coalesce(delayed_until between '0001-01-01 UTC' and '100000-01-01 UTC' or not isfinite(delayed_until), true)
       and coalesce(expires between '0001-01-01 UTC' and '100000-01-01 UTC' or not isfinite(expires), true);
end
$$;

-- Make the tables of a queue.
create function mbus.make_log(known mbus.queue) returns void
language plpgsql as $$
declare
    sequence text := format('mbus.%I', 'seq$' || known.qname);
begin
    -- That of a queue of this name that was dropped is there still: its ids may be waited for, or be a saga's.
    if to_regclass(sequence) is null then
        execute format('create sequence %s', sequence);
        execute format('comment on sequence %s is %L', sequence, 'The ids of the messages of queue ' || known.qname || '.');
    end if;
    -- A message's transaction has its id before the message draws its own: what a reader cannot see yet, of a transaction with
    -- an id that is younger than its snapshot, has a higher id than any that was drawn before.
    execute format($table$
        create table mbus.%1$I (
            data %4$s,
            headers %4$s not null default %4$s(array[
                'seenby', '{' || current_database() || '}', 'source_db', current_database()::text,
                'destination_queue', %2$L, 'enqueue_time', clock_timestamp()::timestamp::text]),
            properties %4$s,
            delayed_until timestamptz,
            expires timestamptz,
            iid text,
            not_for integer[],
            id bigint primary key default case when pg_current_xact_id() is not null then nextval(%3$L) end,
            added timestamptz not null default clock_timestamp(),
            txid xid8 not null default pg_current_xact_id(),
            -- PostgreSQL compiles a constraint in each statement, so it is short, and mostly calls no function.
            constraint is_receivable check (
                delayed_until is null and expires is null and not headers ? 'consume_after'
                or mbus.is_receivable(headers, delayed_until, expires)),
            special boolean not null generated always as (delayed_until is not null or headers ? 'consume_after') stored
        ) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
                autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.2,
                autovacuum_vacuum_cost_delay = 0)
        $table$, 'log$' || known.qname, known.qname, sequence, pg_typeof((null::mbus.qt_model).data));
    perform pgchange.keep_to_owner(r) from unnest(array[sequence, format('mbus.%I', 'log$' || known.qname)]::regclass[]) as r;
    -- Not by id itself: who looks up an id finds its key alone, whatever the planner expects.
    execute format('create index on mbus.%I (txid, (id + 0))', 'log$' || known.qname);
    execute format('create index on mbus.%I (iid) where iid is not null', 'log$' || known.qname);
    -- For maintenance, which looks for these alone however many others wait.
    execute format('create index on mbus.%I (expires) where expires is not null', 'log$' || known.qname);
    execute format('create index on mbus.%I (id) where not_for is not null', 'log$' || known.qname);
    execute format('comment on table mbus.%I is %L', 'log$' || known.qname,
        'The messages of queue ' || known.qname || ' in the order of id, also those that were received; COPY may fill it. not_for: '
        'the consumers that had a message before it was put back, or are to have it still; null for one that was not put back.');
    update mbus.queue as q set
        seq = to_regclass(sequence), began = coalesce(pg_sequence_last_value(to_regclass(sequence)), 0)
    where q.id = known.id;
end
$$;

-- Write one of the functions of a queue, anew if it is there; not pinned, it has the settings of those who call it, search_path too.
create function mbus.place(
    name text, arguments text, returned text, options text, body text, note text, pinned boolean default true,
    place_in name default 'mbus'
) returns void
language plpgsql as $$
declare
    signature text := format('%I.%I(%s)', place_in, mbus.check_length(name), regexp_replace(arguments, ' default [^,]*', '', 'g'));
begin
    perform pgchange.place_function(
        signature,
        format('create or replace function %I.%I(%s) returns %s %s %s as %L',
            place_in, name, arguments, returned, options,
            case when pinned then format('set search_path = %s', current_setting('search_path')) end, body),
        note);
end
$$;

-- Write one of the functions of a queue that users call. One that asks for the rights of its caller stands in the sealed schema, and
-- its public face tells it who that is; any other asks for nothing but EXECUTE.
create function mbus.place_asking(asks boolean, name text, arguments text, returned text, options text, body text, note text) returns void
language plpgsql as $$
declare
    sealed regproc := to_regproc(format('mbus_sealed.%I', name));
begin
    if asks then
        perform mbus.place(
            name, concat_ws(', ', 'caller pgchange.caller', nullif(arguments, '')), returned, options, body, note, place_in => 'mbus_sealed');
        perform pgchange.show(to_regproc(format('mbus_sealed.%I', name))::oid::regprocedure);
    else
        perform mbus.place(name, arguments, returned, options, body, note);
        if sealed is not null then
            execute format('drop function %s', sealed);
        end if;
    end if;
end
$$;

-- The options of a function that looks for what a consumer may have next, or that calls one.
create function mbus.as_receiver(options text) returns text
language sql immutable as $$
    -- What is called below runs with these too: each of its own would be paid for at every message.
    select options || ' set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set enable_hashjoin = off '
        'set enable_sort = off set jit = off set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan'
$$;
