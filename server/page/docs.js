/* The page of /docs: every operation of /openapi.json, with its parameters and answers, and a way to try it. */

const MAX_SHOWN = 100_000; // characters of an answer

async function showOperations() {
  const { info, paths, components } = await get("openapi.json");
  const schemas = new Schemas(components.schemas);
  at("facts").textContent = `API of ${info.title} ${info.version}`;
  const groups = new Map();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const [tag = "Other"] = operation.tags ?? [];
      groups.set(tag, [...(groups.get(tag) ?? []), showOperation(schemas, method.toUpperCase(), path, operation)]);
    }
  }
  at("operations").replaceChildren(
    ...[...groups].map(([tag, elements]) => made("section", { class: "card" }, made("h2", {}, tag), ...elements)),
  );
}

/* A line for an operation, with everything about it once it is opened. */
function showOperation(schemas, method, path, operation) {
  const details = made(
    "details",
    { class: "operation" },
    made(
      "summary",
      {},
      made("span", { class: `method ${method.toLowerCase()}` }, method),
      made("code", {}, path),
      made("span", { class: "soft" }, operation.summary),
    ),
  );
  details.dataset.words = JSON.stringify([
    path,
    operation,
    bodyOf(operation) && schemas.objects(bodyOf(operation)),
  ]).toLowerCase();
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    details.append(
      ...(operation.description ? [prose(operation.description)] : []),
      ...showParameters(schemas, operation.parameters),
      ...showBody(schemas, operation),
      made("h3", {}, "Answers"),
      showResponses(schemas, operation.responses),
      tryIt(schemas, method, path, operation),
    );
  });
  return details;
}

const bodyOf = (operation) => operation.requestBody?.content["application/json"]?.schema;

function showParameters(schemas, parameters = []) {
  if (!parameters.length) return [];
  const fields = parameters.flatMap(({ name, required, schema, description, in: place }) => [
    made(
      "dt",
      {},
      made("code", {}, name),
      made("span", { class: "type" }, `${schemas.words(schema)}, in the ${place}`),
      ...(required ? [made("span", { class: "needed" }, "required")] : []),
    ),
    made("dd", {}, ...(description ? [prose(description)] : [])),
  ]);
  return [made("h3", {}, "Parameters"), made("dl", { class: "fields" }, ...fields)];
}

function showBody(schemas, operation) {
  const schema = bodyOf(operation);
  if (!schema) return [];
  const objects = schemas.objects(schema);
  return [
    made("h3", {}, "Body"),
    ...(objects.length === 1 ? [schemas.fields(objects[0])] : objects.map((each) => schemas.folded(each))),
  ];
}

function showResponses(schemas, responses) {
  return made(
    "dl",
    { class: "fields" },
    ...Object.entries(responses).flatMap(([status, { description, content }]) => {
      const schema = content?.["application/json"]?.schema;
      return [
        made("dt", {}, made("code", {}, status), made("span", { class: "type" }, description)),
        made("dd", {}, ...(schema ? schemas.objects(schema).map((each) => schemas.folded(each)) : [])),
      ];
    }),
  );
}

/* A form that sends the request from this page, and shows what comes back. */
function tryIt(schemas, method, path, operation) {
  const parameters = (operation.parameters ?? []).map((parameter) => [
    parameter,
    made("input", { "aria-label": parameter.name, placeholder: parameter.name }),
  ]);
  const schema = bodyOf(operation);
  const body = made("textarea", { rows: "6", spellcheck: "false", "aria-label": `Body of ${method} ${path}` });
  if (schema) body.value = JSON.stringify(schemas.example(schema), null, 2);
  const result = made("pre", { class: "result", tabindex: "0", "aria-label": "Answer" });
  result.hidden = true;
  const button = made("button", { type: "button", class: "main" }, "Send");
  button.addEventListener("click", async () => {
    button.disabled = true;
    result.hidden = false;
    result.textContent = "…";
    result.textContent = await sent(method, addressOf(path, parameters), schema && body.value);
    button.disabled = false;
  });
  return made(
    "div",
    { class: "try" },
    made("h3", {}, "Try it"),
    ...parameters.map(([, input]) => input),
    ...(schema ? [body] : []),
    made("div", { class: "line" }, button),
    result,
  );
}

/* The path, relative to this page, with the parameters that were filled in. */
function addressOf(path, parameters) {
  const query = new URLSearchParams();
  let address = path.slice(1);
  for (const [{ name, in: place }, { value }] of parameters) {
    if (place === "path") address = address.replace(`{${name}}`, encodeURIComponent(value));
    else if (value) query.set(name, value);
  }
  return address + (query.size ? `?${query}` : "");
}

async function sent(method, address, body) {
  const options = body ? { method, body, headers: { "Content-Type": "application/json" } } : { method };
  try {
    const response = await ask(address, options);
    const text = await response.text();
    return `${response.status}\n${text.length > MAX_SHOWN ? `${text.slice(0, MAX_SHOWN)}\n…` : indented(text)}`;
  } catch (error) {
    return error.status ? `${error.status}\n${error.message}` : error.message;
  }
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // events, or metrics
  }
}

function search() {
  const words = at("words").value.toLowerCase().split(/\s+/).filter(Boolean);
  let num = 0;
  for (const element of document.querySelectorAll(".operation")) {
    element.hidden = !words.every((word) => element.dataset.words.includes(word));
    num += !element.hidden;
  }
  for (const group of document.querySelectorAll("#operations > section"))
    group.hidden = !group.querySelector(".operation:not([hidden])");
  at("nothing").hidden = num > 0 || !words.length;
}

async function load() {
  try {
    await showOperations();
    search();
    tell("server", "");
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
    tell("server", error.message);
    if (error.status !== 401) setTimeout(load, 2000);
  }
}

at("words").addEventListener("input", search);
window.addEventListener("key", load);
load();
