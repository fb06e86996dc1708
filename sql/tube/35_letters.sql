-- Dead letters of tubes: the ids of batches that were given up. To send a letter again means to touch its ids again.

-- The rights of the caller on dead letters of a tube. A role that may delete pods, and so works the tube, may keep them.
create function tube.letter_rights(address jsonb) returns text[]
language sql stable as $$
    select case when has_table_privilege(t.pods, 'delete') then '{see,keep}'::text[] else '{see}' end
    from tube.tube as t
    where t.name = address ->> 'tube' and tube.are_pods(t.pods, t.name)
      and (has_table_privilege(t.pods, 'select, delete') or has_any_column_privilege(t.pods, 'insert'))
$$;

-- The hint that names the grant by which the caller could keep the letters of a tube.
create function tube.keeper_grant(address jsonb) returns text
language sql stable as $$
    select format(
        'let %I, the owner of the pods of tube %I, run: grant select, delete on %s to %I', pg_get_userbyid(c.relowner), t.name,
        tube.full_name(t.pods), current_user)
    from tube.tube as t join pg_class as c on c.oid = t.pods
    where t.name = address ->> 'tube'
$$;

-- The batch that a worker claimed and has not acked, with its attempts and last error. Null if there is none, or if it is a part
-- of a split batch that is not claimed yet.
create function tube.in_work(tube text, worker integer, "position" jsonb) returns jsonb
language plpgsql stable as $$
begin
    perform tube.check_worker_number((tube.named(tube)).partitions, worker);
    return (
        select w.batch || jsonb_build_object('attempt', w.attempt, 'error', w.error) || pgchange.lease_of(tube.mark_of(w))
        from tube.worker_now(tube, worker) as w
        where w.attempt > 0);
end
$$;

-- Store the error of an attempt with its batch, and count the attempt; false if the attempt is not the last.
create function tube.set_error(tube text, worker integer, batch jsonb, error text, of_batch boolean) returns boolean
language plpgsql volatile as $$
begin
    update tube.worker as w set
        error = set_error.error, updated_at = clock_timestamp(),
        -- Count an attempt once, even if its error is recorded twice.
        failures = w.failures + (of_batch is true and w.failures + w.outages < w.attempt)::integer,
        outages = w.outages + (of_batch is false and w.failures + w.outages < w.attempt)::integer
    where w.tube = set_error.tube and w.worker = set_error.worker
      and w.version = (set_error.batch -> 'bounds' ->> 'from_version')::bigint
      and w.batch ->> 'id' = set_error.batch ->> 'id' and w.attempt = (set_error.batch ->> 'attempt')::integer;
    return found;
end
$$;

-- The touches of a batch, as [{shard, op, payload, ids}, ...] in the order in which they were first touched. like_ids is an array
-- of the type of the tube's ids.
create function tube.touches(tube text, worker integer, choice jsonb, like_ids anyarray default null::bigint[]) returns jsonb
language sql volatile as $$
    select coalesce(jsonb_agg(
        jsonb_build_object('shard', t.shard, 'op', t.op, 'payload', t.payload, 'ids', t.ids) order by t.first), '[]')
    from (
        select p.shard, p.op, p.payload, min(p.seq) as first, jsonb_agg(distinct p.id) as ids
        from (
            select p.*, i.id, tube.place_in_order(p.shard, bool_and(p.op = 'B') over same_id, min(p.seq) over same_id, i.id) as place
            from tube.pods_of(tube, worker, choice, like_ids) as p cross join lateral unnest(p.ids) as i(id)
            window same_id as (partition by p.shard, i.id)
        ) as p
        where (select choice -> 'part') is null or tube.is_in_part(choice -> 'part', p.place)
        group by p.shard, p.op, p.payload
    ) as t
$$;

-- Store the ids of a batch as a dead letter, and return its number.
create function tube.give_up(tube text, worker integer, batch jsonb, reason text) returns bigint
language plpgsql volatile as $$
begin
    return pgchange.write_letter(
        'tube', tube.name_of(tube, worker), jsonb_build_object('tube', tube),
        jsonb_build_object('touches', case when (tube.named(tube)).key = '{bigint}' then tube.touches(tube, worker, batch -> 'bounds')
                                      else tube.touches(tube, worker, batch -> 'bounds', null::text[]) end, 'tables', (
            select coalesce(jsonb_agg(jsonb_build_array(a.shard, c.name)), '[]')
            from tube.attachment as a cross join lateral tube.full_name(a.tbl) as c(name)
            where a.tube = give_up.tube and not tube.is_gone(a))),
        (batch ->> 'count')::bigint, reason, batch ->> 'error', (batch ->> 'attempt')::integer, (batch ->> 'id')::uuid);
end
$$;

-- Refuse a dead letter of a tube that was dropped.
create function tube.check_letter(address jsonb, content jsonb) returns void
language plpgsql stable as $$
begin
    perform tube.named(address ->> 'tube');
end
$$;

-- The present shards of the tables that had a shard when the letter was written. tables is a list [[shard, table], ...].
create function tube.shards_now(tube text, shard integer, tables jsonb) returns setof integer
language sql stable as $$
    select distinct coalesce(tube.shard_of(shards_now.tube, k.tbl), shards_now.shard)
    from (
        select to_regclass(t.attached ->> 1) as tbl
        from jsonb_array_elements(tables) as t(attached) where (t.attached ->> 0)::integer = shards_now.shard
        union all
        select null where not exists (
            select from jsonb_array_elements(tables) as t(attached) where (t.attached ->> 0)::integer = shards_now.shard)
    ) as k
$$;

-- Touch the ids of a dead letter again, and delete the letter in the same transaction.
create function tube.redrive(letter bigint) returns void
language plpgsql volatile as $$
declare
    wanted record;
    each_tbl regclass;
begin
    delete from pgchange.letter as l where l.id = letter and l.kind = 'tube'
    returning l.address ->> 'tube' as tube, l.content -> 'touches' as touches, l.content -> 'tables' as tables into wanted;
    if not found then
        perform pgchange.letter_gone(letter);
    end if;
    -- Use the present shard of the table, and keep it from changing. Under its old shard, an id could be in work twice.
    for each_tbl in
        select distinct to_regclass(t.attached ->> 1) as tbl from jsonb_array_elements(wanted.tables) as t(attached) order by 1
    loop
        perform tube.hold_shard(each_tbl);
    end loop;
    perform tube.touch_keys(wanted.tube, s.shard, t.ids, t.op, t.payload)
    from (
        select (e.touch ->> 'shard')::integer as shard, e.touch ->> 'op' as op, nullif(e.touch -> 'payload', 'null') as payload,
               array(select x from jsonb_array_elements_text(e.touch -> 'ids') as x) as ids
        from jsonb_array_elements(wanted.touches) with ordinality as e(touch, n)
        order by e.n
    ) as t
    cross join lateral tube.shards_now(wanted.tube, t.shard, wanted.tables) as s(shard);
end
$$;
