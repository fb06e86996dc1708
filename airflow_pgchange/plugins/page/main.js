// The page as Airflow's shell loads it: a component under the name that the shell looks for. What it shows first is asked
// for while its other files come.
import { begin } from "./api.js";

begin();
const { Page } = await import("./page.js");

globalThis.AirflowPlugin = Page;
