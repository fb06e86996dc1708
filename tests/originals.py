"""Small replicas of the original systems, made from the manuals of their schemas, with the objects that an installation
may find."""

from __future__ import annotations

REVISION = """
create schema revision;
create table revision.commit_queue (id bigserial, commit_id bigint, branch_id bigint, txid bigint default txid_current());
create table revision.commit (id bigserial primary key, branch_id bigint not null default 0);
create function revision.enqueue() returns trigger language plpgsql as $$
begin
    insert into revision.commit_queue (commit_id, branch_id) values (new.id, new.branch_id);
    return null;
end
$$;
create trigger enqueue after insert on revision.commit for each row execute function revision.enqueue();
create table public.item (id bigserial primary key, branch_id bigint not null default 0);
create trigger enqueue after insert on public.item for each row execute function revision.enqueue();
"""
PUBSUB = """
create schema pubsub;
create table pubsub.watermark (consumer_id text, branch_id bigint, txid bigint default 0, commit_id bigint default 0);
create table pubsub.out_of_order (consumer_id text, branch_id bigint, txid bigint, commit_id bigint);
create function pubsub.lock_watermark(consumer_id text, branch_id bigint) returns pubsub.watermark language sql as
    'select w from pubsub.watermark as w where (w.consumer_id, w.branch_id) = ($1, $2) for update';
"""
TUBE = """
create schema tube;
create table tube.q (seq bigserial, op char(1), shard integer, ids bigint[], payload jsonb, ts timestamptz default now());
create function tube.tube_ensure_exists(tube text, partitions integer default 1, predicate text default null)
    returns void language sql as '';
create function tube.tube_table_ensure_attached(tube text, tbl regclass, shard integer default null)
    returns void language sql as '';
create function tube.q_touch(shard integer, ids bigint[], op char) returns void language sql as
    'insert into tube.q (op, shard, ids) values ($3, $1, $2)';
create function tube.q_trigger() returns trigger language plpgsql as $$
begin
    perform tube.q_touch(tg_argv[0]::integer, array(select id from added), 'I');
    return null;
end
$$;
create table public.item (id bigserial primary key);
create trigger item_q_after_insert_trigger after insert on public.item referencing new table as added
    for each statement execute function tube.q_trigger(1);
"""
PGMB = """
create schema pgmb;
create table pgmb.events (id bigserial primary key, topic text, payload jsonb, metadata jsonb, subscription_id text);
create function pgmb.serialise_record_for_event(tabl oid, op text, record record, out serialised jsonb, out emit boolean)
    language plpgsql as 'begin serialised := to_jsonb(record); emit := true; end';
create function pgmb.create_topic(schema_name text, table_name text, kind text) returns text language sql as
    $$select lower($1 || '.' || $2 || '.' || $3)$$;
create function pgmb.push_change() returns trigger language plpgsql as $$
begin
    insert into pgmb.events (topic, payload)
    select pgmb.create_topic(tg_table_schema::text, tg_table_name::text, tg_op), s.serialised
    from added, pgmb.serialise_record_for_event(tg_relid, tg_op, added) as s;
    return null;
end
$$;
create function pgmb.push_table_mutations(tbl regclass) returns void language plpgsql as $$
begin
    execute format(
        'create trigger push_inserts after insert on %s referencing new table as added for each statement '
        'execute function pgmb.push_change()', tbl);
end
$$;
create function pgmb.read_next_events(gid varchar) returns setof pgmb.events language sql as 'select * from pgmb.events';
create table public.item (id bigserial primary key);
select pgmb.push_table_mutations('public.item');
"""
MBUS = """
create schema mbus;
create table mbus.qt_model (id bigserial, added timestamp default now(), iid text, data json);
create table mbus."qt$q" (like mbus.qt_model including all);
create function mbus.create_queue(qname text, consumers_cnt integer) returns void language sql as '';
create function mbus.create_consumer(cname text, qname text) returns void language sql as '';
create function mbus.post_q(data json) returns text language sql as
    'insert into mbus."qt$q" (data) values ($1) returning id::text';
create view public.item as select null::bigint as id, data from mbus."qt$q";
create function mbus.post_through_view() returns trigger language plpgsql as $$
begin
    perform mbus.post_q(coalesce(new.data, '{}'));
    return new;
end
$$;
create trigger post_new instead of insert on public.item for each row execute function mbus.post_through_view();
"""
TOPOLOGY = """
create schema topology;
create table topology._pico_instance (name text, uuid text, current_state json);
create table public.item (id bigserial primary key);
"""
ORIGINALS = {
    "revision": REVISION,
    "pubsub": PUBSUB + "create table public.item (id bigserial primary key);",
    "tube": TUBE,
    "pgmb": PGMB,
    "mbus": MBUS,
    "topology": TOPOLOGY,
}
WRITE = "insert into public.item (id) values (%s)"
"""A write of the application. The original system captures it if it captures writes."""
