-- The capture on partitions that came later, and what was in them.

-- The tables that have the trigger of a tracked table and are no partitions of it any more.
create function revision.departed(known revision.tracked) returns setof regclass
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return query
        select g.tgrelid::regclass
        from pg_trigger as own
        cross join lateral pgchange.triggers_of(own.tgfoid) as g
        where own.tgrelid = known.tbl and own.tgname = 'pgchange_capture' and g.tgname = own.tgname
          and g.tgrelid not in (select d.relid from pgchange.descendants(known.tbl) as d(relid))
        order by g.tgrelid;
end
$$;

create function revision.tracking()
returns table (
    tbl regclass, branch_id bigint, expression text, untriggered regclass[], disabled regclass[], key_renamed boolean,
    existing_done boolean, faults bigint, missed regclass[], departed regclass[], key_trouble text, without_key bigint
)
language sql stable security definer as $$
    select t.tbl, t.branch_id, t.expression,
           array(
               select d.relid from unnest(tree.parts) as d(relid)
               where not exists (
                   select from pg_trigger as g
                   where g.tgrelid = d.relid and g.tgname = 'pgchange_capture' and g.tgfoid = coalesce(own.tgfoid, g.tgfoid))
           ),
           array(
               select g.tgrelid::regclass from pg_trigger as g
               where g.tgrelid = any (tree.parts) and g.tgname = 'pgchange_capture' and g.tgenabled not in ('O', 'A')
           ),
           coalesce((
               select bool_or((k.today).attname <> k.name) or strpos(f.prosrc, pgchange.key_check(
                   t.tbl, array_agg((k.today).attname order by k.place), array_agg((k.today).attnum order by k.place))) = 0
               from revision.key_attributes(t) as k
               having bool_and((k.today).attname is not null)), false),
           t.existing_done,
           revision.count_faults(tree.parts, without_key => false),
           array(
               select d.relid from unnest(tree.parts) as d(relid)
               where exists (select from revision.fault as f where f.tbl = d.relid and f.kind = 'missed')
               order by d.relid),
           array(select d from revision.departed(t) as d),
           revision.key_trouble(t),
           revision.count_faults(tree.parts, without_key => true)
    from revision.tracked as t
    cross join lateral (select array(select d.relid from pgchange.descendants(t.tbl) as d(relid)) offset 0) as tree(parts)
    left join pg_trigger as own on own.tgrelid = t.tbl and own.tgname = 'pgchange_capture'
    left join pg_proc as f on f.oid = own.tgfoid
    where exists (select from pg_class as c where c.oid = t.tbl)
$$;
comment on function revision.tracking() is
    'Every tracked table, with what is not captured as it should be: partitions without its trigger, disabled ones, a capture that '
    'reads the key by a former name or, in a restored database, by a former number, faults (up to 1000), partitions that had rows before '
    'they were captured, tables that were partitions once and still have the trigger, what revision.track() would refuse about the key '
    'today, and how many rows without a key are in no commit (up to 1000). revision.recapture() mends the first, the third and the sixth.';

-- Write the capture of a table anew for its present owner and the column that holds its key now, and say so.
create function revision.mend_key(known revision.tracked) returns text
language plpgsql as $$
declare
    key name[] := revision.key_columns(known.tbl);
    function text := revision.function_for(known.tbl);
begin
    if key is null then
        perform pgchange.refuse('its key column is gone', 'call revision.untrack, then revision.track with another key');
    end if;
    if known.branch_id is not null then
        perform revision.check_branch(known.branch_id, known.tbl, pgchange.key_types(known.tbl, key));
    end if;
    if known.expression is not null then
        perform revision.check_expression(known.tbl, key, known.expression);
    end if;
    perform revision.place_function(known.tbl, key, known.branch_id, known.expression, function);
    if function <> known.function then
        perform revision.place_triggers(known.tbl, function);
    end if;
    perform revision.register(known.tbl, key, known.branch_id, known.expression, known.key_ceiling);
    return case when function <> known.function then format('%s: its capture is that of its present owner now', known.tbl)
        else format('%s: its key is captured as %s', known.tbl, array_to_string(key, ', ')) end;
