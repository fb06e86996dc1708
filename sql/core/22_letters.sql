-- Writing, listing, redriving and dropping dead letters, the same for every kind of feed.

-- Whether the caller has a right on the letters of an address: see, or keep, which means to send again and drop.
create function pgchange.has_letter_right(wanted text, kind text, address jsonb) returns boolean
language plpgsql stable as $$
declare
    system name := (select r.schema from pgchange.registered as r where r.kind = has_letter_right.kind);
    allowed boolean;
begin
    if not pgchange.ours(system, tell => false) or not has_schema_privilege(system, 'usage')
       or not has_function_privilege(format('%I.letter_rights(jsonb)', system), 'execute') then
        return false;
    end if;
    execute format('select $1 = any (%I.letter_rights($2))', system) into allowed using wanted, address;
    return coalesce(allowed, false);
end
$$;

-- Write a dead letter in the transaction in which its consumer goes on. Returns the number of the letter.
create function pgchange.write_letter(
    kind text, consumer text, address jsonb, content jsonb, changes bigint, reason text, error text default null,
    attempts integer default 0, batch_id uuid default null
) returns bigint
language plpgsql as $$
declare
    prefix constant text := (select r.prefix from pgchange.registered as r where r.kind = write_letter.kind);
    letter bigint;
begin
    if not starts_with(consumer, prefix) then
        raise invalid_parameter_value using
            message = format('a letter of kind %s cannot be written for %L: the names of its consumers begin with %s', kind, consumer, prefix),
            hint = 'give the name that status shows';
    end if;
    insert into pgchange.letter (kind, consumer, address, content, changes, reason, error, attempts, batch_id)
    values (kind, consumer, address, content, changes, reason, error, attempts, batch_id)
    returning id into letter;
    return letter;
end
$$;

-- The ids of the chosen letters: one letter, which must exist, or the letters of a consumer, or those older than an age, or all.
create function pgchange.chosen_letters(letter bigint, of_consumer text, older_than interval) returns setof bigint
language plpgsql stable as $$
begin
    if letter is not null and (of_consumer is not null or older_than is not null) then
        raise invalid_parameter_value using
            message = 'letters cannot be chosen by number and by consumer or age at once: name one letter by its number, or '
                      'several by consumer and age';
    end if;
    if older_than < interval '0' then
        raise invalid_parameter_value using message = format('letters cannot be chosen by a negative age, which %s is', older_than),
            hint = 'write it as interval ''7 days''';
    end if;
    if of_consumer = '' then
        raise invalid_parameter_value using message = 'letters cannot be chosen by an empty name of a consumer',
            hint = 'pgchange.letters() shows them';
    end if;
    return query
        select l.id from pgchange.letter as l
        where (letter is null or l.id = letter)
          and (of_consumer is null or l.consumer = of_consumer)
          and (older_than is null or l.given_up_at < clock_timestamp() - older_than)
        order by l.id;
    if letter is not null and not found then
        raise exception using errcode = 'PC011', message = format('there is no dead letter %s', letter),
            hint = 'pgchange.letters() lists the letters that you may see: this letter was sent again or dropped, or you may not '
                   'see it';
    end if;
end
$$;

-- Refuse to send again or drop letters if none were chosen.
create function pgchange.check_letter_choice(letter bigint, of_consumer text, older_than interval) returns void
language plpgsql immutable as $$
begin
    if num_nonnulls(letter, of_consumer, older_than) = 0 then
        raise invalid_parameter_value using message = 'no letters were chosen: choose them by number, by consumer, or by age',
            hint = 'older_than => interval ''0'' means all of them';
    end if;
end
$$;

-- Raise the error for a letter that does not exist any more; redrive() of each kind calls it.
create function pgchange.letter_gone(letter bigint) returns void
language plpgsql immutable as $$
begin
    raise exception using errcode = 'PC011', message = format('dead letter %s does not exist any more', letter),
        hint = 'another session has sent it again or dropped it';
end
$$;

-- Raise the reason why the changes of a letter cannot be sent again, as far as this database knows. A source knows whether it
-- still has the changes, and the database of the letter knows the position of the consumer.
create function pgchange.check_letter(kind text, address jsonb, content jsonb) returns void
language plpgsql volatile as $$
declare
    system name := (select r.schema from pgchange.registered as r where r.kind = check_letter.kind);
