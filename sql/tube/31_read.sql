-- What a worker reads: the ids of its batch, of which tables they are, and which of them a copy is to hold.

-- The ids of a batch, each once a shard, incremental ones first and in the order in which they were first touched; from behind one
-- place up to another.
create function tube.changes(tube text, worker integer, choice jsonb, after integer[], upto integer[])
returns table (id bigint, shard integer, seq bigint, backfill boolean, payload jsonb, touched_at timestamptz)
language sql volatile as $$
    select i.id, p.shard, max(p.seq), bool_and(p.op = 'B'),
           (array_agg(p.payload order by p.seq desc) filter (where p.payload is not null))[1], min(p.ts)
    from tube.pods_of(tube, worker, choice, null::bigint[]) as p
    cross join lateral unnest(p.ids) as i(id)
    where tube.place(p.shard, i.id) > after and tube.place(p.shard, i.id) <= upto
    group by p.shard, i.id
    having (select choice -> 'part') is null
           or tube.is_in_part(choice -> 'part', tube.place_in_order(p.shard, bool_and(p.op = 'B'), min(p.seq), i.id))
    order by bool_and(p.op = 'B'), min(p.seq), i.id
$$;

-- As tube.changes(), for a tube whose ids are texts.
create function tube.key_changes(tube text, worker integer, choice jsonb, after integer[], upto integer[])
returns table (id text, shard integer, seq bigint, backfill boolean, payload jsonb, touched_at timestamptz)
language sql volatile as $$
    select i.id, p.shard, max(p.seq), bool_and(p.op = 'B'),
           (array_agg(p.payload order by p.seq desc) filter (where p.payload is not null))[1], min(p.ts)
    from tube.pods_of(tube, worker, choice, null::text[]) as p
    cross join lateral unnest(p.ids) as i(id)
    where tube.place(p.shard, i.id) > after and tube.place(p.shard, i.id) <= upto
    group by p.shard, i.id
    having (select choice -> 'part') is null
           or tube.is_in_part(choice -> 'part', tube.place_in_order(p.shard, bool_and(p.op = 'B'), min(p.seq), i.id))
    order by bool_and(p.op = 'B'), min(p.seq), i.id collate "C"
$$;

-- The tables in a worker's shards: of each the shard, its schema and name, today's names of the columns of its ids, the predicate that
-- it is attached with; shared: whether another table that touches the tube, or did under another shard, has the same name, so that
-- copies in one schema would be one; the twin that has both name and shard in common with it, or null; and the keeper, who owns the
-- pods.
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
    'Those of some ids that a copy of an attached table is to hold: there is a row, and the predicate that the table was attached '
    'with holds for it, or fails. Refuses a table of which row security hides rows.';

create function tube.wanted_keys(tube text, tbl regclass, keys text[]) returns setof text
language plpgsql stable as $$
begin
    perform tube.check_whole(tbl);
    return query select unnest(tube.judged_ids(tube.require_attachment(tube, tbl, null), keys));
end
$$;
comment on function tube.wanted_keys(text, regclass, text[]) is
    'As tube.wanted(), for a tube whose ids are texts.';
