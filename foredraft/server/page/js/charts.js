// Small charts. Each takes plain numbers and returns an SVG that is read aloud by its label.
import { s } from "./dom.js";

export class Frame {
  constructor(width, height, xs, ys, label) {
    Object.assign(this, { width, height, xs, ys });
    this.svg = s("svg", { viewBox: `-34 -12 ${width + 52} ${height + 44}`, role: "img", "aria-label": label });
  }
  x(value) { return ((value - this.xs[0]) / (this.xs[1] - this.xs[0] || 1)) * this.width; }
  y(value) { return this.height - ((value - this.ys[0]) / (this.ys[1] - this.ys[0] || 1)) * this.height; }
  line(points, kind) {
    const d = points.map(([x, y], i) => `${i ? "L" : "M"}${this.x(x).toFixed(1)} ${this.y(y).toFixed(1)}`).join("");
    this.svg.append(s("path", { class: `curve ${kind}`, d }));
    return this;
  }
  axes(xTicks, yTicks, xTitle, yTitle = "") {
    this.svg.append(s("line", { class: "axis", x1: 0, y1: this.height, x2: this.width, y2: this.height }));
    for (const [value, text] of xTicks) this.svg.append(s("text", { x: this.x(value), y: this.height + 15, "text-anchor": "middle" }, text));
    for (const [value, text] of yTicks) this.svg.append(s("line", { class: "axis", x1: 0, x2: this.width, y1: this.y(value), y2: this.y(value), opacity: 0.6 }), s("text", { x: -7, y: this.y(value) + 4, "text-anchor": "end" }, text));
    this.svg.append(s("text", { x: this.width, y: this.height + 27, "text-anchor": "end" }, xTitle), s("text", { x: -30, y: -3 }, yTitle));
    return this;
  }
  level(value) { this.svg.append(s("line", { class: "level", x1: 0, x2: this.width, y1: this.y(value), y2: this.y(value) })); return this; }
  dot(x, y, text) {
    this.svg.append(s("circle", { class: "dot", cx: this.x(x), cy: this.y(y), r: 6 }));
    if (text) this.svg.append(s("text", { class: "strong", x: this.x(x), y: this.y(y) - 12, "text-anchor": x > (this.xs[0] + this.xs[1]) * 0.7 ? "end" : "middle" }, text));
    return this;
  }
  bar(x, value, width, kind = "", text = "") {
    this.svg.append(s("rect", { class: `fill ${kind}`, x: this.x(x) - width / 2, width, y: this.y(value), height: Math.max(0, this.height - this.y(value)), rx: 3 }));
    if (text) this.svg.append(s("text", { x: this.x(x), y: this.y(value) - 5, "text-anchor": "middle" }, text));
    return this;
  }
}

export const ticks = (values, show = String) => values.map((value) => [value, show(value)]);
