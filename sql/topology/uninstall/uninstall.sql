-- Take out the schema topology: the catalogue, its log, and every consumer's progress and dead letters.

delete from dead_letter.kind where schema = 'topology';
drop schema topology cascade;
