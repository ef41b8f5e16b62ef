// The file of `foredraft measure --output`: the gain of each drafter, by the number of requests at once.
import { h, number } from "../dom.js";

export const isPlan = (file) => Array.isArray(file.plans) && file.plans.every((plan) => Array.isArray(plan.outlooks));

export function planView(report) {
  return h("article", { class: "plan" }, report.plans.map((plan) => machine(plan)),
    h("p", { class: "note" }, [report.about, report.command, report.date].filter((text) => typeof text === "string").join(" · ")));
}

// Bars of the expected speed-up with the band that most prompts lie in, for each load.
function machine(plan) {
  const most = Math.max(1.2, ...plan.outlooks.map((each) => each.high ?? each.gain));
  const loads = [...new Set(plan.outlooks.map((each) => each.load))];
  const row = (each) => {
    const isChoice = plan.choices?.[each.load] === each.flags;
    return h("div", { class: `outlook ${isChoice ? "taken" : ""}` }, h("span", { class: "name mono" }, each.flags || each.drafter),
      h("span", { class: "range", role: "img", "aria-label": `${number(each.gain)} times, from ${number(each.low ?? each.gain)} to ${number(each.high ?? each.gain)}`, vars: { "--one": 1 / most } },
        h("i", { class: each.gain < 1 ? "under" : "", vars: { "--of": each.gain / most } }), h("u", { vars: { "--low": (each.low ?? each.gain) / most, "--high": (each.high ?? each.gain) / most } })), h("b", {}, `${number(each.gain)}×`));
  };
  return h("section", { class: "tile" }, h("h2", {}, plan.machine),
    loads.map((load) => h("div", { class: "load" }, h("h3", {}, load === 1 ? "one request at a time" : `${load} requests at once`), plan.outlooks.filter((each) => each.load === load).map(row))),
    h("p", { class: "note" }, "Expected speed-up against plain decoding. The thin line is where nine of ten drawings of the prompts lie; the dashed one is 1×. Bold: what to run."));
}
