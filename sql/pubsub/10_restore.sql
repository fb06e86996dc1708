-- Continuing after a restore, an upgrade, or a loss of the source's latest transactions.

-- The record of a consumer at this source: the positions before and behind the batch that it claimed last.
create function pubsub.mark(consumer_id text, branch_id bigint) returns jsonb
language sql stable security definer as $$
    -- The current place, which a rebase may have changed.
    select pgchange.mark('commit', c.consumer)
        || jsonb_build_object('source', here.place, 'version', pubsub.check_mark(c, here.place))
    from pubsub.check_origin() as here(place), pgchange.claim as c
    where c.kind = 'commit' and c.consumer = pubsub.name_of(mark.consumer_id, mark.branch_id)
$$;

-- Whether the transaction ids in the queue seem valid here, as after pg_upgrade. Then most rows have an xmin that equals their
-- txid. In a restored dump, the xmin is the transaction id of the restore.
create function pubsub.txids_look_kept() returns boolean
language sql stable security definer as $$
    select coalesce(
        (select count(*) filter (where r.xmin::text::bigint = r.txid::text::bigint & 4294967295) * 2 >= count(*)
         from (select q.xmin, q.txid from revision.commit_queue as q order by q.id desc limit 1000) as r
         having count(*) > 0),
        true)
    and coalesce((select max(q.txid) from revision.commit_queue as q) < pg_snapshot_xmax(pg_current_snapshot()), true)
$$;

-- Use up transaction ids, so that new ids of this cluster are above a number.
create function pubsub.burn_xids(upto bigint) returns void
language plpgsql as $$
begin
    create temporary table if not exists burnt (n integer) on commit drop;
    for n in pg_snapshot_xmax(pg_current_snapshot())::text::bigint .. upto loop
        -- Each block is a subtransaction, and its insert gives it a transaction id.
        begin
            insert into pg_temp.burnt values (1);
        exception when others then
            raise;
        end;
    end loop;
end
$$;

-- Store every position with transaction ids of the old place, in the temporary table at_rest.
create function pubsub.note_positions(old text) returns void
language plpgsql as $$
begin
    create temporary table at_rest on commit drop as
    select row_number() over () as n, p.*
    from (
        select 'watermark' as place, pubsub.name_of(consumer_id, branch_id) as consumer, snapshot, partial_txid, partial_id
        from pubsub.watermark
        where source is null or pgchange.came_along(source, old)
        union all
        select 'after', c.consumer, at.* from pgchange.claim as c cross join lateral pubsub.cursor_of(c.after) as at
        where c.kind = 'commit' and pgchange.came_along(c.source, old)
        union all
        select 'mark', c.consumer, at.* from pgchange.claim as c cross join lateral pubsub.cursor_of(c.upto) as at
        where c.kind = 'commit' and pgchange.came_along(c.source, old)
    ) as p;
end
$$;

-- Fill the temporary table moved with the commits of the queue and their new transaction ids, and return the highest of these ids.
-- The ids count from 3, in the order of the commits. A run of commits that were processed by exactly the same positions gets a
-- single id. Commits written since the restore count as processed by no position.
create function pubsub.renumber_commits(restored_at bigint) returns bigint
language plpgsql as $$
begin
    create temporary table moved on commit drop as
    with judged as (
        select q.*, (
            select coalesce(string_agg(case
                when q.txid::text::bigint > restored_at and q.txid::text::bigint <= revision.full_xid(q.xmin) then '0'
                when pg_visible_in_snapshot(q.txid, r.snapshot) then '1'
                when q.txid = r.partial_txid and q.id <= r.partial_id then '1'
                else '0' end, '' order by r.n), '')
            from at_rest as r
        ) as processed,
        q.txid::text::bigint > restored_at and q.txid::text::bigint <= revision.full_xid(q.xmin) as written_here
        from revision.commit_queue as q
    ), stepped as (
        select j.*, row_number() over w as new_id,
               (j.processed is distinct from lag(j.processed) over w)::integer as step
        from judged as j
        window w as (order by j.written_here, j.txid, j.id)
    )
    select s.commit_id, s.key, s.branch_id, s.created_at, s.processed, s.new_id, 2 + sum(s.step) over (order by s.new_id) as run
    from stepped as s;
    return (select coalesce(max(m.run), 2) from moved as m);
end
$$;

-- Fill the queue with the renumbered commits.
create function pubsub.rewrite_queue() returns void
language plpgsql as $$
declare
    commits bigint := (select count(*) from moved);
    part regclass;
    unfinished name;
