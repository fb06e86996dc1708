-- The declaration of a kind of feed. A schema calls pgchange.offer() with the traits of its kind. Each trait brings functions,
-- which are the same for all kinds with this trait. Each trait also has hooks, which are functions that the schema itself must
-- write because the functions of the trait call them. pgchange.close_schema() refuses a schema that lacks a hook.

create table pgchange.offered (
    trait text,
    name text,
    takes text not null,
    returns text not null,
    volatility text not null check (volatility in ('immutable', 'stable', 'volatile')),
    as_owner boolean,
    callers text check (callers in ('consumer', 'admin')),
    body text not null,
    told text not null,
    primary key (trait, name)
);
comment on table pgchange.offered is
    'The functions that pgchange.offer() gives a schema, by the trait that brings each. In takes, %1$s stands for the arguments '
    'that name a consumer, and %2$s for a comma and the options of a claim. %3$s stands for the arguments that name a consumer '
    'without its caller. In body, %1$I stands for the schema, %2$s for the arguments that name a consumer, and %3$L for the kind. '
    '%4$I stands for the schema that has here() and is_native(), and %5$s for the arguments taken from address jsonb. %6$L stands '
    'for the format of names, and %7$s for the fields of an address. %8$s stands for a comma and the names of the options of a '
    'claim. %9$s stands for the arguments that name a consumer without its caller, and %10$I for the schema that has the '
    'functions with callers. as_owner: whether the function runs as its owner; null if pgchange.offer() decides that. callers: '
    'the role that may execute the function.';

create table pgchange.hook (
    trait text,
    name text,
    takes text not null,
    returns text not null,
    told text not null,
    primary key (trait, name)
);
comment on table pgchange.hook is
    'The functions that a schema must write for a trait, because functions of pgchange.offered or of pgchange itself call them. '
    'takes: the arguments; %1$s, %2$s and %3$s stand for the same as in pgchange.offered. returns: the result; "setof record" '
    'stands for rows of any type. told: what the function does.';

create table pgchange.given (
    schema name references pgchange.registered on delete cascade,
    signature text,
    callers text,
    primary key (schema, signature)
);
comment on table pgchange.given is 'The functions that pgchange.offer() gave each schema, and the role that may execute each.';

create table pgchange.promised (
    schema name references pgchange.registered on delete cascade,
    name text,
    takes text,
    returns text not null,
    told text not null,
    primary key (schema, name)
);
comment on table pgchange.promised is
    'The functions that each schema must write. These are its own functions, and the hooks except those that only its own '
    'functions call. takes is null for an own function that no given function calls: its arguments may differ.';

-- Record a function that pgchange.offer() gives each schema with a trait.
create function pgchange.add_offer(
    trait text, name text, takes text, returns text, volatility text, as_owner boolean, callers text, body text, told text
) returns void
language sql as $$
    insert into pgchange.offered values (trait, name, takes, returns, volatility, as_owner, callers, body, told)
    on conflict on constraint offered_pkey do update set
        takes = excluded.takes, returns = excluded.returns, volatility = excluded.volatility, as_owner = excluded.as_owner,
        callers = excluded.callers, body = excluded.body, told = excluded.told
$$;

-- Record a hook: a function that each schema with a trait must write.
create function pgchange.add_hook(trait text, name text, takes text, returns text, told text) returns void
language sql as $$
    insert into pgchange.hook values (trait, name, takes, returns, told)
    on conflict on constraint hook_pkey do update set takes = excluded.takes, returns = excluded.returns, told = excluded.told
$$;

-- The names and the types of the arguments in a text, as in `a text, b bigint default 0`.
create function pgchange.arguments(takes text, out names text[], out types text[])
language sql immutable as $$
    select coalesce(array_agg(m[1] order by n), '{}'), coalesce(array_agg(m[2] order by n), '{}')
    from regexp_matches(takes, '("?\w+"?) ([^,]+?)(?: default [^,]+)?(?:,|$)', 'g') with ordinality as a(m, n)
$$;

-- Refuse a trait that has no functions, and an own function that none of the traits would bring.
create function pgchange.check_traits(traits text[], own text[]) returns void
language plpgsql stable as $$
declare
    wrong text := (
        select string_agg(distinct format('%L', t), ', ')
        from unnest(traits) as t
        where not exists (select from pgchange.offered as o where o.trait = t)
          and not exists (select from pgchange.hook as h where h.trait = t));
