-- Reading a worker's pods: incremental ones before those of a backfill, each in the order of seq.
--
-- A lower seq may commit later than a higher one that was read. So a worker's position is a snapshot and a seq for each of the
-- two kinds: to be read are the pods above the seq, and those below it of transactions that the snapshot found open.

create function tube.belongs(shard text, partitions integer, worker integer) returns text
language sql immutable
set search_path = pg_catalog, pg_temp
as $$
    select case when partitions = 1 then 'true'
                else format('mod(mod(%1$s, %2$s) + %2$s, %2$s) = %3$s', shard, partitions, worker) end
$$;
comment on function tube.belongs(text, integer, integer) is
    'The condition under which a shard is one of a worker''s: by the remainder that is never negative.';

create function tube.tube_pods_sql(
    tube text, partitions integer, "partition" integer, exclude_backfill boolean default false
) returns text
language plpgsql stable
set search_path = pg_catalog, tube, pg_temp
as $$
begin
    if partitions not between 1 and 999 or "partition" not between 0 and partitions - 1 then
        perform tube.refuse(format('there is no worker %s of %s', "partition", partitions), 'workers are numbered from 0');
    end if;
    return format(
        'select seq, op, shard, ids, payload, ts from %s where %s%s order by op = ''B'', seq',
        (tube.named(tube)).pods, tube.belongs('shard', partitions, "partition"),
        case when exclude_backfill then ' and (op = ''B'', seq) < (true, 0)' else '' end);
end
$$;
comment on function tube.tube_pods_sql(text, integer, integer, boolean) is
    'The query of a worker''s pods, in the order in which they are to be done, for SQL by hand.';

create function tube.tube_pods_delete(tube text, partitions integer, "partition" integer, seqs bigint[]) returns integer
language plpgsql
set search_path = pg_catalog, tube, pg_temp
as $$
declare
    deleted integer;
begin
    execute format(
        'with gone as (
            delete from %s as p
            using (select b, s from unnest($1) as s, (values (false), (true)) as k(b)) as wanted
            where (p.op = ''B'', p.seq) = (wanted.b, wanted.s) and %s
            returning 1)
        select count(*) from gone',
        (tube.named(tube)).pods, tube.belongs('p.shard', partitions, "partition"))
    using seqs into deleted;
    return deleted;
end
$$;
comment on function tube.tube_pods_delete(text, integer, integer, bigint[]) is
    'Delete pods of a worker by their seq, for SQL by hand; returns how many there were.';

create function tube.unread_sql(
    known tube.tube, worker integer, backfill boolean, after pg_snapshot, done bigint, upto pg_snapshot, high bigint,
    most bigint, held_back text
) returns text
language sql immutable
set search_path = pg_catalog, tube, pg_temp
as $$
    select format($query$
        select u.seq, u.op, u.shard, u.ids, u.payload, u.ts from (
            (
                select p.*
                from unnest(%2$L::xid8[]) as late(txid)
                cross join lateral (
                    select l.* from %1$s as l
                    where l.txid = late.txid and l.seq <= least(%4$s, %6$s) and (l.op = 'B') is %3$s
                      and l.ids <> '{}' and %7$s and %9$s
                    order by l.txid, l.seq
                    limit %8$s
                ) as p
                where pg_visible_in_snapshot(late.txid, %5$L)
                order by p.seq
            )
            union all
            (
                select l.* from %1$s as l
                where (l.op = 'B', l.seq) > (%3$s, %4$s) and (l.op = 'B', l.seq) <= (%3$s, %6$s)
                  and l.ids <> '{}' and %7$s and %9$s and pg_visible_in_snapshot(l.txid, %5$L)
                order by l.op = 'B', l.seq
                limit %8$s
            )
        ) as u
        order by u.seq
        limit %8$s
        $query$,
        known.pods, array(select pg_snapshot_xip(after)), case when backfill then 'true' else 'false' end, done, upto, high,
        tube.belongs('l.shard', known.partitions, worker), most, held_back)
$$;
comment on function tube.unread_sql is
    'The query of the first most pods of one kind that a position has not done, upto sees, and whose seq is at most high. Its '
    'cost depends on neither the backlog nor what was deleted.';
