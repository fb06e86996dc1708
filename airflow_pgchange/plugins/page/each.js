// A view that has a section for each database that answers.
import { chakra, h, useCallback } from "./shell.js";
import { useLive } from "./api.js";
import { Empty, Section } from "./pieces.js";

const One = ({ view: { ask, title, Shown }, database, ...rest }) => {
  const { connection } = database;
  const { said, trouble } = useLive(useCallback(() => ask(connection), [ask, connection]));
  const heading = `${title} in ${connection}`;
  const problem = trouble ?? said?.trouble;
  if (problem) return h(Section, { title: heading }, h(Empty, null, problem));
  return said && h(Shown, { found: said, title: heading, database, ...rest });
};

// view: how a database is asked (ask), what for (title), and what shows the answer (Shown).
export const eachDatabase = (view) =>
  ({ said, confirm }) => {
    const answering = said.databases.filter((database) => database.state !== "down");
    if (!answering.length) return h(chakra.Box, { mt: 6 }, h(Empty, null, "No database answers: the overview says why."));
    return answering.map((database) =>
      h(One, {
        key: database.connection,
        view,
        database,
        consumers: said.consumers.filter((one) => [one.connection, one.source].includes(database.connection)),
        confirm,
      }),
    );
  };
