// Vercel's AI SDK: text, streams, tools, and objects with a record, whose schema zod makes with propertyNames.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "local", baseURL: url, apiKey: "none", supportsStructuredOutputs: true });
const model = provider(name);

const { text } = await generateText({ model, prompt: "Tell me a story.", maxOutputTokens: 8 });
assert.ok(text.length > 0);

let streamed = "";
for await (const part of streamText({ model, prompt: "Tell me a story.", maxOutputTokens: 8 }).textStream) streamed += part;
assert.ok(streamed.length > 0);

const schema = z.object({
  name: z.enum(["Lily", "Tom"]),
  born: z.string().regex(/^20[0-2][0-9]$/),
  scores: z.record(z.enum(["maths", "music"]), z.number().int().min(0).max(9)),
});
const { object } = await generateObject({ model, schema, prompt: "A child" });
schema.parse(object);

// A record without a limit of names might never end.
const sizes = z.record(z.string().max(4), z.boolean()).meta({ maxProperties: 3 });
const open = z.object({ sizes: sizes.optional(), n: z.number().int().min(0).max(9) });
open.parse((await generateObject({ model, schema: open, prompt: "Sizes", maxOutputTokens: 400 })).object);

let calls = 0;
const weather = tool({
  description: "The weather in a city.",
  inputSchema: z.object({ city: z.enum(["Rome", "Paris"]) }),
  execute: async ({ city }) => {
    calls += 1;
    return `It is sunny in ${city}.`;
  },
});
const result = await generateText({
  model,
  tools: { weather },
  toolChoice: "required",
  // The SDK runs no tool of a truncated answer, and the small model writes calls until the context is full.
  providerOptions: { local: { parallel_tool_calls: false } },
  prompt: "What is the weather in Rome?",
  stopWhen: stepCountIs(1),
});
assert.equal(result.toolCalls[0].toolName, "weather");
assert.equal(calls, 1);
