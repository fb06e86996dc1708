-- The table of a tube's pods: its creation, the worker of each pod, and inserting pods.

-- The SQL expression of the worker of a shard: the remainder of the shard, which is never negative.
create function tube.belongs(shard text, partitions integer) returns text
language plpgsql immutable as $$
begin
    return case when partitions = 1 then format('mod(%s, 1)', shard)
                else format('mod(mod(%1$s, %2$s) + %2$s, %2$s)', shard, partitions) end;
end
$$;

-- The worker of a shard, the value of the expression of tube.belongs().
create function tube.worker_of(shard integer, partitions integer) returns integer
language sql immutable as $$
    select pg_catalog.mod(pg_catalog.mod(shard, partitions) operator(pg_catalog.+) partitions, partitions)
$$;

-- Create the indexes of the pods for a number of workers. This blocks writers, for about a second per million pods.
create function tube.index_pods(pods regclass, partitions integer) returns void
language plpgsql as $$
declare
    base text := (select c.relname || '_' || partitions from pg_class as c where c.oid = pods);
    workers_index name := tube.short_name(base, '_workers_idx');
    control_index name := tube.short_name(base, '_control_idx');
    part text;
begin
    -- One index serves all workers: the pods of a worker are adjacent in it, so no worker reads over those of another. More
    -- workers cost a writer nothing.
    -- Take at once the lock that dropping an index needs: strengthening it later could deadlock with a reader that goes on to
    -- write.
    perform pgchange.take_locks(array[pods], 'access exclusive');
    for part in
        select i.indexrelid::regclass::text from pg_index as i
        join pg_description as d on d.objoid = i.indexrelid and d.classoid = 'pg_class'::regclass
        where i.indrelid = pods and d.description like 'pgchange workers %'
    loop
        execute format('drop index %s', part);
    end loop;
    execute format(
        'create index %I on %s ((op = ''B''), (%s), seq)', workers_index, pods, tube.belongs('shard', partitions));
    execute format(
        'create index %I on %s ((%s), seq) where ids = ''{}''', control_index, pods, tube.belongs('shard', partitions));
    execute format(
        'comment on index %1$I.%2$I is ''pgchange workers %4$s''; comment on index %1$I.%3$I is ''pgchange workers %4$s''',
        tube.schema_of(pods), workers_index, control_index, partitions);
exception when duplicate_table then
    perform pgchange.refuse(
        format(
            'the pods cannot be indexed: there is a relation %I or %I already in schema %I',
            workers_index, control_index, tube.schema_of(pods)),
        'rename that relation, because the indexes of the pods need these names');
end
$$;

-- Create the table of a tube's pods.
create function tube.make_pods(schema_name name, tube text, key regtype[]) returns regclass
language plpgsql as $$
declare
    pods text;
begin
    if octet_length(tube) > 57 then
        perform pgchange.refuse(format(
            'the tube cannot be made: its name %L is too long', tube),
            'use at most 57 bytes, so that <tube>_touch is a name, too');
    end if;
    if schema_name is null or starts_with(schema_name, 'pg_') then
        perform pgchange.refuse(
            format('a tube cannot be made in %s', coalesce('schema ' || quote_ident(schema_name), 'no schema')),
            'set search_path to the schema that is to have it');
    end if;
    pods := format('%I.%I', schema_name, tube);
    if to_regclass(pods) is not null then
        perform pgchange.refuse(
            format('there is a relation %s already', pods),
            'choose another name, or another schema' || case when tube.are_pods(to_regclass(pods), tube) then format(
                '; if it is left over from a dropped tube: drop table %s; drop function %I.%I; then make the tube and attach its '
                'tables again', pods, schema_name, tube || '_touch') else '' end);
    end if;
    -- A table is a type, too, and PostgreSQL would take a call of a function of that name for a cast.
    if schema_name = 'tube' and exists (
        select from pg_proc as p where p.pronamespace = 'tube'::regnamespace and p.proname = make_pods.tube
    ) then
        perform pgchange.refuse(format('there is a function %s already', pods), 'choose another name, or another schema');
    end if;
    -- The default of seq assigns the transaction its id before it draws the seq. So if a snapshot does not know a transaction,
    -- its pods have higher seqs than any that was drawn before the snapshot was taken.
    execute format($table$
        create table %1$s (
            seq bigint not null default case when pg_current_xact_id() is not null then nextval('tube.seq') end,
            op character(1) not null default 'T',
            shard integer not null,
            ids %2$s not null,
            payload jsonb,
            ts timestamptz not null default statement_timestamp(),
            txid xid8 not null default pg_current_xact_id()
        ) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000)
    $table$, pods, case when key = '{bigint}' then 'bigint[]' else 'text[] collate "C"' end);
    if key = '{bigint}' then
        execute format('alter table %s alter column ids set storage plain', pods);
    else
        -- Compressing the texts of a pod would take longer than all else. A single key that is larger than a page is compressed
        -- all the same.
        execute format('alter table %s set (toast_tuple_target = 8160)', pods);
    end if;
    -- The table has no key. Under a publication for all tables, or for those of the schema, PostgreSQL would refuse every delete.
    execute format('alter table %s replica identity full', pods);
    execute format('create index on %s (txid, seq)', pods);
    -- Default privileges could let others insert a pod with a seq or a txid of their own. That could hide the pods before it from
    -- workers.
    perform pgchange.keep_to_owner(pods::regclass);
    execute format(
        'comment on table %s is %L', pods,
        'Pods of tube ' || tube || ': ids that were touched, in chunks; those without ids are control pods.');
    return pods::regclass;
