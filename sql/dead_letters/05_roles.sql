-- Who may do what. PUBLIC may do nothing; which letters, each kind decides by its letter_rights().

create function dead_letter.grant_admin(role regrole) returns void
language plpgsql
set search_path = pg_catalog, dead_letter, pg_temp
as $$
begin
    perform pgchange.grant_viewer(role);
    execute format($grants$
        grant usage on schema dead_letter to %1$s;
        grant select on dead_letter.installed, dead_letter.kind, dead_letter.letter to %1$s;
        grant insert (kind, consumer, address, content, changes, reason, error, attempts, batch_id), delete
            on dead_letter.letter to %1$s;
        grant execute on all functions in schema dead_letter to %1$s;
        revoke execute on function dead_letter.grant_admin(regrole) from %1$s
    $grants$, role);
end
$$;
comment on function dead_letter.grant_admin(regrole) is
    'Let a role see and keep the letters that its rights on their feeds allow. The grant functions of those feeds call this one.';

alter table dead_letter.letter enable row level security;
create policy seen on dead_letter.letter for select using (dead_letter.may('see', kind, address));
create policy kept on dead_letter.letter using (dead_letter.may('keep', kind, address));

revoke all on all routines in schema dead_letter from public;
revoke all on all tables in schema dead_letter from public;
revoke all on schema dead_letter from public;