begin
    if wrong is not null then
        raise invalid_parameter_value using
            message = format('a feed cannot be offered with the traits %s: no function of pgchange belongs to them', wrong),
            hint = format('choose among %s', (
                select string_agg(distinct format('%L', o.trait), ', ') from pgchange.offered as o where o.trait <> 'feed'));
    end if;
    wrong := (
        select string_agg(format('%L', f), ', ')
        from unnest(own) as f
        where not exists (select from pgchange.offered as o where o.name = f and o.trait = any (traits)));
    if wrong is not null then
        raise invalid_parameter_value using
            message = format('a feed cannot have functions of its own in place of %s: its traits bring no such function', wrong),
            hint = 'select name from pgchange.offered lists the functions that traits bring; leave the others out of own';
    end if;
end
$$;

-- Whether a function that the schema is given calls the function called name. False if all offered functions that call it are
-- replaced by functions of the schema's own; null if no offered function calls it.
create function pgchange.is_called(name text, traits text[], own text[]) returns boolean
language sql stable as $$
    select bool_or(o.name <> all (own))
    from pgchange.offered as o where o.trait = any (traits) and o.body ~ ('%(1|10)\$I\.' || is_called.name || '\(')
$$;

-- Register the feeds of a kind, and give their schema the functions that its traits bring.
-- - traits: 'position' or 'work set', by the form of a consumer's progress; and 'recorded letters' or 'copied letters', by the
--   content of a dead letter.
-- - consumer: the arguments that name a consumer. If the first is `caller pgchange.caller`, the functions for users are in the
--   sealed schema, run as their owner, and pass the caller to the hooks. pgchange.show() makes their public faces.
-- - called: the format of a consumer's name. It begins with a prefix that no other kind has.
-- - own: the functions that the schema writes itself in place of the given functions.
-- - origin: the schema that has here() and is_native(), if not this schema.
-- - letters_elsewhere and tells_of_batches: as in pgchange.registered.
-- - options: more arguments of a claim, which the claim passes on to choose() or claimed().
-- - for_admins: functions that only admins may call, and not consumers.
-- - as_owner: whether the functions for users run as their owner; false if users work tables under their own rights.
create function pgchange.offer(
    kind text, schema name, consumer text, called text, traits text[], own text[] default '{}', origin name default null,
    letters_elsewhere boolean default true, tells_of_batches boolean default false, options text default '',
    for_admins text[] default '{}', as_owner boolean default true
) returns void
language plpgsql as $$
declare
    of_kind constant text[] := array['feed'] || traits;
    of_name constant text := regexp_replace(consumer, '^caller pgchange[.]caller, ', '');
    is_sealed constant boolean := of_name <> consumer;
    open_schema constant name := schema || case when is_sealed then '_sealed' else '' end;
    named record := pgchange.arguments(of_name);
    names_given constant text := array_to_string(named.names, ', ');
    given constant text := case when is_sealed then 'caller, ' else '' end || names_given;
    of_address text := (
        select string_agg(format('(address ->> %L)::%s', a.name, a.type), ', ' order by a.n)
        from unnest(named.names, named.types) with ordinality as a(name, type, n));
    address text := (select string_agg(format('%1$L, %1$s', a.name), ', ' order by a.n) from unnest(named.names) with ordinality as a(name, n));
    more constant text := coalesce(', ' || nullif(options, ''), '');
    more_given constant text := coalesce(', ' || array_to_string(nullif((pgchange.arguments(options)).names, '{}'), ', '), '');
    one pgchange.offered;
    takes text;
    made_in name;
    signature text;
