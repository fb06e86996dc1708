-- Predicates: which SQL is allowed, and which role evaluates it.

-- Refuse a predicate that is not a single SQL expression.
create function tube.parse_predicate(predicate text) returns void
language plpgsql stable as $$
declare
    around text;
    probe refcursor;
begin
    -- Each text is parsed twice, so that it cannot end the expression and begin another. If it closes the parenthesis of the first
    -- query, it does not parse in the brackets of the second. A cursor takes a single statement. For several statements, opening
    -- it fails before any of them runs.
    foreach around in array array[E'select where (%s\n) limit 0', E'select array[%s\n] limit 0'] loop
        begin
            open probe for execute format(around, predicate);
            close probe;
        exception
            when syntax_error or invalid_text_representation or datatype_mismatch or invalid_cursor_definition then
                perform pgchange.refuse(
                    format('the predicate %L does not parse: %s', predicate, sqlerrm),
                    'write an SQL condition over the columns of one row');
            when lock_not_available or transaction_rollback or insufficient_resources then
                raise;
            when others then
                null; -- The columns are unknown here, because the tables are attached later.
        end;
    end loop;
end
$$;

-- Refuse a predicate that does not fit a table. Planning may run parts of the predicate, so this needs the rights of the table's
-- owner.
create function tube.check_predicate(predicate text, tbl regclass) returns void
language plpgsql stable as $$
declare
    probe refcursor;
    -- Leave out virtual columns, because a trigger does not see their values.
    seen text := (
        select format('(select %s from %s)', string_agg(quote_ident(a.attname), ', ') filter (where a.attgenerated <> 'v'), tbl)
        from pg_attribute as a where a.attrelid = tbl and a.attnum > 0 and not a.attisdropped
        having bool_or(a.attgenerated = 'v')
    );
begin
    perform tube.parse_predicate(predicate);
    begin
        open probe for execute format(
            E'select from %s as %I where (%s\n) limit 0', coalesce(seen, tbl::text),
            (select c.relname from pg_class as c where c.oid = tbl), predicate);
        close probe;
    exception
        -- These errors say nothing about the predicate.
        when lock_not_available or transaction_rollback or insufficient_resources then
            raise;
        when others then
            perform pgchange.refuse(
                format('the predicate %L does not fit %s: %s', predicate, tbl, sqlerrm),
                'write an SQL condition over the columns of one row; name functions and other tables with their schema');
    end;
end
$$;

select pgchange.pin_settings('tube.parse_predicate(text)', 'tube.check_predicate(text, regclass)');

-- Check every predicate that is stored with a tube.
create function tube.predicate_parses() returns trigger
language plpgsql as $$
begin
    if new.predicate is not null then
        perform tube.parse_predicate(new.predicate);
    end if;
    return new;
end
$$;
create trigger predicate_parses before insert or update of predicate on tube.tube
    for each row execute function tube.predicate_parses();

-- Call the judge, the function of a table's owner, and undo every side effect of it.
create function tube.ask_judge(
    judge regprocedure, asked anyarray, order_col name default null, in_nulls boolean default null,
    last_value text default null, last_id text default null, chunk integer default null,
    out looked_at bigint, out upto_value text, out upto_id text, out ids anyarray, out failed bigint, out message text
)
language plpgsql as $$
declare
    answered boolean := false;
begin
    -- Cast each argument to its exact type; otherwise PostgreSQL could choose another function of that name, which would run with
    -- the rights of the caller. The rollback discards open cursors, deferred triggers and settings of the judge, which would
    -- otherwise run with these rights later.
    execute format('select * from %s($1::%s, $2::name, $3::boolean, $4::text, $5::text, $6::integer)', judge::regproc, pg_typeof(asked))
    using asked, order_col, in_nulls, last_value, last_id, chunk
    into looked_at, upto_value, upto_id, ids, failed, message;
    answered := true;
    raise exception using errcode = 'PCUND', message = 'answered';
exception when sqlstate 'PCUND' then
    if not answered then
        raise;
    end if;
end
$$;

-- The function judge of the table's owner, which applies the predicate of an attachment. Raises an error if there is none, or if
-- the caller may not execute it.
create function tube.judge_of(attached tube.attachment) returns regprocedure
language plpgsql stable as $$
declare
    judge regprocedure;
begin
    -- Accept only the exact function: it must run as the table's owner, and its result must need no cast.
    select p.oid into judge
    from pg_proc as p join pg_class as c on c.oid = attached.tbl
    where p.proname = tube.function_name(attached.token, 'judge') and p.proowner = c.relowner and p.prosecdef
      and array(select unnest(p.proallargtypes)::regtype)
          = case when attached.key_types = '{bigint}'
                 then '{bigint[],name,boolean,text,text,integer,bigint,text,text,bigint[],bigint,text}'::regtype[]
                 else '{text[],name,boolean,text,text,integer,bigint,text,text,text[],bigint,text}' end
      and p.pronargs = 6;
    if judge is null then
        perform pgchange.refuse(
            format('%s has another owner than when it was attached to tube %I, or the function of its predicate was replaced',
                   attached.tbl, attached.tube),
            format(
                'let its present owner agree to the predicate by attaching it again: select tube.tube_table_ensure_attached(%L, '
                '%L)', attached.tube, attached.tbl));
    end if;
    if not has_function_privilege(judge, 'execute') then
        raise insufficient_privilege using
            message = format('only the owner of the table may apply the predicate of tube %I to %s', attached.tube, attached.tbl),
            hint = format('let the owner backfill, or run: grant execute on function %s to %I', judge, current_user);
    end if;
    return judge;
end
$$;

-- The next rows of a backfill: their number, the order and id of the last row, and the ids for which the attachment's predicate
-- holds. Only a function of the table's owner applies a predicate. like_ids is a null of the array type of the ids.
create function tube.judged_slice(
    attached tube.attachment, order_col name, in_nulls boolean, last_value text, last_id text, chunk integer, like_ids anyarray,
    out looked_at bigint, out upto_value text, out upto_id text, out ids anyarray
)
language plpgsql as $$
declare
    failed bigint;
    message text;
begin
    if attached.predicate is null then
        select s.* into looked_at, upto_value, upto_id, ids, failed, message
        from tube.read_slice(attached, order_col, in_nulls, last_value, last_id, chunk, like_ids) as s;
        return;
    end if;
    select s.* into looked_at, upto_value, upto_id, ids, failed, message
    from tube.ask_judge(tube.judge_of(attached), asked => like_ids, order_col => order_col, in_nulls => in_nulls,
                        last_value => last_value, last_id => last_id, chunk => chunk) as s;
    if failed > 0 then
        insert into tube.fault (tube, tbl, ids, message) values (attached.tube, attached.tbl, failed, message);
    end if;
end
$$;

-- The ids with a row for which the attachment's predicate holds or fails with an error.
create function tube.judged_ids(attached tube.attachment, asked anyarray) returns anyarray
language plpgsql as $$
begin
    if attached.predicate is null then
        return tube.read_wanted(attached, asked);
    end if;
    return (select a.ids from tube.ask_judge(tube.judge_of(attached), asked) as a);
end
$$;
