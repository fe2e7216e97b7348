/* Requests that run or wait, and those that ended lately. Each keeps its element, so it stays open, and focused. */

const MAX_LIVE = 20,
  MAX_ENDED = 10;
let sought = null; // the id of a request that is shown, however many there are
let shownLive = [];
const factsOf = new WeakMap(); // the element of a request -> [name, value] pairs, shown while it is open

function showRequests(live) {
  shownLive = live;
  keep(
    at("requests"),
    live
      .filter(({ id }, index) => index < MAX_LIVE || id === sought)
      .map((request) => [request.id, () => newRequest(request.id, true), (element) => showLive(element, request)]),
  );
  const num = { live: live.length, ended: past.ended.length };
  const waits = num.live === 1 ? "runs or waits" : "run or wait";
  at("num-live").textContent = num.live
    ? `${num.live} ${waits}${num.live > MAX_LIVE ? `, the oldest ${MAX_LIVE} of them here` : ""}.`
    : "None runs or waits.";
  keep(
    at("ended"),
    past.ended
      .toReversed()
      .filter(({ id }, index) => index < MAX_ENDED || id === sought)
      .map((request) => [
        `${request.id} ${request.end_ms}`,
        () => newRequest(request.id, false),
        (element) => showEnded(element, request),
      ]),
  );
  at("num-ended").textContent =
    `${count(num.ended)}${num.ended > MAX_ENDED ? `, the newest ${MAX_ENDED} of them here` : ""}.`;
}

/* Opens the details of a request, and goes there. */
function findRequest(id) {
  sought = id;
  showRequests(shownLive);
  const element = document.querySelector(`.request[data-id=${CSS.escape(id)}]`);
  tell("find", element ? "" : `Of request ${id} nothing is kept: it ended long ago, or without a token.`);
  if (!element) return;
  element.firstChild.open = true;
  element.querySelector("summary").focus();
  element.scrollIntoView({ block: "nearest" });
}

/* The ids of the requests whose details are open. */
const openRequests = () =>
  new Set([...document.querySelectorAll(".request details[open]")].map((details) => details.parentNode.dataset.id));

/* Makes the children of `place` those of [key, make, update] triples, in their order. */
function keep(place, wanted) {
  const old = new Map([...place.children].map((element) => [element.dataset.key, element]));
  wanted.forEach(([key, make, update], index) => {
    const element = old.get(key) ?? make();
    old.delete(key);
    element.dataset.key = key;
    if (place.children[index] !== element) place.insertBefore(element, place.children[index] ?? null);
    update(element);
  });
  for (const gone of old.values()) gone.remove();
}

function newRequest(id, isLive) {
  const parts = ["phase", "bar", "number"].map((name) => made(name === "bar" ? "div" : "span", { class: name }));
  const details = made(
    "details",
    {},
    made("summary", {}, made("span", { class: "id" }, id), ...parts),
    made("dl", { class: "facts" }),
  );
  const element = made("div", { class: "request", "data-id": id }, details, ...(isLive ? [endButton(id)] : []));
  details.addEventListener("toggle", () => {
    writeFacts(element);
    lanes.draw();
  });
  return element;
}

function endButton(id) {
  const button = made("button", { class: "small", type: "button", "aria-label": `End request ${id}` }, "End");
  button.addEventListener("click", () => {
    button.disabled = true;
    endRequest(id).then(
      () => tell("end", ""),
      (error) => {
        tell("end", error.message);
        button.disabled = false;
      },
    );
  });
  return button;
}

const endRequest = (id) => ask(`v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" });

function update(element, phase, number, bar, facts) {
  element.querySelector(".phase").textContent = phase;
  element.querySelector(".number").textContent = number;
  fill(element.querySelector(".bar"), bar);
  factsOf.set(element, facts);
  writeFacts(element);
}

function writeFacts(element) {
  const facts = element.firstChild.open ? factsOf.get(element) : [];
  element
    .querySelector(".facts")
    .replaceChildren(...facts.map(([name, value]) => made("div", {}, made("dt", {}, name), made("dd", {}, value))));
}

function showLive(element, request) {
  const sum = (name) => request.sequences.reduce((whole, each) => whole + (each[name] ?? 0), 0);
  const phases = [...new Set(request.sequences.map(({ phase }) => phase ?? NONE))].join(", ");
  const parts = Object.entries(spansOf(request).spans).map(([name, [from_ms, to_ms]]) => [name, to_ms - from_ms]);
  update(
    element,
    phases,
    `${many(sum("generated_tokens"), "token")}, ${ms(request.age_ms)}`,
    parts,
    request.sequences.flatMap((each) => [
      ["Queue", ms(each.queue_ms)],
      ["Prefill", isNumber(each.queue_ms) ? ms(each.ttft_ms - each.queue_ms) : NONE],
      ["Decode so far", isNumber(each.ttft_ms) ? ms(request.age_ms - each.ttft_ms) : NONE],
      ["Ends at the latest", isNumber(each.predicted_end_ms) ? `in ${ms(each.predicted_end_ms)}` : NONE],
      ["Prompt", `${many(each.prompt_tokens, "token")}, ${count(each.cached_tokens)} cached`],
      ["Computed", many(each.computed_tokens, "token")],
      ["Written", many(each.generated_tokens, "token")],
      ["Held", many(each.kv_blocks, "KV block")],
      ...(isNumber(each.queue_position) ? [["Place in the queue", count(each.queue_position)]] : []),
    ]),
  );
}

function showEnded(element, request) {
  const { timings, arrival_ms, end_ms, finish, status } = request;
  const decode_ms = Math.max(0, end_ms - arrival_ms - timings.ttft_ms);
  update(
    element,
    finish ?? "left",
    `${many(timings.generated_tokens, "token")}, ${ms(end_ms - arrival_ms)}`,
    [
      ["queue", timings.queue_ms],
      ["prefill", timings.prefill_ms],
      ["decode", decode_ms],
    ],
    [
      ["Queue", ms(timings.queue_ms)],
      ["Prefill", ms(timings.prefill_ms)],
      ["Decode", ms(decode_ms)],
      ["TTFT", ms(timings.ttft_ms)],
      ["ITL", `${ms(timings.itl_ms)}, p99 ${ms(timings.itl_p99_ms)}`],
      ["Prompt", `${many(timings.prompt_tokens, "token")}, ${count(timings.cached_tokens)} cached`],
      ["Written", many(timings.generated_tokens, "token")],
      ["Read in", `${many(timings.prefill_chunks, "chunk")}, ${many(timings.preemptions, "preemption")}`],
      ["Model", request.model ?? NONE],
      ["Status", `${status}`],
      ["Ended", ago((past.now_ms - end_ms) / 1000)],
    ],
  );
}
