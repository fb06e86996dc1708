// The entry of the page: a component under the name that Airflow's shell looks for. Request the overview now, while the other
// files load.
import { begin } from "./api.js";

begin();
const { Page } = await import("./page.js");

globalThis.AirflowPlugin = Page;
