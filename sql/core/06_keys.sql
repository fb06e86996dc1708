-- The key of a table: the columns whose values name one row. A key of one integer column is a bigint. Any other key travels as text:
-- one column as its text, several columns as the text of the array of their texts, such as {7f,12}.

-- The type of a column as part of a key: a domain counts as its base type, and integers as bigint. Varchar, char(n) and name
-- count as text.
create function pgchange.key_type(type oid) returns regtype
language plpgsql stable as $$
declare
    base oid := type;
    next_base oid;
begin
    loop
        select t.typbasetype into next_base from pg_type as t where t.oid = base and t.typtype = 'd';
        exit when next_base is null;
        base := next_base;
    end loop;
    return case
        when base in ('bigint'::regtype, 'integer'::regtype, 'smallint'::regtype) then 'bigint'::regtype
        when base in ('varchar'::regtype, 'bpchar'::regtype, 'name'::regtype) then 'text'::regtype
        else base::regtype end;
end
$$;

-- Why a column of a type and a collation cannot be part of a key; null if it can. Two rows with equal keys must have the same
-- text, and the value must be readable back from it.
create function pgchange.key_type_trouble(type oid, collation oid) returns text
language plpgsql stable as $$
begin
    return (
        select case
            when (select t.typtype from pg_type as t where t.oid = k.type) = 'e' then null
            when k.type = 'text'::regtype
                then case when not (select c.collisdeterministic from pg_collation as c where c.oid = key_type_trouble.collation)
                     then 'equal values can have different texts under its collation' end
            when k.type in (
                'bigint'::regtype, 'oid'::regtype, 'xid8'::regtype, 'uuid'::regtype, 'boolean'::regtype, 'numeric'::regtype, 'date'::regtype,
                'time'::regtype, 'timestamp'::regtype, 'timestamptz'::regtype, 'bytea'::regtype, 'bit'::regtype, 'varbit'::regtype,
                'inet'::regtype, 'cidr'::regtype, 'macaddr'::regtype, 'macaddr8'::regtype, 'pg_lsn'::regtype) then null
            when k.type in ('real'::regtype, 'double precision'::regtype) then 'equal values have different texts, such as 0 and -0'
            when k.type = 'interval'::regtype then 'equal values have different texts, such as 1 day and 24:00:00'
            when k.type = 'jsonb'::regtype then 'equal values have different texts, such as 1 and 1.0'
            when k.type = 'money'::regtype then 'the text of a value depends on a setting'
            else 'a key cannot have this type'
        end
        from pgchange.key_type(key_type_trouble.type) as k(type));
end
$$;

-- The types of the columns of a key, as pgchange.key_type() gives them; null for a column that the table does not have.
create function pgchange.key_types(tbl regclass, columns name[]) returns regtype[]
language sql stable as $$
    select coalesce(array_agg(pgchange.key_type(a.atttypid) order by u.place), '{}')
    from unnest(columns) with ordinality as u(name, place)
    left join pg_attribute as a on a.attrelid = tbl and a.attname = u.name and a.attnum > 0 and not a.attisdropped
$$;

-- The unique indexes of a table that cover all its rows, with their columns. The primary key comes first, then the replica
-- identity, then indexes with fewer columns.
create function pgchange.unique_indexes(tbl regclass) returns table (columns name[], is_primary boolean)
language plpgsql stable
set plan_cache_mode = force_generic_plan
as $$
begin
    return query
        select c.columns, i.indisprimary
        from pg_index as i
        cross join lateral (
            -- The names of the key columns of an index, without those of INCLUDE, which come after them. Null if a key column is
            -- an expression.
            select case when count(a.attname) = count(*) then array_agg(a.attname order by k.place) end
            from unnest(i.indkey::smallint[]) with ordinality as k(number, place)
            left join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = k.number
            where k.place <= i.indnkeyatts
        ) as c(columns)
        where i.indrelid = tbl and i.indisunique and i.indisvalid and i.indpred is null and c.columns is not null
        order by i.indisprimary desc, i.indisreplident desc, i.indnkeyatts, i.indexrelid;
end
$$;

-- The columns of the primary key of a table, in order; empty if it has none.
create function pgchange.primary_key(tbl regclass) returns name[]
language sql stable as $$
    select coalesce((select u.columns from pgchange.unique_indexes(tbl) as u where u.is_primary), '{}')
$$;

-- Columns of a table in the order of a unique index on exactly these columns; null if there is no such index.
create function pgchange.key_order(tbl regclass, columns name[]) returns name[]
language plpgsql stable as $$
begin
    return (
        select u.columns from pgchange.unique_indexes(tbl) as u
        where cardinality(u.columns) = cardinality(key_order.columns)
          and u.columns @> key_order.columns and u.columns <@ key_order.columns
        limit 1);
end
$$;

-- Why columns cannot be the key of a table; null if they can.
create function pgchange.key_trouble(tbl regclass, columns name[]) returns text
language sql stable as $$
    select coalesce(
        case when coalesce(cardinality(columns), 0) = 0 then format('%s has no primary key', tbl) end,
        (select case
             when a.attname is null then format('%s has no column %I', tbl, u.name)
             when t.reason is not null
                 then format('column %I of %s is %s: %s', u.name, tbl, format_type(a.atttypid, a.atttypmod), t.reason)
             else format('column %I of %s can be null', u.name, tbl) end
         from unnest(columns) with ordinality as u(name, place)
         left join pg_attribute as a on a.attrelid = tbl and a.attname = u.name and a.attnum > 0 and not a.attisdropped
         cross join lateral pgchange.key_type_trouble(a.atttypid, a.attcollation) as t(reason)
         where a.attname is null or t.reason is not null or not a.attnotnull
         order by u.place
         limit 1),
        case when pgchange.key_order(tbl, columns) is null then format(
            case when cardinality(columns) = 1 then 'column %s of %s is not unique'
                 else '%s has no unique index on exactly the columns %s' end,
            case when cardinality(columns) = 1 then quote_ident(columns[1]) else tbl::text end,
            case when cardinality(columns) = 1 then tbl::text
                 else (select string_agg(quote_ident(c), ', ' order by n) from unnest(columns) with ordinality as u(c, n)) end) end)
