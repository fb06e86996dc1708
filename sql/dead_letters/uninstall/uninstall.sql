-- Take out the schema dead_letter: what consumers gave up is forgotten.

do $$
declare
    needed_by text := (
        select string_agg(distinct k.schema::text, ', ') from dead_letter.kind as k
        where pg_catalog.to_regnamespace(pg_catalog.quote_ident(k.schema)) is not null);
begin
    if needed_by is not null then
        raise invalid_parameter_value using
            message = pg_catalog.format('%s %s dead_letters', needed_by, case when needed_by like '%,%' then 'need' else 'needs' end),
            hint = pg_catalog.format('remove %s first, or all at once', needed_by);
    end if;
end
$$;
drop schema dead_letter cascade;
