// A view with a section for each database that answers.
import { chakra, h, useCallback, useEffect, useState } from "./shell.js";
import { useLive } from "./api.js";
import { Empty, Section } from "./pieces.js";

const One = ({ view: { ask, title, Shown, isEmpty }, database, report, ...rest }) => {
  const { connection } = database;
  const { said, failure } = useLive(useCallback(() => ask(connection), [ask, connection]));
  const empty = said !== null && isEmpty(said);
  useEffect(() => report(connection, empty), [report, connection, empty]);
  const heading = `${title} in ${connection}`;
  const problem = failure ?? said?.failure;
  if (problem) return h(Section, { title: heading }, h(Empty, null, problem));
  return said && h(Shown, { found: said, title: heading, database, ...rest });
};

// view: the request to a database (ask), the heading (title), the component for the answer (Shown), and whether the answer is
// empty (isEmpty). Databases with empty answers come last.
export const eachDatabase = (view) =>
  ({ said, confirm }) => {
    const [empty, setEmpty] = useState(new Set());
    const report = useCallback(
      (connection, isEmpty) =>
        setEmpty((before) => {
          if (before.has(connection) === isEmpty) return before;
          return isEmpty ? new Set([...before, connection]) : new Set([...before].filter((one) => one !== connection));
        }),
      [],
    );
    const answering = said.databases
      .filter((database) => database.state !== "down")
      .sort((one, other) => empty.has(one.connection) - empty.has(other.connection));
    if (!answering.length) return h(chakra.Box, { mt: 6 }, h(Empty, null, "No database answers. The overview shows the reason."));
    return answering.map((database) =>
      h(One, {
        key: database.connection,
        view,
        database,
        report,
        consumers: said.consumers.filter((one) => [one.connection, one.source].includes(database.connection)),
        confirm,
      }),
    );
  };
