-- The registered feeds, and the dead letters of their consumers. Nothing here depends on the kind of a feed; each schema has the
-- functions of its feeds.

create table pgchange.registered (
    schema name primary key,
    kind text unique,
    prefix text unique,
    tells_of_batches boolean not null,
    letters_elsewhere boolean not null
);
comment on table pgchange.registered is
    'The schemas whose state is reported. A schema may have health() returning setof pgchange.finding. A schema with consumers '
    'also has status(upto integer) returning setof pgchange.consumer_status. kind: the kind of its feeds. prefix: the beginning '
    'of the names of its consumers, which no other kind uses. tells_of_batches: whether its health() reports failing batches, '
    'because its consumers have many batches at a time. For dead letters a kind provides functions. letter_rights(address jsonb) '
    'text[] returns which of see and keep the caller may do. check_letter(address jsonb, content jsonb) raises the reason why a '
    'letter cannot be sent again, as far as this database knows. redrive(letter bigint) deletes the letter and sends it, or sets '
    'on_its_way, and then its consumer deletes it. letter_content(address jsonb, content jsonb) jsonb returns the content if it '
    'is not in the letter. erase_letter(letter bigint, key text, field text) bigint erases a key and returns how many changes '
    'were deleted, if letters hold more than bounds. For pgchange.limit_lag() a kind provides address_of(consumer text) jsonb, '
    'and for pgchange.reasons() perhaps kept(consumers text[]). letters_elsewhere: the changes of a letter may be in another '
    'database.';

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
    'Dead letters: batches that consumers gave up, a letter for each batch whatever its number of changes. A letter has the '
    'reason, the last error, the role that gave the batch up, and the time. address: its consumer; content: the data that are '
    'sent again. The form of both depends on the kind. sent_at: when it was last sent again; on_its_way: its consumer has yet to '
    'process it; void: why it can never be sent again.';
create index letter_on_its_way on pgchange.letter (consumer, sent_at, id) where on_its_way;
create index letter_of_kind on pgchange.letter (kind);
create index letter_of_consumer on pgchange.letter (consumer, given_up_at) where not on_its_way;

-- Refuse a prefix that does not distinguish the consumers of this kind from those of other kinds.
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

-- Register a schema for status and health, with the kind of its feeds if it has any. Claims of an earlier schema of that kind are
-- deleted, and its dead letters are never sent again. The default prefix of its consumers is the kind and a colon.
create function pgchange.register(
    schema name, kind text default null, tells_of_batches boolean default false, letters_elsewhere boolean default false,
    prefix text default null
) returns void
language sql as $$
    select pgchange.check_prefix(schema, kind, coalesce(prefix, kind || ':'));
    -- Claims of an earlier schema of this name have no source any more. Its dead letters name consumers and changes that no
    -- longer exist.
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

-- Delete the registration of a schema, with the claims and attempts of its consumers. Its dead letters are deleted with it.
create function pgchange.unregister(schema name) returns void
language sql as $$
    delete from pgchange.claim as c
    where c.kind = (select r.kind from pgchange.registered as r where r.schema = unregister.schema);
    delete from pgchange.batch as b
    where b.kind = (select r.kind from pgchange.registered as r where r.schema = unregister.schema);
    delete from pgchange.registered as r where r.schema = unregister.schema
$$;

-- Whether a registered schema exists and belongs to the owner of pgchange or to a superuser. Another role may have created a
-- schema of this name, and its functions would run as the caller. tell: raise a warning about such a schema; false for a check of
-- each row.
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
