// Findings that need attention, as health words them, with their databases.
import { chakra, h } from "./shell.js";
import { Act, Command, DagReasons, Name, NamedLink, OfConsumer, Section, State } from "./pieces.js";
import { ACTIONS, Cell, Dags, Rows } from "./table.js";
import { at } from "./views.js";
import { called, span } from "./words.js";
import * as plans from "./plans.js";

const { Table, Text } = chakra;

const severeFirst = (one, other) => one.severity.localeCompare(other.severity);

const unanswered = (database) => ({
  connection: database.connection,
  kind: "database",
  severity: "error",
  consumer: null,
  told: database.failure ?? "The database does not answer.",
  call: null,
  dag_reasons: [],
});

// The subject of a finding, with a link to its view.
const About = ({ one, consumers }) => {
  const about = one.consumer ?? one.kind;
  if (one.kind === "letters") return h(NamedLink, { to: at("letters") }, about);
  return h(OfConsumer, { consumer: called(consumers, one.connection, one.kind, one.consumer) }, about);
};

// A command may begin with a text that says what it is for.
const Fix = ({ call }) => {
  const [, purpose, command] = call.match(/^(to [^:]+): (.+)$/s) ?? [null, null, call];
  return [purpose && h(Text, { key: "purpose" }, `${purpose}:`), h(Command, { key: "command" }, command)];
};

const Finding = ({ one, consumers }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: one.severity })),
    h(
      Cell,
      { minW: "11rem", maxW: "18rem" },
      h(About, { one, consumers }),
      h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, `in ${one.connection}`),
    ),
    h(
      Cell,
      { minW: "14rem", overflowWrap: "anywhere" },
      one.told ?? "Only users who may read the connection see the reason and the command that fixes it.",
      h(DagReasons, { reasons: one.dag_reasons }),
    ),
    h(Cell, { minW: "12rem" }, one.call && h(Fix, { call: one.call })),
  );

export const Findings = ({ findings, databases, consumers }) => {
  const down = databases.filter((database) => database.state === "down").map(unanswered);
  const shown = [...down, ...findings].sort(severeFirst);
  const title = "Needs attention";
  return (
    shown.length > 0 &&
    h(
      Section,
      { title },
      h(
        Rows,
        { label: title, columns: [["Severity"], ["About"], ["Problem"], ["How to fix it"]] },
        shown.map((one) => h(Finding, { key: JSON.stringify(one), one, consumers })),
      ),
    )
  );
};

const answer = (database) => {
  if (database.state === "down") return "The database does not answer.";
  if (database.state === "asked") return "Waiting for its first answer.";
  if (database.state === "late") return "The database answers slowly; the values shown may be old.";
  return database.left_out.join("; ");
};

export const Databases = ({ databases, confirm }) =>
  h(
    Section,
    { title: "Databases" },
    h(
      Rows,
      { label: "Databases", columns: [["State"], ["Connection"], ["Last answer", true], ["Details"], ["DAGs"], ACTIONS] },
      databases.map((database) =>
        h(
          Table.Row,
          { key: database.connection },
          h(Cell, null, h(State, { word: database.state })),
          h(Cell, { maxW: "18rem" }, h(Name, null, database.connection)),
          h(Cell, { number: true }, database.age === null ? "never" : `${span(database.age)} ago`),
          h(Cell, { minW: "14rem", overflowWrap: "anywhere" }, answer(database)),
          h(Dags, { dags: database.dags }),
          h(
            Cell,
            { pinned: true },
            database.may_edit &&
              database.state === "answers" &&
              h(
                Act,
                {
                  label: `Run maintenance of ${database.connection}`,
                  onClick: () => confirm(plans.maintenance(database.connection)),
                },
                "Run maintenance",
              ),
          ),
        ),
      ),
    ),
  );
