-- Writing, listing, sending again and dropping letters: the same for every kind.

create function dead_letter.add_kind(kind text, schema name, elsewhere boolean default false) returns void
language sql
set search_path = pg_catalog, dead_letter, pg_temp
as $$
    -- What was left by a schema that was dropped by hand names consumers and changes that are no more.
    update dead_letter.letter as l
    set void = format('schema %I was dropped since, and installed again', schema), on_its_way = false
    where l.kind = add_kind.kind and l.void is null;
    insert into dead_letter.kind (kind, schema, elsewhere) values (kind, schema, elsewhere)
    on conflict on constraint kind_pkey do update set schema = excluded.schema, elsewhere = excluded.elsewhere
$$;
comment on function dead_letter.add_kind(text, name, boolean) is
    'Note a kind of letters and the schema that knows it. Those that an earlier schema of it left are never sent again.';

create function dead_letter.may(wanted text, kind text, address jsonb) returns boolean
language plpgsql stable
set search_path = pg_catalog, dead_letter, pg_temp
as $$
declare
    system name := (select k.schema from dead_letter.kind as k where k.kind = may.kind);
    allowed boolean;
begin
    if to_regnamespace(quote_ident(system)) is null or not has_schema_privilege(system, 'usage')
       or not has_function_privilege(format('%I.letter_rights(jsonb)', system), 'execute') then
        return false;
    end if;
    execute format('select $1 = any (%I.letter_rights($2))', system) into allowed using wanted, address;
    return coalesce(allowed, false);
end
$$;
comment on function dead_letter.may(text, text, jsonb) is
    'Whether the caller may see, or keep (that is send again and drop), the letters of an address.';

create function dead_letter.write(
    kind text, consumer text, address jsonb, content jsonb, changes bigint, reason text, error text default null,
    attempts integer default 0, batch_id uuid default null
) returns bigint
language sql
set search_path = pg_catalog, dead_letter, pg_temp
as $$
    insert into dead_letter.letter (kind, consumer, address, content, changes, reason, error, attempts, batch_id)
    values (kind, consumer, address, content, changes, reason, error, attempts, batch_id)
    returning id
$$;
comment on function dead_letter.write(text, text, jsonb, jsonb, bigint, text, text, integer, uuid) is
    'Keep what a consumer gives up, in the transaction in which it goes on; returns the letter''s number.';

create function dead_letter.fitting(letter bigint, of_consumer text, older_than interval) returns setof bigint
language plpgsql stable
set search_path = pg_catalog, dead_letter, pg_temp
as $$
begin
    if letter is not null and (of_consumer is not null or older_than is not null) then
        raise invalid_parameter_value using
            message = 'name either one letter by its number, or several by their consumer and age';
    end if;
    if older_than < interval '0' then
        raise invalid_parameter_value using message = format('the age of letters cannot be negative, as %s is', older_than),
            hint = 'write it as interval ''7 days''';
    end if;
    if of_consumer = '' then
        raise invalid_parameter_value using message = 'a consumer has a name', hint = 'dead_letter.list() shows them';
    end if;
    return query
        select l.id from dead_letter.letter as l
        where (letter is null or l.id = letter)
          and (of_consumer is null or l.consumer = of_consumer)
          and (older_than is null or l.given_up_at < clock_timestamp() - older_than)
        order by l.id;
    if letter is not null and not found then
        raise exception using errcode = 'PC011', message = format('there is no dead letter %s', letter),
            hint = 'dead_letter.list() shows those that are there: this one was sent again or dropped, or is not yours to see';
    end if;
end
$$;
comment on function dead_letter.fitting(bigint, text, interval) is
    'One letter, which must be there, or those of a consumer, or given up longer ago than an age, or all.';

create function dead_letter.check_choice(letter bigint, of_consumer text, older_than interval) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    if num_nonnulls(letter, of_consumer, older_than) = 0 then
        raise invalid_parameter_value using message = 'say which letters: by number, by consumer, or by age',
            hint = 'older_than => interval ''0'' means all of them';
    end if;
end
$$;
comment on function dead_letter.check_choice(bigint, text, interval) is
    'Refuse to send again or drop letters without a choice of which.';

create function dead_letter.gone(letter bigint) returns void
language plpgsql immutable
set search_path = pg_catalog, pg_temp
as $$
begin
    raise exception using errcode = 'PC011', message = format('dead letter %s is not there any more', letter),
        hint = 'somebody else has sent it again or dropped it';
end
$$;
comment on function dead_letter.gone(bigint) is 'Say that a letter is gone: for redrive() of each kind.';

create function dead_letter.check_letter(kind text, address jsonb, content jsonb) returns void
language plpgsql volatile
set search_path = pg_catalog, dead_letter, pg_temp
as $$
declare
    system name := (select k.schema from dead_letter.kind as k where k.kind = check_letter.kind);
begin
    if system is null then
        raise exception using errcode = 'PC012', message = format('letters of kind %s cannot be sent again here', kind),
            hint = 'install the system that they belong to: airflow pgchange install';
    end if;
    execute format('select %I.check_letter($1, $2)', system) using address, content;
end
$$;
comment on function dead_letter.check_letter(text, jsonb, jsonb) is
    'Raise the reason why what a letter stands for cannot be sent again, as far as this database knows: a source knows whether '
    'it still has it, and the database of the letter how far its consumer has come.';

