// Texts for numbers, times and consumers.

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

// Use no-break spaces, so that a line does not break inside a length of time.
const together = (...words) => words.join("\u00a0");

export const span = (seconds) => {
  if (seconds === null || seconds === undefined) return "";
  const whole = Math.max(0, Math.round(seconds));
  const at = UNITS.findIndex(([, size]) => whole >= size);
  if (at < 0) return together(0, "s");
  const [unit, size] = UNITS[at];
  const rest = at + 1 < UNITS.length ? Math.floor((whole % size) / UNITS[at + 1][1]) : 0;
  const first = together(Math.floor(whole / size), unit);
  return rest ? together(first, rest, UNITS[at + 1][0]) : first;
};

// A server's clock may be some seconds ahead of ours.
const AHEAD = 10;

export const since = (time, now = Date.now(), ahead = AHEAD) => {
  if (time === null || time === undefined) return "";
  const seconds = (now - Date.parse(time)) / 1000;
  return seconds < -ahead ? `in ${span(-seconds)}` : `${span(seconds)} ago`;
};

export const absolute = (time) => (time === null || time === undefined ? undefined : new Date(time).toLocaleString());

export const UNKNOWN = "unknown";

const numbered = (number, sign) => (number === null ? UNKNOWN : sign + number.toLocaleString());

// A number, marked as a minimum if it is not complete.
export const count = (number, all = true) => numbered(number, all === false ? "≥ " : "");

// A number, marked as an estimate if it is not exact.
export const about = (number, exact) => numbered(number, exact === false ? "~" : "");

// The consumer of this kind with this name.
export const called = (consumers, connection, kind, name) =>
  consumers.find((one) => one.connection === connection && one.kind === kind && one.consumer === name);

// Changes a second.
export const rate = (number) => {
  if (number === null) return UNKNOWN;
  if (number === 0) return "0/s";
  if (number < 0.1) return "< 0.1/s";
  return `${number.toLocaleString(undefined, { maximumFractionDigits: number < 10 ? 1 : 0 })}/s`;
};

export const many = (number, one, more = `${one}s`) => `${number.toLocaleString()} ${number === 1 ? one : more}`;

export const key = (consumer) => JSON.stringify([consumer.connection, consumer.source, consumer.kind, consumer.consumer]);

// The text while there is no answer yet; null once every database has answered or failed.
export const asking = (databases) => {
  const asked = databases.filter((database) => database.state === "asked").map((database) => database.connection);
  return asked.length ? `Waiting for the first answer of ${asked.join(", ")}.` : null;
};

// Consumers that need a person come first.
export const STATES = ["failing", "held back", "unknown", "new", "working", "ready", "idle"];

const byName = (one, other) =>
  one.consumer.localeCompare(other.consumer, undefined, { numeric: true }) || one.connection.localeCompare(other.connection);

const WORTH = {
  state: (one) => STATES.indexOf(one.state),
  ready: (one) => one.ready,
  waiting: (one) => one.waiting,
  oldest: (one) => one.oldest_seconds,
  in: (one) => one.rate_in,
  out: (one) => one.rate_out,
};

// Returns the order of consumers by a column, or the reverse if a minus comes before its name. Unknown values come last.
export const by = (order) => {
  const worth = WORTH[order.replace("-", "")];
  const sign = order.startsWith("-") ? -1 : 1;
  if (!worth) return (one, other) => sign * byName(one, other);
  return (one, other) => {
    const [left, right] = [worth(one), worth(other)];
    if (left === null || right === null) return (left === null) - (right === null) || byName(one, other);
    return sign * (left - right) || byName(one, other);
  };
};
