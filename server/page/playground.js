/* The playground: a conversation with the model, with its parameters. */

const TOP_LOGPROBS = 5;
const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "weather",
      description: "The weather of a city.",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

let messages = [];
let running = null; // {id, controller} of the answer that is being written

function parameters() {
  const chosen = { model: at("model").value || undefined };
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (!at(name).checkValidity()) throw new Error(`${name}: ${at(name).validationMessage}`);
    if (at(name).value !== "") chosen[name] = Number(at(name).value);
  }
  if (at("logprobs").checked) Object.assign(chosen, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  if (at("tools").value.trim()) chosen.tools = parsedTools(at("tools").value);
  return chosen;
}

function parsedTools(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are no JSON: ${error.message}`);
  }
}

/* Yields the JSON of each event of a stream. */
async function* events(body) {
  let rest = "";
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let { value, done } = await reader.read(); !done; { value, done } = await reader.read()) {
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith("data: {")) yield JSON.parse(part.slice("data: ".length));
    }
  }
}

async function stream(answer, body) {
  const headers = { "Content-Type": "application/json", "X-Request-Id": running.id };
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers,
    body: JSON.stringify(body),
    signal: running.controller.signal,
  });
  for await (const event of events(response.body)) {
    if (event.error) throw new ServerError(event.error.message, 0);
    answer.add(event);
    followText();
  }
}

const newId = () =>
  `page-${[...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("")}`;

/* Lets the model answer the conversation so far. */
async function answerNow() {
  const system = at("system").value.trim();
  const answer = new Answer();
  const conversation = messages;
  at("conversation").append(answer.element);
  running = { id: newId(), controller: new AbortController() };
  showRunning();
  try {
    const sent = [...(system ? [{ role: "system", content: system }] : []), ...messages];
    await stream(answer, { ...parameters(), messages: sent, stream: true });
  } catch (error) {
    answer.fail(error.name === "AbortError" ? "Stopped." : error.message);
  }
  running = null;
  answer.end();
  if (conversation === messages && (answer.content || answer.calls.length)) messages.push(answer.message());
  if (answer.calls.length) askForResults(answer);
  showRunning();
  followText();
}

/* Below an answer that calls tools: a field for what each of them returns. */
function askForResults(answer) {
  const fields = answer.calls.map((call, index) => {
    const field = made("textarea", { rows: "2", "aria-label": `Result of ${call.function.name}` });
    answer.tools.children[index].append(field);
    return field;
  });
  const button = made("button", { type: "button", class: "main" }, "Send results");
  answer.tools.append(made("div", { class: "line" }, button));
  button.addEventListener("click", () => {
    if (running) return;
    button.remove();
    fields.forEach((field, index) => {
      field.readOnly = true;
      messages.push({ role: "tool", tool_call_id: answer.calls[index].id, content: field.value });
    });
    answerNow();
  });
}

function send() {
  const text = at("message").value;
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  at("conversation").append(
    made("article", { class: "turn user" }, made("h2", {}, "You"), made("div", { class: "text" }, text)),
  );
  at("message").value = "";
  answerNow();
}

/* The server ends the answer and tells its times. Where it cannot be asked, the page hangs up, which ends it, too. */
async function stop() {
  const stopped = running;
  try {
    await endRequest(stopped.id);
  } catch {
    stopped.controller.abort();
  }
}

function showRunning() {
  at("greeting").hidden = at("conversation").childElementCount > 0;
  at("stop").hidden = !running;
  at("send").disabled = running !== null;
  at("conversation").setAttribute("aria-busy", String(running !== null));
}

/* Keeps the end of the text in sight, unless the reader scrolled away from it. */
function followText() {
  const page = document.documentElement;
  if (page.scrollHeight - page.scrollTop - page.clientHeight < 200) page.scrollTop = page.scrollHeight;
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
at("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
at("stop").addEventListener("click", stop);
at("new").addEventListener("click", () => {
  running?.controller.abort();
  messages = [];
  at("conversation").replaceChildren();
  showRunning();
  at("message").focus();
});
at("example").addEventListener("click", () => {
  at("tools").value = JSON.stringify(EXAMPLE_TOOLS, null, 2);
});
