-- A feed of a plain table: the lines of a diary after the line that a reader has come to.

create schema diary;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, diary, pg_temp;

create table diary.line (
    number bigint generated always as identity primary key,
    words text not null,
    written_at timestamptz not null default clock_timestamp()
);
create table diary.reader (
    reader text primary key,
    number bigint not null default 0,
    version bigint not null default 0,
    source text,
    updated_at timestamptz not null default now()
);
select pgchange.keep_origin('diary'),
    pgchange.offer('diary', 'diary', 'reader text', 'diary:%s', traits => '{position,recorded letters}');

create function diary.take_turn() returns trigger language plpgsql as $$
begin
    -- Numbers are drawn, and so committed, by one writer at a time.
    perform pg_advisory_xact_lock(hashtextextended('diary', 0));
    return null;
end $$;
comment on function diary.take_turn() is 'Let the writers of lines wait for each other.';
create trigger take_turn before insert on diary.line execute function diary.take_turn();

create function diary.changes("after" jsonb, upto jsonb default null, most integer default null) returns setof diary.line
language sql stable as $$
    select l.* from diary.line as l where l.number > "after"::bigint and (upto is null or l.number <= upto::bigint)
    order by l.number limit most $$;
comment on function diary.changes(jsonb, jsonb, integer) is 'The lines behind one number up to another, in order.';

create function diary.at("position" jsonb) returns jsonb language sql immutable as $$ select coalesce("position" -> 'number', '0') $$;
comment on function diary.at(jsonb) is 'The number of the line that a position has come to.';

create function diary.position(reader text) returns jsonb language sql stable security definer as $$
    select to_jsonb(r) || jsonb_build_object(
        'schema', 1, 'consumer', diary.name_of(r.reader), 'database', diary.here(),
        'letter', pgchange.next_letter('diary', diary.name_of(r.reader)))
    from diary.reader as r where r.reader = "position".reader $$;
comment on function diary.position(text) is 'The progress of a reader; null for a reader that has not begun.';

create function diary.register(reader text) returns boolean language sql security definer as $$
    insert into diary.reader (reader) select register.reader where diary.take_lock(register.reader)
    on conflict do nothing returning true $$;
comment on function diary.register(text) is 'Make a reader, at the beginning, if it is not there yet.';

create function diary.lag("position" jsonb, upto integer) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'ready', count(*) + coalesce(("position" -> 'letter' -> 'batch' ->> 'count')::bigint, 0), 'ready_exact', count(*) <= upto,
        'ready_age', extract(epoch from clock_timestamp() - min(l.written_at)), 'waiting', 0)
    from diary.changes(diary.at("position"), most => upto + 1) as l $$;
comment on function diary.lag(jsonb, integer) is 'How many lines a reader has to read, exact up to a number.';

create function diary.choose(reader text, "position" jsonb, max_changes integer) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'count', count(*), 'oldest', min(l.written_at),
        'slices', jsonb_build_array(jsonb_build_object('count', count(*), 'after', at, 'upto', max(l.number))),
        'bounds', jsonb_build_object('after', at, 'upto', max(l.number)))
    from diary.at("position") as at, diary.changes(at, most => max_changes) as l group by at $$;
comment on function diary.choose(text, jsonb, integer) is 'The next lines of a reader as a batch; null if there are none.';

create function diary.put(reader text, at jsonb, version bigint, source text, was bigint, before jsonb) returns boolean
language plpgsql as $$
begin
    update diary.reader as r set number = at::bigint, version = put.version, source = put.source, updated_at = now()
    where r.reader = put.reader and r.version = coalesce(was, r.version) and r.number = coalesce(before::bigint, r.number);
    return found;
end $$;
comment on function diary.put(text, jsonb, bigint, text, bigint, jsonb) is 'Put a reader behind a line, if it is where it was.';

create function diary.covers(at jsonb, upto jsonb) returns boolean language sql immutable as $$ select at::bigint >= upto::bigint $$;
comment on function diary.covers(jsonb, jsonb) is 'Whether a reader at one line has read another.';

create function diary.point() returns jsonb language sql stable security definer as $$
    select jsonb_build_object('number', coalesce(max(l.number), 0), 'source', diary.here()) from diary.line as l $$;
comment on function diary.point() is 'The point behind the last line.';

create function diary.passed("position" jsonb, goal jsonb) returns jsonb language sql stable as $$
    select jsonb_build_object('goal', goal, 'passed', diary.covers(diary.at("position"), diary.at(goal))) $$;
comment on function diary.passed(jsonb, jsonb) is 'Whether a reader has come to a point.';

create function diary.consumers() returns setof jsonb language sql stable as $$
    select jsonb_build_object('reader', r.reader) from diary.reader as r order by r.reader $$;
comment on function diary.consumers() is 'The readers whose progress is here.';

create function diary.forget(reader text) returns boolean language sql as $$
    with gone as (delete from diary.reader as r where r.reader = forget.reader returning 1) select exists (select from gone) $$;
comment on function diary.forget(text) is 'Delete the progress of a reader; true if it was here.';

select pgchange.add_role(
    'diary', 'consumer', told => 'Let a role read the diary.', includes => 'pgchange.consumer',
    objects => array['select on diary.line, diary.reader'],
    functions => 'here is_native register position lag changes at point passed covers');
select pgchange.add_role(
    'diary', 'admin', told => 'Let a role look after readers.', includes => 'diary.consumer pgchange.admin');
select pgchange.close_schema('diary', unpinned => 'at changes covers put');
