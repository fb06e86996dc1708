-- Take out the schema pubsub: every consumer's progress is forgotten with its dead letters, results stay.

delete from dead_letter.kind where schema = 'pubsub';
drop schema pubsub cascade;
