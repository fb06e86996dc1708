-- The batch that each consumer claimed last, recorded at the source of its changes. A retry processes it again. It also shows
-- whether this database still has all the changes that the consumer has seen. Only the feed knows what a position means; here two
-- positions are equal or not.

create table pgchange.claim (
    kind text not null,
    consumer text not null,
    address jsonb not null,
    version bigint not null,
    from_version bigint not null,
    batch_id uuid,
    attempt integer not null,
    failures integer not null default 0,
    outages integer not null default 0,
    error text,
    batch jsonb,
    after jsonb not null,
    upto jsonb not null,
    source text not null,
    elsewhere boolean not null,
    claimed_at timestamptz not null default clock_timestamp(),
    leased_by text,
    leased_until timestamptz,
    primary key (kind, consumer)
);
comment on table pgchange.claim is
    'The batch that each consumer claimed last, or the point to which it was moved manually since, without a batch. consumer: its '
    'name in status; address: the name that its feed uses. after: the position before the batch, at from_version; upto: the '
    'position behind it. Both are the same if the batch is a dead letter that is sent again. source: the place of these '
    'positions. elsewhere: the consumer''s progress is in another database, so this row shows how far it has come. error: the '
    'error of the last attempt, if it was reported. failures: attempts that failed by an error of the batch itself; outages: '
    'attempts that failed by another error, such as a lost server. An attempt whose process died counts as neither. leased_by, '
    'leased_until: who processes the batch without the consumer''s lock, and until when the batch is not claimed again.';

-- The processes that hold an advisory lock of this database.
create function pgchange.who_locks(key bigint) returns setof integer
language plpgsql stable as $$
begin
    return query
        select l.pid from pg_locks as l
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
          and l.database = (select d.oid from pg_database as d where d.datname = current_database())
          and (l.classid::bigint << 32 | l.objid::bigint) = key;
end
$$;

-- Whether any session holds an advisory lock, without taking it.
create function pgchange.locked(key bigint) returns boolean
language plpgsql stable as $$
begin
    return exists (select from pgchange.who_locks(key));
end
$$;

-- The keys of all advisory locks that are held in this database, to look up many consumers at once. If the caller reads a claim
-- that is younger than this list, it must ask pgchange.locked(): a consumer takes its lock before it claims.
create function pgchange.locks_held() returns bigint[]
language plpgsql stable as $$
begin
    return array(
        select distinct l.classid::bigint << 32 | l.objid::bigint from pg_locks as l
        where l.locktype = 'advisory' and l.objsubid = 1 and l.granted
          and l.database = (select d.oid from pg_database as d where d.datname = current_database()));
end
$$;

-- Raise an error if the lock of a consumer could not be taken.
create function pgchange.check_taken(consumer text, is_taken boolean) returns void
language plpgsql immutable as $$
begin
    if not is_taken then
        raise lock_not_available using message = format('consumer %s is at work', consumer),
            hint = 'stop it, or wait until its batch has ended';
    end if;
end
$$;

-- Take the lock of a consumer. Raise an error if the consumer is at work or unknown. list: a query that lists the consumers, for
-- the hint.
create function pgchange.take_idle(consumer text, key bigint, is_known boolean, list text) returns void
language plpgsql as $$
begin
    perform pgchange.check_taken(consumer, pg_try_advisory_xact_lock(key));
    if not is_known then
        raise exception using errcode = 'PC002', message = format('there is no consumer %s here', consumer), hint = list || ' lists them';
    end if;
end
$$;

-- Raise an error if the limit is below 1 or if the transaction has already written.
create function pgchange.check_claim(max_changes integer) returns void
language plpgsql stable as $$
begin
    if coalesce(max_changes < 1, true) then
        raise invalid_parameter_value using message =
            'the batch cannot be claimed with fewer than 1 change: give a limit of at least 1';
    end if;
    if pg_current_xact_id_if_assigned() is not null then
        raise exception using errcode = 'PC007', message = 'the batch cannot be claimed: this transaction has already written',
            hint = 'claim in a new transaction, because the consumer would never see the changes of this transaction';
    end if;
