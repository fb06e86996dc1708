-- Who may do what. PUBLIC may do nothing; a writer of an attached table needs nothing. Who may use these functions at all is
-- granted here; which tubes, by GRANTs on their pods: INSERT touches and attaches, SELECT and DELETE work, their owner changes.
-- INSERT of some columns is enough, and better: a role that may set a pod's seq or txid can hide from workers what is behind it.

select pgchange.add_role(
    'tube', 'consumer', told =>
    'Let a role touch, attach its tables to, and work those tubes whose pods it was granted INSERT (op, shard, ids, payload, ts) '
    'on, or SELECT and DELETE. A role that attaches is trusted: it can touch any id.',
    includes => 'pgchange.admin pgchange.consumer pgchange.reader',
    objects => array[
        'usage, select on sequence tube.seq',
        'select on tube.installed, tube.tube, tube.attachment, tube.detached, tube.moved, tube.worker, tube.fault, tube.backfill',
        'insert, update, delete on tube.attachment, tube.detached, tube.moved, tube.worker, tube.backfill',
        'insert (tube, tbl, kind, ids, message), delete on tube.fault'
    ],
    functions => '*');

select pgchange.add_role(
    'tube', 'owner', told =>
    'Let a role make tubes, in schemas where it may create tables, change and remove its own.',
    includes => 'tube.consumer',
    objects => array[
        'insert, update, delete on tube.tube'
    ]);

alter table tube.tube enable row level security;
-- A tube whose pods were dropped is nobody's: whoever may make tubes may clear it away.
create policy seen on tube.tube for select using (
    has_table_privilege(pods, 'select, delete') or has_any_column_privilege(pods, 'insert') or not tube.are_pods(pods, name));
create policy owned on tube.tube
    using (
        pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = pods), 'usage') or not tube.are_pods(pods, name))
    with check (coalesce(pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = pods), 'usage'), true));

alter table tube.attachment enable row level security;
create policy seen on tube.attachment for select using (tube in (select t.name from tube.tube as t));
-- The predicate in it runs with the rights of the table's owner: nobody else may write it.
create policy attached on tube.attachment for insert with check (
    exists (select from tube.tube as t where t.name = tube and has_any_column_privilege(t.pods, 'insert'))
    and pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tbl), 'usage'));
create policy changed on tube.attachment for update using (
    exists (select from tube.tube as t where t.name = tube and has_any_column_privilege(t.pods, 'insert'))
    and pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tbl), 'usage'));
create policy detached on tube.attachment for delete using (
    exists (
        select from tube.tube as t
        where t.name = tube and (
            pg_has_role((select p.relowner from pg_catalog.pg_class as p where p.oid = t.pods), 'usage')
            or not tube.are_pods(t.pods, t.name)
            or has_any_column_privilege(t.pods, 'insert')
               and pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tbl), 'usage'))));

alter table tube.detached enable row level security;
create policy seen on tube.detached for select using (tube in (select t.name from tube.tube as t));
create policy owned on tube.detached using (
    exists (
        select from tube.tube as t
        where t.name = tube and (
            pg_has_role((select p.relowner from pg_catalog.pg_class as p where p.oid = t.pods), 'usage')
            or not tube.are_pods(t.pods, t.name)
            or has_any_column_privilege(t.pods, 'insert')
               and pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tbl), 'usage'))));

alter table tube.moved enable row level security;
create policy seen on tube.moved for select using (tube in (select t.name from tube.tube as t));
create policy touched on tube.moved for insert with check (
    exists (select from tube.tube as t where t.name = tube and has_any_column_privilege(t.pods, 'insert')));
create policy worked on tube.moved for delete using (
    exists (select from tube.tube as t where t.name = tube and has_table_privilege(t.pods, 'delete')));

alter table tube.worker enable row level security;
create policy seen on tube.worker for select using (tube in (select t.name from tube.tube as t));
create policy worked on tube.worker using (
    exists (select from tube.tube as t where t.name = tube and has_table_privilege(t.pods, 'delete')));

alter table tube.fault enable row level security;
create policy seen on tube.fault for select using (tube in (select t.name from tube.tube as t));
create policy touched on tube.fault for insert with check (
    exists (select from tube.tube as t where t.name = tube and has_any_column_privilege(t.pods, 'insert')));
-- Whose right to the pods was taken away notes at least that changes are lost.
create policy lost on tube.fault for insert with check (
    pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = tbl), 'usage') and tube.is_attached(tube, tbl));
create policy worked on tube.fault for delete using (
    exists (select from tube.tube as t where t.name = tube and has_table_privilege(t.pods, 'delete')));
create policy backfilled on tube.fault for delete using (
    kind = 'missed' and exists (select from tube.tube as t where t.name = tube and has_any_column_privilege(t.pods, 'insert')));

alter table tube.backfill enable row level security;
create policy seen on tube.backfill for select using (tube in (select t.name from tube.tube as t));
create policy touched on tube.backfill using (
    exists (select from tube.tube as t where t.name = tube and has_any_column_privilege(t.pods, 'insert')));

select pgchange.close_schema('tube', types => 'keyset progress', unpinned => $$
        claim_again claim_next claimed insert_pods is_in_part lock_key place place_in_order take_lock tube_ensure_exists tube_pods_insert
        worker_of
    $$);
