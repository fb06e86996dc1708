-- The functions that pgchange.offer() gives a schema whose consumers work a set. Rows or messages wait for a consumer, and an ack
-- deletes those of its batch. The schema itself stores the batches. Acks and skips are the same as for consumers with a position.

do $do$
begin
    perform pgchange.add_hook(
        'work set', 'position', '%3$s', 'jsonb',
        'Return the state of the consumer, which changes with each new batch; null if the consumer has none.');
    perform pgchange.add_hook(
        'work set', 'claimed', '%1$s, "position" jsonb, max_changes integer%2$s', 'pgchange.claim',
        'Return the batch that was claimed and never acked, if it is still whole, as a claim; null if there is none. Refuse a '
        'consumer that is unknown, that is not the caller''s, or that is not at the given position. Refuse also what '
        'pgchange.check_claim() refuses.');
    perform pgchange.add_hook(
        'work set', 'claim_again', '%1$s, "position" jsonb, batch jsonb, split jsonb', 'jsonb',
        'Count one more attempt on the batch of the claim that claimed() returned, and return the batch. If parts are given, '
        'replace the batch by the first part, which pgchange.part() makes, with its first attempt.');
    perform pgchange.add_hook(
        'work set', 'claim_next', '%1$s, "position" jsonb, max_changes integer', 'jsonb',
        'Record and return the next batch, with its first attempt; null if nothing is ready.');
    perform pgchange.add_hook(
        'work set', 'advance', '%1$s, batch jsonb', 'bigint',
        'Delete a batch and everything that it holds, and return its version. If parts of a split batch follow, which '
        'pgchange.parts_behind() returns, the next part takes its place, without an attempt. Refuse a batch that has changed '
        'since it was claimed.');
    perform pgchange.add_hook(
        'work set', 'in_work', '%3$s, "position" jsonb', 'jsonb',
        'Return a batch that was claimed, is not acked and not at work, with its attempts and its last error. Null if there is '
        'none, or if it is a part of a split batch that is not claimed yet. Refuse a consumer that is unknown.');
    perform pgchange.add_hook(
        'work set', 'set_error', '%1$s, batch jsonb, error text, of_batch boolean', 'boolean',
        'Store the error of the last attempt with its batch, and count it among the failures or the outages. False if the given '
        'attempt is not the last.');

    perform pgchange.add_hook(
        'work set', 'set_lease', '%1$s, batch jsonb, owner text, ends_at timestamptz', 'boolean',
        'Give the last attempt on a batch a lease, or end its lease if ends_at is null. False if the given attempt is not the '
        'last. A null owner keeps the owner.');
    perform pgchange.add_hook(
        'work set', 'is_leased', '%3$s', 'boolean', 'Return whether a batch of the consumer is leased.');
    perform pgchange.add_hook(
        'work set', 'forget_leases', '%1$s, owner text', 'bigint',
        'End the leases of the consumer, or only those of an owner. Return how many there were.');
    perform pgchange.add_hook(
        'work set', 'resumed', '%1$s, "position" jsonb, batch jsonb', 'pgchange.claim',
        'Return the batch with this id, which was claimed and never acked, as a claim; null if there is none.');

    perform pgchange.add_offer('work set', 'take_idle', '%1$s', 'void', 'volatile', false, null, $$
begin
    perform pgchange.check_taken(%1$I.name_of(%9$s), %1$I.take_lock(%9$s));
end
$$, 'Take the lock of a consumer. Raise an error if the consumer is at work.');

    perform pgchange.add_offer(
        'work set', 'claim',
        '%1$s, "position" jsonb, max_changes integer%2$s, max_attempts integer default null, on_give_up text default null', 'jsonb',
        'volatile', null, 'consumer', $$
declare
    mark pgchange.claim;
    split jsonb;
    batch jsonb;
begin
    if on_give_up is not null then
        perform pgchange.check_on_give_up(on_give_up);
    end if;
    mark := %1$I.claimed(%2$s, "position", max_changes%8$s);
    if mark.batch_id is null then
        batch := %1$I.claim_next(%2$s, "position", max_changes);
    else
        perform pgchange.check_lease(mark);
        if on_give_up = 'bisect' then
            split := pgchange.halves(mark, max_attempts);
        end if;
        if split is null then
            perform pgchange.check_again(mark, max_attempts, on_give_up);
        else
            perform %1$I.note_attempt(%2$s, 'split', mark.batch || pg_catalog.jsonb_build_object('attempt', mark.attempt));
        end if;
        batch := %1$I.claim_again(%2$s, "position", mark.batch, split);
    end if;
    if batch is not null then
        perform %1$I.note_attempt(%2$s, 'claimed', batch);
    end if;
    return batch;
end
$$, 'Record and return the next batch of a consumer; null if nothing is ready. If a batch was claimed and never acked, return it '
    'again, with the attempt counted. With on_give_up bisect, a batch that has failed max_attempts times by its own content is '
    'split, and its first half returned. The other parts follow when it is acked, and a change that fails alone is refused by the '
    'SQLSTATE PC014. Call it in a transaction of its own, while the transaction of the position holds the lock.');

    perform pgchange.add_offer(
        'work set', 'end_leases', '%1$s, owner text default null', 'bigint', 'volatile', null, 'consumer', $$
begin
    return %1$I.forget_leases(%2$s, owner);
end
$$, 'End the leases of a consumer, or only those of an owner, so that its batches can be claimed again. Returns how many there '
    'were.');

    perform pgchange.add_offer('work set', 'resume', '%1$s, "position" jsonb, batch jsonb', 'jsonb', 'volatile', null, 'consumer', $$
declare
    mark constant pgchange.claim := %1$I.resumed(%2$s, "position", batch);
begin
    if mark.batch_id is null then
        perform pgchange.refuse_stale(%1$I.name_of(%9$s), batch);
    end if;
    perform pgchange.check_attempt(mark.consumer, batch, mark.attempt);
    return mark.batch || pg_catalog.jsonb_build_object('attempt', mark.attempt, 'lsn', pg_catalog.pg_current_wal_insert_lsn());
end
$$, 'Return the batch with this id and attempt, as the claim returned it, in a transaction that holds the lock. Refuse an attempt '
    'that is not the last, and a batch that was acked, skipped or split.');

    perform pgchange.add_offer(
        'work set', 'note_failure', '%1$s, batch jsonb, error text, of_batch boolean default null', 'void', 'volatile', null,
        'consumer', $$
begin
    if %1$I.set_error(%2$s, batch, error, of_batch) then
        perform %1$I.note_attempt(%2$s, 'failed', batch, error);
    end if;
end
$$, 'Record the error of an attempt on a batch, for its dead letter. of_batch: whether the batch itself may have caused the '
    'error, so that the batch may be split; false for an outage, null if that is unknown.');
end
$do$;
