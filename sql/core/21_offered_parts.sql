-- The functions that pgchange.offer() gives a schema for batches that are split. 12_splits.sql describes the parts.

do $do$
begin
    perform pgchange.add_offer(
        'position', 'choose_part', '%1$s, "position" jsonb, max_changes integer, split jsonb%2$s', 'jsonb', 'volatile', false, null, $$
declare
    at constant jsonb := %1$I.at("position");
    before constant jsonb := split -> 'before';
    batch jsonb;
begin
    -- A repaired consumer can be before the end of the part that it acked. Then the split is over.
    if before is not null and not (%1$I.covers(at, before) and %1$I.covers(before, at)) then
        return null;
    end if;
    batch := pgchange.part(split, %1$I.choose(
        %2$s, "position" || jsonb_build_object('within', split -> 'within'),
        least(max_changes, (split -> 'rest' -> 0 ->> 'count')::bigint)::integer%8$s));
    return case when %1$I.covers(split -> 'ends', batch -> 'bounds' -> 'upto') then batch end;
end
$$, 'The next part of a split batch; null if the chosen batch is not a part of it, which ends the split.');
end
$do$;
