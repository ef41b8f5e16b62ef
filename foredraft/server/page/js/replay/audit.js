// The report of `foredraft audit --json`: its sentence, and each level with its verdict.
import { h } from "../dom.js";

const VERDICTS = ["Nothing differs", "It differs", "It could not be audited", "Inconclusive"];
const KINDS = ["fine", "bad", "open", "open"];

export const isAudit = (file) => Array.isArray(file.levels) && "exit_code" in file && typeof file.sentence === "string";

export function auditView(report) {
  const kind = KINDS[report.exit_code] ?? "open";
  return h("article", { class: "audit" },
    h("p", { class: `verdict ${kind}` }, VERDICTS[report.exit_code] ?? "Unknown"),
    h("p", { class: "sentence" }, report.sentence),
    h("ol", { class: "levels" }, report.levels.map((level) => h("li", { class: "tile" },
      h("h2", {}, level.name, " ", h("span", { class: `badge ${found(level.verdict)}` }, level.verdict)), h("p", {}, level.said),
      tables(level).map(([name, rows]) => h("details", {}, h("summary", {}, `${name} (${rows.length})`), table(name, rows)))))),
    h("p", { class: "note" }, [report.command, report.date, report.machine?.cpu, `${report.seconds} s`].filter(Boolean).join(" · ")));
}

const found = (verdict) => ({ DIFFERENT: "bad", inconclusive: "open" })[verdict] ?? "fine";
const isTable = (rows) => Array.isArray(rows) && rows.length > 0 && rows[0] !== null && typeof rows[0] === "object";
const tables = (level) => [...Object.entries(level.figures ?? {}), ["evidence", level.evidence]].filter(([, rows]) => isTable(rows));
const cell = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : typeof value === "number" && !Number.isInteger(value) ? value.toPrecision(4) : String(value));

// Rows that share their columns.
export function table(name, rows, columns = Object.keys(rows[0])) {
  return h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": name }, h("table", {}, h("thead", {}, h("tr", {}, columns.map((key) => h("th", { scope: "col" }, key.replaceAll("_", " "))))), h("tbody", {}, rows.slice(0, 200).map((row) => h("tr", {}, columns.map((key) => h("td", {}, cell(row[key]))))))));
}
