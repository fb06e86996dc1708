-- The catalogue of a cluster: replicasets, instances, their addresses, buckets; and the log of its changes.
--
-- The catalogue's tables have the names and columns that their users know. Every change of theirs that a client must hear of
-- becomes an event of the log, numbered (term, index) in the order of commit.

create schema topology;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, topology, pg_temp;
comment on schema topology is 'The catalogue of a cluster, and the log of its changes.';

select pgchange.keep_versions('topology', version => 1);

create table topology._pico_replicaset (
    name text not null unique check (name <> ''),
    uuid text not null unique check (uuid <> ''),
    current_master_name text not null,
    target_master_name text not null,
    tier text not null,
    weight double precision,
    weight_origin text not null default 'auto',
    state text not null default 'ready',
    current_config_version bigint not null default 0 check (current_config_version >= 0),
    target_config_version bigint not null default 0 check (target_config_version >= 0),
    promotion_vclock jsonb not null default '{}',
    primary key (name, uuid)
);
comment on table topology._pico_replicaset is
    'Groups of instances that hold the same data. current_master_name is the instance that is written to, empty for none.';

create table topology._pico_instance (
    name text not null unique check (name <> ''),
    uuid text not null unique check (uuid <> ''),
    raft_id bigint not null unique check (raft_id >= 0),
    replicaset_name text not null,
    current_state jsonb not null check (
        jsonb_typeof(current_state) = 'array' and coalesce(jsonb_typeof(current_state -> 0), '') = 'string'),
    target_state jsonb not null check (jsonb_typeof(target_state) = 'array'),
    failure_domain jsonb not null default '{}',
    tier text not null,
    picodata_version text not null default '',
    primary key (name, uuid, raft_id)
);
comment on table topology._pico_instance is
    'Servers. A state is [state, incarnation], where the state is Online, Offline or Expelled.';

create table topology._pico_peer_address (
    raft_id bigint not null check (raft_id >= 0),
    address text not null check (address <> ''),
    connection_type text not null check (connection_type in ('iproto', 'pgproto')),
    primary key (raft_id, connection_type)
);
comment on table topology._pico_peer_address is 'Where instances are; clients hear of pgproto addresses only.';

create table topology._pico_bucket (
    tier_name text not null,
    bucket_id_start bigint not null check (bucket_id_start >= 0),
    -- What comes behind a range must be a number, too.
    bucket_id_end bigint not null check (bucket_id_end >= bucket_id_start and bucket_id_end < 9223372036854775807),
    state text not null check (state in ('active', 'copying', 'copied', 'aborting-copy')),
    current_replicaset_name text not null,
    target_replicaset_name text,
    primary key (tier_name, bucket_id_start)
);
comment on table topology._pico_bucket is
    'Ranges of buckets and the replicaset that owns each: target_replicaset_name once a range is copied, until then '
    'current_replicaset_name. A target of null means the current one.';

create index pico_bucket_unsettled on topology._pico_bucket (tier_name, bucket_id_start) where state <> 'active';

create table topology.term (
    term bigint primary key check (term > 0),
    system_identifier bigint not null,
    timeline bigint not null,
    started_at timestamptz not null,
    database oid not null,
    log_file oid not null
);
comment on table topology.term is
    'Terms of the catalogue, and where its log is in each: a new one begins when its server was promoted, restored or started '
    'again, or its log was restored into another database or another file, for then events that clients heard of may be lost. '
    'An event of a later term is later, whatever its index.';

create sequence topology.event_index;
comment on sequence topology.event_index is 'Numbers the events, by one writer at a time. Gaps are normal.';

create table topology.log (
    term bigint not null,
    index bigint not null,
    event json not null,
    written_at timestamptz not null default clock_timestamp(),
    primary key (term, index)
);
comment on table topology.log is 'The events, as clients get them, in the order in which they were committed.';

select pgchange.keep_origin('topology');

create table topology.consumer (
    consumer_id text primary key check (consumer_id <> ''),
    term bigint not null default 0,
    index bigint not null default 0,
    version bigint not null default 0,
    source text,
    updated_at timestamptz not null default now()
);
comment on table topology.consumer is
    'Feeds of the log and the last event that each has processed, where its results are. version counts the batches '
    'and the moves by hand, source is the place of the catalogue.';

create table topology.trimmed (
    term bigint not null,
    index bigint not null,
    events bigint not null,
    trimmed_at timestamptz not null default now(),
    primary key (term, index)
);
comment on table topology.trimmed is 'Events that are gone: how many, up to which.';

create table topology.relay_secret (
    id integer primary key default 1 check (id = 1),
    secret bytea not null default sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))
);
comment on table topology.relay_secret is
    'The secret from which relays derive the salts of users that they do not know. One row, once a relay has asked for it.';
