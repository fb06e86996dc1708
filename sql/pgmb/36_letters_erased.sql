-- Erasing events from dead letters of the event log.

-- The events of a letter without those of a key: the event's id, or a value of a field of its payload or metadata.
create function pgmb.events_without(events jsonb, key text, field text) returns jsonb
language sql immutable as $$
    select coalesce(jsonb_agg(e.event order by e.n), '[]')
    from jsonb_array_elements(events) with ordinality as e(event, n)
    where case when field is null then e.event ->> 'id' <> key
               else not (pgchange.field_is(e.event -> 'payload', field, key) or pgchange.field_is(e.event -> 'metadata', field, key)) end
$$;

-- Erase a key from a dead letter, and return how many events were erased. A letter without any events left is deleted.
create function pgmb.erase_letter(letter bigint, key text, field text) returns bigint
language plpgsql volatile as $$
declare
    events jsonb;
    kept jsonb;
    erased bigint;
begin
    select l.content -> 'events' into events
    from pgchange.letter as l
    where l.id = letter and l.kind = 'event' and pgmb.events_without(l.content -> 'events', key, field) <> l.content -> 'events'
    for update;
    if not found then
        return 0;
    end if;
    kept := pgmb.events_without(events, key, field);
    erased := jsonb_array_length(events) - jsonb_array_length(kept);
    perform pgchange.keep_of_letter(letter, 'events', kept, erased);
    return erased;
end
$$;