begin
    if not pgchange.ours(system, tell => false) then
        raise exception using errcode = 'PC012', message = format(
            'letters of kind %s cannot be sent again here: their system is not installed', kind),
            hint = 'install it: airflow-pgchange install';
    end if;
    execute format('select %I.check_letter($1, $2)', system) using address, content;
end
$$;

-- Raise the reason why a letter cannot be sent again, if there is a reason.
create function pgchange.check_sendable(letter bigint) returns void
language plpgsql volatile as $$
declare
    void text := (select l.void from pgchange.letter as l where l.id = letter);
begin
    if void is not null then
        raise exception using errcode = 'PC012', message = format('letter %s cannot be sent again: %s', letter, void),
            hint = 'drop the letter: airflow-pgchange letters drop';
    end if;
    perform pgchange.check_letter(l.kind, l.address, l.content) from pgchange.letter as l where l.id = letter;
end
$$;

-- Whether the caller may send a letter again and drop it.
create function pgchange.keeps_letter(letter bigint) returns boolean
language sql stable as $$
    select pgchange.has_letter_right('keep', l.kind, l.address) from pgchange.letter as l where l.id = letter
$$;

-- The hint that names the grant by which the caller could keep the letters of an address. A schema whose keepers need more than
-- its function grant_admin() has a function keeper_grant() of its own.
create function pgchange.keeper_grant(kind text, address jsonb) returns text
language plpgsql stable as $$
declare
    system name := (select r.schema from pgchange.registered as r where r.kind = keeper_grant.kind);
    hint text;
begin
    if pgchange.ours(system, tell => false) and has_schema_privilege(system, 'usage')
       and has_function_privilege(to_regprocedure(format('%I.keeper_grant(jsonb)', system)), 'execute') then
        execute format('select %I.keeper_grant($1)', system) into hint using address;
        return hint;
    end if;
    return format('let the owner of schema %1$I run: select %1$I.grant_admin(%2$L)', system, quote_ident(current_user));
end
$$;

-- Refuse a caller that may see a letter but not keep it.
create function pgchange.check_letter_keeper(letter bigint) returns void
language plpgsql stable as $$
declare
    known pgchange.letter;
begin
    if not pgchange.keeps_letter(letter) then
        select l.* into known from pgchange.letter as l where l.id = letter;
        raise insufficient_privilege using
            message = format('role %I may see letter %s, but neither send it again nor drop it', current_user, letter),
            hint = pgchange.keeper_grant(known.kind, known.address);
    end if;
end
$$;

-- Why the caller cannot send a letter again; null if it can.
create function pgchange.letter_hindrance(letter bigint) returns text
language plpgsql volatile as $$
begin
    perform pgchange.check_sendable(letter);
    perform pgchange.check_letter_keeper(letter);
    return null;
exception when others then
    if sqlstate like 'PC%' or sqlstate = '42501' then
        return sqlerrm;
    end if;
    raise;
end
$$;

create function pgchange.letters(of_consumer text default null, older_than interval default null)
returns table (
    id bigint, kind text, consumer text, batch_id uuid, changes bigint, reason text, error text, attempts integer,
    given_up_by name, given_up_at timestamptz, sent_at timestamptz, on_its_way boolean, hindrance text
)
language sql volatile as $$
    select l.id, l.kind, l.consumer, l.batch_id, l.changes, l.reason, l.error, l.attempts, l.given_up_by, l.given_up_at,
           l.sent_at, l.on_its_way, pgchange.letter_hindrance(l.id)
    from pgchange.chosen_letters(null, of_consumer, older_than) as f(id)
    join pgchange.letter as l on l.id = f.id
    order by l.id
$$;
comment on function pgchange.letters(text, interval) is
    'The dead letters that the caller may see: all, those of a consumer by its name in status, or those older than an age. '
    'hindrance: why the caller cannot send a letter again, as far as this database knows; null if it can.';

create function pgchange.letter_content(letter bigint) returns jsonb
language plpgsql stable as $$
declare
    known record;
    held jsonb;
begin
    select l.address, l.content, r.schema into known
    from pgchange.letter as l join pgchange.registered as r using (kind) where l.id = letter;
    if not found then
        return null;
    end if;
    if to_regprocedure(format('%I.letter_content(jsonb, jsonb)', known.schema)) is null or not pgchange.ours(known.schema, tell => false) then
        return known.content;
    end if;
    execute format('select %I.letter_content($1, $2)', known.schema) into held using known.address, known.content;
    return held;
