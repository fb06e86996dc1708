-- What consumers gave up, of every kind of feed. How a letter is sent again, its kind knows: each kind names the schema whose
-- functions do it, and nothing here knows any kind.

create schema dead_letter;
comment on schema dead_letter is
    'Dead letters: batches, events and messages that consumers gave up, to be sent again or dropped.';

create table dead_letter.installed (
    version integer not null,
    checksum text,
    installed_at timestamptz not null default now(),
    constraint dead_letter_of_airflow_pgchange check (version >= 0)
);
comment on table dead_letter.installed is 'One row for each version of this schema that was installed here, the newest last.';
-- The installer notes its checksum by an update, which a publication refuses without an identity.
alter table dead_letter.installed replica identity full;
insert into dead_letter.installed (version) values (1);

create table dead_letter.kind (
    kind text primary key check (kind <> ''),
    schema name not null,
    elsewhere boolean not null default false
);
comment on table dead_letter.kind is
    'The kinds of feeds that have dead letters. Each names the schema that brings letter_rights(address jsonb) text[], which of '
    'see and keep the caller may do; check_letter(address jsonb, content jsonb), which raises why it cannot be sent again, as '
    'far as this database knows; and redrive(letter bigint), which deletes the letter as it sends it, or sets on_its_way and '
    'has its consumer delete it. elsewhere: what letters stand for may lie in another database than they do.';

create table dead_letter.letter (
    id bigint generated always as identity primary key,
    kind text not null references dead_letter.kind on delete cascade,
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
comment on table dead_letter.letter is
    'What consumers gave up, a letter for a batch however many changes it has: why, the error of the last of its attempts, by '
    'whom and when. address is whose it is, content what is sent again; both belong to its kind. sent_at is when it was sent '
    'again last, on_its_way that its consumer has it before it, void why it can never be sent again.';
create index letter_on_its_way on dead_letter.letter (consumer, sent_at, id) where on_its_way;
create index letter_of_kind on dead_letter.letter (kind);
