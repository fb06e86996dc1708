// Dead letters in groups with the same error. They can be inspected, sent again, dropped, or erased from.
import { Fragment, chakra, h, useCallback, useEffect, useRef, useState } from "./shell.js";
import { Act, Ago, Call, Empty, Held, OfConsumer, Section, Told } from "./pieces.js";
import { ACTIONS, Cell, Opened, Rows } from "./table.js";
import { called, many } from "./words.js";
import { letter as askOne, letters as ask, useLive } from "./api.js";
import { useAsked } from "./views.js";
import * as plans from "./plans.js";

const { Box, Table, Text } = chakra;

const COLUMNS = [["Letter", true], ["Consumer"], ["Changes", true], ["Given up"], ["Reason"], ["State"], ACTIONS];

const state = (letter) => {
  if (letter.on_its_way) return "on its way";
  return letter.hindrance ?? (letter.sent_at ? "was sent again" : "");
};

const isSendable = (letter) => !letter.on_its_way && letter.hindrance === null;

const Tick = ({ label, checked, onChange }) =>
  h("input", { type: "checkbox", "aria-label": label, checked, onChange: (event) => onChange(event.target.checked) });

// The content of a letter. It is requested when it is opened, and scrolled into view for a link to it.
const Content = ({ connection, letter }) => {
  const row = useRef(null);
  useEffect(() => {
    row.current.scrollIntoView({ block: "nearest" });
  }, []);
  const { said, failure } = useLive(useCallback(() => askOne(connection, letter.id), [connection, letter.id]), true);
  const problem = failure ?? said?.failure;
  return h(
    Opened,
    { ref: row, columns: COLUMNS.length + 1 },
    letter.error && h(Box, { mb: 3 }, h(Text, { fontWeight: "medium" }, `Error of attempt ${letter.attempts}`), h(Call, null, letter.error)),
    h(Text, { fontWeight: "medium" }, "Content"),
    problem && h(Text, { role: "alert", color: "red.fg" }, problem),
    said && said.content !== null && h(Held, { label: `Content of letter ${letter.id}`, held: said }),
  );
};

const Row = ({ letter, consumer, chosen, choose, opened, open, redrive, drop }) =>
  h(
    Table.Row,
    null,
    h(Cell, null, choose && h(Tick, { label: `Select letter ${letter.id}`, checked: chosen, onChange: choose })),
    h(Cell, { number: true }, letter.id),
    h(
      Cell,
      { minW: "11rem", maxW: "18rem" },
      h(OfConsumer, { consumer }, letter.consumer),
    ),
    h(Cell, { number: true }, letter.changes.toLocaleString()),
    h(
      Cell,
      { whiteSpace: "nowrap" },
      h(Ago, { time: letter.given_up_at }),
      h(Text, { color: "fg.muted", fontSize: "xs" }, `by ${letter.given_up_by}`),
    ),
    h(
      Cell,
      { minW: "12rem", maxW: "26rem", overflowWrap: "anywhere" },
      letter.reason,
      h(Told, { error: letter.error && `attempt ${letter.attempts}: ${letter.error}` }),
    ),
    h(Cell, { maxW: "16rem", overflowWrap: "anywhere" }, state(letter)),
    h(
      Cell,
      { pinned: true },
      h(
        Box,
        { display: "flex", flexWrap: "wrap", gap: 1 },
        h(
          Act,
          { label: `${opened ? "Hide" : "Show"} letter ${letter.id}`, expanded: opened, onClick: open },
          opened ? "Hide" : "Show",
        ),
        redrive && h(Act, { label: `Send letter ${letter.id} again`, onClick: redrive }, "Send again"),
        drop && h(Act, { label: `Drop letter ${letter.id}`, onClick: drop, danger: true }, "Drop"),
      ),
    ),
  );

// The row of a group of letters with the same error.
const Group = ({ group, shown, opened, open, redrive, drop }) =>
  h(
    Table.Row,
    { bg: "bg.muted" },
    h(
      Cell,
      { colSpan: COLUMNS.length, minW: "16rem", overflowWrap: "anywhere" },
      h(Text, { fontWeight: "medium", lineClamp: 3, title: group.error }, group.error),
      h(
        Text,
        { color: "fg.muted", fontSize: "xs" },
        `${many(group.letters, "letter")} with ${many(group.changes, "change")} of ${group.consumers.join(", ")}`,
        group.more_consumers > 0 && ` and ${many(group.more_consumers, "other")}`,
        ": ",
        group.letters > 1 && ["the oldest ", h(Ago, { key: "oldest", time: group.oldest }), ", the newest "],
        h(Ago, { time: group.newest }),
        shown < group.letters && `; the latest ${shown} are shown`,
      ),
    ),
    h(
      Cell,
      { pinned: true, bg: "bg.muted" },
      h(
        Box,
        { display: "flex", flexWrap: "wrap", gap: 1 },
        h(
          Act,
          { label: `${opened ? "Hide" : "Show"} the letters that failed on: ${group.error}`, expanded: opened, onClick: open },
          opened ? "Hide" : `Show ${shown}`,
        ),
        redrive && h(Act, { label: `Send the letters again that failed on: ${group.error}`, onClick: redrive }, "Send these again"),
        drop && h(Act, { label: `Drop the letters that failed on: ${group.error}`, onClick: drop, danger: true }, "Drop these"),
      ),
    ),
  );

