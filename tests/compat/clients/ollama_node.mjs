// Ollama's client for JavaScript: models, chats, streams, tools, schemas, errors.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.TWOSTEP_URL });
const model = process.env.TWOSTEP_MODEL;
const messages = [{ role: "user", content: "Say something about lists." }];
const options = { temperature: 0, num_predict: 12, num_ctx: 4096 };

const listed = (await client.list()).models.find((each) => each.name === model);
assert.ok(listed.size > 0);
assert.ok((await client.show({ model })).capabilities.includes("tools"));
assert.ok((await client.ps()).models.some((each) => each.name === model));
assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);

const whole = await client.chat({ model, messages, options });
let text = "";
let last;
for await (const part of await client.chat({ model, messages, options, stream: true, keep_alive: "5m" })) {
  text += part.message.content;
  last = part;
}
assert.equal(text, whole.message.content);
assert.ok(last.done && last.eval_count === whole.eval_count && last.total_duration > last.eval_duration);

const schema = { type: "object", properties: { cups: { type: "integer", minimum: 1, maximum: 9 } }, required: ["cups"] };
const shaped = await client.chat({ model, messages, format: schema, options: { ...options, num_predict: 60 } });
assert.equal(typeof JSON.parse(shaped.message.content).cups, "number");

const parameters = { type: "object", properties: { name: { type: "string" } }, required: ["name"] };
const tool = { type: "function", function: { name: "find_city", description: "Finds a city.", parameters } };
const call = { function: { name: "find_city", arguments: { name: "Oslo" } } };
const history = [
  ...messages,
  { role: "assistant", content: "", tool_calls: [call] },
  { role: "tool", tool_name: "find_city", content: "found Oslo" },
];
assert.ok((await client.chat({ model, messages: history, tools: [tool], options })).done);

const generated = await client.generate({ model, prompt: "A list is", raw: true, options });
assert.ok(generated.response.length > 0);
await assert.rejects(client.chat({ model: "nobody", messages }), (error) => error.status_code === 404);
await assert.rejects(client.chat({ model, messages, options: { mirostat: 1 } }), /mirostat/);
