-- The roles and their rights. PUBLIC has none.

select pgchange.add_role(
    'pubsub', 'consumer', told =>
    'Let a role consume the commit queue, in the database of the commits and in that of the results. Such roles trust each other: '
    'each can advance any consumer.',
    includes => 'pgchange.consumer',
    objects => array[
        'usage on schema revision',
        'execute on function revision.here()',
        'select on revision.commit_queue, revision.branch, revision.gap',
        'select on pubsub.watermark, pubsub.out_of_order, pubsub.installed'
    ],
    functions => $$
        current_snapshot unread cursor_of changes keyed_changes check_branch choose(bigint,jsonb,integer,boolean) over_gap has_narrow_plan count_unread count_behind lag_of lags lag faults point passed
        check_origin check_position check_positions register position lock_watermark poll poll_keyed status held_back_by kept mark
    $$);

select pgchange.add_role(
    'pubsub', 'admin', told =>
    'Let a role administer consumers: skip, send again, move, drop, repair, and trim the history.',
    includes => 'pubsub.consumer pgchange.admin',
    objects => array[
        'select on revision.trimmed'
    ],
    functions => $$
        trim_commit_queue letter_content
    $$);

select pgchange.close_schema('pubsub', unpinned => $$
        at changes keyed_changes check_known choose(text,bigint,jsonb,integer,boolean,boolean,jsonb) cursor_of follow_snapshot lag_of
        over_gap position_of put restored_in_part undecided unread
    $$);
