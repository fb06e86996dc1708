// Tables with units and sorting in their heads, and actions that stay visible. In a narrow window each row is a card.
import { chakra, h } from "./shell.js";
import { DagLinks } from "./pieces.js";

const { Box, Table, Text } = chakra;

// A cell that stays at the right edge when the table scrolls.
const PINNED = {
  position: "sticky",
  right: 0,
  bg: "bg",
  zIndex: 1,
  boxShadow: "-6px 0 6px -6px var(--chakra-colors-border-emphasized)",
};

export const ACTIONS = ["Actions", false, null, { pinned: true }];

const Title = ({ title, name, sort, hint }) => {
  if (!name || !sort) return title;
  const down = sort.order === `-${name}`;
  const sorted = down || sort.order === name;
  return h(
    Box,
    {
      as: "button",
      type: "button",
      cursor: "pointer",
      fontWeight: sorted ? "semibold" : "inherit",
      title: hint ? `${hint}. Press to sort.` : `Sort by ${title}`,
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

const Head = ({ column: [title, isNumber, name, { unit, hint, pinned } = {}], sort }) =>
  h(
    Table.ColumnHeader,
    {
      textAlign: isNumber ? "end" : "start",
      verticalAlign: "top",
      whiteSpace: unit ? "nowrap" : "normal",
      title: hint,
      "aria-sort": direction(name, sort),
      ...(pinned && PINNED),
    },
    h(Title, { title, name, sort, hint }),
    unit && h(Text, { color: "fg.muted", fontSize: "xs", fontWeight: "normal" }, unit),
  );

// In a narrow window a row is a card: its cells flow side by side, each below the title of its column. Only the buttons of the
// head stay.
const NARROW = "@media (max-width: 1023px)";
const LABEL = { display: "block", color: "fg.muted", fontSize: "xs", fontWeight: "normal" };

const cards = (columns) => ({
  [NARROW]: {
    "& table, & thead, & tbody": { display: "block" },
    "& tr": { display: "flex", flexWrap: "wrap", columnGap: 5, rowGap: 2, px: 3, py: 2, borderBottomWidth: "1px" },
    "& thead:not(:has(button, input)), & th:not(:has(button, input)), & td:empty": { display: "none" },
    "& th, & td": {
      display: "block",
      position: "static",
      width: "auto",
      minWidth: 0,
      maxWidth: "100%",
      padding: 0,
      borderWidth: 0,
      boxShadow: "none",
      textAlign: "start",
      overflowWrap: "anywhere",
    },
    "& td[colspan]": { flex: "1 1 100%" },
    ...Object.fromEntries(
      columns.map(([title, , , { pinned } = {}], place) => [
        `& tr:not(:has(td[colspan])) td:nth-of-type(${place + 1})::before`,
        typeof title === "string" && !pinned ? { content: JSON.stringify(title), ...LABEL } : {},
      ]),
    ),
  },
});

// columns: [title, whether it is a number, the name of its sort order, {unit, hint, pinned}]; sort: the order, and a function to
// change it.
export const Rows = ({ label, columns, sort, children }) =>
  h(
    Box,
    { overflowX: "auto", borderWidth: "1px", borderRadius: "md", tabIndex: 0, role: "region", "aria-label": label, css: cards(columns) },
    h(
      Table.Root,
      { size: "sm", "aria-label": label },
      h(Table.Header, null, h(Table.Row, null, columns.map((column, place) => h(Head, { key: place, column, sort })))),
      h(Table.Body, null, children),
    ),
  );

const NUMBER = { textAlign: "end", whiteSpace: "nowrap", fontVariantNumeric: "tabular-nums" };

export const Cell = ({ number = false, pinned = false, children, ...rest }) =>
  h(Table.Cell, { verticalAlign: "top", ...(number && NUMBER), ...(pinned && PINNED), ...rest }, children);

// A row that opens below another row. It is no wider than the table is without it.
export const Opened = ({ columns, children, ...rest }) =>
  h(
    Table.Row,
    rest,
    h(Table.Cell, { colSpan: columns, bg: "bg.subtle" }, h(Box, { w: 0, minW: "100%" }, children)),
  );

export const Amount = ({ known, why, children }) =>
  h(Cell, { number: true, ...(!known && { color: "fg.muted", title: why }) }, children);

export const Dags = ({ dags }) => h(Cell, { minW: "8rem", maxW: "16rem", overflowWrap: "anywhere" }, h(DagLinks, { dags }));
