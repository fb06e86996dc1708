-- Erasing messages from dead letters of queues.

create function mbus_sealed.erase_letter(caller pgchange.caller, letter bigint, key text, field text) returns bigint
language plpgsql security definer as $$
declare
    address jsonb;
    erased bigint;
begin
    select l.address into address from pgchange.letter as l where l.id = letter and l.kind = 'queue' for update;
    if not found then
        return 0;
    end if;
    if 'keep' <> all (mbus_sealed.letter_rights(caller, address)) then
        perform mbus.deny(caller, 'consume', address ->> 'queue', address ->> 'consumer');
    end if;
    delete from mbus.dmq as d
    where d.letter = erase_letter.letter
      and case when field is null then d.iid = key else coalesce(key in (d.properties -> field, d.data -> field), false) end;
    get diagnostics erased = row_count;
    -- Erasing the last message has deleted the letter, too.
    update pgchange.letter as l set
        content = l.content || jsonb_build_object('messages', greatest((l.content ->> 'messages')::bigint - erased, 0)),
        changes = greatest(l.changes - erased, 0)
    where l.id = letter and erased > 0;
    return erased;
end
$$;
comment on function mbus_sealed.erase_letter(pgchange.caller, bigint, text, text) is
    'Delete the messages of a dead letter that have a key from the dmq, by iid or by a field of their properties or data. Returns '
    'how many were deleted.';
