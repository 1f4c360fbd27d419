// The tools of MCP servers: lists them, and calls them with the user's consent.
import type { ToolCall } from '../types';
import type { Delta, FunctionTool } from './chat';
import { ServerError, getJson, headers } from './client';

/** Maximum requests of one answer; each but the last one ends in tool calls. */
export const MAX_ROUNDS = 20;
export const REFUSED = 'The user does not want this call. Do not repeat it.';
/** The result of a call without a response: it was stopped, or the page was closed. */
export const STOPPED = 'The call was stopped; it may have had effects.';

export interface ServerTool {
  server: string;
  tool: string;
  /** Whether it runs without consent. */
  allowed: boolean;
  function: FunctionTool;
}

export interface ToolServer {
  name: string;
  tools: ServerTool[];
  problems: string[];
}

/** Starts the MCP servers and lists their tools. None if the server offers no tools to its page. */
export async function listServers(): Promise<ToolServer[]> {
  type Listed = { tools: ServerTool[]; problems: { server: string; message: string }[] };
  const listed = await getJson<Listed>('mcp/tools').catch((error: unknown) => {
    if (error instanceof ServerError && error.status === 404) return { tools: [], problems: [] };
    throw error;
  });
  const servers = new Map<string, ToolServer>();
  const named = (name: string) => {
    const server = servers.get(name) ?? { name, tools: [], problems: [] };
    servers.set(name, server);
    return server;
  };
  for (const tool of listed.tools) named(tool.server).tools.push(tool);
  for (const { server, message } of listed.problems) named(server).problems.push(message);
  return [...servers.values()];
}

/** Appends the call deltas of an event to the calls of an answer. */
export function addCalls(calls: ToolCall[], pieces: NonNullable<Delta['tool_calls']>): void {
  for (const { index, id, function: piece } of pieces) {
    const call = (calls[index] ??= { id: '', name: '', arguments: '' });
    call.id ||= id ?? '';
    call.name += piece?.name ?? '';
    call.arguments += piece?.arguments ?? '';
  }
}

export type Decision = 'once' | 'always' | 'refuse';

function isObject(text: string): boolean {
  try {
    const value: unknown = JSON.parse(text.trim() || '{}');
    return Boolean(value) && typeof value === 'object' && !Array.isArray(value);
  } catch {
    return false;
  }
}

/** Calls a tool. Returns the call with its result. `consent` returns the user's decision. `begun` is called when it runs. */
export async function callTool(
  call: ToolCall,
  tools: ServerTool[],
  options: { signal: AbortSignal; consent: (call: ToolCall) => Promise<Decision>; begun: (call: ToolCall) => void },
): Promise<ToolCall> {
  const tool = tools.find((one) => one.function.function.name === call.name);
  if (!tool) return { ...call, result: `There is no tool ${call.name}.`, isError: true };
  const named = { ...call, server: tool.server, tool: tool.tool };
  if (!isObject(call.arguments)) return { ...named, result: 'The tool was not called: its arguments are no JSON object.', isError: true };
  for (;;) {
    const decision = tool.allowed ? undefined : await options.consent(named);
    if (decision === 'refuse') return { ...named, result: REFUSED, isError: true };
    options.begun({ ...named, result: STOPPED });
    const done = await request(named, tool, decision, options.signal);
    if (done) return done;
  }
}

/** Calls a tool. Returns undefined if consent is needed and the tool was not called. */
async function request(call: ToolCall, tool: ServerTool, consent: Decision | undefined, signal: AbortSignal): Promise<ToolCall | undefined> {
  // The arguments are sent as the model wrote them: parsed numbers would lose digits.
  const body = `${JSON.stringify({ server: tool.server, tool: tool.tool, consent }).slice(0, -1)},"arguments":${call.arguments.trim() || '{}'}}`;
  const begun = performance.now();
  const seconds = () => (performance.now() - begun) / 1000;
  try {
    const response = await fetch('mcp/call', { method: 'POST', headers: headers(), body, signal });
    const answer = (await response.json().catch(() => ({}))) as { text?: string; is_error?: boolean; error?: { code?: string; message?: string } };
    if (answer.error?.code === 'consent_needed') {
      tool.allowed = false;
      return undefined;
    }
    if (response.ok && consent === 'always') tool.allowed = true;
    if (response.ok) return { ...call, result: answer.text ?? '', isError: answer.is_error, seconds: seconds() };
    return { ...call, result: `The call failed: ${answer.error?.message ?? `the server answered with status ${response.status}.`}`, isError: true, seconds: seconds() };
  } catch (error) {
    if (signal.aborted) throw error;
    return { ...call, result: 'The call failed: the server cannot be reached.', isError: true, seconds: seconds() };
  }
}

/** `text` with characters escaped that are invisible or change the order of others. */
export const visible = (text: string): string =>
  text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => (c === '\n' || c === '\t' ? c : `\\u{${c.codePointAt(0)!.toString(16)}}`));
