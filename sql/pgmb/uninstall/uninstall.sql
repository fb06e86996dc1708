-- Take out the schema pgmb, with every event in it, and the capture on every table whose mutations were published; the tables
-- themselves stay as they are, and so does the role pgmb_reader. What others have made of ours must go first, by their hand.

do $$
declare
    pushed regclass;
    theirs text;
begin
    for pushed in
        select t.tbl from pgmb.pushed_table as t join pg_catalog.pg_class as c on c.oid = t.tbl
    loop
        begin
            perform pgmb.stop_table_mutations_push(pushed);
        exception when insufficient_privilege then
            raise insufficient_privilege using
                message = format('the capture on %s cannot be taken off: %s', pushed, sqlerrm),
                hint = format('as its owner: select pgmb.stop_table_mutations_push(%L); then again', pushed);
        end;
    end loop;
    perform pgmb.drop_left_over();

    with inside as (
        select d.classid, d.objid from pg_catalog.pg_depend as d
        where d.refclassid = 'pg_catalog.pg_namespace'::regclass and d.refobjid = 'pgmb'::regnamespace
    ), of_extensions as (
        select i.classid, i.objid, d.refobjid as extension from inside as i
        join pg_catalog.pg_depend as d on (d.classid, d.objid) = (i.classid, i.objid) and d.deptype = 'e'
    ), ours as (
        select i.classid, i.objid from inside as i except select e.classid, e.objid from of_extensions as e
    ), using_ours as (
        select d.classid, d.objid, d.objsubid from pg_catalog.pg_depend as d
        join ours as o on (o.classid, o.objid) = (d.refclassid, d.refobjid)
        where d.deptype <> 'e'
        union
        -- An extension that somebody has put into the schema, whole or a part of it, stands for all that belongs to it.
        select o.classid, o.objid, 0 from ours as o where o.classid = 'pg_catalog.pg_extension'::regclass
        union
        select 'pg_catalog.pg_extension'::regclass, e.extension, 0 from of_extensions as e
    )
    select string_agg(distinct i.type || ' ' || i.identity, ', ') into theirs
    from using_ours as u
    cross join lateral pg_catalog.pg_identify_object(u.classid, u.objid, u.objsubid) as i
    cross join lateral pg_catalog.pg_identify_object_as_address(u.classid, u.objid, u.objsubid) as a
    where coalesce(i.schema, a.object_names[1]) not in ('pgmb', 'pg_toast');
    if theirs is not null then
        raise exception using errcode = 'PC008', message = format('schema pgmb is used by others: %s', theirs),
            hint = 'removing pgmb would remove these too: drop or change them first';
    end if;
end
$$;
delete from dead_letter.kind where schema = 'pgmb';
drop schema pgmb cascade;