end
$$;

-- Take the capture off the former partitions of a table, and say so; what is written there makes no commits in any case.
create function revision.drop_departed(known revision.tracked) returns setof text
language plpgsql as $$
declare
    former regclass;
begin
    for former in select d from revision.departed(known) as d loop
        begin
            perform pgchange.lock_family(former, 'access exclusive');
            execute format('drop trigger pgchange_capture on %s', former);
            delete from revision.fault as f where f.tbl = former and f.kind = 'missed';
            return next format('%s: it is no partition of %s any more, and its capture was taken off', former, known.tbl);
        exception
            when lock_not_available then
                return next format('%s: postponed, it is being written', former);
            when others then
                return next format('%s: the capture of %s cannot be taken off it: %s', former, known.tbl, sqlerrm);
        end;
    end loop;
end
$$;

create function revision.recapture() returns setof text
language plpgsql as $$
declare
    known revision.tracked;
    broken record;
    placed integer;
begin
    for known in
        select t.* from revision.tracked as t join pg_class as c on c.oid = t.tbl where pg_has_role(current_user, c.relowner, 'usage')
    loop
        -- By the trigger of the table they are found, before that becomes another.
        return query select d from revision.drop_departed(known) as d;
        select s.untriggered <> '{}' as lacks_triggers, s.key_renamed, p.proowner <> c.relowner as handed_on into broken
        from revision.tracking() as s
        join pg_class as c on c.oid = s.tbl
        left join pg_proc as p on p.oid = to_regprocedure(known.function || '()')
        where s.tbl = known.tbl;
        begin
            if broken.lacks_triggers or broken.key_renamed or broken.handed_on then
                perform pgchange.lock_family(known.tbl, 'share row exclusive');
            end if;
            if broken.key_renamed or broken.handed_on then
                return next revision.mend_key(known);
            end if;
            if broken.lacks_triggers then
                placed := cardinality((select s.untriggered from revision.tracking() as s where s.tbl = known.tbl));
                perform revision.place_triggers(known.tbl, (select t.function from revision.tracked as t where t.tbl = known.tbl));
                if placed > 0 then
                    return next format('%s: capture put on %s partitions', known.tbl, placed);
                end if;
                return query
                    select format('%s; %s', pgchange.told_missed(t.tbl, m, 'commit'), pgchange.bring_missed(m, 'revision', 'enqueue_attached'))
                    from revision.tracking() as t cross join lateral unnest(t.missed) as m where t.tbl = known.tbl;
            end if;
        exception
            when lock_not_available then
                return next format('%s: postponed, it is being written', known.tbl);
            when others then
                return next format(
                    case when broken.lacks_triggers then '%s: capture cannot be put on its partitions: %s'
                         else '%s: its capture cannot be repaired: %s' end, known.tbl, sqlerrm);
        end;
    end loop;
end
$$;
comment on function revision.recapture() is
    'Mend the capture of the tables that the caller owns: put it on partitions that were attached since, take it off those that '
    'were detached, follow a key column that was renamed or replaced, and make it the present owner''s. Returns a line for each, with the reason where it cannot '
    'be, and for each partition that has rows that may be in no commit.';

create function revision.enqueue_attached(part regclass) returns bigint
language plpgsql as $$
declare
    known revision.tracked := (
        select t from revision.tracked as t where part in (select d.relid from pgchange.descendants(t.tbl) as d(relid)));
    root regclass := known.tbl;
    columns name[] := revision.key_columns(part);
    held text := revision.queue_column(known.key_types);
    row_alias name := (select c.relname from pg_class as c where c.oid = root);
    since pg_snapshot := case when revision.is_native() then known.since else '1:1:' end;
    -- What came before the ids were made this cluster's own came at a time that nothing tells.
    came_in bigint := (
        select coalesce(max(revision.full_xid(i.xmin)), 1) from pg_inherits as i
        where i.inhrelid = part and revision.full_xid(i.xmin) > revision.native_from());
    rows_of text;
    found_row boolean;
    enqueued bigint;
