// The replay: where a run's time went, step by step. It also shows what audits wrote to their files.
import { announce, h, number } from "../dom.js";
import { drafterChoice, laneOf } from "../drafters.js";
import { getInfo, runs } from "../store.js";
import { collect, spoken } from "../tour/part.js";
import { auditView, isAudit } from "./audit.js";
import { Timeline } from "./timeline.js";

export class Replay {
  constructor() {
    this.chips = h("div", { class: "chips", role: "group", "aria-label": "Runs of this tab" });
    const input = h("input", { type: "file", class: "unseen", id: "replay-file", accept: ".jsonl,.json,application/json", onchange: () => this.#open(input.files[0]) });
    this.drop = h("label", { class: "drop", for: "replay-file" }, "Open a file, or drop it here: a trace (", h("span", { class: "mono" }, "serve --trace"), "), or the report of an audit or of measure (", h("span", { class: "mono" }, "--output"), "). It stays on this machine.");
    this.out = h("div", { class: "replayed", "aria-live": "polite" });
    this.element = h("div", { class: "race replay" },
      h("section", { class: "lead" }, h("h1", {}, "Where did the time go?"), h("p", {}, "Each step of a run in a row: drafting, the model's forward, the rest; above it the tokens that it committed. A run of this tab can be run again with another drafter.")),
      h("div", { class: "sources" }, this.chips, input, this.drop), this.out);
    this.element.addEventListener("dragover", (event) => { event.preventDefault(); this.drop.classList.add("over"); });
    this.element.addEventListener("dragleave", () => this.drop.classList.remove("over"));
    this.element.addEventListener("drop", (event) => { event.preventDefault(); this.drop.classList.remove("over"); this.#open(event.dataTransfer.files[0]); });
  }

  update() {
    if (!this.shown && runs().length) { this.#show(runs().at(-1)); return; }
    this.#list();
  }

  #list() {
    this.chips.replaceChildren(...(runs().length
      ? runs().map((run) => h("button", { class: "chip", type: "button", "aria-pressed": String(run === this.shown), onclick: () => this.#show(run) }, run.title))
      : [h("p", { class: "note" }, "Nothing has been run in this tab yet: ", h("a", { href: "#chat" }, "say something"), " or ", h("a", { href: "#race" }, "start a race"), ", or open a file.")]));
  }

  // A run of this tab: it can be run again with another drafter.
  #show(run) {
    this.shown = run;
    this.#list();
    const head = { type: "run", version: 1, foredraft: getInfo()?.version ?? "", started: "" };
    const lines = run.steps.map((event, i) => ({ type: "step", step: i, at_ms: event.clock_ms, times: event.times, num_waiting: 0, rows: [event.row] }));
    this.#replay([head, ...lines], (timeline) => this.#others(run, timeline));
  }

  async #open(file) {
    if (!file) return;
    this.shown = file;
    this.#list();
    try {
      const text = await file.text();
      const whole = parsed(text);
      if (whole && isAudit(whole)) { this.out.replaceChildren(auditView(whole)); return; }
      const lines = text.split("\n").filter((line) => line.trim()).map(parsed);
      if (lines[0]?.type !== "run" || lines.slice(1).some((line) => !line?.rows || !line.times)) throw new Error(`${file.name} is neither a trace nor the JSON of an audit.`);
      if ((lines[0].version ?? 1) !== 1) throw new Error(`${file.name} is a trace of version ${lines[0].version}, and this page reads 1.`);
      this.#replay(lines);
    } catch (error) {
      this.out.replaceChildren(h("p", { class: "bad", role: "alert" }, error.message));
    }
  }

  // The steps that a request had for itself, one request at a time.
  #replay(lines, more = () => null) {
    const alone = lines.filter((line) => line.rows?.length === 1);
    const ids = [...new Set(alone.filter(({ rows: [row] }) => row.committed.length && row.num_read === 1).map(({ rows: [row] }) => row.request_id))];
    if (!ids.length) {
      this.out.replaceChildren(h("p", { class: "bad", role: "alert" }, "The trace has no step that decoded one request alone."));
      return;
    }
    const at = h("div", { class: "request" });
    const pick = (id) => {
      const timeline = new Timeline(alone.filter(({ rows: [row] }) => row.request_id === Number(id)));
      at.replaceChildren(timeline.element, more(timeline) ?? "", stretchTable(timeline.stretches));
    };
    const select = h("select", { "aria-label": "Request", onchange: () => pick(select.value) }, ids.map((id) => h("option", { value: id }, `request ${id}`)));
    this.out.replaceChildren(ids.length > 1 ? h("label", { class: "field" }, "Of this trace", select) : "", at);
    pick(ids[0]);
    announce(`${ids.length} requests`);
  }

  // The same request with another drafter, really run.
  #others(run, before) {
    const select = drafterChoice(), at = h("div", { class: "again" });
    const go = h("button", { class: "button", type: "button", onclick: async () => {
      go.disabled = true;
      at.replaceChildren(h("p", { class: "note" }, "It is being run again …"));
      try {
        const [lane] = await collect({ ...run.request, lanes: [laneOf(select)] }, null);
        const after = new Timeline(lane.steps), name = select.value ? `with “${spoken(select.value)}”` : "as served";
        const isSame = lane.end.sha256 === run.sha256;
        at.replaceChildren(h("p", {}, `${name[0].toUpperCase()}${name.slice(1)} it took `, h("b", {}, `${number(after.ms / 1000)} s`), ` instead of ${number(before.ms / 1000)}, `, isSame ? "for the same text." : h("span", { class: run.isSeeded ? "bad" : "" }, run.isSeeded ? "and the text is another." : "for another draw of the text.")), after.element);
      } catch (error) { at.replaceChildren(h("p", { class: "bad" }, error.message)); }
      go.disabled = false;
    } }, "Run it again");
    return h("section", { class: "other" }, h("div", { class: "line" }, h("label", { class: "field" }, "And with another drafter?", select), go), at);
  }
}

const parsed = (text) => { try { return JSON.parse(text); } catch { return null; } };

function stretchTable(stretches) {
  const full = Math.max(...stretches.map((each) => each.ms_per_token));
  const row = (each) => {
    const scale = each.ms_per_token / full;
    return h("tr", {}, h("th", { scope: "row" }, `${each.first}–${each.last}`),
      h("td", { class: "wide" }, h("div", { class: "stack", vars: { width: `${100 * scale}%` } }, [["draft", each.draft_ms], ["score", each.score_ms], ["other", each.rest_ms]].map(([kind, ms]) => h("i", { class: kind, vars: { "--of": ms } })))),
      h("td", {}, number(each.ms_per_token, 1)), h("td", {}, number(each.drafted / each.steps, 1)), h("td", {}, number(1 + each.accepted / each.steps)));
  };
  return h("section", { class: "tile" }, h("h2", {}, "By stretches of the reply"), h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "By stretches of the reply" }, h("table", {}, h("thead", {}, h("tr", {}, ["tokens", "", "ms a token", "drafted a step", "committed a step"].map((text) => h("th", { scope: "col", class: text ? "" : "wide" }, text)))), h("tbody", {}, stretches.map(row)))));
}
