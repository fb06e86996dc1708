-- The roles and their rights. PUBLIC has none, and a writer of an attached table needs none. The roles may execute functions. A
-- role also needs privileges on the pods of each tube. INSERT lets it touch ids and attach tables, SELECT and DELETE let it
-- consume. Only the owner of the pods changes the tube. Grant INSERT on some columns only: a role that may set the seq or the txid
-- of a pod can hide earlier pods from workers.

select pgchange.add_role(
    'tube', 'consumer', told =>
    'Let a role use tubes, as far as its GRANTs on their pods allow. It needs INSERT (op, shard, ids, payload, ts) to touch ids and '
    'to attach tables, SELECT and DELETE to consume. A role that attaches is trusted: it can touch any id.',
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
    'Let a role make tubes in schemas where it may create tables, and change and remove its own tubes.',
    includes => 'tube.consumer',
    objects => array[
        'insert, update, delete on tube.tube'
    ]);

alter table tube.tube enable row level security;
-- If the pods of a tube were dropped, the tube has no owner, and any role that may make tubes may remove it.
create policy seen on tube.tube for select using (
    has_table_privilege(pods, 'select, delete') or has_any_column_privilege(pods, 'insert') or not tube.are_pods(pods, name));
create policy owned on tube.tube
    using (
        pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = pods), 'usage') or not tube.are_pods(pods, name))
    with check (coalesce(pg_has_role((select c.relowner from pg_catalog.pg_class as c where c.oid = pods), 'usage'), true));

alter table tube.attachment enable row level security;
create policy seen on tube.attachment for select using (tube in (select t.name from tube.tube as t));
-- The predicate in it runs with the rights of the table's owner, so only that owner may write it.
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
-- A role that lost its right on the pods can still record that changes are lost.
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

select pgchange.close_schema('tube', types => 'judged_row keyset progress', unpinned => $$
        are_few claim_again claim_next claimed fit_into_one insert_pods is_in_part lock_key may_put_ids op_of part_of place_in_order put_many
        sort_key still_fits take_lock touched tube_ensure_exists tube_pods_insert united worker_of
    $$);
