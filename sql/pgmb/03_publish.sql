-- Publishing: what is inserted into events is noted, a slice or a few a statement, for the next poll.
--
-- The trigger fires on the table that a statement names: events is written by its own name, and nobody but the owner has
-- rights on a partition.

create function pgmb.publish() returns trigger
language plpgsql security definer
set search_path = pg_catalog, pgmb, pg_temp
as $$
declare
    now_id text := 'pm' || to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint) || 'g';
    due text[];
    direct boolean;
    later boolean;
begin
    select array_agg(a.id::text) filter (where a.id < now_id), bool_or(a.subscription_id is not null), bool_or(a.id >= now_id)
    into due, direct, later from added as a;
    if cardinality(due) <= 280 then
        insert into pgmb.published (direct, ids) values (direct, due);
    elsif due is not null then
        insert into pgmb.published (direct, ids) select direct, due[i:i + 279] from generate_series(1, cardinality(due), 280) as i;
    end if;
    if later then
        insert into pgmb.scheduled (event_id) select a.id from added as a where a.id >= now_id;
    end if;
    return null;
end
$$;
comment on function pgmb.publish() is
    'Note the ids of inserted events: those whose time has come in slices, in the order of the statement, those in the future '
    'one by one.';

create trigger published after insert on pgmb.events
    referencing new table as added
    for each statement execute function pgmb.publish();
