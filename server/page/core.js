/* What all parts of the pages share: elements, numbers, the server, and what goes wrong. */

const at = (id) => document.getElementById(id);

/* An element with attributes and children. A text stays a text, whatever it says: it is never read as HTML. */
function made(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/* The pieces of a text, where what stands between backticks is code. */
function marked(text) {
  return text.split(/`+([^`]+)`+/).map((piece, index) => (index % 2 ? made("code", {}, piece) : piece));
}

/* Numbers as people read them. */

const NONE = "–";
const isNumber = (value) => value !== null && value !== undefined;

function ms(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 ms";
  if (value >= 60_000) return `${(value / 60_000).toFixed(1)} min`;
  if (value >= 1000) return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
  return `${value.toFixed(value < 10 ? 2 : value < 100 ? 1 : 0)} ms`;
}

const count = (value) =>
  isNumber(value) ? value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 }) : NONE;

const many = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

function percent(ratio) {
  if (!isNumber(ratio)) return NONE;
  return `${(100 * ratio).toFixed(ratio > 0 && ratio < 0.1 ? 1 : 0)} %`;
}

function bytes(value) {
  const units = ["bytes", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) {
    value /= 1024;
    power += 1;
  }
  return `${value.toFixed(power && value < 100 ? 1 : 0)} ${units[power]}`;
}

/* A bar of parts of a whole, given as [class, amount] pairs. */
function fill(bar, parts) {
  const whole = parts.reduce((sum, [, amount]) => sum + amount, 0);
  while (bar.childElementCount < parts.length) bar.append(made("div"));
  parts.forEach(([name, amount], index) => {
    bar.children[index].className = name;
    bar.children[index].style.width = `${whole ? (100 * amount) / whole : 0}%`;
  });
  return bar;
}

/* What goes wrong. Each source of trouble has one line at the top, until it is well again. */

const troubles = new Map();

function tell(source, message) {
  if (message) troubles.set(source, message);
  else troubles.delete(source);
  const text = [...new Set(troubles.values())].join(" ");
  if (at("trouble").textContent !== text) at("trouble").textContent = text;
  at("trouble").hidden = !text;
}

window.addEventListener("error", (event) => {
  tell("bug", `This page has a bug: ${event.message} (line ${event.lineno}). Reload it, and please report this.`);
});
window.addEventListener("unhandledrejection", (event) => {
  tell("bug", `This page has a bug: ${event.reason?.message ?? event.reason}. Reload it, and please report this.`);
});

/* The server. */

class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/* HTTP headers hold bytes, so those of the key in UTF-8 stand for it. */
function keyHeader() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}` } : {};
}

/* Returns the server's response, or throws a ServerError that says why there is none. */
async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers: { ...options.headers, ...keyHeader() } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server does not answer.", 0);
  }
  if (response.status === 401) at("ask").hidden = false;
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const told = typeof body?.error === "string" ? body.error : body?.error?.message; // Ollama's API tells the text alone
  throw new ServerError(told ?? `The server answered with status ${response.status}.`, response.status);
}

const get = async (path) => (await ask(path)).json();

at("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("key", at("key").value);
  at("key").value = "";
  at("ask").hidden = true;
  tell("server", "");
  window.dispatchEvent(new Event("key"));
});
