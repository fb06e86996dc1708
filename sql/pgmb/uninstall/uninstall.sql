-- Before the schema pgmb goes, with every event in it: the capture on every table whose mutations were published; the tables
-- themselves stay as they are, and so does the role pgmb_reader.

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
                message = format('the capture on %s cannot be taken off: %s', pushed, sqlerrm),
                hint = format('as its owner: select pgmb.stop_table_mutations_push(%L); then again', pushed);
        end;
    end loop;
    perform pgmb.drop_left_over();
end
$$;
