-- Leases: a batch is processed while no session holds the lock of its consumer. Until the lease ends, the batch is not claimed
-- again. The attempt is the fencing token: after the next claim, an ack with an earlier attempt is refused. A dead letter that is
-- sent again keeps the id of its batch, and begins with a first attempt. So the version of the batch is part of the token, too.

-- The lease of a claim, as {leased_by, leased_until}; {} if it has none, or if the lease has ended.
create function pgchange.lease_of(mark pgchange.claim) returns jsonb
language sql volatile as $$
    select case when mark.leased_until > pg_catalog.clock_timestamp()
                then pg_catalog.jsonb_build_object('leased_by', mark.leased_by, 'leased_until', mark.leased_until)
                else '{}' end
$$;

-- The batch of a claim with its attempts, its last error and its lease, and whether the progress is in another database. Null for
-- no claim.
create function pgchange.in_work(mark pgchange.claim) returns jsonb
language sql stable as $$
    select mark.batch || pg_catalog.jsonb_build_object(
        'attempt', mark.attempt, 'error', mark.error, 'elsewhere', mark.elsewhere) || pgchange.lease_of(mark)
$$;

-- Refuse to claim, to skip or to move past a batch that is leased. The function has no search_path of its own, which would slow
-- down every claim.
create function pgchange.check_lease(consumer text, batch_id text, leased_by text, leased_until timestamptz) returns void
language plpgsql volatile as $$
begin
    if leased_until > pg_catalog.clock_timestamp() then
        raise exception using errcode = 'PC015',
            message = pg_catalog.format('batch %s of %s is leased until %s by %s', batch_id, consumer, leased_until, leased_by),
            hint = pg_catalog.format('wait until it is acked or the lease ends; or end the lease: airflow-pgchange release %s',
                                     pgchange.shell_quoted(consumer));
    end if;
end
$$;

-- Refuse to claim a batch while it is leased, by the record of the claim that the consumer made last. The function has no
-- search_path of its own, which would slow down every claim.
create function pgchange.check_lease(mark pgchange.claim) returns void
language plpgsql volatile as $$
begin
    perform pgchange.check_lease(mark.consumer, mark.batch_id::text, mark.leased_by, mark.leased_until);
end
$$;

-- The end of a lease that begins now and has this duration. A lease lasts at most seven days, and is renewed while the work goes
-- on.
create function pgchange.lease_end(duration interval) returns timestamptz
language plpgsql volatile as $$
begin
    if coalesce(duration <= interval '0' or duration > interval '7 days', true) then
        raise invalid_parameter_value using
            message = pg_catalog.format('a lease cannot last %s', coalesce(duration::text, 'null')),
            hint = 'give more than 0 seconds and at most 7 days, and renew the lease while the work goes on';
    end if;
    return pg_catalog.clock_timestamp() + duration;
end
$$;

-- Whether a claim has a batch that was not acked, as far as this database knows. at: the version of the consumer's progress, if
-- that is in this database.
create function pgchange.is_in_work(mark pgchange.claim, at bigint) returns boolean
language sql immutable as $$
    select mark.batch is not null and (mark.elsewhere or mark.from_version = at)
$$;

-- Whether the batch of a consumer at a version is leased.
create function pgchange.is_leased(kind text, consumer text, at bigint) returns boolean
language sql stable as $$
    select exists (
        select from pgchange.claim as c
        where c.kind = is_leased.kind and c.consumer = is_leased.consumer and c.leased_until > pg_catalog.clock_timestamp()
          and pgchange.is_in_work(c, at))
$$;

-- Give the last attempt on a consumer's batch a lease, or end its lease if ends_at is null. at: the version of the consumer.
-- Returns false if the attempt is not the last, or if the batch has ended. A null owner keeps the owner of the lease.
create function pgchange.set_lease(kind text, consumer text, at bigint, batch jsonb, owner text, ends_at timestamptz) returns boolean
language plpgsql as $$
begin
    update pgchange.claim as c set
        leased_by = case when ends_at is not null then coalesce(left(owner, 1000), c.leased_by, '') end, leased_until = ends_at
    where c.kind = set_lease.kind and c.consumer = set_lease.consumer
      and c.batch_id = (set_lease.batch ->> 'id')::uuid and c.attempt = (set_lease.batch ->> 'attempt')::integer
      and c.version = (set_lease.batch ->> 'version')::bigint and pgchange.is_in_work(c, at);
    return found;
end
$$;

-- End the leases of a consumer at a version, or only those of an owner. Returns how many there were.
create function pgchange.end_leases(kind text, consumer text, at bigint, owner text) returns bigint
language plpgsql as $$
declare
    ended bigint;
begin
    update pgchange.claim as c set leased_by = null, leased_until = null
    where c.kind = end_leases.kind and c.consumer = end_leases.consumer and c.leased_until > clock_timestamp()
      and coalesce(c.leased_by = left(end_leases.owner, 1000), true) and pgchange.is_in_work(c, at);
    get diagnostics ended = row_count;
    return ended;
end
$$;
