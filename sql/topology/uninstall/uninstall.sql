-- Take out the schema topology: the catalogue, its log, and every consumer's progress.

drop schema topology cascade;
