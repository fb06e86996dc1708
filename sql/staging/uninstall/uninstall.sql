-- Take out the schema pgchange_staging, with what batches in work have staged: they are tried again.

drop schema pgchange_staging cascade;
