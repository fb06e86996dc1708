-- Consuming manually, in SQL, if results and commits are in one database.

create function pubsub.lock_watermark(consumer_id text, branch_id bigint, accept_trimmed boolean default false)
returns pubsub.watermark
language plpgsql volatile security definer as $$
declare
    found_row pubsub.watermark;
begin
    perform pgchange.check_isolation();
    perform pubsub.check_origin();
    perform pubsub.check_branch(branch_id);
    perform pg_advisory_xact_lock(pubsub.lock_key(consumer_id, branch_id));
    select w.* into found_row from pubsub.watermark as w
    where w.consumer_id = lock_watermark.consumer_id and w.branch_id = lock_watermark.branch_id;
    if found_row is null then
        if not accept_trimmed then
            perform pubsub.check_history(branch_id);
        end if;
        insert into pubsub.watermark (consumer_id, branch_id)
        values (lock_watermark.consumer_id, lock_watermark.branch_id)
        returning * into found_row;
    end if;
    return found_row;
end
$$;
comment on function pubsub.lock_watermark(text, bigint, boolean) is
    'For manual SQL: take a consumer''s lock until the transaction ends, after waiting for another holder. Returns the '
    'consumer''s watermark, which the first call creates at the beginning.';

-- Claim and ack the next batch of a consumer. keyed: whether the keys of its branch are texts.
create function pubsub.take(consumer_id text, branch_id bigint, max_changes integer, in_order boolean, keyed boolean) returns jsonb
language plpgsql volatile as $$
declare
    found_position jsonb;
    batch jsonb;
begin
    perform pgchange.check_isolation();
    if pg_current_xact_id_if_assigned() is not null then
        raise exception using errcode = 'PC007', message = 'no batch can be claimed: this transaction has already written',
            hint = 'poll first, write afterwards; call the first lock_watermark() of a new consumer in a transaction of its own';
    end if;
    if (select b.key is not null from revision.branch as b where b.id = take.branch_id) <> keyed then
        perform pgchange.refuse(
            format('the keys of branch %s are %s', branch_id, case when keyed then 'numbers' else 'texts' end),
            case when keyed then 'call pubsub.poll' else 'call pubsub.poll_keyed' end);
    end if;
    perform pg_advisory_xact_lock(pubsub.lock_key(consumer_id, branch_id));
    found_position := pubsub.position(consumer_id, branch_id);
    if found_position is null then
        raise exception using errcode = 'PC002', message = format('there is no consumer %s', pubsub.name_of(consumer_id, branch_id)),
            hint = 'create it by select pubsub.lock_watermark(...), in a transaction of its own';
    end if;
    batch := pubsub.claim(consumer_id, branch_id, found_position, max_changes, in_order, true);
    if batch is not null then
        perform pubsub.ack(consumer_id, branch_id, batch);
    end if;
    return batch;
end
$$;

create function pubsub.poll(consumer_id text, branch_id bigint, max_changes integer default 1000, in_order boolean default false)
returns table (id bigint, queue_id bigint, txid bigint, created_at timestamptz)
language plpgsql volatile security definer as $$
declare
    batch constant jsonb := pubsub.take(consumer_id, branch_id, max_changes, in_order, keyed => false);
begin
    return query
        select c.*
        from jsonb_array_elements(batch -> 'slices') with ordinality as s(slice, n)
        cross join lateral pubsub.changes(
            poll.branch_id, batch -> 'bounds',
            (s.slice -> 'after' ->> 0)::bigint, (s.slice -> 'after' ->> 1)::bigint,
            (s.slice -> 'upto' ->> 0)::bigint, (s.slice -> 'upto' ->> 1)::bigint) as c
        order by s.n, c.txid, c.queue_id;
end
$$;
comment on function pubsub.poll(text, bigint, integer, boolean) is
    'For manual SQL, if results and commits are in one database: the consumer''s next batch, once. Results written in the same '
    'transaction are committed together with the progress.';

create function pubsub.poll_keyed(consumer_id text, branch_id bigint, max_changes integer default 1000, in_order boolean default false)
returns table (id text, queue_id bigint, txid bigint, created_at timestamptz)
language plpgsql volatile security definer as $$
declare
    batch constant jsonb := pubsub.take(consumer_id, branch_id, max_changes, in_order, keyed => true);
begin
    return query
        select c.*
        from jsonb_array_elements(batch -> 'slices') with ordinality as s(slice, n)
        cross join lateral pubsub.keyed_changes(
            poll_keyed.branch_id, batch -> 'bounds',
            (s.slice -> 'after' ->> 0)::bigint, (s.slice -> 'after' ->> 1)::bigint,
            (s.slice -> 'upto' ->> 0)::bigint, (s.slice -> 'upto' ->> 1)::bigint) as c
        order by s.n, c.txid, c.queue_id;
end
$$;
comment on function pubsub.poll_keyed(text, bigint, integer, boolean) is
    'Like pubsub.poll(), for a branch whose keys are not integers: id is the text of the key. For a key of several columns it is '
    'the text of an array, which id::text[] reads.';