create function dead_letter.check_sendable(letter bigint) returns void
language plpgsql volatile
set search_path = pg_catalog, dead_letter, pg_temp
as $$
declare
    void text := (select l.void from dead_letter.letter as l where l.id = letter);
begin
    if void is not null then
        raise exception using errcode = 'PC012', message = format('letter %s cannot be sent again: %s', letter, void),
            hint = 'it can only be dropped';
    end if;
    perform dead_letter.check_letter(l.kind, l.address, l.content) from dead_letter.letter as l where l.id = letter;
end
$$;
comment on function dead_letter.check_sendable(bigint) is 'Refuse to send again a letter that cannot be sent again.';

create function dead_letter.is_kept(letter bigint) returns boolean
language sql stable
set search_path = pg_catalog, dead_letter, pg_temp
as $$
    select dead_letter.may('keep', l.kind, l.address) from dead_letter.letter as l where l.id = letter
$$;
comment on function dead_letter.is_kept(bigint) is 'Whether the caller may send a letter again and drop it.';

create function dead_letter.check_keeper(letter bigint) returns void
language plpgsql stable
set search_path = pg_catalog, dead_letter, pg_temp
as $$
begin
    if not dead_letter.is_kept(letter) then
        raise insufficient_privilege using
            message = format('this role may see letter %s, but neither send it again nor drop it', letter),
            hint = 'a role that may give up batches of its consumer may do both: the guide to roles says what that needs';
    end if;
end
$$;
comment on function dead_letter.check_keeper(bigint) is 'Refuse a role that may only see a letter.';

create function dead_letter.hindrance(letter bigint) returns text
language plpgsql volatile
set search_path = pg_catalog, dead_letter, pg_temp
as $$
begin
    perform dead_letter.check_sendable(letter);
    perform dead_letter.check_keeper(letter);
    return null;
exception when others then
    if sqlstate like 'PC%' or sqlstate = '42501' then
        return sqlerrm;
    end if;
    raise;
end
$$;
comment on function dead_letter.hindrance(bigint) is 'Why the caller cannot send a letter again; null where it can.';

create function dead_letter.list(of_consumer text default null, older_than interval default null)
returns table (
    id bigint, kind text, consumer text, batch_id uuid, changes bigint, reason text, error text, attempts integer,
    given_up_by name, given_up_at timestamptz, sent_at timestamptz, on_its_way boolean, hindrance text
)
language sql volatile
set search_path = pg_catalog, dead_letter, pg_temp
as $$
    select l.id, l.kind, l.consumer, l.batch_id, l.changes, l.reason, l.error, l.attempts, l.given_up_by, l.given_up_at,
           l.sent_at, l.on_its_way, dead_letter.hindrance(l.id)
    from dead_letter.fitting(null, of_consumer, older_than) as f(id)
    join dead_letter.letter as l on l.id = f.id
    order by l.id
$$;
comment on function dead_letter.list(text, interval) is
    'The letters that the caller may see: all, those of a consumer as status names it, or those given up longer ago. hindrance '
    'is why the caller cannot send one again, as far as this database knows.';

create function dead_letter.redrive(
    letter bigint default null, of_consumer text default null, older_than interval default null
) returns setof bigint
language plpgsql volatile
set search_path = pg_catalog, dead_letter, pg_temp
as $$
declare
    chosen bigint;
    system name;
begin
    perform dead_letter.check_choice(letter, of_consumer, older_than);
    for chosen in select f.id from dead_letter.fitting(letter, of_consumer, older_than) as f(id) loop
        continue when letter is null and (
            dead_letter.hindrance(chosen) is not null
            or (select l.on_its_way from dead_letter.letter as l where l.id = chosen));
        perform dead_letter.check_sendable(chosen);
        perform dead_letter.check_keeper(chosen);
        system := (select k.schema from dead_letter.kind as k join dead_letter.letter as l using (kind) where l.id = chosen);
        begin
            if system is null then
                perform dead_letter.gone(chosen);
            end if;
            execute format('select %I.redrive($1)', system) using chosen;
            return next chosen;
        exception when sqlstate 'PC011' or sqlstate 'PC012' then
            -- Somebody else was faster: of several the others go on.
            if letter is not null then
                raise;
            end if;
        end;
    end loop;
end
$$;
comment on function dead_letter.redrive(bigint, text, interval) is
    'Send one letter again, or of a consumer or older than an age all that can be sent; to that consumer alone, and once, '
    'however many ask. Returns the numbers of those that were sent; dead_letter.list() says why others were not.';

create function dead_letter.drop(
    letter bigint default null, of_consumer text default null, older_than interval default null
) returns setof bigint
language plpgsql volatile
set search_path = pg_catalog, dead_letter, pg_temp
as $$
declare
    chosen bigint;
begin
    perform dead_letter.check_choice(letter, of_consumer, older_than);
    for chosen in select f.id from dead_letter.fitting(letter, of_consumer, older_than) as f(id) loop
        delete from dead_letter.letter as l where l.id = chosen;
        if found then
            return next chosen;
        elsif letter is not null then
            perform dead_letter.check_keeper(letter);
            perform dead_letter.gone(letter);
        end if;
    end loop;
end
$$;
comment on function dead_letter.drop(bigint, text, interval) is
    'Forget one letter, or those of a consumer or older than an age; returns their numbers. What they stand for is gone. One '
    'that is on its way is taken back; where its batch is in work, that is rolled back.';
