// Sagas and their progress, and the steps of a saga.
import { Fragment, chakra, h, useCallback, useRef, useState } from "./shell.js";
import { saga as askOne, sagas as ask, useLive } from "./api.js";
import { eachDatabase } from "./each.js";
import { Act, Ago, Empty, Guide, Held, Name, Section, State, Told, breakable } from "./pieces.js";
import { ACTIONS, Cell, Opened, Rows } from "./table.js";
import { Steps, inOrder, retry, stateOf } from "./steps.js";
import { absolute, many } from "./words.js";

const { Box, Table, Text } = chakra;

const COLUMNS = [["State"], ["Saga"], ["Steps", true], ["Current steps"], ["Began", true], ["Problem"], ACTIONS];
const STEPS = [["State"], ["Step"], ["After"], ["Message"], ["Attempt", true], ["Last change", true], ["Error"]];

const isOpen = ({ state }) => state === "forward" || state === "rolling back";

const word = (saga) => (saga.is_stuck ? "stuck" : saga.state);

const where = (saga) => {
  if (!isOpen(saga)) return "";
  if (saga.at.length) return saga.at.join(", ");
  return saga.state === "forward" ? "its end" : "the end of its compensation";
};

const progress = ({ steps, done, undone, state }) => {
  const shown = `${done} of ${steps} done`;
  return state === "rolling back" || state === "rolled back" ? `${shown}, ${undone} compensated` : shown;
};

const Step = ({ step }) =>
  h(
    Table.Row,
    null,
    h(
      Cell,
      null,
      h(State, { word: stateOf(step) }),
      retry(step) && h(Text, { color: "fg.muted", fontSize: "xs", whiteSpace: "nowrap", title: absolute(step.retry_at) }, retry(step)),
    ),
    h(Cell, { minW: "8rem" }, h(Name, null, step.step)),
    h(Cell, null, step.after.join(", ")),
    h(
      Cell,
      { whiteSpace: "nowrap" },
      step.iid,
      step.compensation && h(Text, { color: "fg.muted", fontSize: "xs" }, `compensation: ${step.compensation}`),
    ),
    h(Cell, { number: true }, step.tries.toLocaleString()),
    h(Cell, { number: true }, h(Ago, { time: step.changed_at })),
    h(Cell, { minW: "12rem", maxW: "26rem", overflowWrap: "anywhere" }, h(Told, { error: step.error })),
  );

// The steps of a saga and its start data, while it is open.
const Content = ({ connection, saga, mayRead }) => {
  // The start data never changes, so request it once.
  const started = useRef(null);
  const question = useCallback(async () => {
    const found = await askOne(connection, saga.id, started.current === null);
    if (found.steps.length) started.current ??= { data: found.data };
    return { ...found, ...started.current };
  }, [connection, saga.id]);
  const { said, failure } = useLive(question);
  const name = `${saga.name} ${saga.id}`;
  const problem = failure ?? said?.failure;
  const steps = inOrder(said?.steps ?? []);
  return h(
    Opened,
    { columns: COLUMNS.length },
    problem && h(Text, { role: "alert", color: "red.fg" }, problem),
    steps.length > 0 && h(
      Fragment,
      null,
      h(Box, { overflowX: "auto", mb: 3, tabIndex: 0, role: "region", "aria-label": `Drawing of ${name}` }, h(Steps, { name, steps })),
      h(Rows, { label: `Steps of ${name}`, columns: STEPS }, steps.map((step) => h(Step, { key: step.iid, step }))),
      mayRead && h(Text, { fontWeight: "medium", mt: 3 }, "Start data"),
      mayRead &&
        (said.data ? h(Held, { label: `Start data of ${name}`, held: said.data }) : h(Text, { color: "fg.muted" }, "The start data is no longer kept.")),
    ),
  );
};

const Row = ({ saga, opened, open }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, h(State, { word: word(saga) })),
    h(
      Cell,
      { minW: "8rem", maxW: "18rem", overflowWrap: "anywhere" },
      h(Name, null, saga.name),
      h(Text, { color: "fg.muted", fontSize: "xs" }, `number ${saga.id}`),
    ),
    h(Cell, { number: true }, progress(saga)),
    h(Cell, { minW: "8rem", maxW: "18rem", overflowWrap: "anywhere" }, breakable(where(saga))),
    h(
      Cell,
      { number: true },
      h(Ago, { time: saga.started_at }),
      h(Text, { color: "fg.muted", fontSize: "xs" }, "last change ", h(Ago, { time: saga.changed_at })),
      isOpen(saga) && saga.deadline && h(Text, { color: "fg.muted", fontSize: "xs" }, "deadline ", h(Ago, { time: saga.deadline })),
    ),
    h(
      Cell,
      { minW: "12rem", maxW: "30rem", overflowWrap: "anywhere" },
      h(Told, { error: saga.stuck }),
      saga.is_stuck && !saga.stuck && "It is stuck. Only users who may read the connection see the reason.",
      saga.reason && h(Text, { color: "fg.muted", fontSize: "xs", overflowWrap: "anywhere" }, `rolled back because: ${saga.reason}`),
    ),
    h(
      Cell,
      { pinned: true },
      h(
        Act,
        { label: `${opened ? "Hide" : "Show"} saga ${saga.id}`, expanded: opened, onClick: open },
        opened ? "Hide" : "Show",
      ),
    ),
  );

const Sagas = ({ found, title, database: { connection, may_read: mayRead } }) => {
  const [opened, setOpened] = useState(null);
  const open = found.sagas.filter(isOpen).length;
  return h(
    Section,
    { title: found.sagas.length ? `${title}: ${many(open, "has", "have")} not ended` : title },
    found.sagas.length
      ? h(
          Rows,
          { label: title, columns: COLUMNS },
          found.sagas.map((saga) =>
            h(
              Fragment,
              { key: saga.id },
              h(Row, {
                saga,
                opened: opened === saga.id,
                open: () => setOpened(opened === saga.id ? null : saga.id),
              }),
              opened === saga.id && h(Content, { connection, saga, mayRead }),
            ),
          ),
        )
      : h(
          Empty,
          null,
          "There is no recent saga here that the role of the connection may see. To start a saga, use StartSagaOperator.",
          h(Guide, { name: "queues" }, "The guide to sagas"),
        ),
  );
};

export const AllSagas = eachDatabase({ ask, title: "Sagas", Shown: Sagas, isEmpty: ({ sagas }) => !sagas.length });
