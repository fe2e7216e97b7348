/* The view of what happens on the server, second by second. */

const CHART_S = 300;

const rateChart = new Chart(at("rates"), {
  label: "Tokens a second",
  series: [
    { name: "prefill", label: "read (prefill)", className: "prefill" },
    { name: "decode", label: "written (decode)", className: "decode" },
  ],
  format: (value) => `${count(value)}/s`,
  span_s: CHART_S,
});

const latencyChart = new Chart(at("latencies"), {
  label: "Latency",
  series: [
    { name: "ttft", label: "TTFT", className: "prefill" },
    { name: "worstTtft", label: "longest", className: "prefill faint" },
    { name: "itl", label: "ITL", className: "decode" },
    { name: "worstItl", label: "longest", className: "decode faint" },
  ],
  format: ms,
  span_s: CHART_S,
  isLog: true,
});

const lanes = new Lanes(at("lanes"), Number(at("span").value));
let frozen = null; // what the lanes show while they are held

function showHistory(live) {
  rateChart.show(secondsOf((second) => ({ prefill: second?.prefill_tokens ?? 0, decode: second?.decode_tokens ?? 0 })));
  latencyChart.show(
    secondsOf((second) => ({
      ttft: second?.ttft_ms?.mean,
      worstTtft: second?.ttft_ms?.max,
      itl: second?.itl_ms?.mean,
      worstItl: second?.itl_ms?.max,
    })),
  );
  if (!at("hold").checked) frozen = [past.steps, spansOfRequests(live), past.now_ms];
  lanes.show(...frozen);
}

at("hold").addEventListener("change", () => lanes.pin(null));

at("span").addEventListener("change", () => {
  lanes.pin(null);
  lanes.span_s = Number(at("span").value);
  if (frozen) lanes.show(...frozen);
});

function showDiagnosis({ verdict, sentence, evidence, advice }, recent) {
  at("sentence").textContent = sentence;
  at("verdict").dataset.verdict = verdict;
  at("evidence").replaceChildren(...evidence.map((each) => made("li", {}, ...marked(each))));
  at("advice").replaceChildren(...advice.map((each) => made("li", {}, ...marked(each))));
  at("help").hidden = !advice.length;
  const medians = ["queue", "prefill", "decode"].map((name) => [name, recent[`${name}_ms`]?.p50 ?? 0]);
  fill(at("share"), medians);
  at("share").hidden = verdict === "unknown";
  at("shares").replaceChildren(
    ...(verdict === "unknown" ? [] : medians.map(([name, value]) => entry(name, name, ms(value)))),
  );
}

/* Fills a table. The first cell of each line names it. */
function table(id, head, lines) {
  const names = head.map((name) => made(name ? "th" : "td", name ? { scope: "col" } : {}, name));
  const rows = lines.map(([name, ...cells]) =>
    made("tr", {}, made("th", { scope: "row" }, name), ...cells.map((cell) => made("td", {}, cell))),
  );
  at(id).replaceChildren(made("thead", {}, made("tr", {}, ...names)), made("tbody", {}, ...rows));
}

function showTiles(load, rate) {
  const tiles = [
    ["run", load.requests_running],
    ["wait", load.requests_waiting],
    ["a new one would wait", ms(load.predicted_wait_ms)],
    ["of the KV cache held", percent(load.kv_cache_usage_ratio)],
    ["tokens a second", count(rate)],
  ];
  at("tiles").replaceChildren(
    ...tiles.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, value))),
  );
}

function showPhases(recent) {
  const names = { queue: "Queue", prefill: "Prefill", ttft: "TTFT", decode: "Decode", itl: "ITL", e2e: "E2E" };
  at("window").textContent = recent.count
    ? `Of the answers that ended last: ${count(recent.count)} in ${ms(1000 * recent.over_s)}.`
    : "No answer has ended yet.";
  table(
    "phases",
    ["", "p50", "p90", "p99", "longest"],
    Object.entries(names).map(([name, title]) => {
      const found = recent[`${name}_ms`] ?? {};
      return [title, ms(found.p50), ms(found.p90), ms(found.p99), ms(found.max)];
    }),
  );
}

function showSteps(stats) {
  const lines = ["prefill", "decode"]
    .filter((phase) => stats[phase])
    .map((phase) => {
      const steps = stats[phase];
      return [
        phase,
        count(steps.count),
        count(steps.tokens),
        ms(steps.mean_ms),
        percent(steps.of_ceiling),
        steps.bound,
      ];
    });
  table("steps", ["", "newest", "tokens a step", "mean", "of what the machine could do", "bound by"], lines);
}

function showCache(cache) {
  const found = (tokens) => [count(tokens), cache.prompt_tokens ? percent(tokens / cache.prompt_tokens) : NONE];
  table(
    "cache",
    ["", "tokens found", "of prompts", "size", "read", "written", "blocks being read"],
    [
      ["memory", ...found(cache.memory_hit_tokens), NONE, NONE, NONE, NONE],
      [
        "disk",
        ...found(cache.disk_hit_tokens),
        bytes(cache.disk_bytes),
        bytes(cache.disk_read_bytes),
        bytes(cache.disk_written_bytes),
        count(cache.disk_reads),
      ],
      ["prefill saved", ms(cache.prefill_saved_ms), "", "", "", "", ""],
    ],
  );
}

/* One look, once a second. */
async function look() {
  const [load, stats, diagnosis, list] = await Promise.all([
    get("load"),
    get("stats"),
    get("stats/diagnosis"),
    get("v1/requests"),
    learn(),
  ]);
  const [rate] = secondsOf((second) => second?.decode_tokens ?? 0).slice(-1);
  showTiles(load, rate?.values ?? 0);
  showDiagnosis(diagnosis, stats.requests);
  showHistory(list.data);
  showRequests(list.data);
  showPhases(stats.requests);
  showSteps(stats);
  showCache(stats.prefix_cache);
}
