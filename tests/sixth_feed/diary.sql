-- A feed of a plain table: the lines of a diary behind the one that a reader has come to.

create schema diary;

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
create trigger take_turn before insert on diary.line execute function diary.take_turn();

create function diary.changes("after" jsonb, upto jsonb default null, most integer default null) returns setof diary.line
language sql stable as $$
    select l.* from diary.line as l where l.number > "after"::bigint and (upto is null or l.number <= upto::bigint)
    order by l.number limit most $$;

create function diary.at("position" jsonb) returns jsonb language sql immutable as $$ select coalesce("position" -> 'number', '0') $$;

create function diary.position(reader text) returns jsonb language sql stable as $$
    select to_jsonb(r) || jsonb_build_object(
        'schema', 1, 'consumer', diary.name_of(r.reader), 'database', diary.here(),
        'letter', pgchange.next_letter('diary', diary.name_of(r.reader)))
    from diary.reader as r where r.reader = "position".reader $$;

create function diary.register(reader text) returns boolean language sql as $$
    insert into diary.reader (reader) select register.reader where diary.take_lock(register.reader)
    on conflict do nothing returning true $$;

create function diary.lag("position" jsonb, upto integer) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'ready', count(*) + coalesce(("position" -> 'letter' -> 'batch' ->> 'count')::bigint, 0), 'ready_exact', count(*) <= upto,
        'ready_age', extract(epoch from clock_timestamp() - min(l.written_at)), 'waiting', 0)
    from diary.changes(diary.at("position"), most => upto + 1) as l $$;

create function diary.choose(reader text, "position" jsonb, most integer) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'id', md5(concat_ws(' ', diary.here(), reader, at, max(l.number)))::uuid, 'count', count(*), 'oldest', min(l.written_at),
        'slices', jsonb_build_array(jsonb_build_object('count', count(*), 'after', at, 'upto', max(l.number))),
        'bounds', jsonb_build_object('after', at, 'upto', max(l.number), 'source', diary.here()))
    from diary.at("position") as at, diary.changes(at, most => most) as l group by at $$;

create function diary.put(reader text, at jsonb, version bigint, source text, was bigint default null, before jsonb default null)
returns boolean language plpgsql as $$
begin
    update diary.reader as r set number = at::bigint, version = put.version, source = put.source, updated_at = now()
    where r.reader = put.reader and r.version = coalesce(was, r.version) and r.number = coalesce(before::bigint, r.number);
    return found;
end $$;

create function diary.covers(at jsonb, upto jsonb) returns boolean language sql immutable as $$ select at::bigint >= upto::bigint $$;

create function diary.point() returns jsonb language sql stable as $$
    select jsonb_build_object('number', coalesce(max(l.number), 0), 'source', diary.here()) from diary.line as l $$;

create function diary.passed("position" jsonb, goal jsonb) returns jsonb language sql stable as $$
    select jsonb_build_object('goal', goal, 'passed', diary.covers(diary.at("position"), diary.at(goal))) $$;

create function diary.consumers() returns setof jsonb language sql stable as $$
    select jsonb_build_object('reader', r.reader) from diary.reader as r order by r.reader $$;

create function diary.forget(reader text) returns boolean language sql as $$
    with gone as (delete from diary.reader as r where r.reader = forget.reader returning 1) select exists (select from gone) $$;
