-- Events, their subscriptions, and the dispatches of events to groups.
--
-- An event takes three steps, each insert-only. It is published: a row of events, and its id in a slice of published, or in
-- scheduled if its time is in the future. It is dispatched: its id in slices of the groups whose subscriptions match it. It is
-- read: the cursor of a group passes it. Groups read in the order of dispatch.

create schema pgmb;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, pgmb, pg_temp;
comment on schema pgmb is
    'The event log: events in partitions, subscriptions that choose among them, groups that read by cursor.';

select pgchange.keep_versions('pgmb', version => 1);

create domain pgmb.event_id as varchar(24) collate "C";
comment on domain pgmb.event_id is
    'pm, 13 hexadecimal digits of microseconds since 1970, 9 more digits. The id of an event, the id of a dispatch, or a cursor.';
create domain pgmb.subscription_id as varchar(24) collate "C";
comment on domain pgmb.subscription_id is 'su, 13 hexadecimal digits of the microseconds of its creation, 9 more digits.';
create domain pgmb.group_id as varchar(48) collate "C";
comment on domain pgmb.group_id is 'The name of a group of subscriptions that is read by one reader at a time.';
create domain pgmb.config_type as text check (value in (
    'plugin_version', 'partition_retention_period', 'future_intervals_to_create', 'partition_interval', 'poll_chunk_size',
    'use_pg_cron', 'pg_cron_poll_for_events_cron', 'pg_cron_partition_maintenance_cron'));
comment on domain pgmb.config_type is 'The names of the settings.';

create table pgmb.config (
    id pgmb.config_type primary key,
    value text,
    key text generated always as (id) stored
);
comment on table pgmb.config is 'Settings; key is another name of id.';
insert into pgmb.config (id, value) values
    ('plugin_version', '1'),
    ('partition_retention_period', '60 minutes'),
    ('future_intervals_to_create', '3 hours'),
    ('partition_interval', '30 minutes'),
    ('poll_chunk_size', '10000'),
    ('use_pg_cron', 'false'),
    ('pg_cron_poll_for_events_cron', '1 second'),
    ('pg_cron_partition_maintenance_cron', '*/5 * * * *');

-- Each session takes a thousand numbers at a time. The numbers only order the events that a session publishes within a
-- microsecond.
create sequence pgmb.event_seq minvalue 0 maxvalue 68719476735 start 0 cache 1000 cycle;
comment on sequence pgmb.event_seq is 'The last 9 digits of event ids. Gaps are normal.';

create table pgmb.events (
    id pgmb.event_id not null default (
        'pm' || to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint)
        || right(to_hex(nextval('pgmb.event_seq') + 68719476736), 9)),
    topic varchar(255) not null,
    payload jsonb not null,
    metadata jsonb default '{}',
    subscription_id pgmb.subscription_id,
    primary key (id),
    -- A malformed id would stop every reader that reaches it. Trimming bytes is the fastest check of every digit.
    constraint id_is_pm_and_22_hexadecimal_digits check (
        octet_length(id) = 24 and starts_with(id, 'pm') and rtrim(id::text::bytea, '0123456789abcdef') = 'pm'),
    constraint topic_is_not_empty check (topic <> ''),
    constraint metadata_is_an_object check (jsonb_typeof(metadata) = 'object')
) partition by range (id);
comment on table pgmb.events is
    'The log. An event whose id is in the future is delivered at that time. An event with a subscription_id is delivered to that '
    'subscription alone.';

-- This index is for retention. Retries are rare, and name events that will be read again.
create index events_retries on pgmb.events (id) where topic = 'pgmb-retry';

create table pgmb.events_default partition of pgmb.events default;
comment on table pgmb.events_default is 'Holds the events that fit no other partition, so that publishing never fails.';

create table pgmb.later (like pgmb.events including all);
comment on table pgmb.later is
    'Events of a time that has no partition yet. Maintenance moves them here from the default partition, and publishes them when '
    'their partition exists. A poll publishes them at the latest when they are due.';

create table pgmb.later_from (
    id pgmb.event_id not null
);
comment on table pgmb.later_from is
    'A lower bound of the ids in pgmb.later, in one row, or two after a restore of a dump. It keeps polls from reading rows that '
    'were already published, which stay as dead rows while an old snapshot is open. Only maintenance writes it, one run at a time.';
-- The table has no key, so give it a replica identity. Without either, PostgreSQL would refuse changes under a publication for all
-- tables.
alter table pgmb.later_from replica identity full;
insert into pgmb.later_from (id) values ('pmg');

