-- Attaching and detaching tables, with writers running, and mending what capture has become.

create function tube.lock_for_capture(tbl regclass, to_drop boolean default false) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
set lock_timeout = '5s'
as $$
begin
    execute format('lock table %s in %s mode', tbl, case when to_drop then 'access exclusive' else 'share row exclusive' end);
exception when lock_not_available then
    raise lock_not_available using
        message = format('%s is being %s by transactions that do not end', tbl, case when to_drop then 'used' else 'written' end),
        hint = 'try again when they have ended; nothing was changed';
end
$$;
comment on function tube.lock_for_capture(regclass, boolean) is
    'Wait at most 5 s for the writers of a table, or to drop a trigger for everybody who uses it: a lock that waits longer '
    'would stop everybody behind it.';

create function tube.touch_key(tbl regclass) returns bigint
language sql stable
set search_path = pg_catalog, pg_temp
as $$
    select hashtextextended('pgchange touch ' || tbl::oid, 0)
$$;
comment on function tube.touch_key(regclass) is
    'The advisory lock of touching a table by hand: shared by who touches, exclusive for who changes its shard.';

create function tube.move(known tube.tube, tbl regclass, from_shard integer, to_shard integer) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    upto bigint := nextval('tube.seq');
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception using errcode = 'PC007', message = 'a table changes its shard in a read committed transaction only',
            hint = 'begin isolation level read committed';
    end if;
    if not has_table_privilege(known.pods, 'select') then
        raise insufficient_privilege using
            message = format('who gives %s another shard must read the pods of its old one', tbl),
            hint = format('let their owner run: grant select on %s to %I', known.pods, current_user);
    end if;
    insert into tube.moved (tube, from_shard, to_shard, upto)
    select known.name, o.shard, move.to_shard, upto
    from (
        select move.from_shard
        union
        -- What waits for a shard that the table came from before.
        select m.from_shard from tube.moved as m where m.tube = known.name and m.to_shard = move.from_shard
    ) as o(shard)
    where o.shard <> move.to_shard;
    -- Whoever works the old shard no longer looks into the table: what is undone of it is touched again under the new one.
    -- Of another table in the old shard that is one too many, which does no harm.
    execute format(
        'insert into %1$s (op, shard, ids, payload, ts)
         select l.op, $2, l.ids, l.payload, l.ts from %1$s as l
         where l.shard = $1 and (
             l.ids <> ''{}'' or l.payload ->> ''type'' in (''truncate'', ''backfill_end'')
             and tube.table_named(l.payload ->> ''tbl'') = $3)
         order by l.seq', known.pods)
    using from_shard, to_shard, tbl;
end
$$;
comment on function tube.move(tube.tube, regclass, integer, integer) is
    'Bring what is undone of a table under its new shard, whose newer pods wait for those of the old one. Nobody may be '
    'working the tube or writing the table.';

create function tube.tube_table_ensure_attached(
    tube text, tbl regclass, shard integer default null, id_column name default null
) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    known tube.tube := tube.named(tube);
    before tube.attachment := (
        select a from tube.attachment as a where a.tube = known.name and a.tbl = tube_table_ensure_attached.tbl
    );
    shard_before integer := coalesce(before.shard, (
        select d.shard from tube.detached as d where d.tube = known.name and d.tbl = tube_table_ensure_attached.tbl));
    wanted tube.attachment;
begin
    perform tube.check_table(tbl);
    perform tube.check_rights(tbl, known);
    wanted := (
        known.name, tbl, coalesce(shard, before.shard, tube.inferred_shard(tbl)),
        coalesce(id_column, tube.id_column(tbl, known.name), before.id_column, 'id'), 0, now());
    wanted.id_number := tube.check_key(tbl, wanted.id_column);
    if shard_before <> wanted.shard then
        -- Nobody may go on touching under the old shard once the new one counts: neither a backfill nor a hand nor a worker.
        -- A chunk takes the key before its backfill's row, so here too.
        perform pg_advisory_xact_lock(tube.backfill_key(tbl, shard_before));
        perform tube.fail_backfills(known.name, tbl, format('%s was attached under another shard', tbl));
        perform pg_advisory_xact_lock(tube.touch_key(tbl));
        perform tube.hold_still(known.name);
    end if;
    perform tube.lock_for_capture(tbl);
    if shard_before <> wanted.shard then
        perform tube.move(known, tbl, shard_before, wanted.shard);
    end if;
    insert into tube.attachment values (wanted.*)
    on conflict on constraint attachment_pkey do update
        set shard = excluded.shard, id_column = excluded.id_column, id_number = excluded.id_number;
    delete from tube.detached as d where d.tube = known.name and d.tbl = tube_table_ensure_attached.tbl;
    perform tube.place_capture(wanted);
    perform tube.place_touch(tbl);
end
$$;
comment on function tube.tube_table_ensure_attached(text, regclass, integer, name) is
    'Let a table touch a tube: each of its inserts, updates, deletes and truncates from now on, under a shard (given, or the '
    'trailing digits of its schema''s name), by the ids in id_column (id). Again, it mends the capture, and changes what is '
    'given; another shard when no worker is at work.';

create function tube.detach(tube text, tbl regclass) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    functions oid[] := array(select distinct c.function from tube.captures(tbl, tube) as c);
    captured record;
    function oid;
begin
    if tube.schema_of(tbl) is not null then
        for captured in select c.* from tube.captures(tbl, tube) as c order by c.relid loop
            perform tube.lock_for_capture(captured.relid, to_drop => true);
            execute format('drop trigger %I on %s', captured.trigger, captured.relid);
        end loop;
        foreach function in array functions loop
            execute format('drop function %s', function::regprocedure);
        end loop;
    end if;
    perform tube.fail_backfills(tube, tbl, 'the table was detached');
    with gone as (
        delete from tube.attachment as a where a.tube = detach.tube and a.tbl = detach.tbl returning a.*
    )
    insert into tube.detached (tube, tbl, shard) select g.tube, g.tbl, g.shard from gone as g
    on conflict on constraint detached_pkey do update set shard = excluded.shard;
    perform tube.place_touch(tbl);
end
$$;
comment on function tube.detach(text, regclass) is 'Take the capture of one tube off one table.';

create function tube.tube_table_ensure_detached(in_tube text, in_tbl regclass) returns void
language sql
set search_path = pg_catalog, tube, pg_temp
as $$
    select tube.detach(a.tube, a.tbl)
    from tube.attachment as a
    where (in_tube is null or a.tube = in_tube) and (in_tbl is null or a.tbl = in_tbl)
    order by a.tbl, a.tube
$$;
comment on function tube.tube_table_ensure_detached(text, regclass) is
    'Stop a table from touching a tube; null means all tubes, or all tables. What it touched before stays.';

create function tube.drop_orphans(tube text) returns void
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    function regprocedure;
begin
    for function in
        select p.oid from pg_proc as p
        where p.proname like 'pgchange\_touch\_%' and right(obj_description(p.oid, 'pg_proc'), length(tube) + 11) = format(' for tube %s.', tube)
          and not exists (select from pg_trigger as t where t.tgfoid = p.oid) and pg_has_role(current_user, p.proowner, 'usage')
    loop
        execute format('drop function %s', function);
    end loop;
end
$$;
comment on function tube.drop_orphans(text) is 'Drop the trigger functions of tables that were dropped while attached.';

create function tube.attachments()
returns table (
    tube text, tbl regclass, shard integer, id_column name, untriggered regclass[], disabled regclass[], stale boolean,
    faults bigint
)
language sql stable
set search_path = pg_catalog, tube, pg_temp
as $$
    select a.tube, a.tbl, a.shard, a.id_column,
           array(
               select d.relid from tube.descendants(a.tbl) as d(relid)
               left join tube.captures(a.tbl, a.tube) as c on c.relid = d.relid
               group by d.relid having count(c.op) < 4 order by d.relid
           ),
           array(select distinct c.relid from tube.captures(a.tbl, a.tube) as c where not c.enabled),
           (i.key).attname is distinct from a.id_column or (i.key).attnum <> a.id_number
           or exists (
               select from (select distinct c.function, c.op from tube.captures(a.tbl, a.tube) as c) as c
               join pg_proc as p on p.oid = c.function
               join pg_class as r on r.oid = a.tbl
               where p.prosrc <> tube.capture_body(a, c.op) or p.proowner <> r.relowner
           ),
           (select count(*) from (select from tube.fault as f where f.tube = a.tube and f.tbl in (
               select d.relid from tube.descendants(a.tbl) as d(relid)) limit 1000) as bounded)
    from tube.attachment as a
    cross join lateral (select tube.id_attribute(a)) as i(key)
    join tube.tube as t on t.name = a.tube
    where tube.schema_of(a.tbl) is not null and tube.schema_of(t.pods) is not null
$$;
comment on function tube.attachments() is
    'Every attached table, with what is not captured as it should be: partitions that lack a trigger, disabled ones, a capture '
    'that no longer fits because a column, the pods or the table''s owner changed; and faults, up to 1000. tube.refresh() mends.';

create function tube.refresh() returns setof text
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    attached record;
begin
    for attached in
        select a.* from tube.attachments() as a join pg_class as c on c.oid = a.tbl
        where pg_has_role(current_user, c.relowner, 'usage') and (a.untriggered <> '{}' or a.stale)
    loop
        begin
            perform tube.tube_table_ensure_attached(attached.tube, attached.tbl);
            return next format('%s: its capture for tube %s was mended', attached.tbl, attached.tube);
        exception when lock_not_available then
            return next format('%s: postponed, it is being written', attached.tbl);
        end;
    end loop;
end
$$;
comment on function tube.refresh() is
    'Mend the capture of the tables that the caller owns: partitions that came later, a renamed column; a line for each.';
