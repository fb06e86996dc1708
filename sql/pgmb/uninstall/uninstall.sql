-- Before the schema pgmb is dropped, with every event in it: remove the capture from every table whose mutations were published.
-- The tables themselves stay as they are, and so does the role pgmb_reader.

do $$
declare
    pushed regclass;
begin
    for pushed in
        select t.tbl from pgmb.pushed_table as t join pg_catalog.pg_class as c on c.oid = t.tbl
    loop
        begin
            perform pgmb.stop_table_mutations_push(pushed);
        exception when insufficient_privilege then
            raise insufficient_privilege using
                message = format('the capture on %s cannot be removed: %s', pushed, sqlerrm),
                hint = format('as its owner: select pgmb.stop_table_mutations_push(%L); then uninstall again', pushed);
        end;
    end loop;
    perform pgmb.drop_left_over();
end
$$;
