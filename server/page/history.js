/* What the page knows of the last minutes: what /stats/timeline told, look by look, and which requests are live. */

const KEPT_MS = 300_000,
  KEPT_STEPS = 6000,
  KEPT_SHARES = 50_000; // what each step computed of each request

const past = { cursor: 0, now_ms: 0, seconds: new Map(), steps: [], ended: [] };

async function learn() {
  const news = await get(`stats/timeline?after=${past.cursor}`);
  if (news.cursor < past.cursor) Object.assign(past, { seconds: new Map(), steps: [], ended: [] }); // another server
  past.cursor = news.cursor;
  past.now_ms = news.now_ms;
  for (const second of news.seconds) past.seconds.set(second.start_ms, second);
  for (const start_ms of past.seconds.keys()) if (start_ms < news.now_ms - KEPT_MS) past.seconds.delete(start_ms);
  past.steps = [...past.steps, ...news.steps].slice(-KEPT_STEPS);
  forgetShares();
  past.ended = [...past.ended, ...news.requests].filter(({ end_ms }) => end_ms > news.now_ms - KEPT_MS);
}

function forgetShares() {
  let num = 0;
  for (const step of past.steps.toReversed()) {
    num += step.computed?.length ?? 0;
    if (num > KEPT_SHARES) step.computed = null;
  }
}

/* A value for each whole second of the last five minutes: none where nothing happened, or before the server started. */
function secondsOf(values) {
  const last_ms = 1000 * Math.floor(past.now_ms / 1000) - 1000,
    points = [];
  for (let start_ms = Math.max(0, last_ms - KEPT_MS + 1000); start_ms <= last_ms; start_ms += 1000) {
    points.push({ age_s: (last_ms - start_ms) / 1000, values: values(past.seconds.get(start_ms)) });
  }
  return points;
}

/* The phases of requests, as spans of the server's time, in order of arrival. */
function spansOfRequests(live) {
  const ended = past.ended.map(({ id, arrival_ms, end_ms, timings }) => ({
    id,
    cached: timings.cached_tokens,
    spans: spans(arrival_ms, timings.queue_ms, timings.ttft_ms, end_ms),
  }));
  return [...ended, ...live.map(spansOf)].sort((one, other) => one.spans.queue[0] - other.spans.queue[0]);
}

/* Those of a live request. Before its first token, all its time counts for the phase that it is in. */
function spansOf({ id, age_ms, sequences: [first] }) {
  const queue_ms = first.queue_ms ?? (first.phase === "prefill" ? 0 : age_ms);
  const cached = first.cached_tokens;
  return { id, cached, spans: spans(past.now_ms - age_ms, queue_ms, first.ttft_ms ?? age_ms, past.now_ms) };
}

function spans(arrival_ms, queue_ms, ttft_ms, end_ms) {
  const scheduled_ms = arrival_ms + queue_ms,
    first_ms = arrival_ms + ttft_ms;
  return { queue: [arrival_ms, scheduled_ms], prefill: [scheduled_ms, first_ms], decode: [first_ms, end_ms] };
}
