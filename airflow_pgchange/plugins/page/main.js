// The page as Airflow's shell loads it: a component under the name that the shell looks for.
import { Page } from "./page.js";

globalThis.AirflowPlugin = Page;
