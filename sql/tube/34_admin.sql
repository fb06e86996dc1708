-- Status and repairs.

-- The status of every worker of every tube that the caller may read, as in pgchange.status(). faults are those of the tube's
-- capture. tube.attachments() has the state of the tables.
create function tube.status(upto integer default 1000) returns setof pgchange.consumer_status
language plpgsql volatile
set jit = off
as $$
declare
    held bigint[] := pgchange.locks_held();
    known tube.tube;
begin
    for known in select t.* from tube.readable_tubes() as t loop
        return query
            select 'tube', tube.name_of(known.name, k.worker),
                   jsonb_build_object('tube', known.name, 'worker', k.worker, 'workers', known.partitions), coalesce(w.version, 0),
                   coalesce((l.lag ->> 'ready')::bigint, 0), coalesce((l.lag ->> 'ready_exact')::boolean, true),
                   (l.lag ->> 'ready_age')::double precision, coalesce((l.lag ->> 'waiting')::bigint, 0), f.faults,
                   tube.lock_key(known.name, k.worker) = any (held) or w.attempt > 0 and tube.locked(known.name, k.worker),
                   case when w.attempt > 0 then (w.batch ->> 'id')::uuid end, nullif(w.attempt, 0),
                   case when w.attempt > 0 then w.error end, case when w.attempt > 0 then w.claimed_at end, w.updated_at,
                   null::text, null::text, case when w.attempt > 0 then pgchange.whole_of(w.batch) end,
                   lease.owner, lease.ends_at
            from generate_series(0, known.partitions - 1) as k(worker)
            left join lateral tube.worker_now(known.name, k.worker) as w on true
            left join lateral (
                select w.leased_by, w.leased_until where w.leased_until > clock_timestamp()) as lease(owner, ends_at) on true
            cross join tube.count_faults(known.name) as f(faults)
            left join tube.workers_with_pods(known) as p(worker) on p.worker = k.worker
            cross join lateral (
                select case when p.worker is not null then tube.lag_of(
                    known, k.worker, tube.position_or_start(tube.position(known.name, k.worker)), upto, f.faults) end
            ) as l(lag)
            order by k.worker;
    end loop;
end
$$;

create function tube.attachments()
returns table (
    tube text, tbl regclass, shard integer, key name[], untriggered regclass[], disabled regclass[], stale boolean,
    faults bigint, predicate_waits boolean, lost text, missed bigint, id_trouble text
)
language sql stable
set jit = off
as $$
    select a.tube, a.tbl, a.shard, a.key, c.untriggered, c.disabled,
           exists (
               select from generate_subscripts(a.key, 1) as p(place) cross join lateral tube.key_attribute(a, p.place) as i
               where i.attname is distinct from a.key[p.place] or i.attnum <> a.key_numbers[p.place])
           or a.number_of <> a.tbl::oid
           or exists (
               select from pg_proc as p
               join tube.capture_bodies(a) as b on b.op = split_part(p.proname, '_', 3)
               where p.oid = any (c.functions) and (p.prosrc <> b.body or p.proowner <> r.relowner)
           )
           or a.predicate is not null and not exists (
               select from pg_proc as p where p.proname = tube.function_name(a.token, 'judge') and p.proowner = r.relowner),
           (select count(*) from (
               select
               from unnest(c.tree) as d(relid)
               cross join lateral (
                   select from tube.fault as f where f.tube = a.tube and f.kind = 'capture' and f.tbl = d.relid limit 1000) as f
               limit 1000) as bounded),
           a.predicate is distinct from t.predicate,
           coalesce(
               (select format('%s, %I, may not write the pods of tube %I: %s; %s; then backfill it',
                              case when p.proowner = r.relowner then 'its owner' else 'a former owner' end, w.name, t.name, l.lost,
                              tube.rights_hint(w.name, t.pods))
                from (select distinct o.proowner from pg_proc as o where o.oid = any (c.functions)) as p
                cross join lateral pg_get_userbyid(p.proowner) as w(name)
                cross join lateral tube.what_is_lost(p.proowner, t.pods) as l(lost)
                where l.lost is not null
                limit 1),
               (select format(
                   'writes through %1$s, a parent of it or of its child, are not captured; detach it, attach %1$s to tube %2$I, '
                   'and backfill', p.inhparent::regclass, t.name)
                from pg_inherits as p
                where p.inhrelid = any (c.tree) and p.inhparent <> all (c.tree) and (tube.attachment_of(p.inhparent, a.tube)).tube is null
                order by p.inhparent limit 1),
               (select format(
                   'nothing is captured: it has the foreign table %s as a child, and PostgreSQL refuses updates and deletes of a '
                   'foreign table through a captured table; end the inheritance, or detach the table', f.oid::regclass)
                from pg_class as f where f.oid = any (c.tree) and f.relkind = 'f'
                order by f.oid limit 1)),
           (select count(*) from tube.fault as f where f.tube = a.tube and f.kind = 'missed' and f.tbl = a.tbl),
           tube.id_trouble(a)
    from tube.attachment as a
    join pg_class as r on r.oid = a.tbl
    cross join lateral (
        with captured as materialized (
            select f.* from tube.captures(a.tbl, a.tube) as f
        )
        select array(
                   select d.relid from unnest(o.tree) as d(relid)
                   where (select count(distinct f.op) from captured as f where f.relid = d.relid) < cardinality(o.ops)
                   order by d.relid),
               coalesce(array_agg(distinct f.relid) filter (where not f.enabled), '{}'),
               array_agg(distinct f.function) filter (where f.op not in ('guard', 'bar')),
               o.tree
        -- "offset 0" keeps the planner from evaluating an array at each of its uses.
        from (
            select tube.capture_ops(a.tbl) as ops, array(select d.relid from pgchange.descendants(a.tbl) as d(relid)) as tree offset 0
        ) as o
        left join captured as f on true
        group by o.ops, o.tree
    ) as c(untriggered, disabled, functions, tree)
    join tube.tube as t on t.name = a.tube
    where tube.are_pods(t.pods, t.name) and not tube.is_gone(a)
