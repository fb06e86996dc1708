-- The capture on partitions that were attached later, and the rows that they had.

-- Former partitions of a tracked table that still have its trigger.
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
    'Every tracked table, with the problems of its capture. untriggered: partitions without its trigger; disabled: disabled '
    'triggers. key_renamed: the capture uses a former name or, in a restored database, a former number of the key column. faults: '
    'counted up to 1000. missed: partitions that had rows before they were captured. departed: former partitions that still have '
    'the trigger. key_trouble: why revision.track() would refuse the present key. without_key: rows without a key, which are in '
    'no commit, up to 1000. revision.recapture() repairs untriggered, key_renamed and departed.';

-- Create the capture of a table again for its present owner and its present key columns. Returns a line about that.
create function revision.mend_key(known revision.tracked) returns text
language plpgsql as $$
declare
    key name[] := revision.key_columns(known.tbl);
    function text := revision.function_for(known.tbl);
begin
    if key is null then
        perform pgchange.refuse('its key column was dropped', 'call revision.untrack, then revision.track with another key');
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
    return case when function <> known.function then format('%s: its capture belongs to its present owner now', known.tbl)
        else format('%s: its key is captured as %s', known.tbl, array_to_string(key, ', ')) end;
end
$$;

-- Remove the capture from the former partitions of a table, and return lines about it. Rows that are written there make no
-- commits in any case.
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
            return next format('%s: it is no partition of %s any more, so its capture was removed', former, known.tbl);
        exception
            when lock_not_available then
                return next format('%s: postponed, it is being written', former);
            when others then
                return next format('%s: the capture of %s cannot be removed from it: %s', former, known.tbl, sqlerrm);
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
        -- Do this first: the former partitions are found by the trigger of the table, which changes below.
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
                    return next format('%s: the capture was placed on %s partitions', known.tbl, placed);
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
                    case when broken.lacks_triggers then '%s: the capture cannot be placed on its partitions: %s'
                         else '%s: its capture cannot be repaired: %s' end, known.tbl, sqlerrm);
        end;
    end loop;
end
$$;
comment on function revision.recapture() is
    'Repair the capture of the tables of the caller. Places it on partitions that were attached since, and removes it from those '
    'that were detached. Uses the present name of a key column that was renamed or replaced, and makes the present owner the '
    'owner of the capture. Returns a line for each action, with the reason if it failed. Also a line for each partition that has '
    'rows that may be in no commit.';

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
    -- The transaction that attached the partition. It is unknown if it is older than the transaction ids that are valid in this
    -- cluster; then 1 stands for it.
    came_in bigint := (
        select coalesce(max(revision.full_xid(i.xmin)), 1) from pg_inherits as i
        where i.inhrelid = part and revision.full_xid(i.xmin) > revision.native_from());
    rows_of text;
    found_row boolean;
    enqueued bigint;
begin
    if root is null or columns is null then
        perform pgchange.refuse(
            format(
                '%s is no part of a tracked table, or its key column was dropped', part), 'call revision.track on the table first');
    end if;
    perform revision.check_owner(part, 'put its rows in the queue');
    if not exists (select from revision.fault as f where f.tbl = part and f.kind = 'missed') then
        return 0;
    end if;
    known.tbl := part;
    perform revision.check_reads_no_code(known);
    -- The key of a row with a null in one of its columns is null.
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
                format('rows of %s may still be put in the queue with the existing rows of %s', part, root),
                format('call revision.enqueue_existing(%L) first', root));
        end if;
    end if;
    if revision.trimmed_since(known.branch_id, format('%s:%s:', came_in, came_in)::pg_snapshot) then
        perform pgchange.refuse(
            format('rows of %s may have been captured already, but the history that would show this was trimmed', part),
            format('insert the rows that consumers have not had into revision.commit_queue (%s, branch_id) yourself', held));
    end if;
    if not exists (select from revision.branch as b where b.tbl = root and b.id = known.branch_id) then
        execute format(
            'select exists (select from (%s) as r join revision.commit_queue as q on (q.branch_id, q.%I) = (r.branch, r.key)
             where q.txid >= pg_snapshot_xmin($1) and not pg_visible_in_snapshot(q.txid, $1))', rows_of, held)
        using since into found_row;
        if found_row then
            perform pgchange.refuse(
                format(
                    'rows of %s may be in the queue, but captured rows cannot be distinguished: its branch may also have commits '
                    'of other tables', part),
                'track the table with a branch of its own');
        end if;
    end if;
    -- Rows that were written through the table since the partition was attached are in the queue, or among the faults.
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
    'Put the rows that came with a partition in the queue, without those that are in it already. Returns how many. Refused if '
    'history that is younger than the partition was trimmed, because trimmed commits would come again.';

select pgchange.pin_settings('revision.enqueue_attached(regclass)');
