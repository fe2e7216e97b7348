// OpenAI's Node client: completions, chat, tools, structured output, embeddings, responses, errors.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.env.TWOSTEP_URL}/v1`, apiKey: "none" });
const model = process.env.TWOSTEP_MODEL;
const messages = [{ role: "user", content: "Say something about lists." }];
const schema = {
  type: "object",
  properties: { name: { type: "string" }, inhabitants: { type: "integer" } },
  required: ["name", "inhabitants"],
  additionalProperties: false,
};

const prompt = { model, prompt: "A list is", max_tokens: 8, seed: 1 };
const whole = await client.completions.create(prompt);
let text = "";
for await (const chunk of await client.completions.create({ ...prompt, stream: true })) text += chunk.choices[0].text;
assert.equal(text, whole.choices[0].text);

const asked = { model, messages, max_completion_tokens: 12, seed: 1 };
const chat = await client.chat.completions.create(asked);
const final = await client.chat.completions.stream(asked).finalChatCompletion();
assert.equal(final.choices[0].message.content, chat.choices[0].message.content);

const json = await client.chat.completions.create({
  ...asked,
  max_completion_tokens: 200,
  response_format: { type: "json_schema", json_schema: { name: "city", schema, strict: true } },
});
if (json.choices[0].finish_reason === "stop") assert.ok("name" in JSON.parse(json.choices[0].message.content));

const called = await client.chat.completions.create({
  ...asked,
  max_completion_tokens: 200,
  tools: [{ type: "function", function: { name: "find_city", parameters: schema, strict: true } }],
  tool_choice: "required",
});
assert.equal(called.choices[0].message.tool_calls[0].function.name, "find_city");
JSON.parse(called.choices[0].message.tool_calls[0].function.arguments);

const { data } = await client.embeddings.create({ model, input: ["a list", "a dictionary"] });
assert.equal(data.length, 2);
assert.ok(Math.abs(Math.hypot(...data[0].embedding) - 1) < 1e-3);

const response = await client.responses.create({ model, input: "Say something.", max_output_tokens: 12 });
assert.ok(response.output_text);
const kinds = [];
const stream = await client.responses.create({ model, input: "Say it.", max_output_tokens: 12, stream: true });
for await (const event of stream) kinds.push(event.type);
assert.equal(kinds[0], "response.created");

await assert.rejects(client.chat.completions.create({ model: "nobody", messages }), OpenAI.NotFoundError);
await assert.rejects(client.chat.completions.create({ model, messages, n: 0 }), OpenAI.BadRequestError);
