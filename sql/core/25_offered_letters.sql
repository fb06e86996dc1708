-- The functions that pgchange.offer() gives a schema for the end of a batch: acks, skips and dead letters.

do $do$
begin
    perform pgchange.add_hook(
        'recorded letters', 'changes', '"after" jsonb, upto jsonb', 'setof record',
        'Return the changes behind one place up to another, in order.');
    perform pgchange.add_hook(
        'copied letters', 'give_up', '%1$s, batch jsonb, reason text', 'bigint',
        'Keep copies of the changes of a batch as dead letters, and return the number of the last of them.');
    perform pgchange.add_hook(
        'copied letters', 'check_letter', 'address jsonb, content jsonb', 'void',
        'Raise the reason why a dead letter cannot be sent again, if there is one.');
    perform pgchange.add_hook(
        'copied letters', 'redrive', 'letter bigint', 'void',
        'Send a dead letter again, and delete it.');

    perform pgchange.add_offer(
        'feed', 'note_attempt', '%1$s, became text, batch jsonb, error text default null', 'void', 'volatile', false, null, $$
begin
    case became
        when 'acked' then perform pgchange.note_end(%3$L, %1$I.name_of(%9$s), batch);
        when 'skipped' then perform pgchange.note_end(%3$L, %1$I.name_of(%9$s), batch, skipped => true);
        when 'claimed' then perform pgchange.note_claim(%3$L, %1$I.name_of(%9$s), batch);
        when 'split' then
            perform pgchange.note_split(
                %3$L, %1$I.name_of(%9$s), (batch ->> 'id')::uuid, (batch ->> 'attempt')::integer);
        when 'failed' then perform pgchange.note_failed(%3$L, %1$I.name_of(%9$s), batch, error);
    end case;
end
$$, 'Record the outcome of an attempt on a batch in pgchange.batch: claimed, failed, split, acked or skipped.');

    perform pgchange.add_offer('feed', 'outcome', '%1$s, batch jsonb', 'text', 'stable', null, 'consumer', $$
begin
    return pgchange.outcome(%3$L, %1$I.name_of(%9$s), batch);
end
$$, 'The outcome of an attempt on a batch, as this database has recorded it: acked, skipped, split, failed or claimed; null if it '
    'has no record. acked and skipped are recorded with the progress, the others with the changes.');

    perform pgchange.add_offer('feed', 'ack', '%1$s, batch jsonb', 'bigint', 'volatile', null, 'consumer', $$
declare
    version constant bigint := %1$I.advance(%2$s, batch);
begin
    if batch -> 'bounds' ? 'letter' then
        perform pgchange.letter_done(%3$L, %1$I.address(%9$s), batch);
    end if;
    perform %1$I.note_attempt(%2$s, 'acked', batch);
    return version;
end
$$, 'Put a consumer behind a batch, in the transaction that holds its lock and writes the results. If the batch came from a dead '
    'letter, the letter is deleted.');

    perform pgchange.add_offer('recorded letters', 'give_up', '%1$s, batch jsonb, reason text', 'bigint', 'volatile', false, null, $$
begin
    return pgchange.give_up(%3$L, %1$I.name_of(%2$s), %1$I.address(%2$s), batch, reason);
end
$$, 'Store a batch as a dead letter, or in the letter that it was sent from. Returns the number of the letter.');

    perform pgchange.add_offer('feed', 'skip', '%1$s, batch jsonb, reason text', 'bigint', 'volatile', null, 'consumer', $$
declare
    letter bigint;
begin
    perform %1$I.take_idle(%2$s);
    perform pgchange.check_reason(reason);
    perform pgchange.check_lease(
        %1$I.name_of(%9$s), batch ->> 'id', batch ->> 'leased_by', (batch ->> 'leased_until')::pg_catalog.timestamptz);
    letter := %1$I.give_up(%2$s, batch, reason);
    perform %1$I.advance(%2$s, batch);
    perform %1$I.note_attempt(%2$s, 'skipped', batch);
    return letter;
end
$$, 'Give up a claimed batch, in the form that in_work() of the source returns. It becomes a dead letter, or goes back to the '
    'letter that it was sent from. Its consumer goes on behind it. Returns the number of the letter. Refuse a consumer at work.');

    perform pgchange.add_offer('feed', 'skip_batch', '%1$s, reason text', 'uuid', 'volatile', null, 'admin', $$
declare
    batch jsonb;
begin
    perform %1$I.take_idle(%2$s);
    perform pgchange.check_reason(reason);
    batch := %10$I.in_work(%2$s, %1$I.position(%9$s));
    if batch is null then
        raise exception using errcode = 'PC009', message = format('consumer %%s has no batch in work', %1$I.name_of(%9$s)),
            hint = 'only a batch that was claimed, is not acked and not at work can be skipped';
    end if;
    if (batch -> 'elsewhere')::boolean then
        raise exception using errcode = 'PC009',
            message = format('the batch of consumer %%s cannot be skipped here: its progress is in another database', %1$I.name_of(%9$s)),
            hint = format(
                'airflow-pgchange skip %%s --postgres-conn-id <its results> --source-conn-id <its changes> --reason ''...''',
                          pgchange.shell_quoted(%1$I.name_of(%9$s)));
    end if;
    perform %10$I.skip(%2$s, batch, reason);
    return (batch ->> 'id')::uuid;
end
$$, 'Give up the batch that a consumer claimed and cannot finish, if changes and progress are in one database.');

    perform pgchange.add_offer('position', 'drop_consumer', '%1$s', 'void', 'volatile', true, 'admin', $$
declare
    claims boolean;
begin
    if not %1$I.take_lock(%2$s) then
        perform %1$I.take_idle(%2$s);
    end if;
    perform pgchange.check_lease(%1$I.pending(%2$s, %1$I.position(%2$s)));
    claims := pgchange.forget_claim(%3$L, %1$I.name_of(%2$s));
    perform pgchange.forget_letters(%3$L, %1$I.address(%2$s));
    if not %1$I.forget(%2$s) and claims is null then
        perform %1$I.take_idle(%2$s);
    end if;
end
$$, 'Drop a consumer: its progress, its dead letters and its claim, as far as they are in this database. It no longer holds back '
    'trimming. A consumer of this name then starts from the beginning. An unknown consumer is refused.');

    perform pgchange.add_offer('position', 'letter_rights', 'address jsonb', 'text[]', 'immutable', false, 'admin', $$
begin
    return '{see,keep}';
end
$$, 'The rights on dead letters of this schema that a role with EXECUTE on this function has.');

    perform pgchange.add_offer('recorded letters', 'check_letter', 'address jsonb, content jsonb', 'void', 'stable', true, 'admin', $$
begin
    -- The source is the database that has the claims.
    if pgchange.mark(%3$L, %1$I.name_of(%5$s)) is not null then
        perform %1$I.check_readable(%5$s, content);
    end if;
end
$$, 'In the database of the changes: refuse a dead letter whose batch cannot be read any more.');

    perform pgchange.add_offer('recorded letters', 'redrive', 'letter bigint', 'void', 'volatile', true, 'admin', $$
begin
    perform pgchange.send_letter(%3$L, letter);
end
$$, 'Send a dead letter again: a claim returns its batch once the batch in work has ended.');

    perform pgchange.add_offer('recorded letters', 'check_readable', '%1$s, batch jsonb', 'void', 'stable', true, null, $$
begin
    perform pgchange.check_readable(batch, case
        when %4$I.is_native() and pgchange.came_along(batch -> 'bounds' ->> 'source', %4$I.here()) then (
            select count(*)
            from jsonb_array_elements(batch -> 'slices') as s(slice)
            cross join lateral %1$I.changes(s.slice -> 'after', s.slice -> 'upto')) end);
end
$$, 'Refuse a recorded batch whose changes are not all in this database any more.');

    perform pgchange.add_offer('recorded letters', 'letter_batch', '%1$s, "position" jsonb', 'jsonb', 'stable', false, null, $$
declare
    batch constant jsonb := "position" -> 'letter' -> 'batch';
begin
    if batch is null then
        return null;
    end if;
    perform %1$I.check_readable(%2$s, batch);
    return batch || jsonb_build_object('bounds', (batch -> 'bounds') - 'source' || jsonb_build_object(
        'letter', "position" -> 'letter' -> 'id', 'at', %1$I.at("position")));
end
$$, 'The batch of the dead letter that a position contains, or null. Its recorded bounds say which changes are read. An ack '
    'leaves the consumer at its present place.');

    perform pgchange.add_offer('copied letters', 'letter_batch', '%1$s, "position" jsonb', 'jsonb', 'immutable', false, null, $$
begin
    return null;
end
$$, 'Null, because copies are sent again as new changes, so no position contains a letter.');

    perform pgchange.add_offer('position', 'void_letters', '%1$s, why text', 'void', 'volatile', false, null, $$
declare
    known jsonb := %1$I.position(%2$s);
begin
    update pgchange.letter as l set void = why, on_its_way = false
    where l.kind = %3$L and l.address = %1$I.address(%2$s) and l.void is null
      -- A letter without bounds holds copies of its changes. They can be sent again wherever the consumer is.
      and l.content ? 'bounds'
      and (l.content -> 'bounds' ->> 'source' is distinct from coalesce(known ->> 'source', l.content -> 'bounds' ->> 'source')
           or not %1$I.covers(%1$I.at(known), l.content -> 'bounds' -> 'upto'));
end
$$, 'Make letters of a consumer that was moved void, if their changes come by themselves or their positions belong to another '
    'source.');
end
$do$;
