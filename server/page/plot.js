/* What pictures over time have in common: a time axis, and a place in time, chosen by the pointer or the arrow keys. */

class Plot {
  /* `span_s` is how far back it goes from now. */
  constructor(host, label, span_s, margin, more = "") {
    this.svg = host.querySelector("svg");
    this.span_s = span_s;
    this.margin = margin;
    this.chosen = null; // index of a point
    this.legend = made("ul", { class: "legend" });
    host.append(this.legend);
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("tabindex", "0");
    this.svg.setAttribute("aria-label", `${label}. Arrow keys move through time${more}.`);
    this.svg.addEventListener("pointermove", (event) => this.point(this.nearest(event.offsetX)));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    this.svg.addEventListener("blur", () => this.point(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /* The pointer is at a point, or has left. */
  point(index) {
    this.choose(index);
  }

  choose(index) {
    this.chosen = index;
    this.draw();
  }

  onKey(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key],
      last = this.ages().length - 1;
    if (!step || last < 0) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(last, (this.chosen ?? last + 1) + step)));
  }

  /* The index of the point that is nearest to a horizontal place; null where there is none. */
  nearest(x) {
    const age_s = this.span_s * (1 - (x - this.margin.left) / this.width),
      ages = this.ages();
    let best = null;
    ages.forEach((each, index) => {
      if (best === null || Math.abs(each - age_s) < Math.abs(ages[best] - age_s)) best = index;
    });
    return best;
  }

  draw() {
    const box = this.svg.getBoundingClientRect();
    if (!box.width) return; // not shown
    this.width = box.width - this.margin.left - this.margin.right;
    this.height = box.height - this.margin.top - this.margin.bottom;
    const ages = this.ages();
    if (this.chosen !== null) this.chosen = ages.length ? Math.min(this.chosen, ages.length - 1) : null;
    const cross = this.chosen === null ? [] : [this.column(ages[this.chosen])];
    this.svg.replaceChildren(...this.timeAxis(), ...this.parts(), ...cross);
    this.legend.replaceChildren(...this.entries());
  }

  x(age_s) {
    return this.margin.left + this.width * (1 - age_s / this.span_s);
  }

  part(tag, attributes, text = "") {
    const element = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.textContent = text;
    return element;
  }

  column(age_s) {
    const x = this.x(age_s);
    return this.part("line", { class: "cross", x1: x, x2: x, y1: this.margin.top, y2: this.margin.top + this.height });
  }

  row(y, name) {
    return [
      this.part("line", { class: "grid", x1: this.margin.left, x2: this.margin.left + this.width, y1: y, y2: y }),
      this.part("text", { x: this.margin.left - 6, y: y + 4, "text-anchor": "end" }, name.replace(/\.0+(?= )/, "")),
    ];
  }

  timeAxis() {
    const num = this.width < 560 ? 2 : 5,
      y = this.margin.top + this.height + 16;
    return Array.from({ length: num + 1 }, (_, index) => {
      const age_s = (this.span_s * index) / num;
      const anchor = index === 0 ? "end" : index === num ? "start" : "middle";
      return this.part("text", { x: this.x(age_s), y, "text-anchor": anchor }, ago(age_s));
    });
  }
}

function ago(age_s) {
  if (age_s < 0.05) return "now";
  if (age_s >= 60) return `${Number((age_s / 60).toFixed(1))} min ago`;
  return `${Number(age_s.toFixed(age_s < 10 ? 1 : 0))} s ago`;
}

/* An entry of a legend: a colour, a name, and a value. */
function entry(className, name, value) {
  const swatch = className ? [made("span", { class: `swatch ${className}` })] : [];
  return made("li", {}, ...swatch, `${name} `, made("b", {}, value));
}
