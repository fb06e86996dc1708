// The steps of a saga in their order, in plain SVG with the shell's colours, and as text.
import { h } from "./shell.js";
import { LOOKS } from "./pieces.js";
import { many, since } from "./words.js";

const BOX = { width: 216, height: 46, right: 44, down: 16 };
const EDGE = 6;

const colour = (name) => `var(--chakra-colors-${name})`;

// The column of each step: after all steps that it depends on.
const columns = (steps) => {
  const known = new Map(steps.map((step) => [step.step, step]));
  const found = new Map();
  const column = (name) => {
    if (!found.has(name)) {
      found.set(name, 0);
      found.set(name, Math.max(0, ...known.get(name).after.filter((before) => known.has(before)).map((before) => column(before) + 1)));
    }
    return found.get(name);
  };
  steps.forEach((step) => column(step.step));
  return found;
};

// Place dependent steps after the others.
export const inOrder = (steps) => {
  const column = columns(steps);
  return [...steps].sort((one, other) => column.get(one.step) - column.get(other.step));
};

const places = (steps) => {
  const column = columns(steps);
  const rows = new Map();
  return new Map(
    steps.map(({ step }) => {
      const row = rows.get(column.get(step)) ?? 0;
      rows.set(column.get(step), row + 1);
      return [
        step,
        { x: EDGE + column.get(step) * (BOX.width + BOX.right), y: EDGE + row * (BOX.height + BOX.down) },
      ];
    }),
  );
};

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// A step that is retried later waits, although no other step blocks it.
const isPutBack = ({ state, retry_at: time }) => time !== null && (state === "ready" || state === "to compensate");

export const stateOf = (step) => (isPutBack(step) && step.state === "ready" ? "waiting" : step.state);

// The time of the retry of a step that is retried later; null for any other step.
export const retry = (step) => (isPutBack(step) ? `retry ${Date.parse(step.retry_at) > Date.now() ? since(step.retry_at, Date.now(), 0) : "now"}` : null);

const stated = (step) => [stateOf(step), retry(step)].filter((part) => part !== null).join(", ");

const sentence = (steps) =>
  steps
    .map((step) => `${step.step}${step.after.length ? `, after ${step.after.join(" and ")}` : ""}: ${stated(step)}.`)
    .join(" ");

const Line = ({ from, to }) => {
  const [left, right] = [from.x + BOX.width, to.x];
  const [above, below] = [from.y + BOX.height / 2, to.y + BOX.height / 2];
  const middle = (left + right) / 2;
  return h("path", {
    d: `M${left} ${above}C${middle} ${above} ${middle} ${below} ${right} ${below}`,
    fill: "none",
    stroke: colour("fg-muted"),
    strokeWidth: 1.5,
  });
};

const Box = ({ step, place }) => {
  const [palette, icon] = LOOKS[stateOf(step)] ?? LOOKS.unknown;
  return h(
    "g",
    { transform: `translate(${place.x} ${place.y})` },
    h("title", null, `${step.step}: ${stated(step)}`),
    h("rect", {
      width: BOX.width,
      height: BOX.height,
      rx: 6,
      fill: colour(`${palette}-subtle`),
      stroke: colour(`${palette}-fg`),
      strokeWidth: step.state === "in work" ? 2.5 : 1,
    }),
    h("text", { x: 10, y: 19, fill: colour("fg"), style: { fontWeight: 600 } }, cut(step.step, 28)),
    h("text", { x: 10, y: 36, fill: colour(`${palette}-fg`) }, `${icon} ${stated(step)}`),
  );
};

export const Steps = ({ name, steps }) => {
  const place = places(steps);
  const known = [...place.values()];
  const width = Math.max(...known.map(({ x }) => x)) + BOX.width + EDGE;
  const height = Math.max(...known.map(({ y }) => y)) + BOX.height + EDGE;
  return h(
    "svg",
    {
      viewBox: `0 0 ${width} ${height}`,
      width,
      height,
      role: "img",
      "aria-label": `${many(steps.length, "step")} of ${name}. ${sentence(steps)}`,
      style: { maxWidth: "100%", height: "auto", fontSize: "12px", display: "block" },
    },
    steps.flatMap((step) =>
      step.after
        .filter((before) => place.has(before))
        .map((before) => h(Line, { key: `${before} ${step.step}`, from: place.get(before), to: place.get(step.step) })),
    ),
    steps.map((step) => h(Box, { key: step.step, step, place: place.get(step.step) })),
  );
};
