-- Continuing after a restore or an upgrade. Positions contain transaction ids, which are not valid in another cluster.

-- Replace the transaction ids in the log and the positions of a queue by ids that no transaction has, with the same meaning.
create function mbus.rebase(known mbus.queue) returns void
language plpgsql as $$
declare
    late xid8[];
begin
    execute format('lock table mbus.%I in share row exclusive mode', 'log$' || known.qname);
    execute format($query$
        select coalesce(array_agg(distinct l.txid), '{}') from mbus.%I as l
        where l.txid = any (array(select e.xid from mbus.lates($1) as e))
        $query$, 'log$' || known.qname)
    into late using known.qname;
    -- Replace transaction ids by ids below those of any cluster's transactions. 2 belongs to no transaction, and 1 to no
    -- message; ids of late transactions follow.
    execute format(
        'update mbus.%I as l set txid = coalesce(array_position($1, l.txid) + 2, 2)::text::xid8', 'log$' || known.qname)
    using late;
    update mbus.position as p set
        late_xids = array(
            select coalesce(array_position(late, e.xid) + 2, 1)::text::xid8
            from unnest(p.late_xids) with ordinality as e(xid, n) order by e.n),
        txid = '2'
    where p.consumer in (select c.id from mbus.consumer as c where c.qname = known.qname);
    perform mbus.begin_level(c.id) from mbus.consumer as c where c.qname = known.qname;
    update mbus.receipt as r set txid = '2' where r.queue = known.id;
end
$$;

create function mbus.rebase_after_restore() returns integer
language plpgsql security definer as $$
declare
    known mbus.queue;
    rebased integer := 0;
begin
    perform pgchange.check_isolation();
    perform mbus.hold_queues();
    if mbus.is_native() then
        return 0;
    end if;
    for known in select q.* from mbus.queue as q order by q.qname loop
        perform mbus.rebase(known);
        rebased := rebased + 1;
    end loop;
    perform pgchange.note_origin('mbus.origin');
    return rebased;
end
$$;
comment on function mbus.rebase_after_restore() is
    'Adapt queues that were restored from a dump, or upgraded, to this cluster. Consumers are refused until then. Returns how '
    'many there were. Posts wait meanwhile.';
