-- Setting the lag from which health reports a consumer.

do $do$
begin
    perform pgchange.add_offer('position', 'address_of', 'consumer text', 'jsonb', 'stable', true, 'admin', $$
begin
    return (
        select c.address from %1$I.consumers() as c(address) where %1$I.name_of(%5$s) = address_of.consumer);
end
$$, 'The address of a consumer whose progress is here, by its name in status; null if there is none.');
end
$do$;

create function pgchange.limit_lag(consumer text, max_age interval default '1 hour', max_changes bigint default null) returns void
language plpgsql volatile as $$
declare
    known record;
    address jsonb;
begin
    if max_age <= interval '0' or max_changes <= 0 then
        raise invalid_parameter_value using
            message = format(
                '%s cannot be a limit of %s: a limit must be more than 0',
                case when max_changes <= 0 then max_changes::text else max_age::text end, consumer),
            hint = 'give null for no limit';
    end if;
    select r.kind, r.schema into known from pgchange.registered as r where starts_with(limit_lag.consumer, r.prefix);
    if pgchange.ours(known.schema) then
        execute format('select %I.address_of($1)', known.schema) into address using consumer;
    end if;
    if address is null then
        raise exception using errcode = 'PC002', message = format('no limit was set: there is no consumer %s here', consumer),
            hint = 'list the consumers: select consumer from pgchange.status()';
    end if;
    if not pgchange.has_letter_right('keep', known.kind, address) then
        raise insufficient_privilege using message = format('role %I may not set a limit for %s', current_user, consumer),
            hint = pgchange.keeper_grant(known.kind, address);
    end if;
    insert into pgchange.lag_limit (kind, consumer, address, max_age, max_changes)
    values (known.kind, limit_lag.consumer, address, limit_lag.max_age, limit_lag.max_changes)
    on conflict on constraint lag_limit_pkey do update set
        max_age = excluded.max_age, max_changes = excluded.max_changes, set_by = excluded.set_by, set_at = excluded.set_at;
end
$$;
comment on function pgchange.limit_lag(text, interval, bigint) is
    'Set the lag from which pgchange.health() reports a consumer. max_age limits the age of its oldest ready change, max_changes '
    'the number of changes that are ready or wait. Null is no limit. For a role that may give up batches of the consumer.';
