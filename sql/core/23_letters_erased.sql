-- Erasing the data of a key from letters, such as those of a person who requested it.

-- Whether a field of a JSON object has this value, as text. A nested field is named by both names, with a dot.
create function pgchange.field_is(held jsonb, field text, key text) returns boolean
language sql immutable as $$
    select coalesce(key in (held ->> field, held #>> string_to_array(field, '.')), false)
$$;

-- Whether a text contains a key as a whole word.
create function pgchange.names_key(words text, key text) returns boolean
language sql immutable as $$
    select coalesce(words ~ ('(^|\W)' || regexp_replace(key, '([.\\+*?\[\^\]$(){}=!<>|:#-])', '\\\1', 'g') || '(\W|$)'), false)
$$;

-- Store the rest of a letter's content after changes were erased from a part of it. Delete the letter if no changes are left.
create function pgchange.keep_of_letter(letter bigint, part text, kept jsonb, erased bigint) returns void
language plpgsql as $$
begin
    if kept = '[]' then
        delete from pgchange.letter as l where l.id = letter;
        return;
    end if;
    update pgchange.letter as l set
        content = l.content || jsonb_build_object(part, kept), changes = greatest(l.changes - erased, 0)
    where l.id = letter;
end
$$;

create function pgchange.erase_letters(key text, field text default null, of_consumer text default null)
returns table (letter bigint, erased bigint)
language plpgsql volatile as $$
declare
    chosen record;
    not_kept bigint;
begin
    if coalesce(key, '') = '' or field = '' then
        raise invalid_parameter_value using message = 'nothing can be erased from letters without a key, or by a field without a name',
            hint = 'give the id of a message, an event or a row, or a value and the field that has it';
    end if;
    select min(l.id) into not_kept
    from pgchange.chosen_letters(null, of_consumer, null) as f(id) join pgchange.letter as l on l.id = f.id
    where not pgchange.has_letter_right('keep', l.kind, l.address);
    if not_kept is not null then
        raise insufficient_privilege using
            message = format('nothing was erased: role %I may see letter %s, but not change it', current_user, not_kept),
            hint = (
                select format('%s; or erase letters of one consumer, by of_consumer', pgchange.keeper_grant(l.kind, l.address))
                from pgchange.letter as l where l.id = not_kept);
    end if;
    for chosen in
        select l.id, r.schema
        from pgchange.chosen_letters(null, of_consumer, null) as f(id)
        join pgchange.letter as l on l.id = f.id join pgchange.registered as r using (kind)
        order by l.id
    loop
        letter := chosen.id;
        erased := 0;
        -- A kind without this function has letters that only hold the bounds of their batch.
        if to_regprocedure(format('%I.erase_letter(bigint, text, text)', chosen.schema)) is not null and pgchange.ours(chosen.schema) then
            execute format('select %I.erase_letter($1, $2, $3)', chosen.schema) into erased using letter, key, field;
        end if;
        update pgchange.letter as l set
            error = case when pgchange.names_key(l.error, key) then 'erased' else l.error end,
            reason = case when pgchange.names_key(l.reason, key) then 'erased' else l.reason end
        where l.id = chosen.id and (pgchange.names_key(l.error, key) or pgchange.names_key(l.reason, key));
        if found or erased > 0 then
            return next;
        end if;
    end loop;
end
$$;
comment on function pgchange.erase_letters(text, text, text) is
    'Erase the data of a key from all letters, or from those of a consumer. Returns the changed letters, with the number of '
    'changes erased from each. Without a field, the key is the id of a message, an event or a row. With a field, the key is the '
    'value of that field. The field is in the properties or data of a message, or in the payload of an event or a touch. An error '
    'or a reason that contains the key is replaced. A letter without any changes left is dropped.';
