// Pieces that the parts of the page share.
import { chakra, createContext, h, useContext } from "./shell.js";
import { guide } from "./api.js";
import { To, atConsumer } from "./views.js";
import { absolute, since } from "./words.js";

const { Badge, Box, Button, Code, Heading, Table, Text } = chakra;

// How each state looks: a palette, and an icon for who does not see it.
export const LOOKS = {
  failing: ["red", "✖"],
  "held back": ["orange", "■"],
  working: ["blue", "▸"],
  ready: ["cyan", "●"],
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
  "no end": ["gray", "…"],
  scheduled: ["gray", "…"],
  running: ["blue", "▸"],
  paused: ["orange", "■"],
  done: ["green", "✔"],
  cancelled: ["gray", "■"],
  blind: ["red", "✖"],
  away: ["orange", "…"],
  looks: ["green", "●"],
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

// What somebody keeps, as JSON.
export const Held = ({ label, held }) =>
  h(
    Box,
    null,
    h(Box, { maxH: "24rem", overflowY: "auto", tabIndex: 0, role: "region", "aria-label": label }, h(Call, null, held.content)),
    held.cut && h(Text, { color: "fg.muted", fontSize: "xs" }, "Only its beginning is shown."),
  );

export const Name = ({ children }) => h(Text, { as: "span", overflowWrap: "anywhere", fontWeight: "medium" }, children);

// A name that leads to a consumer, where there is one.
export const OfConsumer = ({ consumer, children }) =>
  consumer ? h(To, { to: atConsumer(consumer), overflowWrap: "anywhere", fontWeight: "medium" }, children) : h(Name, null, children);

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

const Title = ({ title, name, sort }) => {
  if (!name || !sort) return title;
  const down = sort.order === `-${name}`;
  const sorted = down || sort.order === name;
  return h(
    chakra.Box,
    {
      as: "button",
      type: "button",
      cursor: "pointer",
      fontWeight: sorted ? "semibold" : "inherit",
      title: `Sort by ${title}`,
      onClick: () => sort.choose(sorted && !down ? `-${name}` : sorted ? "" : name),
    },
    title,
    h("span", { "aria-hidden": true }, sorted ? (down ? " ↓" : " ↑") : ""),
  );
};

const direction = (name, sort) => {
  if (!name || !sort) return undefined;
  return { [name]: "ascending", [`-${name}`]: "descending" }[sort.order] ?? "none";
};

// Columns: [title, whether it is a number, the name by which it is sorted]; sort: the order, and what chooses another.
export const Rows = ({ label, columns, sort, children }) =>
  h(
    Box,
    { overflowX: "auto", borderWidth: "1px", borderRadius: "md", tabIndex: 0, role: "region", "aria-label": label },
    h(
      Table.Root,
      { size: "sm", "aria-label": label },
      h(
        Table.Header,
        null,
        h(
          Table.Row,
          null,
          columns.map(([title, isNumber, name], place) =>
            h(
              Table.ColumnHeader,
              {
                key: place,
                textAlign: isNumber ? "end" : "start",
                whiteSpace: "nowrap",
                "aria-sort": direction(name, sort),
              },
              h(Title, { title, name, sort }),
            ),
          ),
        ),
      ),
      h(Table.Body, null, children),
    ),
  );

const NUMBER = { textAlign: "end", whiteSpace: "nowrap", fontVariantNumeric: "tabular-nums" };

export const Cell = ({ number = false, children, ...rest }) =>
  h(Table.Cell, { verticalAlign: "top", ...(number && NUMBER), ...rest }, children);

// What a batch failed on.
export const Told = ({ error }) =>
  error && h(Text, { color: "red.fg", fontSize: "xs", lineClamp: 3, title: error }, error);

export const Fact = ({ name, children }) =>
  h(
    Box,
    null,
    h(Text, { as: "dt", color: "fg.muted", fontSize: "xs" }, name),
    h(Box, { as: "dd", fontVariantNumeric: "tabular-nums" }, children),
  );

// The DAGs that are paused.
export const Paused = createContext([]);

export const DagLinks = ({ dags }) => {
  const paused = useContext(Paused);
  return dags.map((dag) =>
    h(
      Box,
      { key: dag },
      h(To, { to: `/dags/${encodeURIComponent(dag)}` }, dag),
      paused.includes(dag) && h(Text, { as: "span", color: "orange.fg", fontSize: "xs" }, " paused"),
    ),
  );
};

export const Dags = ({ dags }) => h(Cell, { maxW: "16rem", overflowWrap: "anywhere" }, h(DagLinks, { dags }));
