-- Message queues: the messages of a queue are in an insert-only log, and each consumer has a position in it.
--
-- Chosen by measurement (CPU per message of 1 kB, batches of 1,000; COPY and SELECT of a bare table: 7.0 and 1.4 us). A log row
-- costs 7.5 us by COPY and 11.3 us through arrays, and 1.4 us to read for each consumer. A row that each consumer deletes costs
-- 12.6 and 4.0 us for a single consumer, and several consumers need a row each. It also leaves dead rows for the next reader
-- while an old snapshot is held anywhere. So handing out a message updates and deletes nothing: a position says what was
-- received.
--
-- A position is a number for each consumer and part. The consumer has received the log's ids up to it, except those of the late
-- transactions, which were open when the position passed them. Messages that cannot be handed out in the log's order are set
-- apart: not yet due, waiting for another message, or with a failed selector. Messages that were received out of order have a
-- receipt.

select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);

do $$
begin
    if not exists (select from pg_catalog.pg_extension where extname = 'hstore') then
        execute 'create extension hstore';
    end if;
    -- hstore may be in any schema. This schema is in the path only for the name of the type, until the end: see 39_hstore.sql.
    perform pg_catalog.set_config('search_path', pg_catalog.format(
        'pg_catalog, mbus, %s, pg_temp',
        (select e.extnamespace::pg_catalog.regnamespace from pg_catalog.pg_extension as e where e.extname = 'hstore')), true);
end
$$;

create schema mbus;
comment on schema mbus is 'Message queues: publish and subscribe, delays, order between messages, request and reply.';

select pgchange.make_sealed('mbus');

select pgchange.keep_versions('mbus', version => 1);

create type mbus.qt_model as (
    id bigint, added timestamp, iid text, delayed_until timestamp, expires timestamp, received integer[],
    headers hstore, properties hstore, data hstore
);
comment on type mbus.qt_model is
    'A message in the form in which consumers get it, with times in the time zone of the session. Selectors see the same form '
    'with times in UTC.';

-- The numbers of the parts of a queue.
create function mbus.numbered(parts integer) returns integer[]
language sql immutable as $$ select array(select pg_catalog.generate_series(0, parts - 1)) $$;

select pgchange.keep_origin('mbus');

create table mbus.queue (
    id integer generated always as identity primary key,
    qname text not null unique,
    consumers_cnt integer not null check (consumers_cnt between 1 and 1024),
    is_roles_security_model boolean not null default false,
    seq regclass,
    began bigint not null default 0,
    parts integer[] not null generated always as (mbus.numbered(consumers_cnt)) stored,
    ordered_by text
);
comment on table mbus.queue is
    'Every queue. A consumer locks parts of a queue; consumers_cnt is their number, and parts has their numbers. seq: the '
    'sequence that numbers its messages. It stays when the queue is dropped, so that no iid is given twice; a new queue of the '
    'same name begins behind it. ordered_by: the property whose value is the key of a message; null if messages have no key.';

create table mbus.consumer (
    id integer generated always as identity primary key,
    name text not null,
    qname text not null references mbus.queue (qname) on delete cascade,
    selector text,
    added timestamp not null default localtimestamp,
    temporary boolean not null default false,
    unique (qname, name)
);
comment on table mbus.consumer is 'The consumers of each queue. Each gets a copy of every message that its selector matches.';

create table mbus.trigger (
    src text not null references mbus.queue (qname) on delete cascade,
    dst text not null references mbus.queue (qname) on delete cascade,
    selector text,
    primary key (src, dst)
);
comment on table mbus.trigger is 'Messages that are posted to src and match the selector are copied to dst.';

