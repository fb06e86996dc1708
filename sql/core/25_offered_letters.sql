-- What pgchange.offer() gives a schema for the end of a batch: acks, skips, and the dead letters of its consumers.

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
$$, 'Note in pgchange.batch what became of an attempt on a batch: claimed, failed, split, acked or skipped.');

    perform pgchange.add_offer('feed', 'outcome', '%1$s, batch jsonb', 'text', 'stable', null, 'consumer', $$
begin
    return pgchange.outcome(%3$L, %1$I.name_of(%9$s), batch);
end
$$, 'What became of an attempt on a batch, as this database knows it: acked, skipped, split, failed or claimed; null if it knows nothing, '
    'or has forgotten it. acked and skipped are known where the progress is, the others where the changes are.');

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
$$, 'Put a consumer behind a batch, in the transaction that holds its lock and writes the results. A dead letter that was sent '
    'again is done with it.');

    perform pgchange.add_offer('recorded letters', 'give_up', '%1$s, batch jsonb, reason text', 'bigint', 'volatile', false, null, $$
begin
    return pgchange.give_up(%3$L, %1$I.name_of(%2$s), %1$I.address(%2$s), batch, reason);
end
$$, 'Keep a batch as a dead letter, or put it back into the letter that it was sent from; the number of the letter.');

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
$$, 'Give up a claimed batch, as in_work() of the source has it: it becomes a dead letter, or goes back to the one that it was sent '
    'from, whose number is returned; the consumer goes on behind it. A consumer at work is refused.');

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
            hint = format('airflow-pgchange skip %%s --postgres-conn-id <its results> --source-conn-id <its changes> --reason ''...''',
                          pgchange.shell_quoted(%1$I.name_of(%9$s)));
    end if;
    perform %10$I.skip(%2$s, batch, reason);
    return (batch ->> 'id')::uuid;
end
$$, 'Give up the batch that a consumer claimed and cannot finish, where changes and progress share a database.');

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
$$, 'Forget a consumer: its progress with its dead letters, and its claim, of which a database has both or one. It no longer holds '
    'back trimming, and under the same name it begins anew. One that nobody knows is refused.');

    perform pgchange.add_offer('position', 'letter_rights', 'address jsonb', 'text[]', 'immutable', false, 'admin', $$
begin
    return '{see,keep}';
end
$$, 'What who may execute this may do with dead letters of this schema.');

    perform pgchange.add_offer('recorded letters', 'check_letter', 'address jsonb, content jsonb', 'void', 'stable', true, 'admin', $$
begin
    -- The source is where the claims are.
    if pgchange.mark(%3$L, %1$I.name_of(%5$s)) is not null then
        perform %1$I.check_readable(%5$s, content);
    end if;
end
$$, 'Refuse a dead letter whose batch cannot be read any more, in the database of the changes.');

    perform pgchange.add_offer('recorded letters', 'redrive', 'letter bigint', 'void', 'volatile', true, 'admin', $$
begin
    perform pgchange.send_letter(%3$L, letter);
end
$$, 'Put a dead letter before its consumer: a claim hands out the letter''s batch once the batch in work is done.');

    perform pgchange.add_offer('recorded letters', 'check_readable', '%1$s, batch jsonb', 'void', 'stable', true, null, $$
begin
    perform pgchange.check_readable(batch, case
        when %4$I.is_native() and pgchange.came_along(batch -> 'bounds' ->> 'source', %4$I.here()) then (
            select count(*)
            from jsonb_array_elements(batch -> 'slices') as s(slice)
            cross join lateral %1$I.changes(s.slice -> 'after', s.slice -> 'upto')) end);
end
$$, 'Refuse a recorded batch whose changes this database cannot give any more.');

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
$$, 'The batch of the dead letter that a position carries, or null if it carries none: read by its recorded bounds, acked at the place '
    'where the position is now.');

    perform pgchange.add_offer('copied letters', 'letter_batch', '%1$s, "position" jsonb', 'jsonb', 'immutable', false, null, $$
begin
    return null;
end
$$, 'Null: copies are sent again as new changes, so no position carries a letter.');

    perform pgchange.add_offer('position', 'void_letters', '%1$s, why text', 'void', 'volatile', false, null, $$
declare
    known jsonb := %1$I.position(%2$s);
begin
    update pgchange.letter as l set void = why, on_its_way = false
    where l.kind = %3$L and l.address = %1$I.address(%2$s) and l.void is null
      -- Without bounds it holds copies of its changes: they can be sent again wherever the consumer is.
      and l.content ? 'bounds'
      and (l.content -> 'bounds' ->> 'source' is distinct from coalesce(known ->> 'source', l.content -> 'bounds' ->> 'source')
           or not %1$I.covers(%1$I.at(known), l.content -> 'bounds' -> 'upto'));
end
$$, 'Never again send the letters of a consumer whose changes come by themselves, or mean something else now, as it was moved.');
end
$do$;
