-- The functions that pgchange.offer() gives a schema for the lock of a consumer, its claims, moves, marks and status. Functions
-- for dead letters are in 25_offered_letters.sql.

do $do$
begin
    perform pgchange.add_hook(
        'position', 'register', '%1$s', 'boolean',
        'Create the consumer at the beginning, if it does not exist and its lock is free; true if it was created.');
    perform pgchange.add_hook(
        'position', 'position', '%1$s', 'jsonb',
        'Return the progress of the consumer with its version and its source, or null if it is not in this database.');
    perform pgchange.add_hook(
        'position', 'at', '"position" jsonb', 'jsonb',
        'Return the place of a position or a point. Equal places have equal JSON. The place of {} is the beginning.');
    perform pgchange.add_hook(
        'position', 'put', '%1$s, at jsonb, version bigint, source text, was bigint, before jsonb', 'boolean',
        'Put the consumer at a place, with a version and a source, if it is at version was and place before. Either of these two '
        'can be null. True if it was put there.');
    perform pgchange.add_hook(
        'position', 'forget', '%1$s', 'boolean',
        'Delete the progress of the consumer; true if it was in this database.');
    perform pgchange.add_hook(
        'position', 'choose', '%1$s, "position" jsonb, max_changes integer%2$s', 'jsonb',
        'Return the next batch after a position, with its count, slices, oldest and bounds {after, upto}; null if nothing is ready. '
        'If the position has within, the bounds of a batch that begins there, return the first changes of that batch.');
    perform pgchange.add_hook(
        'position', 'covers', 'at jsonb, upto jsonb', 'boolean',
        'Return whether a consumer at the place at has processed everything before upto.');
    perform pgchange.add_hook(
        'position', 'point', '', 'jsonb',
        'Return the point after everything that is committed now, with its source.');
    perform pgchange.add_hook(
        'position', 'consumers', '', 'setof jsonb',
        'Return the address of each consumer whose progress is in this database.');
    perform pgchange.add_hook(
        'position', 'lag', '"position" jsonb, upto integer', 'jsonb',
        'Return how many changes are ready after a position, exact up to a number, and how many wait.');

    perform pgchange.add_offer('feed', 'name_of', '%3$s', 'text', 'immutable', false, null, $$
begin
    return pg_catalog.format(%6$L, %9$s);
end
$$, 'The name of a consumer in pgchange.status().');

    perform pgchange.add_offer('feed', 'address', '%3$s', 'jsonb', 'immutable', false, null, $$
begin
    return pg_catalog.jsonb_build_object(%7$s);
end
$$, 'The address of a consumer, which identifies its claim and its dead letters.');

    perform pgchange.add_offer('feed', 'lock_key', '%3$s', 'bigint', 'immutable', false, 'consumer', $$
begin
    return pg_catalog.hashtextextended(pg_catalog.concat_ws(' ', 'pgchange', %3$L, %9$s), 0);
end
$$, 'The key of the advisory lock of a consumer. If two consumers had the same key, each would only find the other busy at times.');

    perform pgchange.add_offer('feed', 'take_lock', '%3$s', 'boolean', 'volatile', false, 'consumer', $$
begin
    return pg_catalog.pg_try_advisory_xact_lock(%1$I.lock_key(%9$s));
end
$$, 'Take the lock of a consumer until the transaction ends; false if another session has it.');

    perform pgchange.add_offer('feed', 'locked', '%3$s', 'boolean', 'stable', false, 'consumer', $$
begin
    return pgchange.locked(%1$I.lock_key(%9$s)) or %1$I.is_leased(%9$s);
end
$$, 'Whether a consumer is at work: a session holds its lock, or its batch is leased.');

    perform pgchange.add_offer('feed', 'lease', '%1$s, batch jsonb, owner text, duration interval', 'jsonb', 'volatile', null, 'consumer', $$
begin
    if batch is not null and not %1$I.set_lease(%2$s, batch, owner, pgchange.lease_end(duration)) then
        perform pgchange.refuse_stale(%1$I.name_of(%9$s), batch);
    end if;
    return batch;
end
$$, 'In the database of the changes: lease a batch for a duration from now. Call it in the statement that claims the batch, or to '
    'renew the lease. The batch is not claimed again until the lease ends. Refuse an attempt that is not the last. A null batch '
    'stays null.');

    perform pgchange.add_offer('feed', 'end_lease', '%1$s, batch jsonb', 'boolean', 'volatile', null, 'consumer', $$
begin
    return %1$I.set_lease(%2$s, batch, null, null);
end
$$, 'In the database of the changes: end the lease of a batch, so that it can be claimed again; false if the attempt is not the last.');

    perform pgchange.add_offer('position', 'take_idle', '%1$s', 'void', 'volatile', false, null, $$
begin
    perform pgchange.take_idle(
        %1$I.name_of(%2$s), %1$I.lock_key(%2$s), %1$I.position(%2$s) is not null,
        format('select consumer from pgchange.status(of_kind => %%L)', %3$L));
end
$$, 'Take the lock of a consumer. Raise an error if the consumer is at work or does not exist.');

    perform pgchange.add_offer('position', 'pending', '%1$s, "position" jsonb', 'pgchange.claim', 'stable', true, 'admin', $$
begin
    return pgchange.pending(
        %3$L, %1$I.name_of(%2$s), coalesce(("position" ->> 'version')::bigint, 0), %1$I.at("position"),
        "position" -> 'letter' -> 'id');
end
$$, 'The claim that a position has not acked yet, or null. The claim of a dead letter counts only while the letter is to be sent.');

    perform pgchange.add_offer('position', 'in_work', '%1$s, "position" jsonb', 'jsonb', 'stable', true, 'consumer', $$
begin
    return pgchange.placed(pgchange.in_work(%1$I.pending(%2$s, "position")), %4$I.here());
end
$$, 'At the source: the batch that a position has not acked yet, or null. It comes with its attempts and last error, and whether '
    'the progress is in another database.');

    perform pgchange.add_offer(
        'position', 'note_failure', '%1$s, batch jsonb, error text, of_batch boolean default null', 'void', 'volatile', true,
        'consumer', $$
begin
    perform pgchange.note_failure(%3$L, %1$I.name_of(%2$s), batch, error, of_batch);
end
$$, 'At the source: record the error of an attempt on a batch, for its dead letter. of_batch: whether the batch itself may have '
    'caused the error, so that the batch may be split; false for an outage, null if that is unknown.');

    perform pgchange.add_offer(
        'position', 'set_lease', '%1$s, batch jsonb, owner text, ends_at timestamptz', 'boolean', 'volatile', false, null, $$
begin
    return pgchange.set_lease(%3$L, %1$I.name_of(%2$s), %1$I.version_here(%2$s), batch, owner, ends_at);
end
$$, 'Give the last attempt on a batch a lease, or end its lease if ends_at is null. False if the attempt is not the last, or if '
    'the batch has ended.');

    perform pgchange.add_offer('position', 'version_here', '%1$s', 'bigint', 'stable', false, null, $$
begin
    return coalesce((%1$I.position(%2$s) ->> 'version')::bigint, 0);
end
$$, 'The version of a consumer''s progress; 0 if the progress is not in this database.');

    perform pgchange.add_offer('position', 'is_leased', '%1$s', 'boolean', 'stable', true, 'consumer', $$
begin
    return pgchange.is_leased(%3$L, %1$I.name_of(%2$s), %1$I.version_here(%2$s));
end
$$, 'In the database of the changes: whether a consumer''s batch is leased.');

    perform pgchange.add_offer(
        'position', 'end_leases', '%1$s, owner text default null', 'bigint', 'volatile', true, 'consumer', $$
begin
    return pgchange.end_leases(%3$L, %1$I.name_of(%2$s), %1$I.version_here(%2$s), owner);
end
$$, 'In the database of the changes: end the leases of a consumer, or only those of an owner, so that its batches can be claimed '
    'again. Returns how many there were.');

    perform pgchange.add_offer('position', 'resume', '%1$s, "position" jsonb, batch jsonb', 'jsonb', 'stable', true, 'consumer', $$
declare
    mark constant pgchange.claim := %1$I.pending(%2$s, "position");
begin
    if (mark.batch_id, mark.version) is distinct from ((batch ->> 'id')::uuid, (batch ->> 'version')::bigint) then
        perform pgchange.refuse_stale(%1$I.name_of(%2$s), batch);
    end if;
    perform pgchange.check_attempt(mark.consumer, batch, mark.attempt);
    return %1$I.again(%2$s, pgchange.placed(mark.batch, %4$I.here()) || pg_catalog.jsonb_build_object(
        'attempt', mark.attempt, 'lsn', pg_catalog.pg_current_wal_insert_lsn()));
end
$$, 'Return the batch with this id, version and attempt, as the claim returned it, in a transaction that holds the lock. Refuse '
    'an attempt that is not the last, and a batch that was acked, skipped or split.');

    perform pgchange.add_offer('position', 'is_known', '%1$s', 'boolean', 'stable', true, 'admin', $$
begin
    return pgchange.mark(%3$L, %1$I.name_of(%2$s)) is not null;
end
$$, 'Whether a consumer has claimed a batch here, wherever its progress is.');

    perform pgchange.add_offer('position', 'mark', '%1$s', 'jsonb', 'stable', true, 'consumer', $$
begin
    return pgchange.mark(%3$L, %1$I.name_of(%2$s)) || jsonb_build_object('source', %4$I.here());
end
$$, 'The record of a consumer at this source: the positions before and behind the batch that it claimed last.');

    perform pgchange.add_offer('position', 'check_position', '%1$s, "position" jsonb', 'text', 'stable', false, null, $$
begin
    return pgchange.check_known(%3$L, %1$I.name_of(%2$s), "position", %4$I.here(), %4$I.is_native());
end
$$, 'Refuse a consumer whose batches this database does not know because it was restored or lost its latest transactions. Else '
    'return the place of this database.');

    perform pgchange.add_offer('position', 'again', '%1$s, batch jsonb', 'jsonb', 'immutable', false, null, $$
begin
    return batch;
end
$$, 'The recorded batch of a consumer, in the form that a retry gets.');

    perform pgchange.add_offer(
        'position', 'claim',
        '%1$s, "position" jsonb, max_changes integer%2$s, max_attempts integer default null, on_give_up text default null', 'jsonb',
        'volatile', true, 'consumer', $$
declare
    here constant text := %1$I.check_position(%2$s, "position");
    consumer_name constant text := %1$I.name_of(%2$s);
    version constant bigint := coalesce(("position" ->> 'version')::bigint, 0);
    last pgchange.claim;
    mark pgchange.claim;
    split jsonb;
    batch jsonb;
begin
    perform pgchange.check_claim(max_changes);
    if on_give_up is not null then
        perform pgchange.check_on_give_up(on_give_up);
    end if;
    last := pgchange.last_claim(%3$L, consumer_name);
    mark := pgchange.unacked(last, version, %1$I.at("position"), "position" -> 'letter' -> 'id');
    if mark.version is null then
        split := pgchange.parts_left(last, version);
    else
        perform pgchange.check_lease(mark);
        if on_give_up = 'bisect' then
            split := pgchange.halves(mark, max_attempts);
        end if;
    end if;
    if split is not null then
        batch := %1$I.choose_part(%2$s, "position", max_changes, split%8$s);
    end if;
    if mark.version is not null then
        if batch is null then
            perform pgchange.check_again(mark, max_attempts, on_give_up);
            batch := pgchange.claim_again(mark);
            if batch -> 'bounds' ? 'letter' then
                perform %1$I.letter_batch(%2$s, "position");
            end if;
            return %1$I.again(%2$s, pgchange.placed(batch, here));
        end if;
        perform pgchange.note_split(%3$L, consumer_name, mark.batch_id, mark.attempt);
    end if;
    batch := coalesce(batch, %1$I.letter_batch(%2$s, "position"), %1$I.choose(%2$s, "position", max_changes%8$s));
    if batch is null then
        return null;
    end if;
    -- A restored source can take its new place while a batch is chosen. Then the batch has the source.
    mark := pgchange.record(
        %3$L, consumer_name, %1$I.address(%2$s), "position", %1$I.at("position"),
        coalesce(batch -> 'bounds' -> 'at', batch -> 'bounds' -> 'upto'), coalesce(batch -> 'bounds' ->> 'source', here), batch);
    return mark.batch;
end
$$, 'Record and return the next batch of a consumer; null if nothing is ready. If the consumer claimed a batch and never acked '
    'it, return that batch again, with the attempt counted. If a dead letter is to be sent again, its batch comes next. With '
    'on_give_up bisect, a batch that has failed max_attempts times by its own content is split, and its first half returned. The '
    'other parts are claimed next, and a change that fails alone is refused by the SQLSTATE PC014. Call it on the primary of the '
    'source, in a transaction of its own, holding the lock.');

    perform pgchange.add_offer('position', 'advance', '%1$s, batch jsonb', 'bigint', 'volatile', false, null, $$
declare
    bounds jsonb := batch -> 'bounds';
begin
    perform pgchange.check_claimed(%3$L, %1$I.name_of(%2$s), batch);
    -- The bounds of a dead letter say which changes to read, so the consumer itself stays at its place.
    if not %1$I.put(
        %2$s, coalesce(bounds -> 'at', bounds -> 'upto'), (batch ->> 'version')::bigint, bounds ->> 'source',
        (bounds ->> 'from_version')::bigint, coalesce(bounds -> 'at', bounds -> 'after'))
    then
        perform pgchange.refuse_stale(%1$I.name_of(%2$s), batch);
    end if;
    return (batch ->> 'version')::bigint;
end
$$, 'Put a consumer behind a batch, if the consumer is where the batch began. Returns its new version.');

    perform pgchange.add_offer('position', 'check_point', 'point jsonb', 'void', 'immutable', false, null, $$
begin
    perform pgchange.check_point(point, %1$L);
end
$$, 'Refuse a value to which no consumer can be moved.');

    perform pgchange.add_offer('position', 'check_move', '%1$s, "position" jsonb, point jsonb', 'void', 'volatile', false, null, $$
begin
    perform pgchange.check_move(
        %1$I.name_of(%2$s), "position", point, %4$I.here(), %1$I.covers(%1$I.at(%1$I.point()), %1$I.at(point)), %1$L);
end
$$, 'In the database of the changes: refuse a move to a point of another database, or of the future.');

    perform pgchange.add_offer('position', 'note_move', '%1$s, "position" jsonb, point jsonb', 'bigint', 'volatile', true, 'admin', $$
begin
    perform %1$I.check_point(point);
    perform %1$I.check_move(%2$s, "position", point);
    perform pgchange.check_lease(%1$I.pending(%2$s, "position"));
    return (pgchange.record(
        %3$L, %1$I.name_of(%2$s), %1$I.address(%2$s), "position", %1$I.at("position"), %1$I.at(point), %4$I.here(), null)).version;
end
$$, 'In the database of the changes: record that a consumer moves from its position to a point, as a claim records a batch. '
    'Returns the version for move_consumer(). A batch in work is given up: its changes come in a new batch.');

    perform pgchange.add_offer(
        'position', 'move_consumer', '%1$s, point jsonb, version bigint default null', 'void', 'volatile', true, 'admin', $$
begin
    perform %1$I.take_idle(%2$s);
    perform %1$I.check_point(point);
    if version is null then
        version := %1$I.note_move(%2$s, %1$I.position(%2$s), point);
    end if;
    perform %1$I.put(
        %2$s, %1$I.at(point), version, coalesce(point ->> 'source', %1$I.position(%2$s) ->> 'source'), null, null);
    perform %1$I.void_letters(%2$s, 'its consumer was moved back before it, so its changes come by themselves');
end
$$, 'Move a consumer to a point that point() of the source returned, or to the beginning. Everything before the point counts as '
    'processed. Everything behind it comes, also if it was processed before. If the changes are in another database, note_move() '
    'there returns the version. Dead letters behind the point are void, because their changes come by themselves.');

    perform pgchange.add_offer('position', 'consumer_names', '', 'setof text', 'stable', true, 'consumer', $$
begin
    return query select c.consumer from pgchange.claim as c where c.kind = %3$L;
end
$$, 'In the database of the changes: the names of the consumers that have claimed or were moved, as in pgchange.status().');

    perform pgchange.add_offer('position', 'note_start', '%1$s, "position" jsonb, point jsonb', 'bigint', 'volatile', true, 'consumer', $$
begin
    if coalesce(("position" ->> 'version')::bigint, 0) > 0 or pgchange.has_claimed(%3$L, %1$I.name_of(%2$s)) then
        return null;
    end if;
    return %1$I.note_move(%2$s, "position", point);
end
$$, 'In the database of the changes: record the point at which a new consumer starts, and return the version for start_at(). Null '
    'if the consumer has claimed a batch or was moved, so that it is not new.');

    perform pgchange.add_offer('position', 'start_at', '%1$s, point jsonb, version bigint', 'boolean', 'volatile', true, 'consumer', $$
begin
    perform %1$I.check_point(point);
    return %1$I.put(%2$s, %1$I.at(point), version, point ->> 'source', 0, %1$I.at('{}'));
end
$$, 'Put a new consumer at the point that note_start() recorded, in the transaction that holds its lock. False if the consumer is '
    'not new.');

    perform pgchange.add_offer('position', 'earlier', 'one jsonb, other jsonb', 'jsonb', 'stable', false, null, $$
begin
    return case when %1$I.covers(one, other) then other else one end;
end
$$, 'The earlier of two places. If neither covers the other, a place before both.');

    perform pgchange.add_offer('position', 'adopt_mark', '%1$s, mark jsonb', 'text', 'volatile', true, 'admin', $$
declare
    here jsonb;
    how record;
    at jsonb;
begin
    perform %1$I.take_idle(%2$s);
    here := %1$I.position(%2$s);
    how := pgchange.adoption(%1$I.name_of(%2$s), (here ->> 'version')::bigint, mark);
    at := coalesce(mark -> how.behind, %1$I.at('{}'));
    -- If the source lost its record, the consumer may have been moved back or created anew since.
    if how.is_lost then
        at := %1$I.earlier(at, %1$I.at(here));
    end if;
    perform %1$I.put(%2$s, at, how.version, mark ->> 'source', null, null);
    perform %1$I.void_letters(%2$s, 'its source was restored or lost its latest transactions, and its changes come by themselves');
    return how.guarantee;
end
$$, 'Continue from the position that mark() of the source returns, or from the beginning if it has no record. Returns the '
    'guarantee: at least once if the source lost batches that were processed.');

    perform pgchange.add_offer(
        'position', 'status', 'upto integer default 1000', 'setof pgchange.consumer_status', 'volatile', true, 'consumer', $$
declare
    held bigint[] := pgchange.locks_held();
    address jsonb;
    at jsonb;
    is_here boolean;
    lag jsonb;
    work jsonb;
    told text;
    advice text;
begin
    for address in select c from %1$I.consumers() as c loop
        at := %1$I.position(%5$s);
        is_here := coalesce(at ->> 'source' = %4$I.here(), true) or %1$I.is_known(%5$s);
        lag := null;
        told := null;
        begin
            lag := case when is_here then %1$I.lag(at, upto) end;
        exception when sqlstate 'PC003' or sqlstate 'PC004' then
            get stacked diagnostics told = message_text, advice = pg_exception_hint;
            told := told || ': ' || advice;
        end;
        work := case when is_here then to_jsonb(%1$I.pending(%5$s, at)) end;
        return next pgchange.standing(
            %3$L, %1$I.name_of(%5$s), address, at, lag, work,
            -- If a consumer took its lock after the locks were listed, and has claimed, it is at work, too.
            %1$I.lock_key(%5$s) = any (held) or work ->> 'batch_id' is not null and %1$I.locked(%5$s),
            told, case when not is_here then 'changes' end);
    end loop;
end
$$, 'Every consumer whose progress is here, as pgchange.status() shows it. If its changes are in another database, the lag is '
    'null; that database knows it. If a person must decide first, held_back_by has the reason.');
end
$do$;
