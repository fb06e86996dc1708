-- What a person should look at.

do $$
begin
    perform pgchange.register('dead_letter');
end
$$;

create function dead_letter.health() returns setof pgchange.finding
language sql stable
set search_path = pg_catalog, dead_letter, pg_temp
as $$
    select 'letters', 'warning', l.consumer,
           format('%s dead letters since %s', count(*), min(l.given_up_at)::timestamptz(0)),
           'airflow pgchange letters list --consumer ' || pgchange.shell_quoted(l.consumer)
    from dead_letter.letter as l
    where not l.on_its_way
    group by l.consumer
    order by l.consumer
$$;
comment on function dead_letter.health() is 'Consumers that have dead letters, of those that the caller may see.';