end
$$;

-- Refuse to claim a batch again after max_attempts attempts. A null max_attempts means no limit. The function has no search_path of
-- its own, which would slow down every claim.
create function pgchange.check_attempts(consumer text, batch_id text, attempt integer, max_attempts integer) returns void
language plpgsql immutable as $$
begin
    if attempt >= max_attempts then
        raise exception using errcode = 'PC010',
            message = pg_catalog.format('batch %s of %s has failed, at attempt %s', batch_id, consumer, attempt),
            hint = pg_catalog.format(
                'fix the cause of the failure and raise max_attempts, or give the batch up: '
                'airflow-pgchange skip %s --reason ''...''', pgchange.shell_quoted(consumer));
    end if;
end
$$;

-- Refuse to give up a batch without a reason, or with a reason of more than 4,000 characters, the limit for errors of batches.
create function pgchange.check_reason(reason text) returns void
language plpgsql immutable as $$
begin
    if coalesce(trim(reason), '') = '' then
        raise invalid_parameter_value using message = 'the batch is not skipped: the reason is missing; say why it is given up';
    end if;
    if length(reason) > 4000 then
        raise invalid_parameter_value using message = format(
            'the batch is not skipped, as the reason has %s characters: give one of at most 4,000 characters', length(reason));
    end if;
end
$$;

-- Refuse a recorded batch if changes of it are missing. counted: how many are there; null if the batch belongs to another
-- database.
create function pgchange.check_readable(batch jsonb, counted bigint) returns void
language plpgsql immutable as $$
begin
    if counted is null then
        raise exception using errcode = 'PC004',
            message = format(
                'batch %s cannot be sent again: it was given up in another database, or before this database was restored',
                batch ->> 'id'),
            hint = 'drop the letter: airflow-pgchange letters drop';
    end if;
    if counted <> (batch ->> 'count')::bigint then
        raise exception using errcode = 'PC005',
            message = format(
                '%s of the %s changes of batch %s were trimmed, so it cannot be sent again', (batch ->> 'count')::bigint - counted,
                             batch ->> 'count', batch ->> 'id'),
            hint = 'drop the letter: airflow-pgchange letters drop';
    end if;
end
$$;

-- The last claim of a consumer, or null.
create function pgchange.last_claim(kind text, consumer text) returns pgchange.claim
language plpgsql stable as $$
begin
    return (select c from pgchange.claim as c where c.kind = last_claim.kind and c.consumer = last_claim.consumer);
end
$$;

-- The given claim if a consumer at this version and position has not acked it yet, else null. The claim of a dead letter counts
-- only while this letter is to be sent.
create function pgchange.unacked(mark pgchange.claim, version bigint, after jsonb, letter jsonb) returns pgchange.claim
language plpgsql immutable as $$
begin
    return case when mark.from_version = unacked.version and mark.version > mark.from_version and mark.batch is not null
                     and mark.after = unacked.after
                     and (mark.batch -> 'bounds' -> 'letter' is null or mark.batch -> 'bounds' -> 'letter' = unacked.letter)
                then mark end;
end
$$;

-- The claim that a consumer at this version and position has not acked yet, or null. The claim of a dead letter counts only while
-- this letter is to be sent.
create function pgchange.pending(kind text, consumer text, version bigint, after jsonb, letter jsonb default null) returns pgchange.claim
language plpgsql stable as $$
begin
    return pgchange.unacked(pgchange.last_claim(kind, consumer), version, after, letter);
end
$$;

-- Raise an error for a single change that has failed at max_attempts attempts, so that its consumer can make it a dead letter.
-- check_attempts() refuses any other batch.
create function pgchange.check_poison(mark pgchange.claim, max_attempts integer) returns void
language plpgsql immutable as $$
begin
    if mark.failures > 0 and mark.attempt - mark.outages >= max_attempts
       and (mark.batch ->> 'count' = '1' or mark.batch -> 'bounds' ? 'letter')
    then
        raise exception using errcode = 'PC014',
            message = format(
                'batch %s of %s failed at each of its attempts and cannot be split any more, at attempt %s', mark.batch_id,
                             mark.consumer, mark.attempt),
            hint = format(
                'fix the cause of the failure and raise max_attempts, or give the batch up: '
                'airflow-pgchange skip %s --reason ''...''', pgchange.shell_quoted(mark.consumer));
    end if;
