// The addresses of the views.
import { Link, chakra, h, useLocation, useSearchParams } from "./shell.js";

const ROOT = "/plugin/pgchange";

export const at = (view = "", asked = {}) => {
  const query = new URLSearchParams(Object.entries(asked).filter(([, value]) => value)).toString();
  return (view ? `${ROOT}/${view}` : ROOT) + (query && `?${query}`);
};

export const atConsumer = ({ connection, source, kind, consumer }) =>
  at("consumer", { connection, source, kind, consumer });

export const atDag = (dag) => `/dags/${encodeURIComponent(dag)}`;

// Airflow's own page of the try of a task, with its log.
export const atRun = (run) => {
  const mapped = run.map_index < 0 ? "" : `/mapped/${run.map_index}`;
  const parts = [run.dag_id, "runs", run.run_id, "tasks", run.task_id].map(encodeURIComponent).join("/");
  return `/dags/${parts}${mapped}?try_number=${run.try_number}`;
};

export const useView = () => useLocation().pathname.split(ROOT)[1]?.split("/")[1] ?? "";

// The parameters in the address besides the view, and a function to change some. Empty parameters are left out.
export const useAsked = () => {
  const [asked, setAsked] = useSearchParams();
  const change = (values) =>
    setAsked(
      (before) => {
        const next = new URLSearchParams(before);
        Object.entries(values).forEach(([name, value]) => (value ? next.set(name, value) : next.delete(name)));
        return next;
      },
      { replace: true },
    );
  return [asked, change];
};

export const To = ({ to, children, ...rest }) =>
  h(chakra.Link, { asChild: true, color: "fg.info", ...rest }, h(Link, { to }, children));

// views: [[name in the address, title]]
export const Tabs = ({ views, view }) =>
  h(
    chakra.Box,
    { as: "nav", "aria-label": "Views of PG feeds", display: "flex", flexWrap: "wrap", gap: 1, mt: 3, borderBottomWidth: "1px" },
    views.map(([name, title]) => {
      const current = name === (view === "consumer" ? "" : view);
      return h(
        To,
        {
          key: name,
          to: at(name),
          "aria-current": current ? "page" : undefined,
          color: current ? "fg" : "fg.muted",
          fontWeight: "medium",
          borderBottomWidth: "2px",
          borderColor: current ? "blue.solid" : "transparent",
          px: 3,
          py: 2,
          mb: "-1px",
          textDecoration: "none",
        },
        title,
      );
    }),
  );
