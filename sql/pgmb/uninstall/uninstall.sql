-- Take out the schema pgmb, with every event in it; users' tables stay as they are.

drop schema pgmb cascade;
