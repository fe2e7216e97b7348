// Vercel's AI SDK: a turn with a call of a tool and its result, streamed and not.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "twostep",
  baseURL: `${process.env.TWOSTEP_URL}/v1`,
  apiKey: "none",
  includeUsage: true,
});
const calls = [];
const add = tool({
  description: "Add two numbers",
  inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
  execute: async ({ a, b }) => {
    calls.push([a, b]);
    return `twostep-${a + b}`;
  },
});
const asked = {
  model: provider(process.env.TWOSTEP_MODEL),
  prompt: "What is 40 + 2?",
  tools: { add },
  stopWhen: stepCountIs(4),
};

const whole = await generateText(asked);
assert.equal(whole.text, "The tool said twostep-42.");
assert.equal(whole.steps.length, 2);
assert.equal(whole.steps[0].finishReason, "tool-calls");
assert.ok(whole.usage.inputTokens > 0);

const streamed = streamText(asked);
let text = "";
for await (const piece of streamed.textStream) text += piece;
assert.equal(text, whole.text);
assert.ok((await streamed.usage).inputTokens > 0);
assert.deepEqual(calls, [[40, 2], [40, 2]]);