end
$$;
comment on function pgchange.letter_content(bigint) is
    'The content of a letter in a readable form. Null if the letter does not exist or the caller may not see it.';

create function pgchange.redrive(
    letter bigint default null, of_consumer text default null, older_than interval default null
) returns setof bigint
language plpgsql volatile as $$
declare
    chosen bigint;
    system name;
begin
    perform pgchange.check_letter_choice(letter, of_consumer, older_than);
    for chosen in select f.id from pgchange.chosen_letters(letter, of_consumer, older_than) as f(id) loop
        continue when letter is null and (
            pgchange.letter_hindrance(chosen) is not null
            or (select l.on_its_way from pgchange.letter as l where l.id = chosen));
        perform pgchange.check_sendable(chosen);
        perform pgchange.check_letter_keeper(chosen);
        system := (select r.schema from pgchange.registered as r join pgchange.letter as l using (kind) where l.id = chosen);
        begin
            if not pgchange.ours(system, tell => false) then
                perform pgchange.letter_gone(chosen);
            end if;
            execute format('select %I.redrive($1)', system) using chosen;
            return next chosen;
        exception when sqlstate 'PC011' or sqlstate 'PC012' then
            -- Another session was faster. If several letters were chosen, go on with the others.
            if letter is not null then
                raise;
            end if;
        end;
    end loop;
end
$$;
comment on function pgchange.redrive(bigint, text, interval) is
    'Send a letter again, or all letters of a consumer or older than an age that can be sent. A letter goes to its own consumer, '
    'and only once, however many sessions call this. Returns the ids of the letters that were sent; pgchange.letters() has the '
    'reasons for the others.';

create function pgchange.drop_letters(
    letter bigint default null, of_consumer text default null, older_than interval default null
) returns setof bigint
language plpgsql volatile as $$
declare
    chosen bigint;
begin
    perform pgchange.check_letter_choice(letter, of_consumer, older_than);
    for chosen in select f.id from pgchange.chosen_letters(letter, of_consumer, older_than) as f(id) loop
        delete from pgchange.letter as l where l.id = chosen;
        if found then
            return next chosen;
        elsif letter is not null then
            perform pgchange.check_letter_keeper(letter);
            perform pgchange.letter_gone(letter);
        end if;
    end loop;
end
$$;
comment on function pgchange.drop_letters(bigint, text, interval) is
    'Delete a letter, or the letters of a consumer or older than an age, and return their ids. Their changes are lost. A letter '
    'that is on its way is taken back; if its batch is in work, the ack of that batch fails and rolls back.';

create function pgchange.expire_letters(retention interval, most integer default 1000) returns setof text
language plpgsql volatile as $$
declare
    -- A constant, because PostgreSQL would evaluate an expression only after row security has checked the rights on each letter.
    expired constant timestamptz := clock_timestamp() - retention;
    gone bigint;
    kept bigint;
begin
    if retention is null or retention < interval '0' then
        raise invalid_parameter_value using message = format(
            'letters cannot be kept for %s: the time must be given and not be negative', coalesce(retention::text, 'no time')),
            hint = 'write it as interval ''90 days''';
    end if;
    with old as (
        select l.id from pgchange.letter as l
        where l.given_up_at < expired and not l.on_its_way
        order by l.id limit most for update skip locked
    ), dropped as (
        delete from pgchange.letter as l using old as o where l.id = o.id returning l.id
    )
    select count(*) into gone from dropped;
    if gone > 0 then
        return next format('letters: dropped %s that were given up before %s', gone, expired::timestamptz(0));
    end if;
    if gone = most then
        return next 'left more letters for the next run';
        return;
    end if;
    select count(*) into kept from pgchange.letter as l where l.given_up_at < expired and not l.on_its_way;
    if kept > 0 then
        return next format('kept %s older letters: they are being worked on, or this role may see them but not drop them', kept);
    end if;
end
$$;
comment on function pgchange.expire_letters(interval, integer) is
    'Delete letters that are older than retention, if the caller may drop them, at most this many at once. Returns lines that say '
    'what was done. Letters that are on their way stay.';
