// Components that several views share.
import { Fragment, chakra, createContext, h, useContext } from "./shell.js";
import { guide } from "./api.js";
import { To, atConsumer, atDag, atRun } from "./views.js";
import { absolute, since } from "./words.js";

const { Badge, Box, Button, Code, Heading, Menu, Portal, Text } = chakra;

// The palette of each state, and an icon for people who cannot see colours.
export const LOOKS = {
  failing: ["red", "✖"],
  "held back": ["orange", "■"],
  working: ["blue", "▸"],
  ready: ["cyan", "●"],
  new: ["teal", "✚"],
  idle: ["gray", "○"],
  unknown: ["purple", "?"],
  error: ["red", "✖"],
  warning: ["orange", "▲"],
  answers: ["green", "●"],
  asked: ["gray", "…"],
  late: ["orange", "…"],
  down: ["red", "✖"],
  current: ["blue", "▸"],
  recent: ["gray", "○"],
  old: ["gray", "…"],
  kept: ["orange", "■"],
  Online: ["green", "●"],
  Offline: ["red", "✖"],
  Expelled: ["gray", "■"],
  committed: ["green", "✔"],
  failed: ["red", "✖"],
  skipped: ["orange", "■"],
  split: ["orange", "◫"],
  "no outcome": ["gray", "…"],
  scheduled: ["gray", "…"],
  running: ["blue", "▸"],
  paused: ["orange", "■"],
  done: ["green", "✔"],
  cancelled: ["gray", "■"],
  silent: ["orange", "…"],
  watching: ["green", "●"],
  forward: ["blue", "▸"],
  complete: ["green", "✔"],
  "rolling back": ["orange", "◂"],
  "rolled back": ["gray", "■"],
  stuck: ["red", "✖"],
  waiting: ["gray", "○"],
  "in work": ["blue", "▸"],
  refused: ["red", "✖"],
  "to compensate": ["orange", "…"],
  compensated: ["orange", "◂"],
  "left out": ["gray", "–"],
};

export const State = ({ word }) => {
  const [palette, icon] = LOOKS[word] ?? LOOKS.unknown;
  return h(
    Badge,
    { colorPalette: palette, variant: "subtle", whiteSpace: "nowrap" },
    h("span", { "aria-hidden": true }, icon),
    word,
  );
};

export const Ago = ({ time }) => h("time", { dateTime: time ?? undefined, title: absolute(time) }, since(time));

export const Section = ({ title, aside, children }) =>
  h(
    Box,
    { mt: 6 },
    h(
      Box,
      { display: "flex", flexWrap: "wrap", gap: 3, alignItems: "center", mb: 2 },
      h(Heading, { as: "h2", size: "md", flex: "1" }, title),
      aside,
    ),
    children,
  );

export const Empty = ({ children }) =>
  h(Box, { borderWidth: "1px", borderRadius: "md", p: 6, color: "fg.muted" }, children);

export const Guide = ({ name, children }) =>
  h(
    Box,
    { mt: 2 },
    h(chakra.Link, { href: guide(name), target: "_blank", rel: "noreferrer", color: "fg.info", textDecoration: "underline" }, children),
  );

export const Call = ({ children }) =>
  h(Code, { whiteSpace: "pre-wrap", overflowWrap: "anywhere", size: "sm" }, children);

// A command whose lines break only between words, because a browser would also break options after hyphens. The words are in one
// element, because Chakra's Code would lay them out as columns.
const words = (text) =>
  text.split(/(\s+)/).map((word, place) => (place % 2 ? word : h(Box, { key: place, as: "span", display: "inline-block" }, word)));

export const Command = ({ children: text }) => h(Call, null, h("span", null, words(text)));

// Stored data as JSON.
export const Held = ({ label, held }) =>
  h(
    Box,
    null,
    h(Box, { maxH: "24rem", overflowY: "auto", tabIndex: 0, role: "region", "aria-label": label }, h(Call, null, held.content)),
    held.cut && h(Text, { color: "fg.muted", fontSize: "xs" }, "Only its beginning is shown."),
  );

