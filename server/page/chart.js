/* A chart of the last minutes: lines over time with axes, units, and the values under the pointer or the arrow keys. */

const MARGIN = { left: 52, right: 8, top: 8, bottom: 20 };

class Chart {
  /* `series` are {name, label, className} objects, drawn in this order; `format` writes a value with its unit; `span_s` is
     how far back the chart goes. */
  constructor(host, { label, series, format, span_s, isLog = false }) {
    this.svg = host.querySelector("svg");
    this.series = series;
    this.format = format;
    this.span_s = span_s;
    this.isLog = isLog;
    this.points = [];
    this.chosen = null; // index of the point under the pointer
    this.legend = made("ul", { class: "legend" });
    host.append(this.legend);
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("aria-label", `${label}. Arrow keys move through time.`);
    this.svg.addEventListener("pointermove", (event) => this.choose(this.indexAt(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.choose(null));
    this.svg.addEventListener("blur", () => this.choose(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /* `points` are {age_s, values: {name: number or null}} objects, the oldest first. */
  show(points) {
    if (this.chosen !== null) this.chosen = Math.min(this.chosen, points.length - 1);
    this.points = points;
    this.draw();
  }

  choose(index) {
    this.chosen = index;
    this.draw();
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.points.length) return;
    event.preventDefault();
    const last = this.points.length - 1;
    this.choose(Math.max(0, Math.min(last, (this.chosen ?? last + 1) + step)));
  }

  indexAt(x) {
    const age_s = this.span_s * (1 - (x - MARGIN.left) / this.width);
    const distance = (index) => Math.abs(this.points[index].age_s - age_s);
    return this.points.reduce((best, _, index) => (best === null || distance(index) < distance(best) ? index : best), null);
  }

  draw() {
    const box = this.svg.getBoundingClientRect();
    if (!box.width) return;
    this.width = box.width - MARGIN.left - MARGIN.right;
    this.height = box.height - MARGIN.top - MARGIN.bottom;
    this.scale();
    this.svg.replaceChildren(...this.axes(), ...this.series.flatMap((each) => this.lines(each)), ...this.cross());
    this.writeLegend();
  }

  scale() {
    const values = this.points.flatMap((point) => this.series.map(({ name }) => point.values[name])).filter(isNumber);
    const most = Math.max(...values, this.isLog ? 10 : 1);
    const least = Math.min(...values.filter((value) => value > 0), most);
    this.ticks = this.isLog ? decades(least, most) : rounds(most);
  }

  x(age_s) { return MARGIN.left + this.width * (1 - age_s / this.span_s); }

  y(value) {
    const ends = [this.ticks[0], this.ticks.at(-1)].map((each) => (this.isLog ? Math.log(each) : each));
    const place = this.isLog ? Math.log(Math.max(value, this.ticks[0])) : value;
    return MARGIN.top + this.height * (1 - (place - ends[0]) / (ends[1] - ends[0]));
  }

  part(tag, attributes, text = "") {
    const element = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }

  axes() {
    const right = MARGIN.left + this.width, bottom = MARGIN.top + this.height;
    const rows = this.ticks.flatMap((tick) => {
      const y = this.y(tick);
      return [
        this.part("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y, y2: y }),
        this.part("text", { x: MARGIN.left - 6, y: y + 4, "text-anchor": "end" }, this.format(tick)),
      ];
    });
    const every_s = this.span_s / (this.width < 400 ? 2 : 5);
    const columns = [];
    for (let age_s = 0; age_s <= this.span_s; age_s += every_s) {
      const anchor = age_s === 0 ? "end" : age_s === this.span_s ? "start" : "middle";
      columns.push(this.part("text", { x: this.x(age_s), y: bottom + 16, "text-anchor": anchor }, ago(age_s)));
    }
    return [...rows, ...columns];
  }

  /* One path for a series: a value that is null is a gap in it. */
  lines({ name, className }) {
    let isDown = false;
    const steps = this.points.map(({ age_s, values }) => {
      if (!isNumber(values[name])) { isDown = false; return ""; }
      const step = `${isDown ? "L" : "M"}${this.x(age_s).toFixed(1)} ${this.y(values[name]).toFixed(1)}`;
      isDown = true;
      return step;
    });
    return [this.part("path", { class: className, d: steps.join("") || "M0 0", "stroke-linecap": "round" })];
  }

  cross() {
    if (this.chosen === null || !this.points[this.chosen]) return [];
    const x = this.x(this.points[this.chosen].age_s);
    return [this.part("line", { class: "cross", x1: x, x2: x, y1: MARGIN.top, y2: MARGIN.top + this.height })];
  }

  writeLegend() {
    const point = this.points[this.chosen ?? this.points.length - 1];
    const entries = this.series.map(({ name, label, className }) => made(
      "li", {}, made("span", { class: `swatch ${className.replace("ink-", "")}` }), `${label} `,
      made("b", {}, point && isNumber(point.values[name]) ? this.format(point.values[name]) : NONE),
    ));
    this.legend.replaceChildren(...entries, made("li", {}, point && this.chosen !== null ? ago(point.age_s) : "now"));
  }
}

function ago(age_s) {
  if (age_s < 0.5) return "now";
  return age_s >= 60 && age_s % 30 === 0 ? `${age_s / 60} min ago` : `${age_s.toFixed(0)} s ago`;
}

/* Round numbers from 0 to at least `most`, four or five of them. */
function rounds(most) {
  const rough = most / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, index) => index * step);
}

/* Powers of ten around `least` and `most`. */
function decades(least, most) {
  const first = Math.floor(Math.log10(least)), last = Math.max(Math.ceil(Math.log10(most)), first + 1);
  return Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
}