create table pgmb.published (
    slot smallint not null default ((extract(epoch from statement_timestamp())::bigint / 900) % 4),
    txid xid8 not null default pg_current_xact_id(),
    seq bigint generated always as identity,
    addressed boolean not null,
    ids text[] collate "C" not null
) partition by list (slot);
comment on table pgmb.published is
    'The ids of published events, in one or more slices for each statement, with its transaction. addressed: some of the events '
    'are for a single subscription. The partition of each quarter of an hour is emptied before its turn comes again, when '
    'everything in it is dispatched.';
create index published_order on pgmb.published (txid, seq);
create table pgmb.published_0 partition of pgmb.published for values in (0);
create table pgmb.published_1 partition of pgmb.published for values in (1);
create table pgmb.published_2 partition of pgmb.published for values in (2);
create table pgmb.published_3 partition of pgmb.published for values in (3);

create table pgmb.scheduled (
    event_id pgmb.event_id primary key,
    txid xid8 not null default pg_current_xact_id()
);
comment on table pgmb.scheduled is 'Events that were published before their time.';
create index scheduled_by_txid on pgmb.scheduled (txid, event_id);

select pgchange.keep_origin('pgmb');

create table pgmb.dispatcher (
    version bigint primary key,
    snapshot pg_snapshot not null default '1:1:',
    partial_txid xid8,
    partial_seq bigint,
    last_id pgmb.event_id not null,
    scheduled_upto pgmb.event_id not null default '',
    total bigint not null default 0,
    restored text,
    restored_at timestamptz,
    dispatched_at timestamptz not null default clock_timestamp(),
    check ((partial_txid is null) = (partial_seq is null))
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);
comment on table pgmb.dispatcher is
    'The progress of dispatching. Dispatched are the slices of every transaction that snapshot sees, and those of partial_txid up '
    'to partial_seq. Of the scheduled events, those up to scheduled_upto that it saw. last_id is the last dispatch, total the '
    'number of events so far. restored: what was done when the transaction ids were not those of this cluster. Each poll replaces '
    'the row by a new row, so that the newest is found at once, however many dead rows there are.';
insert into pgmb.dispatcher (version, last_id)
select 0, 'pm' || to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint) || '000000000';

create table pgmb.dispatched (
    id pgmb.event_id not null,
    group_id pgmb.group_id not null,
    subscription_id pgmb.subscription_id not null,
    event_ids text[] collate "C" not null,
    alone boolean not null,
    total bigint not null
) partition by range (id);
comment on table pgmb.dispatched is
    'Dispatched events, in slices of a subscription''s events in the order of their ids. id is the cursor of a group that has '
    'read the slice. It consists of the dispatch and, in the last 9 digits, the rank of the last event among the group''s events '
    'of the dispatch. If other subscriptions of the group are in the same dispatch, the slice is not alone, and this is the last '
    'rank of the dispatch. total is that of the dispatcher.';
create index dispatched_order on pgmb.dispatched (group_id, id);
create table pgmb.dispatched_default partition of pgmb.dispatched default;
comment on table pgmb.dispatched_default is 'Holds the dispatches that fit no other partition, so that dispatching never fails.';
-- Each partition needs a replica identity of its own.
alter table pgmb.published_0 replica identity full;
alter table pgmb.published_1 replica identity full;
alter table pgmb.published_2 replica identity full;
alter table pgmb.published_3 replica identity full;
alter table pgmb.dispatched_default replica identity full;
-- A slice has at most 280 ids. Of 28 bytes each in an array, they fit on a page, so the array is neither compressed nor moved out
-- of the row.
alter table pgmb.published alter column ids set storage plain;
alter table pgmb.published_0 alter column ids set storage plain;
alter table pgmb.published_1 alter column ids set storage plain;
alter table pgmb.published_2 alter column ids set storage plain;
alter table pgmb.published_3 alter column ids set storage plain;
alter table pgmb.dispatched alter column event_ids set storage plain;
alter table pgmb.dispatched_default alter column event_ids set storage plain;
-- Let PostgreSQL not move the short columns out of the row in place of the array.
alter table pgmb.dispatched
    alter column id set storage main, alter column group_id set storage main, alter column subscription_id set storage main;
alter table pgmb.dispatched_default
    alter column id set storage main, alter column group_id set storage main, alter column subscription_id set storage main;

