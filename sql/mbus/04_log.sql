-- Objects that are made for each queue: its log, and functions that carry its name.

-- Whether every consumer can receive a message with these headers and times. A malformed consume_after would fail the consumers
-- instead of the poster. Near the ends of the range of timestamps, some time zones have no local time.
create function mbus.is_receivable(headers hstore, delayed_until timestamptz, expires timestamptz) returns boolean
language plpgsql immutable as $$
begin
    return array_position((headers -> 'consume_after')::text[], null) is null
       and coalesce(delayed_until between '0001-01-01 UTC' and '100000-01-01 UTC' or not isfinite(delayed_until), true)
       and coalesce(expires between '0001-01-01 UTC' and '100000-01-01 UTC' or not isfinite(expires), true);
end
$$;

-- Create the tables of a queue.
create function mbus.make_log(known mbus.queue) returns void
language plpgsql as $$
declare
    sequence text := format('mbus.%I', 'seq$' || known.qname);
begin
    -- The sequence of a dropped queue of this name still exists: messages or sagas may refer to its ids.
    if to_regclass(sequence) is null then
        execute format('create sequence %s', sequence);
        execute format('comment on sequence %s is %L', sequence, 'The ids of the messages of queue ' || known.qname || '.');
    end if;
    -- The default of id assigns the transaction its id before it draws the message's id. So if a reader's snapshot does not know
    -- a transaction, its messages have higher ids than any that was drawn before.
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
            -- PostgreSQL prepares a check constraint anew for each statement. So this constraint is short, and calls no
            -- function for most messages.
            constraint is_receivable check (not special and expires is null or mbus.is_receivable(headers, delayed_until, expires)),
            special boolean not null generated always as (delayed_until is not null or headers ? 'consume_after') stored
        ) with (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
                autovacuum_vacuum_insert_scale_factor = 0.2, autovacuum_analyze_scale_factor = 0.2,
                autovacuum_vacuum_cost_delay = 0)
        $table$, 'log$' || known.qname, known.qname, sequence, pg_typeof((null::mbus.qt_model).data));
    perform pgchange.keep_to_owner(r) from unnest(array[sequence, format('mbus.%I', 'log$' || known.qname)]::regclass[]) as r;
    -- The index is not on id itself. So a lookup of an id always uses the primary key, whatever the planner expects.
    execute format('create index on mbus.%I (txid, (id + 0))', 'log$' || known.qname);
    execute format('create index on mbus.%I (iid) where iid is not null', 'log$' || known.qname);
    -- This index is for maintenance. With it, maintenance reads only messages that can expire, however many others wait.
    execute format('create index on mbus.%I (expires) where expires is not null', 'log$' || known.qname);
    execute format('create index on mbus.%I (id) where not_for is not null', 'log$' || known.qname);
    execute format('comment on table mbus.%I is %L', 'log$' || known.qname,
        'The messages of queue ' || known.qname || ' in the order of id, also those that were received; COPY may write to it. '
        'not_for: for a message that was put back, the consumers that received it before, or are still to receive it; null for '
        'other messages.');
    update mbus.queue as q set
        seq = to_regclass(sequence), began = coalesce(pg_sequence_last_value(to_regclass(sequence)), 0)
    where q.id = known.id;
end
$$;

-- Create or replace a function of a queue. A function that is not pinned has the settings of its caller, also the search_path.
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

-- Create or replace a function of a queue for users. If it checks the rights of its caller, it is in the sealed schema, and its
-- public face passes the caller. Otherwise EXECUTE is all that its callers need.
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

-- The options of a function that searches the next messages of a consumer, or that calls such a function.
create function mbus.as_receiver(options text) returns text
language sql immutable as $$
    -- The functions that this function calls use these settings, too. If each had its own settings, they would cost time for
    -- every message.
    select options || ' set enable_seqscan = off set enable_bitmapscan = off set enable_mergejoin = off set enable_hashjoin = off '
        'set enable_sort = off set jit = off set max_parallel_workers_per_gather = 0 set plan_cache_mode = force_generic_plan'
$$;
