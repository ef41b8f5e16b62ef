// Elements from plain data. Text always becomes a text node: nothing here parses markup.
const SVG = "http://www.w3.org/2000/svg";

// Attributes and children; children that are null are left out.
export function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "vars") for (const [key, v] of Object.entries(value)) element.style.setProperty(key, v);
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

export const h = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const s = (tag, attributes = {}, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
export const clear = (element) => { element.replaceChildren(); return element; };

// A slider with its value beside it; changed(value) is called when it is let go, moved(value) at every move.
export function slider(label, { min, max, step = 1, value, show = String, moved = () => {}, changed = () => {} }) {
  const out = h("output", {}, show(value));
  const input = h("input", { type: "range", min, max, step, value, "aria-label": label, "aria-valuetext": show(value) });
  input.addEventListener("input", () => {
    out.textContent = show(Number(input.value));
    input.setAttribute("aria-valuetext", out.textContent);
    moved(Number(input.value));
  });
  input.addEventListener("change", () => changed(Number(input.value)));
  const field = h("label", { class: "field" }, label, input, out);
  return { field, input, get value() { return Number(input.value); } };
}

// A number within a sentence: dragged sideways, or moved with the arrow keys. Until it has been moved a `blank` one
// is a question mark; `values` are all that there are, where not every step is. Returns the element, its value, and set(value), which calls nobody.
export function scrub(label, { min, max, step = 1, value, values = null, show = String, blank = false, moved = () => {}, changed = () => {} }) {
  const element = h("span", { class: "scrub", role: "slider", tabindex: 0, "aria-label": label, "aria-valuemin": min, "aria-valuemax": max });
  const digits = (String(step).split(".")[1] ?? "").length, wide = Math.max(4, Math.min(18, 180 / ((max - min) / step)));
  let from = null, isBlank = blank;
  const set = (to) => {
    value = Number(Math.max(min, Math.min(max, to)).toFixed(digits));
    element.textContent = isBlank ? "?" : show(value);
    element.setAttribute("aria-valuenow", value);
    element.setAttribute("aria-valuetext", isBlank ? "not guessed yet" : show(value));
  };
  const snap = (to) => (!values ? to : to > value ? values.find((each) => each >= to) ?? values.at(-1) : values.findLast((each) => each <= to) ?? values[0]);
  const move = (to) => { const before = value; to = snap(to); isBlank = false; set(to); if (value !== before || blank) moved(value); };
  element.addEventListener("pointerdown", (event) => { from = { x: event.clientX, value }; element.setPointerCapture(event.pointerId); });
  element.addEventListener("pointermove", (event) => { if (from) move(from.value + Math.round((event.clientX - from.x) / wide) * step); });
  element.addEventListener("pointerup", () => { if (from) { move(value); changed(value); } from = null; });
  element.addEventListener("pointercancel", () => { from = null; });
  element.addEventListener("keydown", (event) => {
    const to = { ArrowRight: value + step, ArrowUp: value + step, ArrowLeft: value - step, ArrowDown: value - step, Home: min, End: max, PageUp: value + 5 * step, PageDown: value - 5 * step }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    event.stopPropagation();
    move(to);
    changed(value);
  });
  set(value);
  return { element, get value() { return value; }, set(to) { isBlank = false; set(to); } };
}

// A word within a sentence that is one of two things.
export function toggle(label, [off, on], changed = () => {}) {
  let isOn = false;
  const element = h("button", { class: "scrub", type: "button", "aria-pressed": "false", "aria-label": label, onclick: () => {
    isOn = !isOn;
    element.textContent = isOn ? on : off;
    element.setAttribute("aria-pressed", String(isOn));
    changed(isOn);
  } }, off);
  return { element, get value() { return isOn; } };
}

// A choice of a few; returns the element and its value. Tab reaches the group, arrows go through it.
export function choice(label, options, chosen, changed = () => {}) {
  let value = chosen;
  const buttons = options.map(([key, text]) => h("button", { type: "button", role: "radio", onclick: () => take(key) }, text));
  const mark = () => buttons.forEach((button, i) => {
    button.setAttribute("aria-checked", String(options[i][0] === value));
    button.tabIndex = options[i][0] === value ? 0 : -1;
  });
  const take = (key) => { value = key; mark(); changed(key); };
  const onkeydown = (event) => {
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = (buttons.indexOf(document.activeElement) + by + buttons.length) % buttons.length;
    buttons[next].focus();
    take(options[next][0]);
  };
  mark();
  return { element: h("span", { class: "pace", role: "radiogroup", "aria-label": label, onkeydown }, buttons), get value() { return value; } };
}

export const number = (x, digits = 2) => Number(x).toFixed(digits);
export const percent = (x) => x === 0 ? "0 %" : x >= 0.995 && x < 1 ? ">99 %" : x >= 0.1 ? `${(100 * x).toFixed(0)} %` : x >= 0.001 ? `${(100 * x).toFixed(1)} %` : "<0.1 %";
// A token's text where it stands alone: what would not be seen has a sign.
export const shown = (text) => (text.trim() ? text : text.replaceAll(" ", "␣")).replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
// For those who listen.
export const announce = (text) => { document.getElementById("said").textContent = text; };
