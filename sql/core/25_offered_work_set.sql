-- What pgchange.offer() gives a schema whose consumers work a set: rows or messages wait for a consumer, and an ack deletes those of its
-- batch. The schema itself keeps the batches. Acks and skips are the same as for consumers with a position.

do $do$
begin
    perform pgchange.add_hook(
        'work set', 'position', '%3$s', 'jsonb',
        'Return the state of the consumer, which changes with each new batch; null if the consumer has none.');
    perform pgchange.add_hook(
        'work set', 'claim_again', '%1$s, "position" jsonb, max_changes integer, max_attempts integer%2$s', 'jsonb',
        'Return a batch that was claimed and never acked, if it is still whole, with the attempt counted; null if there is none. Refuse a '
        'consumer that is unknown, not the caller''s, or not where the position says, what pgchange.check_claim() refuses, and a batch '
        'that was tried max_attempts times.');
    perform pgchange.add_hook(
        'work set', 'claim_next', '%1$s, "position" jsonb, max_changes integer', 'jsonb',
        'Record and return the next batch, with its first attempt; null if nothing is ready.');
    perform pgchange.add_hook(
        'work set', 'advance', '%1$s, batch jsonb', 'bigint',
        'Delete a batch and all that it holds, and return its version. Refuse a batch that is no longer as it was claimed.');
    perform pgchange.add_hook(
        'work set', 'in_work', '%3$s, "position" jsonb', 'jsonb',
        'Return a batch that was claimed, is not acked and not at work, with its attempts and the error of the last one; null if there is '
        'none. Refuse a consumer that is unknown.');
    perform pgchange.add_hook(
        'work set', 'set_error', '%1$s, batch jsonb, error text', 'boolean',
        'Keep the error of the last attempt with its batch; false if the given attempt is not the last.');

    perform pgchange.add_offer('work set', 'take_idle', '%1$s', 'void', 'volatile', false, null, $$
begin
    perform pgchange.check_taken(%1$I.name_of(%9$s), %1$I.take_lock(%9$s));
end
$$, 'Take the lock of a consumer that is not at work, or say so.');

    perform pgchange.add_offer(
        'work set', 'claim', '%1$s, "position" jsonb, max_changes integer%2$s, max_attempts integer default null', 'jsonb', 'volatile', null,
        'consumer', $$
declare
    batch jsonb;
begin
    batch := %1$I.claim_again(%2$s, "position", max_changes, max_attempts%8$s);
    if batch is null then
        batch := %1$I.claim_next(%2$s, "position", max_changes);
    end if;
    if batch is not null then
        perform %1$I.note_attempt(%2$s, 'claimed', batch);
    end if;
    return batch;
end
$$, 'Record and return the next batch of a consumer, or one that was claimed and never acked, with the attempt counted; null if nothing is '
    'ready. Call it in a transaction of its own, while the transaction of the position holds the lock.');

    perform pgchange.add_offer('work set', 'note_failure', '%1$s, batch jsonb, error text', 'void', 'volatile', null, 'consumer', $$
begin
    if %1$I.set_error(%2$s, batch, error) then
        perform %1$I.note_attempt(%2$s, 'failed', batch, error);
    end if;
end
$$, 'Note what the attempt on a batch failed on, for its dead letter.');
end
$do$;
