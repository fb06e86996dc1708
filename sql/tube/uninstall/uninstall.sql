-- Take out the schema tube: every table is detached and every tube removed with its pods.

select tube.tube_ensure_absent(t.name) from tube.tube as t;
drop schema tube cascade;