$$;
comment on function tube.attachments() is
    'Every attached table, with the problems of its capture. untriggered: partitions without a trigger. stale: a column, the pods '
    'or the owner of the table changed. tube.recapture() repairs both. disabled: triggers that somebody disabled and has to '
    'enable. faults: errors of the capture, counted up to 1000. predicate_waits: the tube has another predicate than the table''s '
    'owner agreed to. lost: why changes are lost. The table''s owner may no longer insert pods, or the table has a parent that is '
    'not attached, or a foreign child. missed: how many partitions came with rows that a backfill has to add. id_trouble: the '
    'problem with its id columns.';

-- The tables of the caller whose capture tube.recapture() can repair, with their full names.
create function tube.to_recapture() returns table (tube text, tbl regclass, name text)
language sql stable as $$
    select a.tube, a.tbl, tube.full_name(a.tbl) from tube.attachments() as a join pg_class as c on c.oid = a.tbl
    where pg_has_role(current_user, c.relowner, 'usage') and (a.untriggered <> '{}' or a.stale)
$$;

create function tube.recapture(tube text, tbl regclass) returns void
language plpgsql as $$
declare
    before tube.attachment := (select a from tube.attachment as a where a.tube = recapture.tube and a.tbl = recapture.tbl);
begin
    if before.predicate is not null then
        -- The new owner has not agreed to a predicate that the former owner agreed to.
        perform tube.judge_of(before);
    end if;
    perform tube.attach(tube, tbl, shard => null, key => null, group_by => null, agreed => false);
end
$$;
comment on function tube.recapture(text, regclass) is 'Repair the capture of a table, without changing how it is attached.';

create function tube.recapture() returns setof text
language plpgsql as $$
declare
    each_one record;
begin
    for each_one in select m.* from tube.to_recapture() as m loop
        begin
            if pgchange.foreign_child(each_one.tbl) is not null
                and (select tube.take_off(a) from tube.attachment as a where (a.tube, a.tbl) = (each_one.tube, each_one.tbl))
            then
                return next format('%s: its capture for tube %s was taken off, because the foreign table %s is a child of it',
                                   each_one.tbl, each_one.tube, pgchange.foreign_child(each_one.tbl));
                continue;
            end if;
            perform tube.recapture(each_one.tube, each_one.tbl);
            return next format('%s: its capture for tube %s was repaired', each_one.tbl, each_one.tube);
            return query select format('%s; %s', m.told, m.call) from tube.missed() as m where (m.tube, m.tbl) = (each_one.tube, each_one.tbl);
        exception
            when lock_not_available then
                return next format('%s: postponed, it is being written', each_one.tbl);
            when others then
                return next format('%s: its capture for tube %s cannot be repaired: %s', each_one.tbl, each_one.tube, sqlerrm);
        end;
    end loop;
end
$$;
comment on function tube.recapture() is
    'Repair the capture of the tables of the caller, for example after a new partition or a renamed column. Returns a line for '
    'each table, with the reason if it cannot be repaired.';
