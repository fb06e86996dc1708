// Requests of the page to its API.
import { useCallback, useEffect, useRef, useState } from "./shell.js";

const BASE = new URL("../../", import.meta.url);
const EVERY = 3000;
const SOON = 100;

const told = async (answer) => {
  const body = await answer.json().catch(() => null);
  const detail = body?.detail ?? answer.statusText;
  return typeof detail === "string" ? detail : detail.map((one) => `${one.loc.at(-1)}: ${one.msg}`).join("; ");
};

const asked = async (path, options = {}) => {
  const answer = await fetch(new URL(path, BASE), { headers: { "Content-Type": "application/json" }, ...options });
  if (answer.status === 401) throw new Error("You are no longer logged in: reload the page.");
  if (!answer.ok) throw new Error(await told(answer));
  return answer.json();
};

const of = (connection, rest, source, values = {}) => {
  const query = new URLSearchParams({ ...values, ...(source && { source }) }).toString();
  return `connections/${encodeURIComponent(connection)}/${rest}${query && `?${query}`}`;
};

let first = null;

// Requests the overview before a view needs it.
export const begin = () => {
  first = asked("overview");
  first.catch(() => {});
};

export const overview = () => {
  const answer = first ?? asked("overview");
  first = null;
  return answer;
};

export const history = ({ connection, source, kind, consumer }) =>
  asked(of(connection, "consumer", source, { kind, consumer }));

export const letters = (connection) => asked(of(connection, "letters"));

export const events = (connection) => asked(of(connection, "events"));

export const topology = (connection) => asked(of(connection, "topology"));

export const backfills = (connection) => asked(of(connection, "backfills"));

export const guide = (name) => new URL(`guides/${name}`, BASE).href;

export const queues = (connection) => asked(of(connection, "queues"));

export const sagas = (connection) => asked(of(connection, "sagas"));

export const saga = (connection, id, data) => asked(of(connection, `sagas/${id}`, null, { data }));

export const letter = (connection, id) => asked(of(connection, `letters/${id}`));

export const act = (connection, action, body, source) =>
  asked(of(connection, action, source), { method: "POST", body: JSON.stringify(body) });

const isComing = ({ databases, content, failure }) =>
  databases?.some(({ state }) => state === "asked") || (content === null && !failure);

// The answer to a request. It is repeated every few seconds while the page is visible, or sent once; and sooner while a database
// has not answered yet.
export const useLive = (question, once = false) => {
  const [found, setFound] = useState({ said: null, failure: null });
  const open = useRef(false);
  const again = useRef(null);
  const refresh = useCallback(async () => {
    if (open.current) return;
    open.current = true;
    try {
      const said = await question();
      setFound({ said, failure: null });
      if (isComing(said)) again.current?.();
    } catch (error) {
      setFound((before) => ({ ...before, failure: error.message }));
    } finally {
      open.current = false;
    }
  }, [question]);
  useEffect(() => {
    let soon;
    again.current = () => (soon = setTimeout(look, SOON));
    const look = () => document.hidden || refresh();
    refresh();
    if (once) return undefined;
    const timer = setInterval(look, EVERY);
    document.addEventListener("visibilitychange", look);
    return () => {
      clearInterval(timer);
      clearTimeout(soon);
      again.current = null;
      document.removeEventListener("visibilitychange", look);
    };
  }, [refresh, once]);
  return { ...found, refresh };
};
