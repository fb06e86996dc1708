-- Before the schema revision is dropped: remove the capture from every tracked table. The tables themselves stay as they are.

do $$
declare
    tracked regclass;
begin
    for tracked in
        select t.tbl from revision.tracked as t join pg_catalog.pg_class as c on c.oid = t.tbl
    loop
        begin
            perform revision.untrack(tracked);
        exception when insufficient_privilege then
            raise insufficient_privilege using
                message = format('the capture on %s cannot be removed: %s', tracked, sqlerrm),
                hint = format('as its owner: select revision.untrack(%L); then uninstall again', tracked);
        end;
    end loop;
    -- Former partitions of a dropped table are still captured.
    perform revision.drop_capture(t.function) from revision.tracked as t;
end
$$;
