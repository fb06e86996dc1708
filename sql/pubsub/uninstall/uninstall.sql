-- Take out the schema pubsub: every consumer's progress is forgotten, results stay.

drop schema pubsub cascade;
