-- Before the schema mbus is dropped: drop every queue with its views and roles. The extension hstore stays.

do $$
declare
    each_queue text;
begin
    for each_queue in select q.qname from mbus.queue as q order by q.qname loop
        perform mbus.drop_queue(each_queue);
    end loop;
    perform mbus.drop_role('admin');
    if to_regnamespace('pgchange') is not null then
        revoke select on pgchange.registered from public;
        revoke execute on function pgchange.ours(name, boolean), pgchange.with_grant(name, text, text),
            pgchange.status(integer, text) from public;
        revoke usage on schema pgchange from public;
    end if;
end
$$;
