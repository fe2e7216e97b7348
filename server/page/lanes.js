/* The timeline of steps: a lane for those of each phase, one for the KV blocks in use, and one for each request. A
   click or Enter pins a step: then the timeline is held, and a table has the requests that ran in it. */

const LANE = 26,
  REQUEST = 13,
  MAX_LANES = 14,
  MAX_NAMES = 4;
const PHASES = ["queue", "prefill", "decode"];

class Lanes extends Plot {
  constructor(host, span_s) {
    const margin = { left: 76, right: 8, top: 4, bottom: 20 };
    super(host, "Timeline of steps", span_s, margin, ", Enter lists the requests of a step");
    Object.assign(this, { steps: [], requests: [], known: new Map(), now_ms: 0, isPinned: false });
    this.svg.addEventListener("click", (event) => this.onClick(event));
  }

  /* `steps` are those of /stats/timeline; `requests` are {id, cached, spans: {queue, prefill, decode}} objects, where a
     span is a pair of times. Times are the server's milliseconds. */
  show(steps, requests, now_ms) {
    const first_ms = now_ms - 1000 * this.span_s;
    this.now_ms = now_ms;
    this.steps = steps.filter(({ end_ms }) => end_ms > first_ms);
    this.known = new Map(requests.map((request) => [request.id, request]));
    this.requests = requests.filter(({ spans }) => spans.decode[1] > first_ms).slice(-MAX_LANES);
    this.svg.style.height = `${3 * LANE + Math.max(1, this.requests.length) * REQUEST + 34}px`;
    this.draw();
  }

  /* Pins the point of this index; null: none. */
  pin(index) {
    this.isPinned = index !== null;
    if (this.isPinned) at("hold").checked = true;
    this.choose(index);
  }

  point(index) {
    if (!this.isPinned) super.point(index);
  }

  onClick({ offsetX, offsetY }) {
    const lane = Math.floor((offsetY - this.margin.top - 3 * LANE - 4) / REQUEST);
    const request = this.requests[lane];
    if (request) findRequest(request.id);
    else this.pin(this.nearest(offsetX));
  }

  onKey(event) {
    if (event.key === "Enter" && this.chosen !== null) this.pin(this.chosen);
    else if (event.key === "Escape") this.pin(null);
    else super.onKey(event);
  }

  draw() {
    super.draw();
    this.showRan();
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

  /* Whether a step is drawn faint, so that those of the requests whose details are open stand out. */
  isFaint(step, open) {
    return open.size > 0 && !step.computed?.some(({ id }) => open.has(id));
  }

  stepsOf(phase, isFaint, top) {
    const open = openRequests();
    const steps = this.steps.filter((step) => step.phase === phase && this.isFaint(step, open) === isFaint);
    const boxes = steps.map((step) => this.box([step.end_ms - step.duration_ms, step.end_ms], top, LANE - 8));
    return this.area(isFaint ? `${phase} faint` : phase, boxes);
  }

  parts() {
    const top = this.margin.top;
    const label = (name, index) =>
      this.part("text", { x: this.margin.left - 8, y: top + index * LANE + 16, "text-anchor": "end" }, name);
    return [
      ...["prefill", "decode", "KV in use"].map(label),
      ...["prefill", "decode"].flatMap((phase, index) =>
        [true, false].map((isFaint) => this.stepsOf(phase, isFaint, top + index * LANE + 4)),
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
    const ran = tokensOf(step);
    const open = openRequests();
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
      ...(ran.length && !this.isPinned ? [made("li", { class: "ids" }, `ran: ${namesOf(ran)}`)] : []),
      made("li", {}, ago(this.age(step.end_ms))),
      ...(open.size ? [made("li", {}, `faint: steps without ${namesOf([...open].map((id) => ({ id })))}`)] : []),
    ];
  }

  /* The table of the pinned step. */
  showRan() {
    const step = this.isPinned ? this.steps[this.chosen] : null;
    at("ran").hidden = !step;
    if (step === this.shown) return; // what is focused stays so
    this.shown = step;
    if (!step) return;
    const rows = tokensOf(step).map((each) => this.ranRow(step, each));
    const names = ["request", "computed", "positions", ...(step.phase === "prefill" ? ["cached"] : [])];
    const head = names.map((name) => made("th", { scope: "col" }, name));
    at("ran")
      .querySelector("table")
      .replaceChildren(
        made("caption", {}, captionOf(step)),
        made("thead", {}, made("tr", {}, ...head)),
        made("tbody", {}, ...rows),
      );
  }

  ranRow(step, { id, num, start, end }) {
    const request = this.known.get(id);
    const button = made("button", { class: "small id", type: "button" }, id);
    button.addEventListener("click", () => findRequest(id));
    const positions = num === 1 ? count(start) : end - start === num ? `${count(start)} to ${count(end - 1)}` : NONE;
    const cells = [many(num, "token"), positions, ...(step.phase === "prefill" ? [count(request?.cached)] : [])];
    const name = made("th", { scope: "row" }, button);
    return made("tr", {}, name, ...cells.map((cell) => made("td", {}, cell)));
  }
}

/* What a step computed of each request, its sequences taken together. */
function tokensOf(step) {
  const found = new Map();
  for (const { id, start, end } of step.computed ?? []) {
    const one = found.get(id) ?? { id, num: 0, start, end };
    one.num += end - start;
    found.set(id, one);
  }
  return [...found.values()];
}

function captionOf(step) {
  const name = `${step.phase} step of ${many(step.tokens, "token")}`;
  if (step.computed === null) return `A ${name}: too long ago to tell who ran in it.`;
  const num = step.requests - step.computed.length;
  return `A ${name}${num ? `; ${many(num, "sequence")} of other API keys, or ended since` : ""}.`;
}

function namesOf(requests) {
  const names = requests.slice(0, MAX_NAMES).map(({ id }) => (id.length > 20 ? `${id.slice(0, 16)}…` : id));
  return names.join(", ") + (requests.length > MAX_NAMES ? ` and ${requests.length - MAX_NAMES} more` : "");
}

function heldRatio(step) {
  return step.kv_held_blocks / (step.kv_held_blocks + step.kv_cached_blocks + step.kv_free_blocks);
}
