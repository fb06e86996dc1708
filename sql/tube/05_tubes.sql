-- Making, changing and removing tubes, and which worker a shard belongs to.

create function tube.belongs(shard text, partitions integer) returns text
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    return case when partitions = 1 then format('mod(%s, 1)', shard)
                else format('mod(mod(%1$s, %2$s) + %2$s, %2$s)', shard, partitions) end;
end
$$;
comment on function tube.belongs(text, integer) is
    'The SQL of the worker that a shard belongs to: its remainder, which is never negative.';

create function tube.worker_of(shard integer, partitions integer) returns integer
language sql immutable
as $$
    select pg_catalog.mod(pg_catalog.mod(shard, partitions) operator(pg_catalog.+) partitions, partitions)
$$;
comment on function tube.worker_of(integer, integer) is 'The worker that a shard belongs to, as tube.belongs() has it in SQL.';

create function tube.index_pods(pods regclass, partitions integer) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    base text := (select c.relname || '_' || partitions from pg_class as c where c.oid = pods);
    workers_index name := tube.short_name(base, '_workers_idx');
    control_index name := tube.short_name(base, '_control_idx');
    part text;
begin
    -- One index for all workers: a worker's pods lie together in it, so that no worker steps over those of another, and more
    -- workers cost a writer nothing.
    -- At once as strong as dropping an index needs: to strengthen it later could deadlock with a reader that goes on to write.
    perform tube.take_locks(array[pods], 'access exclusive');
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
    perform tube.refuse(
        format('there is a relation %I or %I already in schema %I', workers_index, control_index, tube.schema_of(pods)),
        'rename it: the indexes of the pods need these names');
end
$$;
comment on function tube.index_pods(regclass, integer) is
    'Give the pods the indexes for a number of workers. Writers wait meanwhile, about a second for a million pods.';

create function tube.make_pods(schema_name name, tube text) returns regclass
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    pods text;
    grantee text;
begin
    if octet_length(tube) > 57 then
        perform tube.refuse(format('the name %L is too long', tube), 'at most 57 bytes, so that <tube>_touch is a name too');
    end if;
    if schema_name is null or starts_with(schema_name, 'pg_') then
        perform tube.refuse(
            format('a tube cannot be made in %s', coalesce('schema ' || quote_ident(schema_name), 'no schema')),
            'set search_path to the schema that is to hold it');
    end if;
    pods := format('%I.%I', schema_name, tube);
    if to_regclass(pods) is not null then
        perform tube.refuse(
            format('there is a relation %s already', pods),
            'choose another name, or another schema' || case when tube.are_pods(to_regclass(pods), tube) then format(
                '; if it is left of a tube that is no more: drop table %s; drop function %I.%I; then make the tube and attach its '
                'tables again', pods, schema_name, tube || '_touch') else '' end);
    end if;
    -- A table is a type too, and a call of a function of that name would become a cast.
    if schema_name = 'tube' and exists (
        select from pg_proc as p where p.pronamespace = 'tube'::regnamespace and p.proname = make_pods.tube
    ) then
        perform tube.refuse(format('there is a function %s already', pods), 'choose another name, or another schema');
    end if;
    -- A pod's transaction has its id before the pod draws its seq: so a pod of a transaction that a snapshot does not know
    -- has a higher seq than any that was drawn when the snapshot was taken.
    execute format($table$
        create table %1$s (
            seq bigint not null default case when pg_current_xact_id() is not null then nextval('tube.seq') end,
            op character(1) not null default 'T',
            shard integer not null,
            ids bigint[] not null,
            payload jsonb,
            ts timestamptz not null default statement_timestamp(),
            txid xid8 not null default pg_current_xact_id()
        ) with (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 5000)
    $table$, pods);
    execute format('alter table %s alter column ids set storage plain', pods);
    -- They have no key. Under a publication for all tables, or for those of the schema, PostgreSQL would refuse every delete.
    execute format('alter table %s replica identity full', pods);
    execute format('create index on %s (txid, seq)', pods);
    -- Default privileges would let others write a pod with a seq or a txid of their own, and hide from workers what is behind it.
    for grantee in
        select distinct case when g.grantee = 0 then 'public' else g.grantee::regrole::text end
        from pg_class as c cross join lateral aclexplode(c.relacl) as g
        where c.oid = pods::regclass and g.grantee <> c.relowner
    loop
        execute format('revoke all on table %s from %s', pods, grantee);
    end loop;
    execute format(
        'comment on table %s is %L', pods,
        'Pods of tube ' || tube || ': ids that were touched, in chunks; those without ids are control pods.');
    return pods::regclass;
exception when duplicate_object then
    perform tube.refuse(format('there is a type %s already', pods), 'choose another name, or another schema');
end
$$;
comment on function tube.make_pods(name, text) is 'Make the table of a tube''s pods.';

create function tube.make(tube text, partitions integer, predicate text, schema_name name) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube;
    wanted text := nullif(trim(predicate), '');
    attached tube.attachment;
