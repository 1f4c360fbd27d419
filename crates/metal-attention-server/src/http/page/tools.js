// The tools of MCP servers: the list, and calls with the user's consent.
import { parsed } from "./store.js";

/** Requests of one answer, each of which but the last ends in calls of tools. */
export const MAX_ROUNDS = 20;
const REFUSED = "The user does not want this call. Do not repeat it.";
/** The result of a call without a response: it was stopped, or the page was left. */
const STOPPED = "The call was stopped; it may have had effects.";

/** Whether this server offers tools to its page. */
export const hasTools = "tools" in document.body.dataset;

/** The calls that are under way. They have the result that they keep where no response comes. */
export const underWay = new WeakSet();

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
  for (;;) {
    const answer = tool.allowed ? undefined : await consent(call);
    if (answer === "refuse") {
      call.result = REFUSED;
      return;
    }
    if (await request(call, tool, answer, { headers, signal })) return;
  }
}

/** Calls a tool; `call` gets the result. False: it is no longer always allowed, and was not called. */
async function request(call, tool, consent, { headers, signal }) {
  const { server, tool: name } = tool;
  // The model's own text: numbers would lose digits.
  const body = `${JSON.stringify({ server, tool: name, consent }).slice(0, -1)},"arguments":${call.arguments.trim() || "{}"}}`;
  call.result = STOPPED;
  underWay.add(call);
  try {
    const response = await fetch("mcp/call", { method: "POST", headers, body, signal });
    const { text, error } = parsed(await response.text()) ?? {};
    if (error?.code === "consent_needed") {
      tool.allowed = false;
      delete call.result;
      return false;
    }
    if (response.ok && consent === "always") tool.allowed = true;
    if (response.ok) call.result = text;
    else call.result = `The call failed: ${error?.message ?? `the server answered with status ${response.status}.`}`;
    return true;
  } finally {
    underWay.delete(call);
  }
}
