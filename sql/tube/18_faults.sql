-- Failures of a capture, and rows that it missed: recording, reporting, counting and deleting them.

-- The call that adds the missing rows of a table to the tube.
create function tube.backfill_call(attached tube.attachment) returns text
language sql stable as $$
    select format('backfill %1$s: select tube.tube_backfill_schedule(%2$L, %3$L, %4$s, %4$s), or the DAG tube_backfill',
                  tube.full_name(attached.tbl), attached.tube, quote_ident(tube.default_order(attached)), attached.shard)
$$;

-- Record partitions that were attached with rows that may be in no pod, and raise a notice for each.
create function tube.note_missed(attached tube.attachment, came regclass[]) returns void
language plpgsql as $$
declare
    told text;
begin
    for told in
        select format('rows of %s may have been there before it was captured, and are not in tube %s',
                      tube.full_name(r), attached.tube)
        from pgchange.came_with_rows(came) as r
    loop
        insert into tube.fault (tube, tbl, kind, ids, message) values (attached.tube, attached.tbl, 'missed', 0, told);
        raise notice using message = format('%s: %s', tube.full_name(attached.tbl), told), hint = tube.backfill_call(attached);
    end loop;
end
$$;

-- The partitions that were attached with rows that may be in no pod, each with the call that adds these rows.
create function tube.missed() returns table (tube text, tbl regclass, told text, call text)
language sql stable as $$
    select a.tube, a.tbl, format('%s: %s', tube.full_name(a.tbl), f.message), tube.backfill_call(a)
    from tube.fault as f
    join tube.attachment as a on (a.tube, a.tbl) = (f.tube, f.tbl)
    where f.kind = 'missed' and not tube.is_gone(a)
    order by f.id
$$;

-- Delete the records of rows that were missed before a backfill began, because it adds these rows.
create function tube.clear_missed(tube text, tbl regclass, before timestamptz) returns void
language sql as $$
    delete from tube.fault as f
    where f.tube = clear_missed.tube and f.tbl = clear_missed.tbl and f.kind = 'missed' and f.occurred_at < before
$$;

-- The number of faults of the capture of a tube's tables, with missed rows, up to 1000.
create function tube.count_faults(tube text) returns bigint
language plpgsql stable as $$
begin
    return (
        select count(*)
        from (select from tube.fault as f where f.tube = count_faults.tube and f.kind <> 'control' limit 1000) as bounded);
end
$$;

create function tube.clear_faults(tube text) returns bigint
language sql as $$
    with gone as (delete from tube.fault as f where f.tube = clear_faults.tube returning 1) select count(*) from gone
$$;
comment on function tube.clear_faults(text) is
    'Delete the faults of a tube, once their cause is fixed. Returns how many were deleted.';
