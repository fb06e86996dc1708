-- A group's next batch. The lock, the cursor and the ack are where the results are; the claim is where the events are.

create function pgmb.pending(gid text, "position" jsonb) returns pgmb.claim
language plpgsql stable security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    return (
        select c from pgmb.claim as c
        where c.group_id = gid
          and c.from_version = coalesce(("position" ->> 'version')::bigint, 0)
          and c.version > c.from_version and c.batch is not null
          and c.after = coalesce("position" ->> 'cursor', ''));
end
$$;
comment on function pgmb.pending(text, jsonb) is 'The claim that a position has not acked yet, if there is one.';

create function pgmb.choose(gid text, after text, max_changes integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    run record;
    low text := after;
    taken bigint := 0;
    slices jsonb := '[]';
    alone boolean := true;
    lowest text;
    highest text;
begin
    for run in select * from pgmb.next_runs(gid, after, max_changes, greatest(10000, max_changes / 256)) loop
        slices := slices || jsonb_build_object('count', run.count, 'after', low, 'upto', run.upto);
        low := run.upto;
        taken := taken + run.count;
        alone := run.alone;
        lowest := run.lowest;
        highest := run.highest;
    end loop;
    return jsonb_build_object(
        'count', taken, 'slices', slices, 'oldest', pgmb.extract_date_from_event_id(lowest),
        'bounds', jsonb_build_object(
            'after', after, 'upto', low, 'alone', alone, 'lowest', lowest, 'highest', highest));
end
$$;
comment on function pgmb.choose(text, text, integer) is
    'The next dispatched events of a group, at most so many, as a batch.';

create function pgmb.claim_again(mark pgmb.claim, max_attempts integer) returns jsonb
language plpgsql volatile
set search_path = pg_catalog, pgmb, pg_temp
as $$
begin
    if mark.attempt >= max_attempts then
        raise exception using errcode = 'PC010',
            message = format('batch %s of group %I has failed, at attempt %s', mark.batch_id, mark.group_id, mark.attempt),
            hint = format(
                'mend what it fails on and raise max_attempts, or give it up: airflow pgchange skip events:%s', mark.group_id);
    end if;
    perform pgmb.keep_alive(mark.group_id);
    update pgmb.claim as c set attempt = c.attempt + 1, claimed_at = clock_timestamp()
    where c.group_id = mark.group_id
    returning c.attempt into mark.attempt;
    -- What the first attempt dispatched was committed after the point that it noted.
    return mark.batch || jsonb_build_object('attempt', mark.attempt, 'lsn', pg_current_wal_insert_lsn());
end
$$;
comment on function pgmb.claim_again(pgmb.claim, integer) is
    'The batch of a claim once more, with the attempt counted; refused after max_attempts of them.';

create function pgmb.claim(gid text, "position" jsonb, max_changes integer, max_attempts integer default null) returns jsonb
language plpgsql volatile security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    began_at bigint := coalesce(("position" ->> 'version')::bigint, 0);
    after text := coalesce("position" ->> 'cursor', '');
    mark pgmb.claim;
    choice jsonb;
    polled record;
    batch jsonb;
    id uuid;
begin
    perform pgmb.check_position(gid, "position");
    if coalesce(max_changes < 1, true) then
        raise invalid_parameter_value using message = 'a batch has at least 1 change';
    end if;
    if pg_current_xact_id_if_assigned() is not null then
        raise exception using errcode = 'PC007', message = 'this transaction has already written something',
            hint = 'claim in a transaction of its own';
    end if;
    mark := pgmb.pending(gid, "position");
    if mark.version is not null then
        return pgmb.claim_again(mark, max_attempts);
    end if;
    choice := pgmb.choose(gid, after, max_changes);
    while (choice ->> 'count')::bigint < max_changes loop
        polled := pgmb.dispatch();
        if polled.pairs > 0 then
            choice := pgmb.choose(gid, after, max_changes);
        end if;
        exit when not polled.more;
    end loop;
    -- After the dispatch: removing a subscription whose condition does not end must not wait for that condition.
    perform pgmb.keep_alive(gid);
    if choice ->> 'count' = '0' then
        return null;
    end if;
    id := md5(concat_ws('|', gid, choice -> 'bounds', choice -> 'count', began_at))::uuid;
    batch := choice || jsonb_build_object(
        'id', id, 'attempt', 1, 'lsn', pg_current_wal_insert_lsn(),
        'version', pgchange.next_version(
            pgmb.name_of(gid), greatest(began_at, (select c.version from pgmb.claim as c where c.group_id = gid))),
        'bounds', choice -> 'bounds' || jsonb_build_object(
            'from_version', began_at, 'source', pgmb.here()));
    insert into pgmb.claim as c (group_id, version, from_version, batch_id, attempt, batch, after, upto, elsewhere)
    values (
        gid, (batch ->> 'version')::bigint, began_at, id, 1, batch, after, choice -> 'bounds' ->> 'upto',
        coalesce("position" ->> 'database', '') <> pgmb.here())
    on conflict on constraint claim_pkey do update set
        version = excluded.version, from_version = excluded.from_version, batch_id = excluded.batch_id, attempt = 1,
        error = null,
        batch = excluded.batch, after = excluded.after, upto = excluded.upto, elsewhere = excluded.elsewhere, moved_to = null,
        claimed_at = excluded.claimed_at;
    return batch;
end
$$;
comment on function pgmb.claim(text, jsonb, integer, integer) is
    'Record and return the next batch of a group, or the one that it claimed and never acked, with the attempt counted; null '
    'when nothing is ready. Where too little is ready it dispatches first. Call it on the primary of the source, in a '
    'transaction of its own, holding the lock.';