begin
    perform pgchange.check_traits(of_kind, own);
    perform pgchange.register(schema, kind, tells_of_batches, letters_elsewhere, split_part(called, '%', 1));
    delete from pgchange.given as g where g.schema = offer.schema;
    delete from pgchange.promised as p where p.schema = offer.schema;
    for one in
        select o.* from pgchange.offered as o
        where o.trait = any (of_kind) and o.name <> all (own)
          -- Give an internal function only to a schema in which another function calls it.
          and (o.callers is not null or pgchange.is_called(o.name, of_kind, own) is not null)
        order by o.name
    loop
        takes := format(one.takes, consumer, more, of_name);
        made_in := case when one.callers is not null and one.takes like '\%1$s%' then open_schema else schema end;
        signature := format('%I.%I(%s)', made_in, one.name, array_to_string((pgchange.arguments(takes)).types, ', '));
        execute format(
            'create function %I.%I(%s) returns %s language plpgsql %s %s %s as %L',
            made_in, one.name, takes, one.returns, one.volatility,
            case when coalesce(one.as_owner, offer.as_owner) then 'security definer' end,
            -- Functions that always run as their caller get no search_path: setting it costs more than running one of these
            -- bodies. They name everything with its schema, or are called by functions that have a path.
            case when one.as_owner is not false then 'set search_path = pg_catalog, pg_temp' end,
            format(one.body, schema, given, kind, coalesce(origin, schema), of_address, called, address, more_given, names_given, open_schema));
        execute format('comment on function %s is %L', signature, one.told);
        -- Callers of a sealed function get EXECUTE on its public face.
        insert into pgchange.given (schema, signature, callers)
        values (schema, signature, case when one.name = any (for_admins) then 'admin' when made_in = schema then one.callers end);
    end loop;
    insert into pgchange.promised (schema, name, takes, returns, told)
    select schema, f.name, case when f.is_called then format(f.takes, consumer, more, of_name) end, f.returns, f.told
    from (
        select o.name, o.takes, o.returns, o.told, pgchange.is_called(o.name, of_kind, own) is true as is_called
        from pgchange.offered as o where o.trait = any (of_kind) and o.name = any (own)
        union all
        -- A hook that only pgchange itself calls, such as redrive(), is called by no offered function, so is_called() is null.
        select h.name, h.takes, h.returns, h.told, true
        from pgchange.hook as h where h.trait = any (of_kind) and pgchange.is_called(h.name, of_kind, own) is not false
    ) as f;
end
$$;

-- Describe a promised function that a schema lacks: its arguments, its result, and its task. Null if the schema has the function.
create function pgchange.missing(schema name, wanted pgchange.promised) returns text
language plpgsql stable as $$
declare
    shown_returns constant text := regexp_replace(
        wanted.returns, '[a-z_.]+$', format_type(to_regtype(regexp_replace(wanted.returns, '^setof ', '')), null));
    types constant oid[] := array(select to_regtype(t)::oid from unnest((pgchange.arguments(wanted.takes)).types) as t);
    result text := (
        select case when p.proretset then 'setof ' else '' end || format_type(p.prorettype, null)
        from pg_proc as p
        where p.pronamespace = quote_ident(schema)::regnamespace and p.proname = wanted.name
          and (wanted.takes is null
               or (p.proargtypes::oid[])[0:cardinality(types) - 1] = types and p.pronargs - cardinality(types) <= p.pronargdefaults)
        order by p.pronargs limit 1);
begin
    -- Compare both types as this search_path spells them.
    if shown_returns in (result, case when result like 'setof %' then 'setof record' end) or wanted.takes is null and result is not null then
        return null;
    end if;
    return format('%I.%I(%s) returns %s%s: %s', schema, wanted.name, coalesce(wanted.takes, '...'), wanted.returns,
                  ', not ' || result, wanted.told);
end
$$;

-- Refuse a schema that lacks functions that it promised by pgchange.offer(). The detail describes all that are missing.
create function pgchange.check_offer(schema name) returns void
language plpgsql stable as $$
declare
    missing text[] := array(
        select m.told
        from pgchange.promised as p cross join lateral pgchange.missing(check_offer.schema, p) as m(told)
        where p.schema = check_offer.schema and m.told is not null
        order by p.name);
begin
    if missing <> '{}' then
        raise undefined_object using
            message = format('schema %I cannot be a feed yet: it lacks %s of the functions that its given functions call',
                             schema, cardinality(missing)),
            detail = array_to_string(missing, E'\n'),
            hint = 'create them before pgchange.close_schema()';
    end if;
end
$$;

-- Grant a role the functions that pgchange.offer() gave a schema for these callers: consumer, or admin, which administers
-- consumers.
create function pgchange.open_given(schema name, callers text, role regrole) returns void
language plpgsql as $$
declare
    signature text;
begin
    for signature in
        select g.signature from pgchange.given as g where g.schema = open_given.schema and g.callers = open_given.callers
    loop
        execute format('grant execute on function %s to %s', signature, role);
    end loop;
end
$$;
