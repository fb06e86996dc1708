-- Moving a table to another shard: its open ids are touched again under the new shard.
--
-- The worker of the old shard does not read the table any more. So its open ids are touched again, each once, however many pods
-- they were in. They also stay under the old shard, because they may belong to another table there. If the table moves back
-- before all this is done, the repeated pods replace those that were waiting. Otherwise each move would add to the work of the
-- next.

-- The condition of the control pods that make a downstream delete rows of a table.
create function tube.asks_for_giving_up(tbl text) returns text
language sql immutable as $$
    select format(
        'l.ids = ''{}'' and l.payload ->> ''type'' in (''truncate'', ''backfill_end'') '
        'and tube.table_named(l.payload ->> ''tbl'') = %s', tbl)
$$;

-- If a table has come back to a shard, delete the pods that were waiting there and are repeated by pods after seq upto.
create function tube.drop_repeated(known tube.tube, tbl regclass, shard integer, upto bigint) returns void
language plpgsql
set lock_timeout = '100ms'
set jit = off
as $$
begin
    perform set_config('lock_timeout', pgchange.patience('100 ms'), true);
    -- Keep the pods of a claimed batch, so that a retry has the same batch. Keep also pods that were in the shard before the
    -- table first came to it.
    execute format(
        'with again as (
             select l.op, l.payload, i.id from %1$s as l cross join lateral unnest(l.ids) as i(id)
             where l.shard = $1 and l.seq > $2
         ), repeated as (
             select l.ctid as place
             from %1$s as l
             cross join lateral unnest(l.ids) as i(id)
             left join again as a on a.id = i.id and a.op = l.op and a.payload is not distinct from l.payload
             where l.shard = $1 and l.seq <= $2
               and l.seq > (select min(m.upto) from tube.moved as m where m.tube = $3 and m.to_shard = $1 and m.upto < $2)
               and l.seq not in (
                   select p.seq
                   from tube.worker as w cross join lateral tube.seqs_of(w.tube, w.worker, w.batch -> ''bounds'') as p(seq)
                   where w.tube = $3 and w.worker = $4 and w.batch is not null)
             group by l.ctid
             having bool_and(a.id is not null)
         )
         delete from %1$s as l using repeated as r where l.ctid = r.place', known.pods)
    using shard, upto, known.name, tube.worker_of(shard, known.partitions);
    execute format(
        'delete from %1$s as l
         where l.shard = $1 and l.seq <= $2 and %2$s
           and exists (
               select from %1$s as a
               where a.ids = ''{}'' and a.shard = $1 and a.seq > $2 and a.op = l.op
                 and a.payload ->> ''type'' = l.payload ->> ''type''
                 and a.payload ->> ''start_seq'' is not distinct from l.payload ->> ''start_seq''
                 and tube.table_named(a.payload ->> ''tbl'') = $3)', known.pods, tube.asks_for_giving_up('$3'))
    using shard, upto, tbl;
exception when lock_not_available or deadlock_detected then
    null; -- Another session is deleting pods manually. The remaining ids are processed twice, which does no harm.
end
$$;

-- Touch the open ids of a table again under its new shard, each id and control pod once. Newer pods of the new shard wait for
-- those of the old. The caller has locked out the workers of the tube and the writers of the table.
create function tube.move(known tube.tube, tbl regclass, from_shard integer, to_shard integer) returns void
language plpgsql
set jit = off
as $$
declare
    upto bigint := nextval('tube.seq');
begin
    perform tube.demand(known, format('give %s another shard of tube', tbl), '{select}');
    insert into tube.moved (tube, from_shard, to_shard, upto)
    select known.name, o.shard, move.to_shard, upto
    from (
        select move.from_shard
        union
        -- Find the shards from which the table came, if pods of this shard still wait for them.
        select m.from_shard from tube.moved as m where m.tube = known.name and m.to_shard = move.from_shard
    ) as o(shard)
    where o.shard <> move.to_shard;
    -- This also touches ids of other tables in the old shard, which does no harm.
    execute format(
        'insert into %1$s (op, shard, ids, payload, ts)
         select c.op, $2, array_agg(c.id order by c.seq, c.n), c.payload, min(c.ts)
         from (
             select u.*, div(row_number() over (partition by u.op, u.payload order by u.seq, u.n) - 1, %2$s) as chunk
             from (
                 select distinct on (l.op, l.payload, i.id) l.op, l.payload, i.id, i.n, l.seq, l.ts
                 from %1$s as l cross join lateral unnest(l.ids) with ordinality as i(id, n)
                 where l.shard = $1 and i.id is not null
                 order by l.op, l.payload, i.id, l.seq, i.n
             ) as u
         ) as c
         group by c.op, c.payload, c.chunk
         order by min(c.seq)', known.pods, case when known.key = '{bigint}' then 250 else 150 end)
    using from_shard, to_shard;
    execute format(
        'insert into %1$s (op, shard, ids, payload, ts)
         select c.op, $2, ''{}'', c.payload, c.ts
         from (
             select distinct on (l.op, l.payload ->> ''type'', l.payload ->> ''start_seq'') l.op, l.payload, l.ts, l.seq
             from %1$s as l
             where l.shard = $1 and %2$s
             order by l.op, l.payload ->> ''type'', l.payload ->> ''start_seq'', l.seq desc
         ) as c
         order by c.seq', known.pods, tube.asks_for_giving_up('$3'))
    using from_shard, to_shard, tbl;
    if has_table_privilege(known.pods, 'delete') then
        perform tube.drop_repeated(known, tbl, to_shard, upto);
    end if;
end
$$;
