// The tools of MCP servers: lists them, and calls them with the user's consent.
import { parsed } from "./store.js";

/** Maximum requests of one answer; each but the last one ends in tool calls. */
export const MAX_ROUNDS = 20;
const REFUSED = "The user does not want this call. Do not repeat it.";
/** The result of a call without a response: it was aborted, or the page was closed. */
const STOPPED = "The call was stopped; it may have had effects.";

/** Whether this server offers tools to its page. */
export const hasTools = "tools" in document.body.dataset;

/** The running calls. Their result is STOPPED until a response arrives. */
export const underWay = new WeakSet();

/** The listed tools: `server`, `tool` (its name on the server), `function` (its form in requests), `allowed` (without consent). */
let tools = [];

/** Starts the MCP servers and lists their tools. Returns pairs of a server's name and its `tools` and `problems`. */
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

/** The listed tools of `servers`, in the form of a chat completion's `tools`. */
export const functionsOf = (servers) => tools.filter(({ server }) => servers.includes(server)).map((tool) => tool.function);

/** Appends the call deltas of a chunk to the calls of an answer. */
export function addCalls(calls, pieces) {
  for (const { index, id, function: piece } of pieces) {
    const call = (calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += piece?.name ?? "";
    call.arguments += piece?.arguments ?? "";
  }
}

/** Calls a tool of `servers`, and sets the result of `call`, a text. `consent` returns the user's decision: "once", "always"
 * or "refuse". */
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

/** Calls a tool, and sets the result of `call`. Returns false if consent is needed and the tool was not called. */
async function request(call, tool, consent, { headers, signal }) {
  const { server, tool: name } = tool;
  // The arguments are sent as the model wrote them: parsed numbers would lose digits.
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