const Letters = ({ database, consumers, confirm }) => {
  const { connection, may_edit: mayEdit } = database;
  const { said, failure } = useLive(useCallback(() => ask(connection), [connection]));
  const [ids, setIds] = useState(new Set());
  // The groups that a person has opened or closed.
  const [turned, setTurned] = useState(new Map());
  const [asked, change] = useAsked();
  const opened = asked.get("connection") === connection ? asked.get("letter") : null;
  const title = `Dead letters in ${connection}`;
  const problem = failure ?? said?.failure;
  if (problem) return h(Section, { title }, h(Empty, null, problem));
  if (said === null) return null;
  const isOpened = ({ id }) => String(id) === opened;
  const gone =
    opened !== null &&
    !said.letters.some(isOpened) &&
    h(Text, { mb: 2 }, `Letter ${opened} is not listed: it was processed or dropped, or there are many newer letters.`);
  if (!said.letters.length) {
    return h(Section, { title }, gone, h(Empty, null, "There are no dead letters here. A batch that is skipped, or that fails its last attempt, becomes a dead letter."));
  }
  const consumer = (letter) => called(consumers, connection, letter.kind, letter.consumer);
  const source = (letter) => consumer(letter)?.source;
  const chosen = said.letters.filter((letter) => ids.has(letter.id));
  const sendable = chosen.filter(isSendable);
  // Letters with their changes in different databases cannot be sent with one request.
  const sending = (letters) => {
    const sources = new Set(letters.map((letter) => source(letter) ?? null));
    return mayEdit && sources.size === 1 && (() => confirm(plans.redrive(connection, letters, [...sources][0])));
  };
  const choose = (letters, yes) =>
    setIds((before) => {
      const next = new Set(before);
      letters.forEach(({ id }) => (yes ? next.add(id) : next.delete(id)));
      return next;
    });
  const byGroup = said.groups.map((group) => ({ group, letters: said.letters.filter((letter) => letter.group === group.group) }));
  // Open a group if it is the only group, or if a link leads to one of its letters.
  const isShown = ({ group, letters }) => turned.get(group.group) ?? (said.groups.length === 1 || letters.some(isOpened));
  const turn = (one) => setTurned((before) => new Map(before).set(one.group.group, !isShown(one)));
  const rows = (letters) =>
    letters.map((letter) =>
      h(
        Fragment,
        { key: letter.id },
        h(Row, {
          letter,
          consumer: consumer(letter),
          chosen: ids.has(letter.id),
          choose: mayEdit && ((yes) => choose([letter], yes)),
          opened: isOpened(letter),
          open: () => change(isOpened(letter) ? { connection: null, letter: null } : { connection, letter: letter.id }),
          redrive: isSendable(letter) && sending([letter]),
          drop: mayEdit && (() => confirm(plans.dropLetters(connection, [letter]))),
        }),
        isOpened(letter) && h(Content, { connection, letter }),
      ),
    );
  const shown = said.letters.length < said.all ? `, the latest ${said.letters.length} of ${said.all}` : "";
  const aside =
    mayEdit &&
    h(
      Box,
      { display: "flex", flexWrap: "wrap", gap: 2, alignItems: "center" },
      h(Text, { color: "fg.muted", fontSize: "sm" }, chosen.length ? `${many(chosen.length, "letter")} selected` : "none selected"),
      h(
        Act,
        {
          label: `Send the selected letters in ${connection} again`,
          disabled: !sending(sendable),
          onClick: sending(sendable),
        },
        sendable.length ? `Send ${sendable.length} again` : "Send again",
      ),
      h(
        Act,
        {
          label: `Drop the selected letters in ${connection}`,
          danger: true,
          disabled: !chosen.length,
          onClick: () => confirm(plans.dropLetters(connection, chosen)),
        },
        chosen.length ? `Drop ${chosen.length}` : "Drop",
      ),
      h(
        Act,
        {
          label: `Erase a key from the letters in ${connection}`,
          danger: true,
          onClick: () => confirm(plans.eraseLetters(connection, [...new Set(said.letters.map((letter) => letter.consumer))].sort())),
        },
        "Erase a key",
      ),
    );
  const all = mayEdit &&
    h(Tick, {
      label: `Select all letters in ${connection}`,
      checked: chosen.length === said.letters.length,
      onChange: (yes) => choose(said.letters, yes),
    });
  return h(
    Section,
    { title: title + shown, aside },
    gone,
    h(
      Rows,
      { label: title, columns: [[all], ...COLUMNS] },
      byGroup.map((one) =>
        h(
          Fragment,
          { key: one.group.group },
          h(Group, {
            group: one.group,
            shown: one.letters.length,
            opened: isShown(one),
            open: () => turn(one),
            redrive: one.letters.length > 1 && sending(one.letters.filter(isSendable)),
            drop: one.letters.length > 1 && mayEdit && (() => confirm(plans.dropLetters(connection, one.letters))),
          }),
          isShown(one) && rows(one.letters),
        ),
      ),
    ),
  );
};

export const AllLetters = ({ said, confirm }) => {
  const readable = said.databases.filter((database) => database.may_read);
  if (!readable.length) return h(Box, { mt: 6 }, h(Empty, null, "You may not read any of these connections in Airflow, so no dead letters are shown."));
  const answering = readable.filter((database) => database.state !== "down");
  if (!answering.length) return h(Box, { mt: 6 }, h(Empty, null, "No database answers. The overview shows the reason."));
  return answering.map((database) =>
    h(Letters, { key: database.connection, database, consumers: said.consumers, confirm }),
  );
};
