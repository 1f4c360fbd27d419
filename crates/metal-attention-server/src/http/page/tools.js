// The tools of MCP servers: the list, and calls with the user's consent.
import { parsed } from "./store.js";

/** Requests of one answer, each of which but the last ends in calls of tools. */
export const MAX_ROUNDS = 20;
const REFUSED = "The user does not want this call. Do not repeat it.";

/** Whether this server offers tools to its page. */
export const hasTools = "tools" in document.body.dataset;

/** The tools that were listed: `server`, `tool` (its name there), `function` (as the model is offered it), `allowed`. */
let tools = [];

/** Starts the MCP servers and lists their tools. Returns the names of the servers, each with its `tools` and `problems`. */
export async function listServers(headers) {
  const response = await fetch("mcp/tools", { headers });
  const body = parsed(await response.text());
  if (!response.ok) throw new Error(body?.error?.message ?? `The server answered with status ${response.status}.`);
  tools = body.tools;
  const servers = new Map();
  const named = (name) => servers.get(name) ?? servers.set(name, { tools: [], problems: [] }).get(name);
  for (const { server, tool } of body.tools) named(server).tools.push(tool);
  for (const { server, message } of body.problems) named(server).problems.push(message);
  return [...servers];
}

/** The listed tools of `servers`, as a chat completion takes them. */
export const functionsOf = (servers) => tools.filter(({ server }) => servers.includes(server)).map((tool) => tool.function);

/** Adds a piece of the stream to the calls of an answer. */
export function addCalls(calls, pieces) {
  for (const { index, id, function: piece } of pieces) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += piece?.name ?? "";
    call.arguments += piece?.arguments ?? "";
  }
}

/** Calls a tool of `servers`. `consent` asks the user and gives "once", "always" or "refuse". `call` gets the result, a text. */
export async function callTool(call, servers, { headers, signal, consent }) {
  const tool = tools.find((one) => servers.includes(one.server) && one.function.function.name === call.name);
  const values = parsed(call.arguments.trim() || "{}");
  if (!tool) {
    call.result = `There is no tool ${call.name}.`;
    return;
  }
  Object.assign(call, { server: tool.server, tool: tool.tool });
  if (!values || typeof values !== "object" || Array.isArray(values)) {
    call.result = "The tool was not called: its arguments are no JSON object.";
    return;
  }
  const answer = tool.allowed ? undefined : await consent(call);
  if (answer === "refuse") {
    call.result = REFUSED;
    return;
  }
  const request = JSON.stringify({ server: tool.server, tool: tool.tool, arguments: values, consent: answer });
  const response = await fetch("mcp/call", { method: "POST", headers, body: request, signal });
  const body = parsed(await response.text());
  if (response.ok && answer === "always") tool.allowed = true;
  if (response.ok) call.result = body.text;
  else call.result = `The call failed: ${body?.error?.message ?? `the server answered with status ${response.status}.`}`;
}
