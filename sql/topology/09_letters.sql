-- What of a consumer's dead letters has been passed, where it was moved.

create function topology.covers(at jsonb, upto jsonb) returns boolean
language sql immutable
as $$
    select ((at ->> 0)::bigint, (at ->> 1)::bigint) >= ((upto ->> 0)::bigint, (upto ->> 1)::bigint)
$$;
comment on function topology.covers(jsonb, jsonb) is 'Whether a consumer at one place has passed another.';
