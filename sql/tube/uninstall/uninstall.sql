-- Take out the schema tube: every table is detached and every tube removed with its pods; users' tables stay as they are.

do $$
declare
    name text;
begin
    for name in select t.name from tube.tube as t order by t.name loop
        perform tube.tube_ensure_absent(name);
    end loop;
end
$$;
delete from dead_letter.kind where schema = 'tube';
drop schema tube cascade;
