-- The triggers that put a commit in the queue of its branch.

-- Put a commit of trunk or of a stable branch in the queue of its branch. Put a commit of trunk that is inserted approved in the
-- queue of the approved branch, too.
create function revision.commit_inserted() returns trigger
language plpgsql security definer as $$
begin
    insert into revision.commit_queue (commit_id, branch_id)
    select c.id, c.branch_id
    from added as c
    where c.branch_id = 0
       or exists (select from revision.branch as b where b.id = c.branch_id and b.type = 'stable' and b.key is null)
    union all
    select c.id, b.id
    from added as c
    join revision.branch as b on b.type = 'approved'
    where c.branch_id = 0 and c.state = 'approved';
    return null;
end
$$;

-- Put a commit of trunk that becomes approved in the queue of the approved branch.
create function revision.commit_updated() returns trigger
language plpgsql security definer as $$
begin
    insert into revision.commit_queue (commit_id, branch_id)
    select c.id, b.id
    from added as c
    join removed as was on was.id = c.id
    join revision.branch as b on b.type = 'approved'
    where c.branch_id = 0 and c.state = 'approved' and was.state <> 'approved';
    return null;
end
$$;

create trigger inserted after insert on revision.commit
    referencing new table as added
    for each statement execute function revision.commit_inserted();
create trigger updated after update on revision.commit
    referencing old table as removed new table as added
    for each statement execute function revision.commit_updated();
