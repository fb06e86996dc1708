// The page: findings that need attention on top, then consumers, dead letters and databases.
import { Fragment, chakra, h, useCallback, useEffect, useState } from "./shell.js";
import { overview, useLive } from "./api.js";
import { AllBackfills } from "./backfills.js";
import { Call, Empty, Paused } from "./pieces.js";
import { Confirm } from "./confirm.js";
import { Consumers } from "./consumers.js";
import { Databases, Findings } from "./attention.js";
import { AllEventLogs } from "./events.js";
import { Flow } from "./flow.js";
import { Consumer } from "./history.js";
import { AllLetters } from "./letters.js";
import { AllQueues } from "./queues.js";
import { AllSagas } from "./sagas.js";
import { AllTopologies } from "./topology.js";
import { Watchers } from "./watchers.js";
import { Tabs, useView } from "./views.js";

const { Box, Heading, Spinner, Text } = chakra;

const Beginning = () =>
  h(
    Empty,
    null,
    h(Text, { mb: 2 }, "No DAG that you may read names a feed yet. To begin, install the schemas into a database:"),
    h(Call, null, "airflow-pgchange install --postgres-conn-id airline"),
    h(Text, { my: 2 }, "track a table there, and schedule a DAG on its changes:"),
    h(Call, null, '@dag(schedule=[feed_asset(CommitFeed("delays", 0), "airline")])'),
    h(Text, { mt: 2 }, "To show a database that no DAG names, add its connection to the option [pgchange] connections."),
  );

const Notice = ({ done, onClose }) =>
  h(
    Box,
    { role: "status", "aria-live": "polite" },
    done !== null &&
      h(
        Box,
        { bg: "bg.success", color: "green.fg", borderRadius: "md", p: 3, mt: 3, display: "flex", gap: 3 },
        h(Box, { flex: "1", overflowWrap: "anywhere" }, done.length ? done.map((line) => h(Text, { key: line }, line)) : "There was nothing to do."),
        h(chakra.CloseButton, { size: "xs", "aria-label": "Close", onClick: onClose }),
      ),
  );

const Overview = ({ said, confirm }) =>
  h(
    Fragment,
    null,
    h(Findings, { findings: said.findings, databases: said.databases, consumers: said.consumers }),
    h(Consumers, { said, confirm }),
    h(Flow, { consumers: said.consumers }),
    h(Databases, { databases: said.databases, confirm }),
  );

const VIEWS = [
  ["", "Overview", Overview],
  ["letters", "Dead letters", AllLetters],
  ["backfills", "Backfills", AllBackfills],
  ["queues", "Queues", AllQueues],
  ["sagas", "Sagas", AllSagas],
  ["events", "Event log", AllEventLogs],
  ["topology", "Topology", AllTopologies],
  ["watchers", "Watchers", Watchers],
];

const Body = ({ said, view, confirm }) => {
  if (said.databases.length === 0) return h(Beginning);
  if (view === "consumer") return h(Consumer, { said, confirm });
  const [, , View] = VIEWS.find(([name]) => name === view) ?? VIEWS[0];
  return h(View, { said, confirm });
};

export const Page = () => {
  const { said, failure, refresh } = useLive(overview);
  const view = useView();
  const [plan, setPlan] = useState(null);
  const [done, setDone] = useState(null);
  const close = useCallback(() => setPlan(null), []);
  useEffect(() => {
    document.title = "PG feeds";
  }, []);
  const finish = (lines) => {
    setDone(lines);
    close();
    refresh();
  };
  return h(
    Box,
    { p: 4, maxW: "100%", overflowY: "auto", height: "100%", "data-page": "pgchange" },
    h(Heading, { as: "h1", size: "xl" }, "PG feeds"),
    h(Tabs, { views: VIEWS, view }),
    h(Notice, { done, onClose: () => setDone(null) }),
    failure && h(Text, { role: "alert", color: "red.fg", mt: 3 }, failure),
    said === null
      ? failure === null && h(Spinner, { mt: 6 })
      : h(Paused.Provider, { value: said.paused }, h(Body, { said, view, confirm: setPlan })),
    plan && h(Confirm, { key: plan.title, plan, onClose: close, onDone: finish }),
  );
};
