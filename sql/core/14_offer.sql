-- What is the same for every feed whose claims are in pgchange.claim. A feed brings what only it knows, and is given the rest as
-- functions of its own schema: thin calls, so that who may do what stays a matter of that schema's rights.

create table pgchange.offered (
    name text primary key,
    takes text not null,
    returns text not null,
    volatility text not null check (volatility in ('immutable', 'stable', 'volatile')),
    as_owner boolean not null,
    callers text check (callers in ('consumer', 'admin')),
    body text not null,
    told text not null
);
comment on table pgchange.offered is
    'The functions that pgchange.offer() gives a schema. In takes %s stands for what a consumer is named by. In body %1$I stands for '
    'the schema, %2$s for the consumer, %3$L for the kind, %4$I for the schema that says where its positions mean something, %5$s for the '
    'consumer of address jsonb, %6$L for the format of names, and %7$s for the fields of an address. callers: who is granted it.';

create table pgchange.given (
    schema name references pgchange.registered on delete cascade,
    signature text,
    callers text,
    primary key (schema, signature)
);
comment on table pgchange.given is 'The functions that pgchange.offer() gave each schema, and who is granted them.';

create function pgchange.add_offer(
    name text, takes text, returns text, volatility text, as_owner boolean, callers text, body text, told text
) returns void
language sql
as $$
    insert into pgchange.offered values (name, takes, returns, volatility, as_owner, callers, body, told)
    on conflict on constraint offered_pkey do update set
        takes = excluded.takes, returns = excluded.returns, volatility = excluded.volatility, as_owner = excluded.as_owner,
        callers = excluded.callers, body = excluded.body, told = excluded.told
$$;
comment on function pgchange.add_offer(text, text, text, text, boolean, text, text, text) is
    'Note a function that pgchange.offer() gives a schema.';

create function pgchange.offer(
    kind text, schema name, consumer text, called text, functions text[] default null, own text[] default '{}',
    origin name default null, letters_elsewhere boolean default true
) returns void
language plpgsql
as $$
declare
    one pgchange.offered;
    takes text;
    signature text;
    given text;
    of_address text;
    address text;
begin
    perform pgchange.register(schema, kind, letters_elsewhere => letters_elsewhere, prefix => split_part(called, '%', 1));
    delete from pgchange.given as g where g.schema = offer.schema;
    select string_agg(format('%I', p.name), ', ' order by p.n),
           string_agg(format('(address ->> %L)::%s', p.name, p.type), ', ' order by p.n),
           string_agg(format('%1$L, %1$I', p.name), ', ' order by p.n)
    into given, of_address, address
    from (
        select a.n, split_part(a.argument, ' ', 1) as name, split_part(a.argument, ' ', 2) as type
        from unnest(string_to_array(consumer, ', ')) with ordinality as a(argument, n)
    ) as p;
    for one in
        select o.* from pgchange.offered as o
        where o.name = any (coalesce(functions, array[o.name])) and o.name <> all (own)
        order by o.name
    loop
        takes := format(one.takes, consumer);
        signature := format('%I.%I(%s)', schema, one.name, regexp_replace(takes, ' default [^,]+', '', 'g'));
        execute format(
            'create function %I.%I(%s) returns %s language plpgsql %s %s as %L',
            schema, one.name, takes, one.returns, one.volatility,
            -- To set it costs more than what the others do: such functions call them, or they name everything with its schema.
            case when one.as_owner then 'security definer set search_path = pg_catalog, pg_temp' end,
            format(one.body, schema, given, kind, coalesce(origin, schema), of_address, called, address));
        execute format('comment on function %s is %L', signature, one.told);
        insert into pgchange.given (schema, signature, callers) values (schema, signature, one.callers);
    end loop;
end
$$;
comment on function pgchange.offer(text, name, text, text, text[], text[], name, boolean) is
    'Register the feeds of a kind and give their schema the functions that are the same for all kinds, all but its own or only those '
    'that are named: the schema brings the others, and what these call. consumer is what a consumer is named by, as arguments of a function; called the '
    'format of its name, which begins with a prefix that no other kind has; origin the schema that keeps where its positions mean something, if another does; letters_elsewhere is as '
    'in pgchange.registered.';

create function pgchange.open_given(schema name, callers text, role regrole) returns void
language plpgsql
as $$
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
comment on function pgchange.open_given(name, text, regrole) is
    'Let a role call what pgchange.offer() gave a schema for consumers, or for an admin, who looks after them.';
