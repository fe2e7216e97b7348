/* Lines over time, with units, and the values at the place that is chosen. */

class Chart extends Plot {
  /* `series` are {name, label, className} objects, drawn in this order; `format` writes a value with its unit. */
  constructor(host, { label, series, format, span_s, isLog = false }) {
    super(host, label, span_s, { left: 58, right: 8, top: 8, bottom: 20 });
    Object.assign(this, { series, format, isLog, points: [] });
  }

  /* `points` are {age_s, values: {name: number or null}} objects, the oldest first. */
  show(points) {
    this.points = points;
    this.draw();
  }

  ages() {
    return this.points.map(({ age_s }) => age_s);
  }

  parts() {
    const values = this.points.flatMap((point) => this.series.map(({ name }) => point.values[name])).filter(isNumber);
    const most = Math.max(...values, this.isLog ? 10 : 1);
    const least = Math.min(...values.filter((value) => value > 0), most);
    this.ticks = this.isLog ? decades(least, most) : rounds(most);
    return [
      ...this.ticks.flatMap((tick) => this.row(this.y(tick), this.format(tick))),
      ...this.series.map((each) => this.line(each)),
    ];
  }

  y(value) {
    const scale = (each) => (this.isLog ? Math.log(Math.max(each, this.ticks[0])) : each);
    const [low, high] = [this.ticks[0], this.ticks.at(-1)].map(scale);
    return this.margin.top + this.height * (1 - (scale(value) - low) / (high - low));
  }

  /* One path for a series: a value that is null is a gap in it, and one between two gaps is a dot. */
  line({ name, className }) {
    const steps = this.points.map(({ age_s, values }, index) => {
      if (!isNumber(values[name])) return "";
      const follows = index > 0 && isNumber(this.points[index - 1].values[name]);
      const place = `${this.x(age_s).toFixed(1)} ${this.y(values[name]).toFixed(1)}`;
      return follows ? `L${place}` : `M${place}h0`;
    });
    return this.part("path", {
      class: `line ink-${className}`,
      d: steps.join("") || "M0 0",
      "stroke-linecap": "round",
    });
  }

  entries() {
    const point = this.points[this.chosen ?? this.points.length - 1];
    const value = (name) => (point && isNumber(point.values[name]) ? this.format(point.values[name]) : NONE);
    const when = this.chosen === null ? "now" : ago(point.age_s);
    return [
      ...this.series.map(({ name, label, className }) => entry(className, label, value(name))),
      made("li", {}, when),
    ];
  }
}

/* Round numbers from 0 to at least `most`, four or five of them. */
function rounds(most) {
  const rough = most / 4,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  return Array.from({ length: Math.ceil(most / step - 1e-9) + 1 }, (_, index) => index * step);
}

/* Powers of ten around `least` and `most`. */
function decades(least, most) {
  const first = Math.floor(Math.log10(least)),
    last = Math.max(Math.ceil(Math.log10(most)), first + 1);
  return Array.from({ length: last - first + 1 }, (_, index) => 10 ** (first + index));
}
