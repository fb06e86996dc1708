-- Attaching and detaching tables while others write them.

-- The id columns of a table in a tube: the key, by default the primary key, or columns whose values several rows can have. Raises
-- an error with the reason if they cannot be ids.
create function tube.check_key(tbl regclass, key name[], group_by name[], known tube.tube) returns name[]
language plpgsql stable as $$
declare
    call constant text := format('select tube.tube_table_ensure_attached(%L, %L, key => %%s)', known.name, tube.full_name(tbl));
    columns constant name[] := coalesce(group_by, key, pgchange.primary_key(tbl));
    reason constant text := case when group_by is null then pgchange.key_trouble(tbl, columns) end;
begin
    if key is not null and group_by is not null then
        perform pgchange.refuse(
            'both key and group_by were given', 'give key if an id identifies one row, or group_by if it identifies several');
    end if;
    if reason is not null then
        perform pgchange.refuse(
            reason,
            concat_ws('; ', pgchange.other_keys(tbl, call),
                      format('if an id is to stand for several rows: group_by => %L',
                             case when cardinality(columns) > 0 then columns::text else '{order_id}' end)));
    end if;
    perform tube.check_columns(tbl, columns, known);
    return columns;
end
$$;

-- Attach a table, repair its capture, or change how it is attached. agreed: the owner calls this and agrees to the present
-- predicate of the tube; else the table keeps its predicate.
create function tube.attach(tube text, tbl regclass, shard integer, key name[], group_by name[], agreed boolean) returns void
language plpgsql as $$
declare
    known tube.tube := tube.named(tube);
    before tube.attachment;
    shard_before integer;
    wanted tube.attachment;
    held oid;
    came regclass[];
    columns name[];
begin
    perform pgchange.check_isolation();
    perform tube.check_table(tbl);
    -- Lock the inheritance children of the table, too. Otherwise check_family would not see that another session is attaching
    -- one of them. A partition cannot be attached.
    for held in
        select c.oid from pgchange.descendants(tbl) as d(relid) join pg_class as c on c.oid = d.relid
        where not c.relispartition order by c.oid
    loop
        perform tube.hold_capture(held);
    end loop;
    known := tube.named(tube);
    select a.* into before from tube.attachment as a where a.tube = known.name and a.tbl = attach.tbl;
    if before.tube is not null and tube.is_gone(before) then
        -- The attachment belongs to a dropped table whose oid this table has now.
        delete from tube.attachment as a where a.tube = before.tube and a.tbl = before.tbl;
        before := null;
    end if;
    if before.tube is not null then
        came := tube.uncaptured(before);
    end if;
    shard_before := tube.shard_of(known.name, tbl);
    perform tube.check_rights(tbl, known);
    perform tube.check_family(tbl, tube);
    perform tube.check_parents(tbl);
    if key is null and group_by is null and before.tube is not null then
        columns := coalesce(tube.key_names(tbl, known.name), before.key);
        perform tube.check_columns(tbl, columns, known);
    else
        columns := tube.check_key(tbl, key, group_by, known);
    end if;
    wanted := (
        known.name, tbl, coalesce(shard, before.shard, tube.inferred_shard(tbl)), columns,
        array(
            select a.attnum from unnest(columns) with ordinality as c(name, place)
            join pg_attribute as a on a.attrelid = tbl and a.attname = c.name order by c.place),
        known.key, case when key is null and group_by is null then coalesce(before.is_grouped, false) else group_by is not null end,
        case when agreed or before.tube is null then known.predicate else before.predicate end,
        case when before.token is null or tube.is_anothers(before)
             then left(md5(concat(tube, tbl::oid, clock_timestamp(), random())), 12) else before.token end, now(), tbl::oid);
    -- Check this only for a new shard. Tables that got the same name by a rename must still be repairable.
    if before.shard is distinct from wanted.shard then
        perform tube.check_twin(wanted);
    end if;
    if shard_before <> wanted.shard then
        -- No worker, backfill or manual touch may use the old shard once the new shard is in force. The order of the locks
        -- matters: a worker that gathers ids touches manually, and a chunk locks its key before the row of its backfill.
        perform tube.hold_still(known.name);
        perform tube.hold(tube.backfill_key(tbl, shard_before), format('backfills of %s', tbl));
        perform tube.fail_backfills(known.name, tbl, format('%s was attached under another shard', tbl));
        perform tube.hold(tube.touch_key(tbl), format('manual touches of %s', tbl));
        perform pgchange.lock_family(tbl, 'share row exclusive');
        perform tube.move(known, tbl, shard_before, wanted.shard);
    elsif wanted.predicate is distinct from before.predicate or wanted.key is distinct from tube.key_names(tbl, known.name) then
        perform tube.fail_backfills(known.name, tbl, format('%s was attached with another predicate, or by other ids', tbl));
    end if;
    if before.token <> wanted.token then
        perform pgchange.take_locks(array(
            select c.relid from tube.captures(before.tbl, before.tube) as c group by 1 order by 1), 'access exclusive');
        perform tube.drop_capture(before);
    end if;
    insert into tube.attachment values (wanted.*)
    on conflict on constraint attachment_pkey do update set
        shard = excluded.shard, key = excluded.key, key_numbers = excluded.key_numbers, key_types = excluded.key_types,
        is_grouped = excluded.is_grouped, predicate = excluded.predicate, token = excluded.token, number_of = excluded.number_of;
    delete from tube.detached as d where d.tube = known.name and d.tbl = attach.tbl;
    if found then
        raise notice 'changes of % while it was detached are in no pod: a backfill adds them', tbl;
    end if;
    perform tube.place_functions(wanted);
    perform tube.place_triggers(wanted);
    perform tube.note_missed(wanted, came);
    perform tube.place_touch(tbl);
