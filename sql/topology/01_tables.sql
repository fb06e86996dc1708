-- The catalogue of a cluster: replicasets, instances, their addresses, buckets; and the log of its changes.
--
-- The catalogue's tables have the names and columns of the cluster that they describe. Each change that clients need becomes an
-- event of the log. Events are numbered (term, index) in the order of commit.

create schema topology;
select pg_catalog.set_config('pgchange.path_before', pg_catalog.current_setting('search_path'), true);
set local search_path = pg_catalog, topology, pg_temp;
comment on schema topology is 'The catalogue of a cluster and the log of its changes.';

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
    'Groups of instances that hold the same data. current_master_name is the instance that takes writes, or empty.';

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
    'Servers of the cluster. A state is [state, incarnation], where state is Online, Offline or Expelled.';

create table topology._pico_peer_address (
    raft_id bigint not null check (raft_id >= 0),
    address text not null check (address <> ''),
    connection_type text not null check (connection_type in ('iproto', 'pgproto')),
    primary key (raft_id, connection_type)
);
comment on table topology._pico_peer_address is 'Addresses of instances. Clients get the pgproto addresses only.';

create table topology._pico_bucket (
    tier_name text not null,
    bucket_id_start bigint not null check (bucket_id_start >= 0),
    -- Less than the maximum, so that the end plus one is a bigint too.
    bucket_id_end bigint not null check (bucket_id_end >= bucket_id_start and bucket_id_end < 9223372036854775807),
    state text not null check (state in ('active', 'copying', 'copied', 'aborting-copy')),
    current_replicaset_name text not null,
    target_replicaset_name text,
    primary key (tier_name, bucket_id_start)
);
comment on table topology._pico_bucket is
    'Ranges of buckets and their owners. The owner is current_replicaset_name until the state is copied, then '
    'target_replicaset_name. A null target means the current replicaset.';

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
    'Terms of the catalogue, each with the server and the file of the log. A new term begins after a promotion, a restore or a '
    'restart of the server. It also begins after a restore of the log into another database or file. Each of these may have lost '
    'events that clients already have. Events are ordered by term first, then by index.';

create sequence topology.event_index;
comment on sequence topology.event_index is 'The index of the next event. Only one transaction writes at a time. Gaps are normal.';

create table topology.log (
    term bigint not null,
    index bigint not null,
    event json not null,
    written_at timestamptz not null default clock_timestamp(),
    primary key (term, index)
);
comment on table topology.log is 'The events as JSON for clients, numbered in the order of commit.';

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
    'Consumers of the log, each with the last event that it has processed. The row is in the database of the results. version '
    'counts batches and manual moves; source identifies the database of the catalogue.';

create table topology.trimmed (
    term bigint not null,
    index bigint not null,
    events bigint not null,
    trimmed_at timestamptz not null default now(),
    primary key (term, index)
);
comment on table topology.trimmed is 'Deleted events of the log: how many, and the last of them.';

create table topology.relay_secret (
    id integer primary key default 1 check (id = 1),
    secret bytea not null default sha256(uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid()))
);
comment on table topology.relay_secret is
    'The secret from which relays derive the password salts of unknown users. Has one row after the first request of a relay.';
