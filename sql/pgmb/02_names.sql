-- Ids and the times in them, names of groups, and numbers that distribute events among handlers.

create function pgmb.create_event_id(ts timestamptz, rand bigint) returns pgmb.event_id
language plpgsql immutable strict as $$
begin
    return 'pm' || lpad(to_hex(least(greatest(date_part('epoch', ts) * 1000000, 0), 4503599627370495)::bigint), 13, '0')
           || lpad(to_hex(rand & 68719476735), 9, '0');
end
$$;
comment on function pgmb.create_event_id(timestamptz, bigint) is
    'The event id of a time, to the microsecond, and a number, of which the lowest 36 bits count. With 0 it is below every other '
    'id of that microsecond. A time before 1970 counts as 1970. A time after 2112, which 13 digits cannot express, counts as the '
    'last that they can. For null the id is null.';

create function pgmb.create_event_id_default() returns pgmb.event_id
language sql volatile as $$
    select pgmb.create_event_id(clock_timestamp(), nextval('pgmb.event_seq'))
$$;
comment on function pgmb.create_event_id_default() is
    'An id for an event that happens now. It is the same as the default of events.id, but slower.';

create function pgmb.create_random_bigint() returns bigint
language sql volatile as $$
    select floor(random() * 68719476736)::bigint
$$;
comment on function pgmb.create_random_bigint() is 'A random number for pgmb.create_event_id.';

create function pgmb.create_subscription_id() returns pgmb.subscription_id
language sql volatile as $$
    select ('su' || substr(pgmb.create_event_id(clock_timestamp(), pgmb.create_random_bigint()), 3))::pgmb.subscription_id
$$;
comment on function pgmb.create_subscription_id() is 'An id for a subscription that is created now.';

create function pgmb.extract_date_from_event_id(id text) returns timestamptz
language sql immutable as $$
    select case when id ~ '^(pm|su)[0-9a-f]{13}' then pg_catalog.to_timestamp(
        ('x' || pg_catalog.substr(id, 3, 13))::bit(52)::bigint / 1000000.0::double precision) end
$$;
comment on function pgmb.extract_date_from_event_id(text) is 'The time in an id; null for a text that is not an id.';

create function pgmb.add_interval_imm(ts timestamptz, delta interval) returns timestamptz
language sql immutable strict
-- A day has 24 hours in this time zone. With the time zone of the session, the function would not be immutable.
set timezone = 'UTC'
as $$
    select ts + delta
$$;
comment on function pgmb.add_interval_imm(timestamptz, interval) is
    'The sum of a time and an interval, in UTC. Immutable, so that an index or a partition bound may use it.';

-- The microseconds since 1970 in an id.
create function pgmb.micros(id text) returns bigint
language sql immutable as $$
    select ('x' || pg_catalog.substr(id, 3, 13))::bit(52)::bigint
$$;

-- The last 9 digits of an id. In a cursor, they are the rank of the last event that was read.
create function pgmb.rank_of(id text) returns bigint
language sql immutable as $$
    select ('x' || pg_catalog.substr(id, 16, 9))::bit(36)::bigint
$$;

-- The cursor of a dispatch and a rank.
create function pgmb.cursor_at(micros bigint, rank bigint) returns text
language sql immutable as $$
    select 'pm' || pg_catalog.right(pg_catalog.to_hex(micros + 4503599627370496), 13)
           || pg_catalog.right(pg_catalog.to_hex(rank + 68719476736), 9)
$$;

-- The present time in microseconds since 1970. PostgreSQL inlines it, so that it costs no call.
create function pgmb.now_micros() returns bigint
language sql volatile as $$
    select (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp()) * 1000000)::bigint
$$;

-- An id above every id of this microsecond, and below those of the next: an event with a lower id is due. PostgreSQL inlines it.
create function pgmb.due_before() returns text
language sql volatile as $$
    select 'pm' || pg_catalog.to_hex(pgmb.now_micros()) || 'g'
$$;

-- The seconds since the time in an id: 0 for a time in the future, null for null.
create function pgmb.age(id text) returns double precision
language sql volatile as $$
    select greatest(pgmb.now_micros() - pgmb.micros(age.id), 0) / 1000000.0 where age.id is not null
$$;

create function pgmb.event_partition(key text, partitions integer) returns integer
language sql immutable as $$
    select mod(mod(hashtextextended(key, 0), partitions) + partitions, partitions)::integer
$$;
comment on function pgmb.event_partition(text, integer) is
    'The number of the handler for a key, such as an event''s id: from 0 to partitions - 1, never negative. A condition can be '
    'pgmb.event_partition(e.id, 4) = (s.params ->> ''partition'')::int.';

-- Refuse a group that does not exist.
create function pgmb.check_group(gid text) returns void
language plpgsql stable security definer as $$
begin
    if not exists (select from pgmb.subscription_groups as g where g.id = gid) then
        raise exception using errcode = 'PC002', message = format('there is no group %L', gid),
            hint = 'select id from pgmb.subscription_groups lists them; the first subscription of a group creates it';
    end if;
end
$$;

-- Functions that pgmb writes itself.
-- - address() and address_of(): the address in a handler's letters has the group.
-- - again(): the lsn of the first attempt is before the commit of its dispatch.
-- - check_move(), note_move() and check_position(): retention deletes events.
-- - check_point(): a cursor has a form.
-- - is_known(): subscriptions create a group.
-- - status(): it depends on its caller.
-- - take_idle(): a manual reader holds the lock, too.
-- - skip() is for admins, because it copies events.
select pgchange.offer(
    'event', 'pgmb', 'gid text', 'events:%s', traits => '{position,copied letters}',
    own => '{address,address_of,again,check_move,check_point,check_position,is_known,note_move,status,take_idle}', letters_elsewhere => false,
    for_admins => '{skip}');
