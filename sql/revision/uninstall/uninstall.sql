-- Before the schema revision goes: the capture on every tracked table; the tables themselves stay as they are.

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
                message = format('the capture on %s cannot be taken off: %s', tracked, sqlerrm),
                hint = format('as its owner: select revision.untrack(%L); then again', tracked);
        end;
    end loop;
    -- What was a partition of a table that is gone is still captured.
    perform revision.drop_capture(t.function) from revision.tracked as t;
end
$$;
