-- Making, changing and removing tubes.

-- Use a new predicate for a table of the caller. A table of another owner keeps the predicate that its owner agreed to.
create function tube.adopt(attached tube.attachment, predicate text) returns void
language plpgsql as $$
begin
    if tube.is_anothers(attached)
       or not pg_has_role(current_user, (select c.relowner from pg_class as c where c.oid = attached.tbl), 'usage')
    then
        raise notice '% keeps the predicate that its owner has agreed to; it gets the new predicate when the owner attaches it '
                     'again',
            attached.tbl;
        return;
    end if;
    perform tube.hold_capture(attached.tbl);
    update tube.attachment as a set predicate = adopt.predicate where a.tube = attached.tube and a.tbl = attached.tbl
    returning a.* into attached;
    if found then
        perform tube.fail_backfills(attached.tube, attached.tbl, 'the predicate was changed');
        perform tube.place_functions(attached);
    end if;
end
$$;

-- Make a tube, or change those of its properties that are given.
create function tube.make(tube text, partitions integer, predicate text, key regtype[], schema_name name) returns void
language plpgsql as $$
declare
    known tube.tube;
    wanted text := nullif(trim(predicate), '');
    attached tube.attachment;
    types regtype[] := array(
        select pgchange.key_type(u.type) from unnest(make.key) with ordinality as u(type, place) order by u.place);
    reason text;
begin
    if coalesce(tube, '') = '' then
        perform pgchange.refuse('a tube needs a name', 'its pods are in a table of that name');
    end if;
    if partitions not between 1 and 999 then
        perform pgchange.refuse(format('a tube cannot have %s workers', partitions), 'give a number of partitions from 1 to 999');
    end if;
    select format('ids cannot be %s: %s', u.type, t.reason) into reason
    from unnest(types) as u(type) cross join lateral pgchange.key_type_trouble(u.type, 'pg_catalog.default'::regcollation) as t(reason)
    where t.reason is not null limit 1;
    if reason is not null or key is not null and cardinality(types) not between 1 and 32 then
        perform pgchange.refuse(
            coalesce(reason, format('ids cannot have %s columns', cardinality(types))),
            'give the types of the id columns, as in key => ''{uuid}''');
    end if;
    -- If two sessions make the same tube at once, the second waits here, and then finds the tube of the first.
    perform pg_advisory_xact_lock(hashtextextended('pgchange make ' || tube, 0));
    select t.* into known from tube.tube as t where t.name = make.tube;
    if known.name is not null and not tube.are_pods(known.pods, tube) then
        perform tube.tube_ensure_absent(tube);
        raise notice 'the table of the pods of tube % was dropped: the tube is made anew, and no table is attached to it', tube;
        known := null;
    end if;
    if known.name is null then
        types := coalesce(nullif(types, '{}'), '{bigint}');
        known := (make.tube, tube.make_pods(schema_name, make.tube, types), coalesce(make.partitions, 1), wanted, now(), types);
        insert into tube.tube values (known.*);
        perform tube.index_pods(known.pods, known.partitions);
        perform tube.make_touch(schema_name, tube, types);
        return;
    end if;
    if key is not null and types <> known.key then
        perform pgchange.refuse(
            format('the ids of tube %I are %s and cannot be changed', tube, array_to_string(known.key, ', ')),
            format('make another tube for ids that are %s', array_to_string(types, ', ')));
    end if;
    perform pgchange.check_isolation();
    perform tube.named(tube);
    if predicate is not null and wanted is distinct from known.predicate then
        perform pgchange.check_owner(known.pods, format('change tube %I', tube));
        update tube.tube as t set predicate = wanted where t.name = make.tube;
        for attached in
            select a.* from tube.attachment as a where a.tube = make.tube and not tube.is_gone(a) order by a.tbl
        loop
            perform tube.adopt(attached, wanted);
        end loop;
    end if;
    if partitions <> known.partitions then
        perform pgchange.check_owner(known.pods, format('change tube %I', tube));
        perform tube.hold_still(tube);
        perform tube.check_leases(tube);
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

create function tube.tube_ensure_exists(
    tube text, partitions integer default null, predicate text default null, key regtype[] default null
) returns void
language sql as $$
    select tube.make(tube, partitions, predicate, key, pg_catalog.current_schema())
$$;
comment on function tube.tube_ensure_exists(text, integer, text, regtype[]) is
    'Make a tube in the current schema, or change what is given of an existing tube. partitions: the number of workers, by '
    'default 1; a change waits until no worker is at work. predicate: an SQL condition over a row, by default none; only rows '
    'that satisfy it are touched. It runs with the rights of the owner of each attached table. A new predicate takes effect at '
    'once for the caller''s tables. For tables of others it takes effect when their owners attach them again. An empty text '
    'removes it. key: the types of the id columns. The default {bigint} stands for integers of any size; other ids, as of {uuid} '
    'or {uuid,bigint}, are stored as text.';

-- Detach all tables from a tube and remove it.
create function tube.remove(in_tube text) returns void
language plpgsql as $$
declare
    known tube.tube := (select t from tube.tube as t where t.name = in_tube);
    pods regclass := case when tube.are_pods(known.pods, known.name) then known.pods end;
    attached oid;
    function regprocedure;
begin
    if known.name is null then
        return;
    end if;
    perform pgchange.check_owner(pods, format('remove tube %I', in_tube));
    for attached in select a.tbl from tube.attachment as a where a.tube = in_tube order by a.tbl loop
        perform tube.hold_capture(attached);
    end loop;
    perform tube.hold_still(in_tube);
    perform tube.check_leases(in_tube);
    -- Wait for sessions that are attaching a table, so that it is detached, too. Later sessions find no tube.
    perform from tube.tube as t where t.name = in_tube for update;
    perform tube.detach(in_tube, tbl => null, beside => pods);
    delete from pgchange.letter as l where l.kind = 'tube' and l.address ->> 'tube' = in_tube;
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
create function tube.tube_ensure_absent(in_tube text) returns void
language sql as $$
    select tube.remove(in_tube);
    select tube.drop_lost_touches();
$$;
comment on function tube.tube_ensure_absent(text) is
    'Detach all tables from a tube, and remove it with its pods and its dead letters. Waits until no worker is at work. Does '
    'nothing if there is no such tube.';

create function tube.tube_list(in_tbl regclass default null)
returns table (tube text, predicate text, partitions integer, tbl regclass, shard integer)
language sql stable as $$
    select t.name, t.predicate, t.partitions, a.tbl, a.shard
    from tube.tube as t
    left join tube.attachment as a on a.tube = t.name and not tube.is_gone(a)
    where in_tbl is null or a.tbl = in_tbl
    order by t.name, a.shard, a.tbl::text
$$;
comment on function tube.tube_list(regclass) is 'Every tube with every table attached to it, or the tubes of one table.';
