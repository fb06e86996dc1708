-- Erasing ids from the dead letters of tubes.

-- The ids of a touch without those of a key. The key is the id itself. With a field, all ids go if the payload has the key in
-- that field.
create function tube.ids_without(touch jsonb, key text, field text) returns jsonb
language sql immutable as $$
    select case
        when field is null then (
            select coalesce(jsonb_agg(i.id order by i.n), '[]')
            from jsonb_array_elements(touch -> 'ids') with ordinality as i(id, n)
            -- People may leave out the braces around the columns of a key.
            where i.id #>> '{}' not in (key, '{' || key || '}'))
        when pgchange.field_is(touch -> 'payload', field, key) then '[]'
        else touch -> 'ids' end
$$;

-- The touches of a letter without those of a key. A touch that has no ids left is left out, with its payload.
create function tube.touches_without(touches jsonb, key text, field text) returns jsonb
language sql immutable as $$
    select coalesce(jsonb_agg(t.touch || jsonb_build_object('ids', left_over.ids) order by t.n), '[]')
    from jsonb_array_elements(touches) with ordinality as t(touch, n)
    cross join lateral tube.ids_without(t.touch, key, field) as left_over(ids)
    where left_over.ids <> '[]'
$$;

-- The number of ids in touches.
create function tube.ids_in(touches jsonb) returns bigint
language sql immutable as $$
    select coalesce(sum(jsonb_array_length(t.touch -> 'ids')), 0)::bigint from jsonb_array_elements(touches) as t(touch)
$$;

-- Erase a key from a dead letter, and return how many ids were erased. A letter without any ids left is deleted.
create function tube.erase_letter(letter bigint, key text, field text) returns bigint
language plpgsql volatile as $$
declare
    touches jsonb;
    kept jsonb;
    erased bigint;
begin
    select l.content -> 'touches' into touches
    from pgchange.letter as l
    where l.id = letter and l.kind = 'tube' and tube.touches_without(l.content -> 'touches', key, field) <> l.content -> 'touches'
    for update;
    if not found then
        return 0;
    end if;
    kept := tube.touches_without(touches, key, field);
    erased := tube.ids_in(touches) - tube.ids_in(kept);
    perform pgchange.keep_of_letter(letter, 'touches', kept, erased);
    return erased;
end
$$;
