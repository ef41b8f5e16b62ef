// Columns of bars side by side, of which some can be dragged.
import { h } from "./dom.js";

export class Bars {
  // `columns`: [name, {kind: value or null}]; `full`: the value that fills a column.
  constructor(label, columns, full, { show, moved = () => {} }) {
    Object.assign(this, { full, show, moved });
    this.columns = columns.map((name, i) => new Column(this, name, i));
    this.said = h("p", { class: "unseen" });
    this.element = h("div", { class: "columns", role: "group", "aria-label": label }, this.columns.map((column) => column.element));
  }

  // One bar of a column; a value that is null takes it away.
  set(i, kind, value, text) { this.columns[i].set(kind, value, text); }
  draggable(i, kind, value) { this.columns[i].drag(kind, value); }
  // Nobody drags any more: what was drawn is what was said.
  fix() { this.columns.forEach((column) => column.fix()); }
}

class Column {
  constructor(bars, name, i) {
    Object.assign(this, { bars, name, i, found: new Map() });
    this.well = h("div", { class: "well" });
    this.element = h("div", { class: "column" }, this.well, h("span", { class: "name" }, name));
  }

  set(kind, value, text = value === null ? "" : this.bars.show(value)) {
    let bar = this.found.get(kind);
    if (value === null) { bar?.remove(); this.found.delete(kind); return; }
    if (!bar) {
      bar = h("i", { class: kind }, h("b", {}));
      this.found.set(kind, bar);
      this.well.append(bar);
    }
    bar.style.setProperty("--of", Math.max(0, Math.min(1, value / this.bars.full)));
    bar.firstChild.textContent = text;
  }

  drag(kind, value) {
    const { well, bars } = this;
    const say = (is) => {
      well.setAttribute("aria-valuenow", is);
      well.setAttribute("aria-valuetext", bars.show(is));
      this.value = is;
    };
    const move = (to) => bars.moved(this.i, Math.max(0, Math.min(bars.full, to)));
    const at = (event) => { const { top, height } = well.getBoundingClientRect(); move(bars.full * (1 - (event.clientY - top) / height)); };
    for (const [key, is] of Object.entries({ role: "slider", tabindex: 0, "aria-label": this.name, "aria-orientation": "vertical", "aria-valuemin": 0, "aria-valuemax": bars.full })) well.setAttribute(key, is);
    this.live = new AbortController();
    const { signal } = this.live;
    well.addEventListener("pointerdown", (event) => { well.setPointerCapture(event.pointerId); at(event); }, { signal });
    well.addEventListener("pointermove", (event) => { if (well.hasPointerCapture(event.pointerId)) at(event); }, { signal });
    well.addEventListener("keydown", (event) => {
      const by = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      event.preventDefault();
      move(this.value + by * bars.full * 0.05);
    }, { signal });
    well.classList.add("open");
    say(value);
    this.say = say;
  }

  fix() {
    this.live?.abort();
    this.well.classList.remove("open");
    for (const name of ["role", "tabindex", "aria-valuenow", "aria-valuetext", "aria-orientation", "aria-valuemin", "aria-valuemax"]) this.well.removeAttribute(name);
  }
}

// The names of the bars' colours.
export const keys = (...pairs) => h("p", { class: "keys" }, pairs.map(([kind, text]) => h("span", {}, h("i", { class: kind }), text)));