begin
    if coalesce(tube, '') = '' then
        perform tube.refuse('a tube needs a name');
    end if;
    if partitions not between 1 and 999 then
        perform tube.refuse(format('%s workers cannot share a tube', partitions), 'partitions is a number from 1 to 999');
    end if;
    -- Where two make the same tube at once, the second finds it made.
    perform pg_advisory_xact_lock(hashtextextended('pgchange make ' || tube, 0));
    select t.* into known from tube.tube as t where t.name = make.tube;
    if known.name is not null and not tube.are_pods(known.pods, tube) then
        perform tube.tube_ensure_absent(tube);
        raise notice 'the table of the pods of tube % was dropped: the tube is made anew, and no table is attached to it', tube;
        known := null;
    end if;
    if known.name is null then
        known := (make.tube, tube.make_pods(schema_name, make.tube), coalesce(make.partitions, 1), wanted, now());
        insert into tube.tube values (known.*);
        perform tube.index_pods(known.pods, known.partitions);
        perform tube.make_touch(schema_name, tube);
        return;
    end if;
    perform tube.check_level();
    perform tube.named(tube);
    if predicate is not null and wanted is distinct from known.predicate then
        perform tube.check_owner(known.pods, format('change tube %I', tube));
        update tube.tube as t set predicate = wanted where t.name = make.tube;
        for attached in
            select a.* from tube.attachment as a where a.tube = make.tube and not tube.is_gone(a) order by a.tbl
        loop
            perform tube.adopt(attached, wanted);
        end loop;
    end if;
    if partitions <> known.partitions then
        perform tube.check_owner(known.pods, format('change tube %I', tube));
        perform tube.hold_still(tube);
        perform tube.index_pods(known.pods, partitions);
        update tube.tube as t set partitions = make.partitions where t.name = make.tube;
        update tube.worker as w set
            version = w.version + 1, snapshot = default, done = 0, backfill_snapshot = default, backfill_done = 0,
            batch = null, attempt = 0
        where w.tube = make.tube and w.worker < make.partitions;
        delete from tube.worker as w where w.tube = make.tube and w.worker >= make.partitions;
    end if;
end
$$;
comment on function tube.make(text, integer, text, name) is 'Make a tube, or change what of it is given.';

create function tube.tube_ensure_exists(tube text, partitions integer default null, predicate text default null) returns void
language sql
as $$
    select tube.make(tube, partitions, predicate, pg_catalog.current_schema())
$$;
comment on function tube.tube_ensure_exists(text, integer, text) is
    'Make a tube in the current schema, for partitions workers (1) and the rows that predicate holds for (all); of one that is '
    'there change what is given: the number of workers once none is at work, the predicate (an empty one takes it away) at once '
    'for the caller''s tables, for those of others when their owners attach them again. It is SQL over one row, and runs with '
    'the rights of the owner of each attached table.';

create function tube.tube_ensure_absent(in_tube text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := (select t from tube.tube as t where t.name = in_tube);
    pods regclass := case when tube.are_pods(known.pods, known.name) then known.pods end;
    attached oid;
    function regprocedure;
begin
    if known.name is null then
        return;
    end if;
    perform tube.check_owner(pods, format('remove tube %I', in_tube));
    for attached in select a.tbl from tube.attachment as a where a.tube = in_tube order by a.tbl loop
        perform tube.hold_capture(attached);
    end loop;
    perform tube.hold_still(in_tube);
    -- Who is attaching a table ends first, so that it is detached too; who comes later finds no tube.
    perform from tube.tube as t where t.name = in_tube for update;
    perform tube.detach(in_tube, tbl => null, beside => pods);
    delete from dead_letter.letter as l where l.kind = 'tube' and l.address ->> 'tube' = in_tube;
    perform tube.clear_faults(in_tube);
    delete from tube.tube as t where t.name = in_tube;
    for function in
        select p.oid from pg_proc as p
        where p.proname = in_tube || '_touch' and pg_has_role(current_user, p.proowner, 'usage')
          and obj_description(p.oid, 'pg_proc') = format('Touch ids of a shard in tube %s.', in_tube)
    loop
        execute format('drop function %s', function);
    end loop;
    if pods is not null then
        execute format('drop table %s', pods);
    end if;
end
$$;
comment on function tube.tube_ensure_absent(text) is
    'Detach all tables from a tube and remove it with its pods and its dead letters, once no worker is at work; nothing where '
    'there is none.';

create function tube.tube_list(in_tbl regclass default null)
returns table (tube text, predicate text, partitions integer, tbl regclass, shard integer)
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select t.name, t.predicate, t.partitions, a.tbl, a.shard
    from tube.tube as t
    left join tube.attachment as a on a.tube = t.name and not tube.is_gone(a)
    where in_tbl is null or a.tbl = in_tbl
    order by t.name, a.shard, a.tbl::text
$$;
comment on function tube.tube_list(regclass) is 'Every tube with every table attached to it; or the tubes of one table.';
