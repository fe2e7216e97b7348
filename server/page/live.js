/* The view of what happens on the server, second by second. */

const SPAN_S = 300, MAX_REQUESTS = 50;

const rateChart = new Chart(at("rates"), {
  label: "Tokens a second",
  series: [{ name: "decode", label: "written (decode)", className: "ink-decode" }],
  format: (value) => `${count(value)}/s`,
  span_s: SPAN_S,
});

/* Fills a table. The first cell of each line names it. */
function table(id, head, lines) {
  const names = head.map((name) => made(name ? "th" : "td", name ? { scope: "col" } : {}, name));
  const rows = lines.map(([name, ...cells]) => made("tr", {}, made("th", { scope: "row" }, name), ...cells.map((cell) => made("td", {}, cell))));
  at(id).replaceChildren(made("thead", {}, made("tr", {}, ...names)), made("tbody", {}, ...rows));
}

function showTiles(load, rate) {
  const tiles = [
    ["run", load.requests_running], ["wait", load.requests_waiting],
    ["a new one would wait", ms(load.predicted_wait_ms)], ["of the KV cache held", percent(load.kv_cache_usage_ratio)],
    ["tokens a second", count(rate)],
  ];
  at("tiles").replaceChildren(...tiles.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, value))));
}

function showPhases(recent) {
  const names = { queue: "Queue", prefill: "Prefill", ttft: "TTFT", decode: "Decode", itl: "ITL", e2e: "E2E" };
  at("window").textContent = recent.count
    ? `Of the answers that ended last: ${count(recent.count)} in ${ms(1000 * recent.over_s)}.`
    : "No answer has ended yet.";
  table("phases", ["", "p50", "p90", "p99", "longest"], Object.entries(names).map(([name, title]) => {
    const found = recent[`${name}_ms`] ?? {};
    return [title, ms(found.p50), ms(found.p90), ms(found.p99), ms(found.max)];
  }));
}

function showSteps(stats) {
  const lines = ["prefill", "decode"].filter((phase) => stats[phase]).map((phase) => {
    const steps = stats[phase];
    return [phase, count(steps.count), count(steps.tokens), ms(steps.mean_ms), percent(steps.of_ceiling)];
  });
  table("steps", ["", "newest", "tokens a step", "mean", "of what the machine could do"], lines);
}

function showCache(cache) {
  const found = (tokens) => [count(tokens), cache.prompt_tokens ? percent(tokens / cache.prompt_tokens) : NONE];
  table("cache", ["", "tokens found", "of prompts", "size", "read", "written", "blocks being read"], [
    ["memory", ...found(cache.memory_hit_tokens), NONE, NONE, NONE, NONE],
    ["disk", ...found(cache.disk_hit_tokens), bytes(cache.disk_bytes), bytes(cache.disk_read_bytes),
      bytes(cache.disk_written_bytes), count(cache.disk_reads)],
    ["prefill saved", ms(cache.prefill_saved_ms), "", "", "", "", ""],
  ]);
}

/* Requests that run or wait. Each keeps its element while it lives, so that it stays open, and focused. */

function showRequests(list) {
  const old = new Map([...at("requests").children].map((element) => [element.dataset.id, element]));
  const shown = list.data.slice(0, MAX_REQUESTS).map((request) => {
    const element = old.get(request.id) ?? newRequest(request.id);
    old.delete(request.id);
    updateRequest(element, request);
    return element;
  });
  for (const gone of old.values()) gone.remove();
  shown.forEach((element, index) => {
    if (at("requests").children[index] !== element) at("requests").insertBefore(element, at("requests").children[index] ?? null);
  });
  at("no-requests").hidden = shown.length > 0;
}

function newRequest(id) {
  const end = made("button", { class: "small", type: "button" }, "End");
  end.setAttribute("aria-label", `End request ${id}`);
  end.addEventListener("click", () => {
    end.disabled = true;
    endRequest(id).catch((error) => { tell("end", error.message); end.disabled = false; });
  });
  const details = made("details", {}, made(
    "summary", {}, made("span", { class: "id" }, id), made("span", { class: "phase" }), made("div", { class: "bar" }),
    made("span", { class: "number" }),
  ), made("dl", { class: "facts" }));
  const element = made("div", { class: "request" }, details, end);
  element.dataset.id = id;
  return element;
}

const endRequest = (id) => ask(`v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" });

function updateRequest(element, request) {
  const sum = (name) => request.sequences.reduce((whole, each) => whole + (each[name] ?? 0), 0);
  const phases = [...new Set(request.sequences.map((each) => each.phase ?? NONE))];
  const read = Math.min(sum("computed_tokens"), sum("prompt_tokens"));
  element.querySelector(".phase").textContent = phases.join(", ");
  element.querySelector(".number").textContent = `${count(sum("generated_tokens"))} tokens, ${ms(request.age_ms)}`;
  fill(element.querySelector(".bar"), [["queue", sum("prompt_tokens") - read], ["prefill", read], ["decode", sum("generated_tokens")]]);
  const facts = element.firstChild.open ? request.sequences.flatMap((sequence) => factsOf(sequence)) : [];
  element.querySelector(".facts").replaceChildren(...facts.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, value))));
}

function factsOf(sequence) {
  return [
    ["Prompt", `${count(sequence.prompt_tokens)} tokens`],
    ["found in the cache", `${count(sequence.cached_tokens)} tokens`],
    ["computed so far", `${count(sequence.computed_tokens)} tokens`],
    ["written so far", `${count(sequence.generated_tokens)} tokens`],
    ["Place in the queue", isNumber(sequence.queue_position) ? count(sequence.queue_position) : NONE],
    ["TTFT", ms(sequence.ttft_ms)],
    ["KV blocks", count(sequence.kv_blocks)],
    ["ends at the latest", isNumber(sequence.predicted_end_ms) ? `in ${ms(sequence.predicted_end_ms)}` : NONE],
  ];
}

/* One look a second, while somebody looks. */

const rates = [];
let before = null;

function rateOf(totals) {
  const now = { tokens: totals.generated_tokens, time: performance.now() };
  const rate = before && Math.max(0, (1000 * (now.tokens - before.tokens)) / (now.time - before.time));
  before = now;
  if (rate !== null) rates.push({ time: now.time, values: { decode: rate } });
  while (rates.length && now.time - rates[0].time > 1000 * SPAN_S) rates.shift();
  rateChart.show(rates.map(({ time, values }) => ({ age_s: (now.time - time) / 1000, values })));
  return rate;
}

async function look() {
  const [load, stats, live] = await Promise.all([get("load"), get("stats"), get("v1/requests")]);
  showTiles(load, rateOf(stats.totals));
  showPhases(stats.requests);
  showSteps(stats);
  showCache(stats.prefix_cache);
  showRequests(live);
}
