-- A batch that fails by its own content is split: its halves are claimed one after the other. A half that fails is halved again,
-- until the bad change is alone. A part is a batch with an id of its own. Its bounds have "split":
--   - parts_of: the ids of the batches of which it is a part, the whole batch first
--   - rest: the parts that follow it, in order, each as {count, depth}. count: its number of changes. depth: how many halvings have
--     led to it, so it belongs to as many of the batches in parts_of, from the first on
--   - ends: the place where the whole ends, if it has an end
--   - attempts: how many attempts were made on the whole and on its earlier parts
--   - letters: how many changes of the whole became dead letters
--   - first_claimed_at: when the whole was claimed first

-- The parts into which a claimed batch is split, in the form of the bounds of a part, the next part first. within: the bounds of
-- the batch. Null if the batch is not split. It is split if max_attempts attempts were made, and one of them failed by the batch
-- itself. Attempts that an outage ended do not count. A single change cannot be split, and a dead letter that was sent again
-- stays whole. If ten changes of the whole have become dead letters, the cause is probably in the code. The rest is then kept
-- together for a person.
create function pgchange.halves(mark pgchange.claim, max_attempts integer) returns jsonb
language plpgsql immutable as $$
declare
    bounds constant jsonb := mark.batch -> 'bounds';
    count constant bigint := mark.batch -> 'count';
    parts_of constant jsonb := coalesce(bounds -> 'split' -> 'parts_of', '[]') || to_jsonb(mark.batch_id);
    depth constant integer := jsonb_array_length(parts_of);
begin
    if coalesce(mark.attempt - mark.outages < max_attempts, true) or mark.failures = 0 or count = 1 or bounds ? 'letter'
       or (bounds -> 'split' -> 'letters')::integer >= 10
    then
        return null;
    end if;
    return jsonb_build_object(
        'parts_of', parts_of,
        'rest', jsonb_build_array(
            jsonb_build_object('count', count - count / 2, 'depth', depth), jsonb_build_object('count', count / 2, 'depth', depth))
            || coalesce(bounds -> 'split' -> 'rest', '[]'),
        'ends', coalesce(bounds -> 'split' -> 'ends', bounds -> 'upto'),
        'attempts', coalesce((bounds -> 'split' -> 'attempts')::integer, 0) + mark.attempt,
        'letters', coalesce((bounds -> 'split' -> 'letters')::integer, 0),
        'first_claimed_at', mark.batch -> 'first_claimed_at',
        'within', bounds - 'split');
end
$$;

-- The parts of a split batch that follow a part that has ended, in the form that halves() returns. before: the place where they
-- begin, if they have a place. Null if there are none.
create function pgchange.parts_behind(mark pgchange.claim) returns jsonb
language plpgsql immutable as $$
declare
    split constant jsonb := mark.batch -> 'bounds' -> 'split';
begin
    if coalesce(split -> 'rest', '[]') = '[]' then
        return null;
    end if;
    return split || jsonb_build_object(
        'attempts', (split -> 'attempts')::integer + mark.attempt,
        -- If each attempt on a change failed and its consumer is past it, the change became a dead letter.
        'letters', (split -> 'letters')::integer
            + (mark.batch ->> 'count' = '1' and mark.failures > 0 and mark.failures + mark.outages = mark.attempt)::integer,
        'before', mark.batch -> 'bounds' -> 'upto', 'within', (mark.batch -> 'bounds') - 'split');
end
$$;

-- The parts of a split batch that a consumer at a version has still to process, given its last claim. The form is that of
-- parts_behind(); null if there are none. A consumer that was moved since is at another version, so its split is over. The function
-- has no search_path of its own, which would slow down every claim.
create function pgchange.parts_left(mark pgchange.claim, version bigint) returns jsonb
language plpgsql immutable as $$
begin
    return case when mark.version = parts_left.version and mark.batch -> 'bounds' -> 'split' -> 'rest' <> '[]'
                     and mark.batch -> 'bounds' -> 'letter' is null
                then pgchange.parts_behind(mark) end;
end
$$;

-- A chosen batch as the next of the parts of a split; null if it has more changes than this part.
create function pgchange.part(split jsonb, batch jsonb) returns jsonb
language plpgsql immutable as $$
declare
    due constant jsonb := split -> 'rest' -> 0;
    left_over constant bigint := (due -> 'count')::bigint - (batch -> 'count')::bigint;
begin
    if coalesce(left_over < 0, true) then
        return null;
    end if;
    split := split - array['before', 'within'] || jsonb_build_object(
        'parts_of', jsonb_path_query_array(
            split -> 'parts_of', '$[0 to $last]', jsonb_build_object('last', (due -> 'depth')::integer - 1)),
        'rest', case when left_over > 0 then jsonb_build_array(due || jsonb_build_object('count', left_over)) else '[]' end
            || ((split -> 'rest') - 0));
    return jsonb_set(batch, '{bounds,split}', split) || jsonb_build_object('first_claimed_at', split -> 'first_claimed_at');
end
$$;

-- Refuse an unknown value of on_give_up, which says how a batch is handled after its last attempt.
create function pgchange.check_on_give_up(word text) returns void
language plpgsql immutable as $$
begin
    if word <> 'bisect' then
        raise invalid_parameter_value using message = format('on_give_up cannot be %L', word),
            hint = 'use bisect, or null to refuse a batch whose attempts are used up';
    end if;
end
$$;