// A long name, which breaks after separators and is cut after three lines. Its title has the whole name.
export const breakable = (name) =>
  name.split(/(?<=[:/_.-])/).map((part, place) => h(Fragment, { key: place }, place > 0 && h("wbr"), part));

const NAME = { overflowWrap: "anywhere", fontWeight: "medium", lineClamp: 3 };

export const Name = ({ children: name }) => h(Text, { as: "span", title: name, ...NAME }, breakable(name));

export const NamedLink = ({ to, children: name }) => h(To, { to, title: name, ...NAME }, breakable(name));

// A name, as a link if there is such a consumer.
export const OfConsumer = ({ consumer, children: name }) =>
  consumer ? h(NamedLink, { to: atConsumer(consumer) }, name) : h(Name, null, name);

export const Act = ({ label, onClick, danger = false, disabled = false, expanded, children }) =>
  h(
    Button,
    {
      size: "xs",
      variant: "outline",
      colorPalette: danger ? "red" : "gray",
      "aria-label": label,
      "aria-expanded": expanded,
      disabled,
      onClick,
    },
    children,
  );

// Actions in a menu. offered: [[verb, function, whether it destroys something]]
export const ActionMenu = ({ label, offered }) =>
  offered.length > 0 &&
  h(
    Menu.Root,
    { lazyMount: true, unmountOnExit: true, positioning: { placement: "bottom-end" } },
    h(Menu.Trigger, { asChild: true }, h(Button, { size: "xs", variant: "outline", colorPalette: "gray", "aria-label": label, title: label }, "⋯")),
    h(
      Portal,
      null,
      h(
        Menu.Positioner,
        null,
        h(
          Menu.Content,
          null,
          offered.map(([verb, act, destroys]) =>
            h(Menu.Item, { key: verb, value: verb, color: destroys ? "red.fg" : undefined, onClick: act }, verb),
          ),
        ),
      ),
    ),
  );

// The error of a batch.
export const Told = ({ error }) =>
  error && h(Text, { color: "red.fg", fontSize: "xs", lineClamp: 3, overflowWrap: "anywhere", title: error }, error);

export const Fact = ({ name, hint, children }) =>
  h(
    Box,
    { title: hint },
    h(Text, { as: "dt", color: "fg.muted", fontSize: "xs" }, name),
    h(Box, { as: "dd", fontVariantNumeric: "tabular-nums" }, children),
  );

// The DAGs that are paused.
export const Paused = createContext([]);

const DagLink = ({ dag }) => {
  const paused = useContext(Paused);
  return h(
    Fragment,
    null,
    h(To, { to: atDag(dag), title: dag }, breakable(dag)),
    paused.includes(dag) && h(Text, { as: "span", color: "orange.fg", fontSize: "xs" }, " paused"),
  );
};

export const DagLinks = ({ dags }) => dags.map((dag) => h(Box, { key: dag }, h(DagLink, { dag })));

// Why DAGs do not process the changes of a consumer, according to Airflow: a DAG is paused, or its last run failed.
export const DagReasons = ({ reasons }) =>
  reasons.map(({ told, run }) =>
    h(
      Text,
      { key: told, color: "orange.fg", fontSize: "xs", overflowWrap: "anywhere" },
      told,
      run && [": ", h(To, { key: "log", to: atRun(run), textDecoration: "underline" }, "its log")],
    ),
  );

// The DAGs of a consumer in a line below its name.
export const DagLine = ({ dags }) =>
  dags.length > 0 &&
  h(
    Text,
    { as: "div", fontSize: "xs", overflowWrap: "anywhere" },
    h(Text, { as: "span", color: "fg.muted" }, dags.length === 1 ? "DAG " : "DAGs "),
    dags.map((dag, place) => h(Fragment, { key: dag }, place > 0 && ", ", h(DagLink, { dag }))),
  );