end
$$;

-- Refuse to claim a batch again after max_attempts attempts. With on_give_up, attempts that an outage ended do not count. With
-- 'bisect', a change that failed alone is refused by an error of its own. The function has no search_path of its own, which would
-- slow down every claim.
create function pgchange.check_again(mark pgchange.claim, max_attempts integer, on_give_up text) returns void
language plpgsql immutable as $$
begin
    if on_give_up = 'bisect' then
        perform pgchange.check_poison(mark, max_attempts);
    end if;
    if on_give_up is null or mark.attempt - mark.outages >= max_attempts then
        perform pgchange.check_attempts(mark.consumer, mark.batch_id::text, mark.attempt, max_attempts);
    end if;
end
$$;

-- Claim the batch of a claim again, with the attempt counted.
create function pgchange.claim_again(mark pgchange.claim) returns jsonb
language plpgsql as $$
begin
    update pgchange.claim as c set
        attempt = c.attempt + 1, claimed_at = clock_timestamp(), leased_by = null, leased_until = null
    where c.kind = mark.kind and c.consumer = mark.consumer
    returning c.attempt into mark.attempt;
    mark.batch := mark.batch || jsonb_build_object('attempt', mark.attempt);
    perform pgchange.note_claim(mark.kind, mark.consumer, mark.batch);
    return mark.batch;
end
$$;

-- Record the batch that a consumer at a position claims, from after up to a point of the source. It gets an id, its version and
-- its first attempt. Without a batch, record a manual move. This replaces the last claim, so a batch in work is given up.
create function pgchange.record(
    kind text, consumer text, address jsonb, "position" jsonb, after jsonb, upto jsonb, source text, batch jsonb
) returns pgchange.claim
language plpgsql as $$
declare
    made pgchange.claim;
    began_at bigint := coalesce(("position" ->> 'version')::bigint, 0);
    -- A dead letter that is sent again keeps the id of its batch.
    id constant uuid := coalesce(
        batch ->> 'id', case when batch is not null then md5(concat_ws('|', kind, consumer, source, began_at, after, upto, batch -> 'count')) end);
begin
    insert into pgchange.claim as c (
        kind, consumer, address, version, from_version, batch_id, attempt, batch, after, upto, source, elsewhere)
    select
        record.kind, record.consumer, record.address, n.version, began_at, id, (record.batch is not null)::integer,
        record.batch || jsonb_build_object(
            'id', id, 'version', n.version, 'attempt', 1,
            -- A part of a split batch keeps the time of the whole batch, and a letter that is sent again keeps its own.
            'first_claimed_at', coalesce(record.batch -> 'first_claimed_at', to_jsonb(clock_timestamp())),
            'bounds', record.batch -> 'bounds' || jsonb_build_object('source', record.source, 'from_version', began_at)),
        record.after, record.upto, record.source,
        coalesce(record."position" ->> 'database', '') <> record.source
    from (
        select pgchange.next_version(record.kind, record.consumer, greatest(began_at, (
            select l.version from pgchange.claim as l where l.kind = record.kind and l.consumer = record.consumer)))
        offset 0
    ) as n(version)
    on conflict on constraint claim_pkey do update set
        version = excluded.version, from_version = excluded.from_version, batch_id = excluded.batch_id,
        attempt = excluded.attempt, failures = 0, outages = 0, error = null, batch = excluded.batch, after = excluded.after,
        upto = excluded.upto, source = excluded.source, elsewhere = excluded.elsewhere, claimed_at = excluded.claimed_at,
        leased_by = null, leased_until = null
    returning c.* into made;
    if batch is not null then
        perform pgchange.note_claim(kind, consumer, made.batch);
    end if;
    return made;
end
$$;

