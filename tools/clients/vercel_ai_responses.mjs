// Vercel's AI SDK with its default model for OpenAI, which speaks the Responses interface.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const model = createOpenAI({ baseURL: url, apiKey: "none" })(name);

const { text } = await generateText({ model, prompt: "Tell me a story.", maxOutputTokens: 8 });
assert.ok(text.length > 0);

let streamed = "";
for await (const part of streamText({ model, prompt: "Tell me a story.", maxOutputTokens: 8 }).textStream) streamed += part;
assert.ok(streamed.length > 0);

const schema = z.object({ name: z.enum(["Lily", "Tom"]), age: z.number().int().min(1).max(9) });
schema.parse((await generateObject({ model, schema, prompt: "A child" })).object);

let calls = 0;
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => {
    calls += 1;
    return `It is sunny in ${city}.`;
  },
});
const once = { model, tools: { weather }, maxOutputTokens: 100, providerOptions: { openai: { parallelToolCalls: false } } };
// The second step refers to the items of the first, which the server stores.
const result = await generateText({
  ...once,
  prompt: "What is the weather in Rome?",
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  stopWhen: stepCountIs(2),
});
assert.equal(result.steps[0].toolCalls[0].toolName, "weather");
assert.equal(calls, 1);
assert.equal(result.steps.length, 2);
