// The package openai in a page: requests of another origin, with the headers that the package adds.
import OpenAI from "openai";

window.run = async (baseURL, model) => {
  const client = new OpenAI({ baseURL, apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
  const messages = [{ role: "user", content: "Tell me a story." }];
  const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
  if (answer.usage.completion_tokens !== 8) throw new Error(JSON.stringify(answer));
  let text = "";
  for await (const part of await client.chat.completions.create({ model, messages, max_tokens: 8, stream: true })) {
    text += part.choices[0]?.delta?.content ?? "";
  }
  if (!text) throw new Error("the stream is empty");
  const { data, response } = await client.models.list().withResponse();
  if (data.data[0].id !== model) throw new Error(JSON.stringify(data));
  if (!response.headers.get("x-request-id")) throw new Error("x-request-id cannot be read");
  return "done";
};
