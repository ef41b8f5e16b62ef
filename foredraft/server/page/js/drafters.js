// The choice of a drafter: as served, where the controller may draft nothing, or one that always drafts.
import { h } from "./dom.js";
import { getInfo } from "./store.js";

export function drafterChoice(chosen = "") {
  const names = (getInfo()?.drafters ?? []).filter((name) => name !== "none");
  const select = h("select", { "aria-label": "Drafter" }, h("option", { value: "" }, "as served"), names.map((name) => h("option", { value: name }, name.replaceAll("_", " "))));
  select.value = chosen;
  return select;
}

export const laneOf = (select) => (select.value ? { drafter: select.value } : {});