-- A recorded batch with this database as its source. A batch that was claimed before a restore and a repair still names the former
-- source. Its ack would put that into the consumer's position.
create function pgchange.placed(batch jsonb, here text) returns jsonb
language sql immutable as $$
    select pg_catalog.jsonb_set(batch, '{bounds,source}', pg_catalog.to_jsonb(here))
$$;

-- Refuse a position from another place, or beyond the last claim of its consumer; else return the place.
create function pgchange.check_known(kind text, consumer text, "position" jsonb, here text, is_native boolean) returns text
language plpgsql stable as $$
begin
    perform pgchange.check_position(
        consumer, "position", case when is_native then here end, (
            select c.version from pgchange.claim as c where c.kind = check_known.kind and c.consumer = check_known.consumer));
    return here;
end
$$;

-- Record the error of an attempt at the source, for the dead letter. of_batch: whether the batch itself may have caused it; null
-- if that is unknown.
create function pgchange.note_failure(kind text, consumer text, batch jsonb, error text, of_batch boolean) returns void
language plpgsql as $$
begin
    update pgchange.claim as c set
        error = note_failure.error,
        -- Count an attempt once, even if its error is recorded twice.
        failures = c.failures + (of_batch is true and c.failures + c.outages < c.attempt)::integer,
        outages = c.outages + (of_batch is false and c.failures + c.outages < c.attempt)::integer
    where c.kind = note_failure.kind and c.consumer = note_failure.consumer
      and c.version = (note_failure.batch ->> 'version')::bigint and c.attempt = (note_failure.batch ->> 'attempt')::integer;
    if found then
        perform pgchange.note_failed(kind, consumer, batch, error);
    end if;
end
$$;

-- Refuse an attempt on a batch if another attempt has begun. last: the number of the last attempt; null if it is not known here.
-- The function has no search_path of its own, which would slow down every ack.
create function pgchange.check_attempt(consumer text, batch jsonb, last integer) returns void
language plpgsql immutable as $$
begin
    if (batch ->> 'attempt')::integer <> last then
        raise exception using errcode = 'PC006',
            message = pg_catalog.format('attempt %s on batch %s of %s is over: attempt %s has begun', batch ->> 'attempt', batch ->> 'id',
                                        consumer, last),
            hint = 'drop the results of this attempt; the later attempt processes the same changes';
    end if;
end
$$;

-- Refuse to ack a batch at another version than that of its claim, or after an attempt that is not the last. The function has no
-- search_path of its own, which would slow down every ack.
create function pgchange.check_claimed(kind text, consumer text, batch jsonb) returns void
language plpgsql stable as $$
declare
    version bigint;
    attempt integer;
begin
    select c.version, c.attempt into version, attempt
    from pgchange.claim as c
    where c.kind = check_claimed.kind and c.consumer = check_claimed.consumer
      and c.batch_id = (check_claimed.batch ->> 'id')::uuid;
    perform pgchange.check_version(batch, version);
    perform pgchange.check_attempt(consumer, batch, attempt);
end
$$;

-- The positions before and behind the batch that a consumer claimed last; null if there is no claim here.
create function pgchange.mark(kind text, consumer text) returns jsonb
language plpgsql stable as $$
begin
    return (
        select jsonb_build_object(
            'version', c.version, 'from_version', c.from_version, 'after', c.after, 'upto', c.upto, 'source', c.source)
        from pgchange.claim as c
        where c.kind = mark.kind and c.consumer = mark.consumer);
end
$$;

-- Whether a consumer has claimed a batch here. A consumer that was only moved, or that was placed at its start, has not.
create function pgchange.has_claimed(kind text, consumer text) returns boolean
language plpgsql stable as $$
begin
    return exists (
        select from pgchange.claim as c
        where c.kind = has_claimed.kind and c.consumer = has_claimed.consumer and c.batch is not null);
end
$$;

-- Delete the last claim of a consumer; true if it had a claim.
create function pgchange.forget_claim(kind text, consumer text) returns boolean
language sql as $$
    delete from pgchange.claim as c where c.kind = forget_claim.kind and c.consumer = forget_claim.consumer
    returning true
$$;