exception when duplicate_object then
    perform pgchange.refuse(format('there is a type %s already', pods), 'choose another name, or another schema');
end
$$;

-- The number of ids of a pod, at most as many as fit on a page.
create function tube.checked_chunk(chunk_size integer) returns integer
language plpgsql immutable as $$
begin
    if chunk_size is null or chunk_size < 1 then
        perform pgchange.refuse(format('a pod cannot have %s ids', coalesce(chunk_size::text, 'null')), 'a pod holds 1 to 900 ids');
    end if;
    return least(chunk_size, 900);
end
$$;

-- The bytes of text of a pod: as many as fit on a page. A longer key makes a pod of its own, which is stored outside of the page.
create function tube.bytes_a_pod() returns integer
language sql immutable as $$
    select 7000
$$;

-- The query that cuts an array of texts into the ids of pods. A pod has at most this many ids, and no more of average length than
-- fit on a page. PostgreSQL reads everything before an element to find it, so the query cuts the array into long parts first, and
-- these into pods.
create function tube.cut_sql(ids text, most text) returns text
language sql immutable as $$
    select format($query$
        select part.ids[i : pg_catalog.int4mi(pg_catalog.int4pl(i, whole.size), 1)] as ids
        from (
            select given.ids, given.size, pg_catalog.int4mul(given.size, pg_catalog.ceil(pg_catalog.sqrt(
                       pg_catalog.cardinality(given.ids)::pg_catalog.float8 operator(pg_catalog./) given.size))::pg_catalog.int4) as step
            from (
                select pg_catalog.array_cat(%1$s, '{}') as ids, greatest(1, least(%2$s, pg_catalog.int8div(
                           pg_catalog.int8mul(%3$s, pg_catalog.cardinality(%1$s)), pg_catalog.pg_column_size(%1$s))))::pg_catalog.int4 as size
                offset 0
            ) as given
            offset 0
        ) as whole
        cross join lateral (
            select whole.ids[j : pg_catalog.int4mi(pg_catalog.int4pl(j, whole.step), 1)] as ids
            from pg_catalog.generate_series(1, pg_catalog.cardinality(whole.ids), whole.step) as j
            offset 0
        ) as part
        cross join lateral pg_catalog.generate_series(1, pg_catalog.cardinality(part.ids), whole.size) as i
    $query$, ids, most, tube.bytes_a_pod())
$$;

-- Insert ids of a shard as pods of a tube, each with the payload. A pod has at most chunk_size ids, and no more bytes than fit. A
-- payload without ids makes a control pod.
create function tube.put_pods(
    pods regclass, op text, shard integer, ids anyarray, payload jsonb default null, chunk_size integer default 900
) returns void
language plpgsql as $$
declare
    -- Name the column payload only if there is a payload, because a role without INSERT on this column may touch ids, too.
    target constant text := format('insert into %s (op, shard, ids%s)', pods, case when payload is not null then ', payload' end);
    with_payload constant text := case when payload is not null then ', $5' else '' end;
begin
    if coalesce(cardinality(ids), 0) = 0 and payload is null then
        return;
    end if;
    if pg_typeof(ids) = 'text[]'::regtype and cardinality(ids) > 1 then
        execute format('%s select $1, $2, c.ids%s from (%s) as c', target, with_payload, tube.cut_sql('$3', '$4'))
        using op, shard, ids, chunk_size, payload;
    else
        execute format(
            '%s select $1, $2, ($3)[i : i + $4 - 1]%s from generate_series(1, greatest(cardinality($3), 1), $4) as i',
            target, with_payload)
        using op, shard, ids, chunk_size, payload;
    end if;
end
$$;

-- Insert a control pod about an attached table.
create function tube.put_control(known tube.tube, attached tube.attachment, op text, type text, details jsonb) returns void
language sql as $$
    select tube.put_pods(
        known.pods, op, attached.shard, '{}'::bigint[],
        jsonb_build_object('type', type, 'tbl', tube.full_name(attached.tbl)) || details)
$$;

-- Whether there is a control pod of one of these types for a table and shard. A control pod without a table counts for its whole
-- shard.
create function tube.has_control(known tube.tube, tbl regclass, shard integer, types text[]) returns boolean
language plpgsql volatile as $$
declare
    found_one boolean;
begin
    execute format(
        'select exists (
            select from %s as l
            where l.ids = ''{}'' and %s = %s and l.shard = $1 and l.payload ->> ''type'' = any ($2)
              and (tube.table_named(l.payload ->> ''tbl'') = $3 or l.payload ->> ''tbl'' is null))',
        known.pods, tube.belongs('l.shard', known.partitions), tube.belongs(format('(%s)', shard), known.partitions))
    using shard, types, tbl into found_one;
    return found_one;
end
$$;
