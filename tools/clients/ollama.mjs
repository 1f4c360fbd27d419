// ollama's package for JavaScript: texts, streams, tools, schemas, embeddings and models.
import assert from "node:assert/strict";
import { Ollama } from "ollama";

const [host, model] = process.argv.slice(2);
const ollama = new Ollama({ host });
const options = { temperature: 0, num_predict: 8 };
const prompt = "Once upon a time";
const story = ", there was a little girl";

const text = await ollama.generate({ model, prompt, raw: true, options });
assert.equal(text.response, story);
assert.equal(text.done_reason, "length");
let streamed = "";
for await (const part of await ollama.generate({ model, prompt, raw: true, stream: true, options })) streamed += part.response;
assert.equal(streamed, story);

const messages = [{ role: "user", content: "What is the weather in Rome?" }];
const whole = await ollama.chat({ model, messages, options, keep_alive: "5m" });
assert.ok(whole.message.content.length > 0 && whole.prompt_eval_count > 0);
let content = "";
let last;
for await (last of await ollama.chat({ model, messages, options, stream: true })) content += last.message.content;
assert.equal(content, whole.message.content);
assert.ok(last.done && last.eval_count === 8);

const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "weather", description: "The weather in a city.", parameters } }];
messages.push({ role: "assistant", content: "", tool_calls: [{ function: { name: "weather", arguments: { city: "Rome" } } }] });
messages.push({ role: "tool", tool_name: "weather", content: "It is sunny." });
assert.equal((await ollama.chat({ model, messages, tools, options })).message.role, "assistant");

const format = { type: "object", properties: { name: { enum: ["Lily", "Tom"] } }, required: ["name"] };
const child = await ollama.chat({ model, messages: [{ role: "user", content: "A child" }], format });
assert.ok(["Lily", "Tom"].includes(JSON.parse(child.message.content).name));

const { embeddings } = await ollama.embed({ model, input: [prompt, "Hello"] });
assert.deepEqual(embeddings.map((vector) => vector.length), [64, 64]);
assert.equal((await ollama.embeddings({ model, prompt })).embedding.length, 64);

assert.equal((await ollama.list()).models[0].name, `${model}:latest`);
assert.equal((await ollama.show({ model })).model_info["general.architecture"], "llama");
assert.equal((await ollama.ps()).models[0].model, `${model}:latest`);
assert.match((await ollama.version()).version, /^\d+\.\d+\.\d+$/);

assert.equal((await ollama.create({ model: "mario", from: model, system: "You are Mario.", stream: false })).status, "success");
await ollama.copy({ source: "mario", destination: "luigi" });
for (const name of ["mario", "luigi"]) assert.equal((await ollama.delete({ model: name })).status, "success");
await assert.rejects(ollama.chat({ model: "mario", messages }), { name: "ResponseError", status_code: 404 });
// A stream that the client ends early.
const left = await ollama.generate({ model, prompt, stream: true });
for await (const _ of left) break;
left.abort();