$$;

-- The hint if a key was refused: the keys that the table has, each in a call that uses it. %s in the call stands for the columns.
create function pgchange.other_keys(tbl regclass, call text) returns text
language sql stable as $$
    with known as (
        select u.columns, u.is_primary, row_number() over () as rank
        from pgchange.unique_indexes(tbl) as u
        where pgchange.key_trouble(tbl, u.columns) is null
    )
    select coalesce(
        concat_ws(
            '; or ',
            (select format('leave the key out to use the primary key, %s', array_to_string(k.columns, ', '))
             from known as k where k.is_primary),
            (select 'name its key: ' || string_agg(replace(call, '%s', quote_literal(k.columns::text)), ' or ' order by k.rank)
             from known as k where not k.is_primary having count(*) > 0)),
        '')
    || case when not exists (select from known)
       then 'give it a primary key or a unique index on columns that are not null and of a type that a key can have; the event '
            'log accepts tables without one' else '' end
$$;

-- The columns of the key of a table: those that are given, or the primary key. Refuse columns that do not identify a row, with
-- the keys that the table has. %s in the call stands for the columns.
create function pgchange.check_key(tbl regclass, columns name[], call text) returns name[]
language plpgsql stable as $$
declare
    key constant name[] := coalesce(columns, pgchange.primary_key(tbl));
    reason constant text := pgchange.key_trouble(tbl, key);
begin
    if reason is not null then
        perform pgchange.refuse(reason, pgchange.other_keys(tbl, call));
    end if;
    return key;
end
$$;

-- Whether the text of an array contains the values of a type as they are, without quotes.
create function pgchange.is_plain(type regtype) returns boolean
language sql immutable as $$
    select type = any (
        '{bigint,oid,xid8,uuid,boolean,numeric,time,inet,cidr,macaddr,macaddr8,pg_lsn}'::regtype[])
$$;

-- The SQL expression of the key of a row, by the types and the names of its columns: a bigint, or a text. It names everything
-- with its schema and runs no cast of a user. Joining texts that need no quotes takes half the time of making an array of them.
create function pgchange.key_text(types regtype[], columns name[], row_alias text) returns text
language sql stable as $$
    select case
        when types = '{bigint}' then format('%I.%I::pg_catalog.int8', row_alias, columns[1])
        when cardinality(types) = 1 then format('(%s collate pg_catalog."C")', max(e.text))
        when bool_and(pgchange.is_plain(u.type)) then format(
            '((''{'' operator(pg_catalog.||) %s operator(pg_catalog.||) ''}'') collate pg_catalog."C")',
            string_agg(e.text, ' operator(pg_catalog.||) '','' operator(pg_catalog.||) ' order by u.place))
        else format('(array[%s]::pg_catalog.text collate pg_catalog."C")', string_agg(e.text, ', ' order by u.place)) end
    from unnest(types, columns) with ordinality as u(type, name, place)
    cross join lateral format(
        case
            when u.type = 'numeric'::regtype then 'pg_catalog.trim_scale(%I.%I)::pg_catalog.text'
            -- The cast of inet adds the length of the mask. The owner of an enum can make a cast to text.
            when u.type in ('inet'::regtype, 'cidr'::regtype) or (select t.typtype from pg_type as t where t.oid = u.type) = 'e'
                then 'pg_catalog.concat(%I.%I)'
            else '%I.%I::pg_catalog.text' end,
        row_alias, u.name) as e(text)
$$;

-- The SQL expression that returns the key of a row of this table: a bigint, or a text. columns: those of the key; row_alias: the
-- name of the row in the query.
create function pgchange.key_text(tbl regclass, columns name[], row_alias text) returns text
language sql stable as $$
    select pgchange.key_text(pgchange.key_types(tbl, columns), columns, row_alias)
$$;

-- The texts of the columns of a key, from its text.
create function pgchange.key_parts(types regtype[], key text) returns text[]
language sql immutable as $$
    select case when cardinality(types) = 1 then array[key] else key::text[] end
$$;

-- The SQL condition that selects the row with a key.
create function pgchange.key_condition(types regtype[], columns name[], row_alias text, key text) returns text
language sql stable as $$
    -- PostgreSQL reads a literal by the type of the column, without a cast of a user.
    select string_agg(
        format(case when u.type = 'bigint'::regtype then '%I.%I operator(pg_catalog.=) %L::pg_catalog.int8'
                    else '%I.%I operator(pg_catalog.=) %L' end, row_alias, u.name, u.value), ' and ' order by u.place)
    from unnest(types, columns, pgchange.key_parts(types, key)) with ordinality as u(type, name, value, place)
$$;

-- The settings of a function that returns texts of keys of these types, as clauses of create function. They are empty if no
-- setting matters for these types.
create function pgchange.key_settings(types regtype[]) returns text
language sql stable as $$
    select coalesce(string_agg(format('set %s = %L', s.name, s.value), ' '), '')
    from pgchange.pinned_settings() as s
    where case s.name
        when 'timezone' then 'timestamptz'::regtype = any (types)
        when 'datestyle' then types && '{date,timestamp,timestamptz}'::regtype[]
        when 'bytea_output' then 'bytea'::regtype = any (types)
    end
$$;
