-- The key of a table: the column whose value names one row.

-- Whether a type is bigint, integer or smallint, or a domain over one of them.
create function pgchange.is_integer(type oid) returns boolean
language sql stable as $$
    with recursive line(type) as (
        select is_integer.type
        union all
        select t.typbasetype from line join pg_type as t on t.oid = line.type where t.typtype = 'd'
    )
    select exists (select from line where line.type in ('bigint'::regtype, 'integer'::regtype, 'smallint'::regtype))
$$;

-- Whether no two rows of a table can have the same value in a column. PostgreSQL wants the columns that a table is partitioned by in
-- each unique index, so of a partitioned table a column counts that is in one with others.
create function pgchange.is_unique(tbl regclass, number smallint) returns boolean
language sql stable as $$
    select exists (
        select from pg_index as i join pg_class as c on c.oid = i.indrelid
        where i.indrelid = tbl and i.indisunique and i.indisvalid and i.indpred is null
          and number = any (i.indkey::smallint[]) and (i.indnkeyatts = 1 or c.relkind = 'p'))
$$;

-- The columns of a table that can be its key: integers that are unique and not null, in the order of the table.
create function pgchange.key_columns(tbl regclass) returns name[]
language sql stable as $$
    select coalesce(array_agg(a.attname order by a.attnum), '{}')
    from pg_attribute as a
    where a.attrelid = tbl and a.attnum > 0 and not a.attisdropped and a.attnotnull
      and pgchange.is_integer(a.atttypid) and pgchange.is_unique(tbl, a.attnum)
$$;

-- The columns of the primary key of a table, in their order; empty if it has none.
create function pgchange.primary_key(tbl regclass) returns name[]
language sql stable as $$
    select coalesce(array_agg(a.attname order by k.place), '{}')
    from pg_index as i
    cross join lateral unnest(i.indkey::smallint[]) with ordinality as k(number, place)
    join pg_attribute as a on a.attrelid = i.indrelid and a.attnum = k.number
    where i.indrelid = tbl and i.indisprimary and k.place <= i.indnkeyatts
$$;

-- The column that is the key of a table where nobody names one: its primary key, or id.
create function pgchange.default_key(tbl regclass) returns name
language sql stable as $$
    select case when cardinality(p.columns) = 1 then p.columns[1] else 'id' end from pgchange.primary_key(tbl) as p(columns)
$$;

-- What to do if a column cannot be the key of a table: which other columns can, with a call that names one.
create function pgchange.key_hint(tbl regclass, call text) returns text
language sql stable as $$
    select case when k.columns = '{}'
        then 'the key is one column of type bigint, integer or smallint, unique and not null: add such a primary key or unique index'
        else format('name another column, %s, %s', (
            select string_agg(quote_ident(c), ' or ' order by n) from unnest(k.columns) with ordinality as u(c, n)), call) end
    from pgchange.key_columns(tbl) as k(columns)
$$;