end
$$;

create function tube.tube_table_ensure_attached(
    tube text, tbl regclass, shard integer default null, key name[] default null, group_by name[] default null
) returns void
language sql as $$
    select tube.attach(tube, tbl, shard, key, group_by, agreed => true)
$$;
comment on function tube.tube_table_ensure_attached(text, regclass, integer, name[], name[]) is
    'Attach a table to a tube. From now on each insert, update, delete and truncate of the table touches the tube for rows that '
    'satisfy its predicate. shard: a number, by default the trailing digits of the name of its schema or its own. key: the '
    'columns of the ids, unique and not null, by default the primary key. group_by: columns whose values several rows have '
    'instead, such as the order of each order line. Calling it again repairs the capture, adopts the present predicate of the '
    'tube, and changes what is given. A new shard waits until no worker is at work.';

-- Detach tables: null means all tubes or all tables. Waits until nobody uses these tables or the relation beside.
create function tube.detach(tube text, tbl regclass, beside regclass default null) returns void
language plpgsql as $$
declare
    going tube.attachment[];
    each_one tube.attachment;
    was_there boolean;
begin
    perform pgchange.check_isolation();
    for each_one in
        select a.* from tube.attachment as a
        where (detach.tube is null or a.tube = detach.tube) and (detach.tbl is null or a.tbl = detach.tbl) order by a.tbl, a.tube
    loop
        -- If the table was dropped, its oid may belong to another table. Then only the row and its functions are dropped.
        if not tube.is_gone(each_one) then
            perform pgchange.check_owner(each_one.tbl, 'detach it');
        end if;
        perform tube.hold_capture(each_one.tbl);
        -- Fail the backfills first, because a chunk of a backfill locks its row until it has read the table.
        perform tube.fail_backfills(each_one.tube, each_one.tbl, 'the table was detached');
        going := going || each_one;
    end loop;
    perform pgchange.take_locks(array(
        select c.relid from unnest(going) as g cross join lateral tube.captures(g.tbl, g.tube) as c group by 1 order by 1
    ) || array_remove(array[beside], null), 'access exclusive');
    foreach each_one in array coalesce(going, '{}') loop
        was_there := not tube.is_gone(each_one);
        perform tube.drop_capture(each_one);
        delete from tube.attachment as a where a.tube = each_one.tube and a.tbl = each_one.tbl returning a.* into each_one;
        if was_there and each_one.tube is not null then
            insert into tube.detached (tube, tbl, shard) values (each_one.tube, each_one.tbl, each_one.shard)
            on conflict on constraint detached_pkey do update set shard = excluded.shard;
            perform tube.place_touch(each_one.tbl);
        end if;
    end loop;
    -- Delete the shards of tables that were dropped since, because another table may get their oid.
    delete from tube.detached as d where (detach.tube is null or d.tube = detach.tube) and tube.schema_of(d.tbl) is null;
end
$$;

create function tube.tube_table_ensure_detached(in_tube text, in_tbl regclass) returns void
language sql as $$
    select tube.detach(in_tube, in_tbl);
    select tube.drop_lost_touches();
$$;
comment on function tube.tube_table_ensure_detached(text, regclass) is
    'Detach a table from a tube; null means all tubes, or all tables. Pods of earlier touches stay.';
