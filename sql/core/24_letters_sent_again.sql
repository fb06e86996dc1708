-- Letters of feeds whose consumers have a position. A letter holds its batch as it was recorded. While it is on its way, the
-- position of its consumer contains it, and a claim returns the same changes again, at a new version. Only this consumer gets
-- them, and it does not move, because it has passed these changes already.

-- The next letter that is on its way to a consumer, for its position; null if there is none.
create function pgchange.next_letter(kind text, consumer text) returns jsonb
language plpgsql stable as $$
begin
    return (
        select jsonb_build_object('id', l.id, 'since', l.sent_at, 'batch', l.content)
        from pgchange.letter as l
        where l.on_its_way and l.consumer = next_letter.consumer and l.kind = next_letter.kind
        order by l.sent_at, l.id
        limit 1);
end
$$;

-- Store a claimed batch that is given up, in the form that in_work() returns. It goes into a new letter, or into the letter that
-- it was sent from. Returns the number of the letter.
create function pgchange.give_up(kind text, consumer text, address jsonb, batch jsonb, reason text) returns bigint
language plpgsql as $$
declare
    letter bigint := batch -> 'bounds' -> 'letter';
    tried integer := (batch ->> 'attempt')::integer;
begin
    perform pgchange.check_reason(reason);
    if letter is null then
        return pgchange.write_letter(
            kind, consumer, address, batch - array['attempt', 'error', 'elsewhere'], (batch ->> 'count')::bigint, reason, batch ->> 'error',
            tried, (batch ->> 'id')::uuid);
    end if;
    update pgchange.letter as l set
        on_its_way = false, reason = give_up.reason, error = coalesce(batch ->> 'error', l.error),
        attempts = l.attempts + tried, given_up_by = session_user, given_up_at = clock_timestamp()
    where l.id = letter and l.kind = give_up.kind and l.on_its_way and l.address = give_up.address;
    if not found then
        perform pgchange.letter_gone(letter);
    end if;
    return letter;
end
$$;

-- Send a letter again: a claim returns its batch once the batch in work has ended.
create function pgchange.send_letter(kind text, letter bigint) returns void
language plpgsql as $$
declare
    on_its_way boolean;
begin
    update pgchange.letter as l set on_its_way = true, sent_at = clock_timestamp()
    where l.id = letter and l.kind = send_letter.kind and not l.on_its_way and l.void is null;
    if found then
        return;
    end if;
    select l.on_its_way into on_its_way from pgchange.letter as l where l.id = letter and l.kind = send_letter.kind;
    if on_its_way then
        raise exception using errcode = 'PC012', message = format('letter %s is on its way already', letter),
            hint = 'its consumer gets it with its next claim; to take it back, drop it';
    end if;
    perform pgchange.letter_gone(letter);
end
$$;

-- Delete the letter whose batch was processed, if the batch came from a letter.
create function pgchange.letter_done(kind text, address jsonb, batch jsonb) returns void
language plpgsql as $$
begin
    if not batch -> 'bounds' ? 'letter' then
        return;
    end if;
    delete from pgchange.letter as l
    where l.id = (batch -> 'bounds' ->> 'letter')::bigint and l.kind = letter_done.kind and l.on_its_way and l.address = letter_done.address;
    if not found then
        raise exception using errcode = 'PC006',
            message = format(
                'dead letter %s was dropped, so its batch %s cannot be acked', batch -> 'bounds' ->> 'letter', batch ->> 'id'),
            hint = 'roll back and claim again';
    end if;
end
$$;

-- Delete the letters of a consumer that is dropped.
create function pgchange.forget_letters(kind text, address jsonb) returns void
language sql as $$
    delete from pgchange.letter as l where l.kind = forget_letters.kind and l.address = forget_letters.address
$$;