create table mbus.position (
    consumer integer not null,
    part integer not null,
    version bigint not null,
    done bigint not null,
    late_xids xid8[] not null default '{}',
    late_ids bigint[] not null default '{}',
    txid xid8 not null default pg_current_xact_id(),
    began bigint not null default 0,
    began_xids xid8[] not null default '{}',
    began_ids bigint[] not null default '{}',
    primary key (consumer, part, version)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index on mbus.position (consumer, version);
comment on table mbus.position is
    'The position of a consumer in a part, or with part -1 in all parts that have no younger version. The consumer has passed the '
    'messages up to id done, except those of transactions late_xids above late_ids. txid: the last transaction that moved it; '
    'began, began_xids, began_ids: done, late_xids and late_ids before that transaction. Each claim replaces the row by a new row, '
    'so that the newest is found at once, however many dead rows an old snapshot keeps.';

-- The position of a consumer in a part.
create function mbus.stands_at(consumer integer, part integer) returns setof mbus.position
language sql stable rows 1 as $$
    -- In this form, the planner finds the newest position of the part by the key, without reading the positions of other parts.
    select p.* from (
        (select p.* from mbus.position as p where p.consumer = $1 and p.part between $2 and $2 order by p.part desc, p.version desc limit 1)
        union all
        (select p.* from mbus.position as p where p.consumer = $1 and p.part between -1 and -1 order by p.part desc, p.version desc limit 1)
    ) as p
    order by p.version desc
    limit 1
$$;

create table mbus.level (
    consumer integer not null,
    done bigint not null,
    late_xids xid8[] not null,
    busy integer[] not null,
    froms bigint[] not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index on mbus.level (consumer, done);
alter table mbus.level replica identity full;
comment on table mbus.level is
    'The place from which the next single message of a consumer is searched. It has passed everything up to done, except messages '
    'of transactions late_xids, and those above froms in parts that were busy. This follows from its positions, but saves reading '
    'each of them. Every consumer has a level; the first is the beginning of the log.';

-- Set the level of a consumer to the beginning of the log, where it excludes nothing.
create function mbus.begin_level(consumer integer) returns void
language sql as $$
    delete from mbus.level as l where l.consumer = $1;
    insert into mbus.level (consumer, done, late_xids, busy, froms) values ($1, 0, '{}', '{}', '{}');
$$;

create table mbus.apart (
    consumer integer not null,
    id bigint not null,
    part integer not null,
    due timestamptz not null default '-infinity',
    expires timestamptz,
    after text,
    wait_consumer integer,
    wait_part integer,
    wait_id bigint,
    failed boolean not null default false,
    batch bigint,
    key text,
    primary key (consumer, id)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index apart_due on mbus.apart (consumer, due, id) where wait_consumer is null and not failed;
create index apart_expiring on mbus.apart (consumer, due) where wait_consumer is not null and due < 'infinity';
create index apart_waiting on mbus.apart (consumer, wait_consumer, wait_part, wait_id) where wait_consumer is not null;
create index apart_behind on mbus.apart (wait_consumer, wait_id) where wait_consumer is not null;
create index apart_of_key on mbus.apart (consumer, key, id) where key is not null and not failed;
create index apart_in_work on mbus.apart (consumer, key, id) where key is not null and batch is not null;
comment on table mbus.apart is
    'Messages that a consumer''s position passed without handing them out. If wait_consumer is null, they can be received from '
    'due on. Otherwise they wait for its message wait_id: until its position in wait_part passes that message. If wait_part is -1, '
    'they wait until that message leaves mbus.apart, or the dmq for wait_consumer 0. They wait at most until due, when that message '
    'expires. batch: the batch of a feed that claimed the message; key: the key of a message of an ordered queue.';

create table mbus.receipt (
    queue integer not null,
    id bigint not null,
    consumer integer,
    pending integer[],
    txid xid8 not null default pg_current_xact_id()
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
-- The order of the columns matters. With another order, statistics of a small table could lead the planner to this index for
-- queries by queue and id. If two indexes cost the same, the planner takes the index that was created later.
create index on mbus.receipt (coalesce(consumer, 0), queue, id);
create index on mbus.receipt (queue, id);
comment on table mbus.receipt is
    'Messages that were received out of order, by a consumer, or taken from all consumers (consumer is null). pending: the '
    'consumers that had not received it then.';

-- The table has no key, so give it a replica identity. Without either, PostgreSQL would refuse deletes under a publication for all
-- tables.
alter table mbus.receipt replica identity full;

create table mbus.wake (
    consumer integer not null,
    id bigint not null,
    part integer not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index on mbus.wake (consumer, part);
alter table mbus.wake replica identity full;
comment on table mbus.wake is
    'Messages apart whose predecessor was received out of order. Their consumer has to check them again.';

create table mbus.batch (
    number bigint generated always as identity primary key,
    consumer integer not null references mbus.consumer on delete cascade,
    slot integer not null,
    batch jsonb not null,
    attempt integer not null default 1,
    failures integer not null default 0,
    outages integer not null default 0,
    error text,
    count bigint not null,
    lowest bigint not null,
    highest bigint not null,
    claimed_at timestamptz not null default clock_timestamp(),
    taken bigint not null default 0,
    taken_by xid8,
    leased_by text,
    leased_until timestamptz
);
create index on mbus.batch (consumer, number);
comment on table mbus.batch is
    'Batches that workers of a consumer''s feed claimed and did not ack. Their messages, count of them, are in mbus.apart between '
    'lowest and highest. If a batch was split, batch is the part that is due, and the messages are those of this part and of the '
    'later parts. failures: attempts that failed by an error of the batch itself; outages: attempts that failed by another error, '
    'such as a lost server. taken: how many messages the transaction taken_by of the worker itself took by their ids.';

create table mbus.fault (
    id bigint generated always as identity primary key,
    qname text not null,
    consumer text,
    message_id bigint,
    message text not null,
    occurred_at timestamptz not null default clock_timestamp()
);
create index on mbus.fault (qname, consumer);
comment on table mbus.fault is
    'Selectors that failed on a message. If a consumer''s selector failed, the message is kept apart for it until '
    'mbus.retry_faults(). If a trigger''s selector failed, the message was not copied.';

create table mbus.dmq (
    id bigint generated by default as identity primary key,
    added timestamp not null default clock_timestamp()::timestamp,
    iid text not null,
    delayed_until timestamp,
    expires timestamp,
    received integer[],
    headers hstore,
    properties hstore,
    data hstore
);
-- This index finds a message by its iid. It also finds the messages of a queue, because an iid begins with the name of its queue.
create index on mbus.dmq (iid text_pattern_ops);
comment on table mbus.dmq is 'Dead messages, which nobody could process. Messages that wait for such a message go on waiting.';

create table mbus.tempq (
    id bigint generated by default as identity primary key,
    added timestamptz not null default clock_timestamp(),
    iid text not null unique,
    delayed_until timestamptz,
    expires timestamptz,
    received integer[],
    headers hstore,
    properties hstore,
    data hstore,
    tqname text not null
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500);
create index on mbus.tempq (tqname, added, id);
comment on table mbus.tempq is 'Messages of temporary queues.';

create table mbus.temporary (
    name text primary key,
    is_queue boolean not null,
    pid integer not null default pg_backend_pid(),
    through integer[] not null default '{}',
    made_by name not null default session_user,
    made_at timestamptz not null default clock_timestamp()
);
comment on table mbus.temporary is
    'Temporary queues and consumers. Each lives as long as its session holds the advisory lock on its name. made_by: the '
    'session_user, which gives no right. through: the consumers by whose rights its maker could consume.';

create type mbus.picked as (id bigint, part integer, due timestamptz, expires timestamptz, after text, ok boolean, key text);
comment on type mbus.picked is 'A message of the log that a consumer has reached. ok is null if the selector failed.';
