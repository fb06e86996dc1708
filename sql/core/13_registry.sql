-- The feeds that are known here, each by a row, and what their consumers gave up. What feeds do, their schemas know, and nothing
-- here knows any kind.

create table pgchange.registered (
    schema name primary key,
    kind text unique,
    prefix text unique,
    tells_of_batches boolean not null,
    letters_elsewhere boolean not null
);
comment on table pgchange.registered is
    'The schemas that tell how things are: by health() setof pgchange.finding what a person should look at, where they know of '
    'more than their consumers say, and one with consumers, of the feeds of one kind, by status(upto integer) setof '
    'pgchange.consumer_status how they stand. prefix: how the names of its consumers begin, and those of no other kind. '
    'tells_of_batches: whether health() has what fails, as of consumers that have many '
    'batches at a time. For its dead letters a kind brings letter_rights(address jsonb) text[], which of see and keep the caller '
    'may do; check_letter(address jsonb, content jsonb), which raises why one cannot be sent again, as far as this database '
    'knows; and redrive(letter bigint), which deletes the letter as it sends it, or sets on_its_way and has its consumer delete '
    'it; and letter_content(address jsonb, content jsonb) jsonb, where what a letter holds is not in itself; and erase_letter(letter '
    'bigint, key text, field text) bigint, where letters hold more than bounds, which erases a key and returns how many changes went. '
    'For pgchange.limit_lag() it brings address_of(consumer text) jsonb, and for pgchange.reasons() perhaps kept(consumers text[]). '
    'letters_elsewhere: what letters stand for may lie in another database than they do.';

create table pgchange.letter (
    id bigint generated always as identity primary key,
    kind text not null references pgchange.registered (kind) on delete cascade,
    consumer text not null check (consumer <> ''),
    address jsonb not null,
    content jsonb not null,
    changes bigint not null check (changes >= 0),
    batch_id uuid,
    reason text not null check (reason <> ''),
    error text,
    attempts integer not null check (attempts >= 0),
    given_up_by name not null default session_user,
    given_up_at timestamptz not null default clock_timestamp(),
    sent_at timestamptz,
    on_its_way boolean not null default false,
    void text
);
comment on table pgchange.letter is
    'What consumers gave up, a letter for a batch however many changes it has: why, the error of the last of its attempts, by '
    'whom and when. address is whose it is, content what is sent again; both belong to its kind. sent_at is when it was sent '
    'again last, on_its_way that its consumer has it before it, void why it can never be sent again.';
create index letter_on_its_way on pgchange.letter (consumer, sent_at, id) where on_its_way;
create index letter_of_kind on pgchange.letter (kind);

-- Refuse a prefix by which the names of two kinds' consumers could not be told apart.
create function pgchange.check_prefix(schema name, kind text, prefix text) returns void
language plpgsql stable as $$
declare
    other text := (select r.kind from pgchange.registered as r where r.prefix = check_prefix.prefix and r.schema <> check_prefix.schema);
begin
    if prefix !~ '^[^:]+:$' then
        raise invalid_parameter_value using
            message = format('consumers of kind %s cannot have names that begin with %L: a name must begin with the prefix of its kind', kind, prefix),
            hint = format('let them begin with a word and a colon, such as %s:', kind);
    end if;
    if other is not null then
        raise invalid_parameter_value using
            message = format('consumers of kind %s cannot have the prefix %s: consumers of kind %s have it', kind, prefix, other),
            hint = format('choose another prefix, such as %s:', kind);
    end if;
end
$$;

-- Note a schema that tells how things are, and the kind of its feeds if it has any; what an earlier schema of that kind had in work
-- is forgotten, and its dead letters are never sent again. The names of its consumers begin with the prefix, which is the kind and a
-- colon if none is given.
create function pgchange.register(
    schema name, kind text default null, tells_of_batches boolean default false, letters_elsewhere boolean default false,
    prefix text default null
) returns void
language sql as $$
    select pgchange.check_prefix(schema, kind, coalesce(prefix, kind || ':'));
    -- What an earlier schema of this name claimed is no more, and what it gave up names consumers and changes that are no more.
    delete from pgchange.claim as c where c.kind = register.kind;
    delete from pgchange.batch as b where b.kind = register.kind;
    update pgchange.letter as l
    set void = format('schema %I was dropped since, and installed again', schema), on_its_way = false
    where l.kind = register.kind and l.void is null;
    insert into pgchange.registered (schema, kind, prefix, tells_of_batches, letters_elsewhere)
    values (schema, kind, coalesce(prefix, kind || ':'), tells_of_batches, letters_elsewhere)
    on conflict on constraint registered_pkey do update set
        kind = excluded.kind, prefix = excluded.prefix, tells_of_batches = excluded.tells_of_batches, letters_elsewhere = excluded.letters_elsewhere
$$;

-- Forget a schema that goes, with what its consumers have in work or gave up.
create function pgchange.unregister(schema name) returns void
language sql as $$
    delete from pgchange.claim as c
    where c.kind = (select r.kind from pgchange.registered as r where r.schema = unregister.schema);
    delete from pgchange.batch as b
    where b.kind = (select r.kind from pgchange.registered as r where r.schema = unregister.schema);
    delete from pgchange.registered as r where r.schema = unregister.schema
$$;

-- Whether a schema that was registered is there, and not another that somebody has made since: its functions run as whoever asks. Of
-- another it is told by a warning, but where it is asked of every row.
create function pgchange.ours(schema name, tell boolean default true) returns boolean
language plpgsql stable as $$
declare
    owner oid := (select n.nspowner from pg_namespace as n where n.nspname = schema);
begin
    if owner is null then
        return false;
    end if;
    if owner <> (select n.nspowner from pg_namespace as n where n.nspname = 'pgchange')
       and not (select r.rolsuper from pg_roles as r where r.oid = owner)
    then
        if tell then
            raise warning 'schema % is left out: it belongs to %, and pgchange does not', schema, pg_get_userbyid(owner);
        end if;
        return false;
    end if;
    return true;
end
$$;