begin
    if root is null or columns is null then
        perform pgchange.refuse(
            format('%s is no part of a tracked table, or its key column is gone', part), 'call revision.track on the table first');
    end if;
    perform revision.check_owner(part, 'put its rows in the queue');
    if not exists (select from revision.fault as f where f.tbl = part and f.kind = 'missed') then
        return 0;
    end if;
    known.tbl := part;
    perform revision.check_reads_no_code(known);
    -- The key of a row without a value in one of its columns is null.
    rows_of := format(
        'select case when %1$s then %2$s end as key, pg_catalog.int8up((%3$s)) as branch from %4$s as %5$I',
        (select string_agg(format('%I.%I is not null', row_alias, u.name), ' and ') from unnest(columns) as u(name)),
        pgchange.key_text(known.key_types, columns, row_alias), coalesce(known.expression, known.branch_id::text), part, row_alias);
    if not known.existing_done then
        execute format(
            'select exists (select from %s as %I where %s%s)', part, row_alias,
            revision.beside_key(known, columns, row_alias, '>', known.existing_upto),
            case when known.key_ceiling is not null
                then ' and ' || revision.beside_key(known, columns, row_alias, '<=', known.key_ceiling::text) end)
        into found_row;
        if found_row then
            perform pgchange.refuse(
                format('rows of %s may still be put in the queue with those of %s that were there before', part, root),
                format('call revision.enqueue_existing(%L) first', root));
        end if;
    end if;
    if revision.trimmed_since(known.branch_id, format('%s:%s:', came_in, came_in)::pg_snapshot) then
        perform pgchange.refuse(
            format('rows of %s may have been captured already, and the history that would tell was trimmed', part),
            format('put those that consumers have not had into revision.commit_queue (%s, branch_id) yourself', held));
    end if;
    if not exists (select from revision.branch as b where b.tbl = root and b.id = known.branch_id) then
        execute format(
            'select exists (select from (%s) as r join revision.commit_queue as q on (q.branch_id, q.%I) = (r.branch, r.key)
             where q.txid >= pg_snapshot_xmin($1) and not pg_visible_in_snapshot(q.txid, $1))', rows_of, held)
        using since into found_row;
        if found_row then
            perform pgchange.refuse(
                format('rows of %s may be in the queue, and its branch may hold other tables'' commits, so captured ones cannot be '
                       'told from the rest', part),
                'track the table with a branch of its own');
        end if;
    end if;
    -- What was written through the table since it came is in the queue, or among the faults.
    execute format($rows$
        insert into revision.commit_queue (%2$I, branch_id)
        select r.key, r.branch from (%1$s) as r
        where r.branch is not null and r.key is not null
          and not exists (
              select from revision.commit_queue as q
              where (q.branch_id, q.%2$I) = (r.branch, r.key)
                and q.txid >= pg_snapshot_xmin($1) and not pg_visible_in_snapshot(q.txid, $1))
          and not exists (
              select from revision.fault as f
              where f.%2$I = r.key and f.tbl in (select d.relid from pgchange.descendants($2) as d(relid)))
        order by r.key
    $rows$, rows_of, held) using since, root;
    get diagnostics enqueued = row_count;
    execute format(
        'insert into revision.fault (tbl, message) select $1, ''its key is null'' from (%s) as r where r.branch is not null and r.key is null',
        rows_of) using part;
    delete from revision.fault as f where f.tbl = part and f.kind = 'missed';
    return enqueued;
end
$$;
comment on function revision.enqueue_attached(regclass) is
    'Put the rows that came with a partition in the queue, but for those that are in it; returns how many. Refused where history '
    'that is younger than the partition was trimmed: what is gone would come again.';

select pgchange.pin_settings('revision.enqueue_attached(regclass)');