begin
    truncate revision.commit_queue, revision.gap;
    -- A move of rows out of the default partition that had begun is over. Its bounds are ids of the old cluster.
    for unfinished in
        select c.conname from pg_constraint as c
        where c.conrelid = 'revision.commit_queue_default'::regclass and c.conname ~ '^pgchange_moving_'
    loop
        execute format('alter table revision.commit_queue_default drop constraint %I', unfinished);
    end loop;
    for part in select p.relid from revision.partitions() as p loop
        execute format('drop table %s', part);
    end loop;
    perform revision.add_partition(3, pg_snapshot_xmax(pg_current_snapshot())::text::bigint);
    insert into revision.commit_queue (id, commit_id, key, branch_id, txid, created_at)
    select m.new_id, m.commit_id, m.key, m.branch_id, m.run::text::xid8, m.created_at from moved as m order by m.new_id;
    perform setval(pg_get_serial_sequence('revision.commit_queue', 'id'), greatest(commits, 1), commits > 0);
end
$$;

-- Set every position to the same commits as before, by their new transaction ids.
create function pubsub.rewrite_positions() returns void
language plpgsql as $$
begin
    create temporary table arrived on commit drop as
    select r.place, r.consumer, coalesce((
               select pgchange.snapshot_of(array_agg(g.run::bigint) filter (where not g.done), max(g.run) filter (where g.done)::bigint + 1)
               from (select distinct m.run, substr(m.processed, r.n::integer, 1) = '1' as done from moved as m) as g
               having bool_or(g.done)), '1:1:') as snapshot
    from at_rest as r;
    update pubsub.watermark as w set snapshot = a.snapshot, partial_txid = null, partial_id = null
    from arrived as a
    where a.place = 'watermark' and a.consumer = pubsub.name_of(w.consumer_id, w.branch_id);
    -- A batch in work is given up: its commits come in a new batch. A split is given up, too, because its end is a snapshot of
    -- the old cluster.
    update pgchange.claim as c set
        batch = c.batch #- '{bounds,split}',
        after = pubsub.at(jsonb_build_object('snapshot', a.snapshot)),
        upto = pubsub.at(jsonb_build_object('snapshot', m.snapshot)),
        from_version = case when c.from_version = (
                select w.version from pubsub.watermark as w
                where w.consumer_id = c.address ->> 'consumer_id' and w.branch_id = (c.address -> 'branch_id')::bigint)
            then -1 else c.from_version end
    from arrived as a, arrived as m
    where c.kind = 'commit' and a.place = 'after' and a.consumer = c.consumer and m.place = 'mark' and m.consumer = c.consumer;
end
$$;

create function pubsub.rebase_after_restore(txids_kept boolean default false) returns text
language plpgsql as $$
declare
    old text := revision.here();
    here text;
    restored_at bigint := (
        select revision.full_xid(o.xmin) from revision.origin as o
        order by o.written_as = o.tableoid, o.written_in = o.xmin limit 1);
begin
    if revision.is_native() then
        return 'nothing to do: the transaction ids belong to this cluster';
    end if;
    perform pgchange.check_isolation();
    perform set_config('synchronous_commit', 'on', true);
    lock table revision.commit_queue, pubsub.watermark in access exclusive mode;
    perform from pgchange.claim as c where c.kind = 'commit' for update;
    if not txids_kept then
        perform pubsub.note_positions(old);
        perform pubsub.burn_xids(pubsub.renumber_commits(restored_at));
        perform pubsub.rewrite_queue();
        perform pubsub.rewrite_positions();
        delete from revision.trimmed as t where t.commits = 0;
        update revision.trimmed as t set upto = '3';
    elsif not pubsub.txids_look_kept() then
        raise exception using errcode = 'PC004', message = 'the transaction ids were not kept: this is a restored dump',
            hint = 'run select pubsub.rebase_after_restore()';
    end if;
    perform pgchange.note_origin('revision.origin');
    update revision.tracked as t set since = '1:1:' where not txids_kept;
    delete from revision.enqueued where not txids_kept;
    here := revision.here();
    update pubsub.watermark as w set source = here where pgchange.came_along(w.source, old);
    update pgchange.claim as c set
        source = here,
        batch = jsonb_set(c.batch, '{bounds,source}', to_jsonb(here)),
        from_version = case when txids_kept then c.from_version else least(c.from_version, c.version) end
    where c.kind = 'commit' and pgchange.came_along(c.source, old);
    update pgchange.letter as l set
        content = case when txids_kept then jsonb_set(l.content, '{bounds,source}', to_jsonb(here)) else l.content end,
        on_its_way = l.on_its_way and txids_kept
    where l.kind = 'commit' and pgchange.came_along(l.content -> 'bounds' ->> 'source', old);
    delete from revision.pace;
    perform revision.maintain_partitions();
    return format('rebased onto cluster %s', pgchange.cluster());
end
$$;
comment on function pubsub.rebase_after_restore(boolean) is
    'Adapt the queue and the watermarks of a restored dump to this cluster, so that they mean the same commits. Dead letters of '
    'the dump can no longer be sent. After pg_upgrade, which keeps transaction ids, pass txids_kept => true; this is checked. '
    'Consumers with their watermark in another database need `airflow-pgchange repair` afterwards. Stop writers and consumers '
    'first, and run it as the owner of the schemas.';
