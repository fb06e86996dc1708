-- Reading a batch: its ids, their tables, and which of the ids a copy contains.

-- The ids of a batch between two places, each once per shard. Incremental ids come first, in the order in which they were first
-- touched. PostgreSQL expects few ids, and would put them into a hash table. Sorting takes less time for more ids than fit into
-- work_mem, so hash tables are turned off.
create function tube.changes(tube text, worker integer, choice jsonb, after integer[], upto integer[])
returns table (id bigint, shard integer, seq bigint, backfill boolean, payload jsonb, touched_at timestamptz)
language sql volatile
set enable_hashagg = off
as $$
    select i.id, p.shard, max(p.seq), bool_and(p.op = 'B'),
           -- The latest payload. An aggregate with its own order would begin a sort for each id.
           (max(array[lpad(p.seq::text, 19, '0'), p.payload::text] collate "C") filter (where p.payload is not null))[2]::jsonb,
           min(p.ts)
    from tube.pods_of(tube, worker, choice, null::bigint[]) as p
    cross join lateral unnest(p.ids) as i(id)
    where (p.shard, tube.part_of(i.id)) > (after[1], after[2]) and (p.shard, tube.part_of(i.id)) <= (upto[1], upto[2])
    group by tube.sort_key(i.id), p.shard, i.id
    having (select choice -> 'part') is null
           or tube.is_in_part(choice -> 'part', tube.place_in_order(p.shard, bool_and(p.op = 'B'), min(p.seq), i.id))
    order by bool_and(p.op = 'B'), min(p.seq), i.id
$$;

-- Like tube.changes(), for a tube whose ids are texts.
create function tube.key_changes(tube text, worker integer, choice jsonb, after integer[], upto integer[])
returns table (id text, shard integer, seq bigint, backfill boolean, payload jsonb, touched_at timestamptz)
language sql volatile
set enable_hashagg = off
as $$
    select i.id, p.shard, max(p.seq), bool_and(p.op = 'B'),
           -- The latest payload. An aggregate with its own order would begin a sort for each id.
           (max(array[lpad(p.seq::text, 19, '0'), p.payload::text] collate "C") filter (where p.payload is not null))[2]::jsonb,
           min(p.ts)
    from tube.pods_of(tube, worker, choice, null::text[]) as p
    cross join lateral unnest(p.ids) as i(id)
    where (p.shard, tube.part_of(i.id)) > (after[1], after[2]) and (p.shard, tube.part_of(i.id)) <= (upto[1], upto[2])
    group by tube.sort_key(i.id), p.shard, i.id
    having (select choice -> 'part') is null
           or tube.is_in_part(choice -> 'part', tube.place_in_order(p.shard, bool_and(p.op = 'B'), min(p.seq), i.id))
    order by bool_and(p.op = 'B'), min(p.seq), i.id collate "C"
$$;

-- The tables in the shards of a worker. Each has its shard, its schema and name, the current names of its id columns, and its
-- predicate. shared: another table with the same name touches the tube, or did under another shard. The copies of both in one
-- schema would be the same table. twin: the table with the same name and shard, or null. keeper: the owner of the pods.
create function tube.attached_to(tube text, workers integer, worker integer) returns jsonb
language plpgsql stable as $$
declare
    known tube.tube := tube.named(tube);
begin
    perform tube.check_worker_number(workers, worker);
    return (
        with tables as (
            select a as attached, a.shard, n.nspname, c.relname, count(*) over (partition by c.relname) as namesakes,
                   min(format('%I.%I', n.nspname, c.relname)) over (
                       partition by c.relname, a.shard
                       rows between unbounded preceding and unbounded following exclude current row) as twin
            from tube.attachment as a
            join pg_class as c on c.oid = a.tbl
            join pg_namespace as n on n.oid = c.relnamespace
            where a.tube = known.name and not tube.is_gone(a)
        ), former as (
            select c.relname, min(d.shard) as lowest, max(d.shard) as highest
            from tube.detached as d join pg_class as c on c.oid = d.tbl
            where d.tube = known.name
            group by c.relname
        )
        select coalesce(jsonb_agg(jsonb_build_object(
            'shard', t.shard, 'schema', t.nspname, 'name', t.relname,
            'key', array(
                select coalesce((tube.key_attribute(t.attached, p)).attname, (t.attached).key[p])
                from generate_subscripts((t.attached).key, 1) as p),
            'predicate', (t.attached).predicate,
            'shared', t.namesakes > 1 or coalesce(f.lowest <> t.shard or f.highest <> t.shard, false),
            'keeper', (select pg_get_userbyid(p.relowner) from pg_class as p where p.oid = known.pods),
            'twin', t.twin
        ) order by t.shard, t.nspname, t.relname), '[]')
        from tables as t
        left join former as f on f.relname = t.relname
        where tube.worker_of(t.shard, workers) = worker);
end
$$;

create function tube.wanted(tube text, tbl regclass, ids bigint[]) returns setof bigint
language plpgsql stable as $$
begin
    perform tube.check_whole(tbl);
    return query select unnest(tube.judged_ids(tube.require_attachment(tube, tbl, null), ids));
end
$$;
comment on function tube.wanted(text, regclass, bigint[]) is
    'The ids that a copy of an attached table contains. Their row exists, and the predicate of the attachment holds for it, or '
    'fails with an error. Refuses a table if row security hides rows of it.';

create function tube.wanted_keys(tube text, tbl regclass, keys text[]) returns setof text
language plpgsql stable as $$
begin
    perform tube.check_whole(tbl);
    return query select unnest(tube.judged_ids(tube.require_attachment(tube, tbl, null), keys));
end
$$;
comment on function tube.wanted_keys(text, regclass, text[]) is
    'Like tube.wanted(), for a tube whose ids are texts.';
