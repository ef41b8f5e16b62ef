// Elements from plain data. Text always becomes a text node: nothing here parses markup.
const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
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

// A slider with its value beside it; told(value) is called when it is let go, moved(value) at every move.
export function slider(label, { min, max, step = 1, value, show = String, moved = () => {}, told = () => {} }) {
  const out = h("output", {}, show(value));
  const input = h("input", { type: "range", min, max, step, value, "aria-label": label });
  input.addEventListener("input", () => { out.textContent = show(Number(input.value)); moved(Number(input.value)); });
  input.addEventListener("change", () => told(Number(input.value)));
  const field = h("label", { class: "field" }, label, input, out);
  return { field, input, get value() { return Number(input.value); } };
}

// A choice of a few; returns the element and its value.
export function choice(label, options, chosen, told = () => {}) {
  let value = chosen;
  const buttons = options.map(([key, text]) => h("button", {
    type: "button", role: "radio", "aria-checked": String(key === value),
    onclick: () => {
      value = key;
      buttons.forEach((b, i) => b.setAttribute("aria-checked", String(options[i][0] === key)));
      told(key);
    },
  }, text));
  return { element: h("span", { class: "pace", role: "radiogroup", "aria-label": label }, buttons), get value() { return value; } };
}

export const number = (x, digits = 2) => Number(x).toFixed(digits);
export const percent = (x) => x === 0 ? "0 %" : x >= 0.995 && x < 1 ? ">99 %" : x >= 0.1 ? `${(100 * x).toFixed(0)} %` : x >= 0.001 ? `${(100 * x).toFixed(1)} %` : "<0.1 %";
export const shown = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
