-- Before the schema tube goes: every table is detached and every tube removed with its pods; users' tables stay as they are.

do $$
declare
    name text;
begin
    for name in select t.name from tube.tube as t order by t.name loop
        perform tube.remove(name);
    end loop;
    perform tube.drop_lost_touches();
end
$$;