create table pgmb.gap (
    group_id pgmb.group_id not null,
    low pgmb.event_id not null,
    high pgmb.event_id not null,
    primary key (group_id, low)
);
comment on table pgmb.gap is
    'For each group, ranges of cursors without dispatches to it: none is behind low and up to high. All dispatches of these ranges '
    'are committed. Readers step over a gap, so that an idle group does not cost more with each partition. '
    'pgmb.make_partitions() notes them: the range before the first dispatch of a group, and ranges with a whole partition.';

create table pgmb.subscription_groups (
    id pgmb.group_id primary key check (id <> ''),
    created_at timestamptz not null default now(),
    last_read_event_id pgmb.event_id,
    version bigint not null default 0,
    source text,
    updated_at timestamptz not null default now(),
    -- A slash separates the name of a group from that of a handler.
    constraint name_has_no_slash check (strpos(id, '/') = 0)
);
comment on table pgmb.subscription_groups is
    'Groups and their progress. last_read_event_id is the cursor, null for a group that has read nothing. version counts the '
    'batches of its feed; source is the place of the events. If the results of a group are in another database, the row in that '
    'database counts.';

create table pgmb.condition (
    id integer generated always as identity primary key,
    conditions_sql text not null,
    by_topic boolean not null default false,
    of_event boolean not null default true,
    by_params boolean not null default false,
    known_since timestamptz not null default now()
);
comment on table pgmb.condition is
    'Every condition that a subscription has or had. A role that may insert here can use new conditions. of_event: it depends on '
    'the event, as any condition but TRUE does. by_topic: it depends on the topic only, so it is evaluated once for each topic in '
    'a poll. by_params: the index on params finds the subscriptions.';
create unique index condition_text on pgmb.condition (md5(conditions_sql));

create table pgmb.subscriptions (
    id pgmb.subscription_id primary key default (
        'su' || lpad(to_hex((date_part('epoch', clock_timestamp()) * 1000000)::bigint), 13, '0')
        || left(replace(gen_random_uuid()::text, '-', ''), 9)),
    group_id pgmb.group_id not null references pgmb.subscription_groups on delete cascade,
    conditions_sql text not null default 'TRUE',
    params jsonb not null default '{}',
    identity text not null unique generated always as (md5(group_id || '/' || md5(conditions_sql) || params::text)) stored,
    last_active_at timestamptz not null default now(),
    expiry_interval interval,
    condition_id integer not null references pgmb.condition,
    created_at timestamptz not null default clock_timestamp(),
    -- The interval must not be shorter, because a reader reports its subscriptions as active only from time to time.
    constraint expiry_interval_is_at_least_a_second check (expiry_interval >= interval '1 second'),
    -- Maintenance computes the expiry of each subscription: a single value out of range would make it fail for all.
    constraint it_expires_in_a_year_up_to_9999 check (
        last_active_at + expiry_interval between '1970-01-01 00:00:00+00' and '9999-12-31 00:00:00+00')
);
comment on table pgmb.subscriptions is
    'The events that a group gets: those for which conditions_sql is true, an expression over e (the event) and s (this row). A '
    'group has each pair of conditions and params only once, which identity ensures. A subscription that was not active for '
    'expiry_interval expires.';
create index subscriptions_group on pgmb.subscriptions (group_id);
create index subscriptions_condition on pgmb.subscriptions (condition_id);
create index subscriptions_params on pgmb.subscriptions using gin (params) with (fastupdate = off);

create view pgmb.claims as
select c.consumer, c.address ->> 'group' as group_id, c.version, c.from_version, c.batch_id, c.attempt, c.error, c.batch,
       (c.after #>> '{}')::pgmb.event_id as after, (c.upto #>> '{}')::pgmb.event_id as upto, c.elsewhere, c.claimed_at,
       c.leased_by, c.leased_until
from pgchange.claim as c
where c.kind = 'event';
comment on view pgmb.claims is
    'The batch that each group claimed last, in the database of the events. after: the cursor before the batch. upto: the cursor '
    'behind it, or the point to which the group was moved since. elsewhere: the cursor is in another database, so this row shows '
    'how far the group has read.';

create table pgmb.fault (
    id bigint generated always as identity primary key,
    group_id pgmb.group_id,
    subscription_id pgmb.subscription_id not null,
    event_ids text[] not null,
    message text not null,
    occurred_at timestamptz not null default clock_timestamp()
);
create index fault_by_group on pgmb.fault (group_id);
comment on table pgmb.fault is
    'Events that were not dispatched to a subscription, because its condition failed for them. If group_id is null, they were '
    'addressed to a subscription that does not exist any more. pgmb.replay_faults tries again if the subscription exists.';
