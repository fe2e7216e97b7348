/* The timeline of steps: a lane for those of each phase, one for the KV blocks in use, and one for each request, so
   that it shows who ran in which step. */

const LANE = 26,
  REQUEST = 13,
  MAX_LANES = 14,
  MAX_NAMES = 4;
const PHASES = ["queue", "prefill", "decode"];

class Lanes extends Plot {
  constructor(host, span_s) {
    super(host, "Timeline of steps", span_s, { left: 76, right: 8, top: 4, bottom: 20 });
    Object.assign(this, { steps: [], requests: [], now_ms: 0 });
  }

  /* `steps` are those of /stats/timeline; `requests` are {id, spans: {queue, prefill, decode}} objects, where a span
     is a pair of times. Times are the server's milliseconds. */
  show(steps, requests, now_ms) {
    const first_ms = now_ms - 1000 * this.span_s;
    this.now_ms = now_ms;
    this.steps = steps.filter(({ end_ms }) => end_ms > first_ms);
    this.requests = requests.filter(({ spans }) => spans.decode[1] > first_ms).slice(-MAX_LANES);
    this.svg.style.height = `${3 * LANE + Math.max(1, this.requests.length) * REQUEST + 34}px`;
    this.draw();
  }

  age(time_ms) {
    return Math.min(Math.max(this.now_ms - time_ms, 0) / 1000, this.span_s);
  }

  ages() {
    return this.steps.map(({ end_ms, duration_ms }) => this.age(end_ms - duration_ms / 2));
  }

  /* A rectangle of a path, over a time and from the top of a lane. */
  box([from_ms, to_ms], y, height) {
    const left = this.x(this.age(from_ms)),
      width = Math.max(this.x(this.age(to_ms)) - left, 0.6);
    return `M${left.toFixed(1)} ${y}h${width.toFixed(1)}v${height}h${-width.toFixed(1)}z`;
  }

  parts() {
    const top = this.margin.top;
    const label = (name, index) =>
      this.part("text", { x: this.margin.left - 8, y: top + index * LANE + 16, "text-anchor": "end" }, name);
    return [
      ...["prefill", "decode", "KV in use"].map(label),
      ...["prefill", "decode"].map((phase, index) =>
        this.area(
          phase,
          this.steps
            .filter((step) => step.phase === phase)
            .map((step) => this.box([step.end_ms - step.duration_ms, step.end_ms], top + index * LANE + 4, LANE - 8)),
        ),
      ),
      this.part("line", {
        class: "grid",
        x1: this.margin.left,
        x2: this.margin.left + this.width,
        y1: top + 3 * LANE - 2,
        y2: top + 3 * LANE - 2,
      }),
      this.area(
        "kv",
        this.steps.map((step, index) => this.memory(step, this.steps[index + 1], top + 3 * LANE - 2)),
      ),
      this.part("text", { x: this.margin.left - 8, y: top + 3 * LANE + 13, "text-anchor": "end" }, "requests"),
      ...PHASES.map((phase) =>
        this.area(
          phase,
          this.requests.map(({ spans }, index) =>
            this.box(spans[phase], top + 3 * LANE + 4 + index * REQUEST, REQUEST - 4),
          ),
        ),
      ),
    ];
  }

  area(className, boxes) {
    return this.part("path", { class: `area ink-${className}`, d: boxes.join("") || "M0 0" });
  }

  /* The KV blocks held from the end of a step to that of the next. */
  memory(step, next, bottom) {
    const height = (LANE - 6) * heldRatio(step);
    return this.box([step.end_ms, next?.end_ms ?? this.now_ms], (bottom - height).toFixed(1), height.toFixed(1));
  }

  entries() {
    const step = this.steps[this.chosen ?? this.steps.length - 1];
    if (!step) return [made("li", {}, "No step ran lately.")];
    const ran = this.requests.filter(
      ({ spans }) => spans[step.phase][0] < step.end_ms && spans[step.phase][1] >= step.end_ms - step.duration_ms,
    );
    const ceiling = isNumber(step.floor_ms)
      ? `, ${percent(step.floor_ms / step.model_ms)} of what the machine could do, bound by ${step.bound}`
      : "";
    return [
      entry(
        step.phase,
        `${step.phase} step of`,
        `${many(step.tokens, "token")}, ${many(step.requests, "request")}, ${ms(step.duration_ms)}`,
      ),
      made("li", {}, `${percent(heldRatio(step))} of the KV cache held${ceiling}`),
      ...(ran.length ? [made("li", { class: "ids" }, `in this phase: ${namesOf(ran)}`)] : []),
      made("li", {}, ago(this.age(step.end_ms))),
    ];
  }
}

function namesOf(requests) {
  const names = requests.slice(0, MAX_NAMES).map(({ id }) => (id.length > 20 ? `${id.slice(0, 16)}…` : id));
  return names.join(", ") + (requests.length > MAX_NAMES ? ` and ${requests.length - MAX_NAMES} more` : "");
}

function heldRatio(step) {
  return step.kv_held_blocks / (step.kv_held_blocks + step.kv_cached_blocks + step.kv_free_blocks);
}
