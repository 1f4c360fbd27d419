// Chat completions: the request for a path of messages, and its stream of events, which can be resumed.
import type { ChatSettings, Message } from '../types';
import { ConnectionError, ServerError, errorOf, send } from './client';
import { Lines, dataOf } from './lines';

/** A tool in a request. */
export interface FunctionTool {
  type: 'function';
  function: { name: string; description?: string; parameters?: unknown };
}

export interface Usage {
  prompt_tokens: number;
  completion_tokens: number;
  prompt_tokens_details?: { cached_tokens?: number };
}

export interface Delta {
  content?: string;
  reasoning_content?: string;
  tool_calls?: { index: number; id?: string; function?: { name?: string; arguments?: string } }[];
}

export interface ChatEvent {
  model?: string;
  choices?: { delta?: Delta; finish_reason?: string | null }[];
  usage?: Usage;
  error?: unknown;
}

export type Part = { type: 'text'; text: string } | { type: 'image_url'; image_url: { url: string } };

export interface ApiMessage {
  role: 'system' | 'user' | 'assistant' | 'tool';
  content: string | Part[];
  name?: string;
  reasoning_content?: string;
  tool_call_id?: string;
  tool_calls?: { id: string; type: 'function'; function: { name: string; arguments: string } }[];
}

/** Reads the files of a message: the parts of its pictures, and the texts of its other files. */
export type ReadFiles = (message: Message) => Promise<{ pictures: Part[]; texts: string[] }>;

const textParts = (content: string | Part[]): Part[] => (typeof content !== 'string' ? content : content ? [{ type: 'text', text: content }] : []);

/** The messages of a request for one message: an answer with tool calls is several. */
async function expanded(message: Message, read: ReadFiles): Promise<ApiMessage[]> {
  const { role, content, steps = [] } = message;
  const list: ApiMessage[] = steps.flatMap(({ calls, content: text, thoughts }): ApiMessage[] => [
    {
      role,
      content: text,
      ...(thoughts ? { reasoning_content: thoughts } : {}),
      tool_calls: calls.map(({ id, name, arguments: values }) => ({ id, type: 'function', function: { name, arguments: values } })),
    },
    ...calls.map(({ id, name, result }): ApiMessage => ({ role: 'tool', tool_call_id: id, name, content: result ?? 'The tool was not called.' })),
  ]);
  const { pictures, texts } = message.files?.length ? await read(message) : { pictures: [], texts: [] };
  const text = [...texts, content].filter(Boolean).join('\n\n');
  if (pictures.length) list.push({ role, content: [...pictures, ...textParts(text)] });
  else if (text || !list.length) list.push({ role, content: text });
  return list;
}

function merged(first: string | Part[], second: string | Part[]): string | Part[] {
  if (typeof first === 'string' && typeof second === 'string') return [first, second].filter(Boolean).join('\n\n');
  return [...textParts(first), { type: 'text', text: '\n\n' }, ...textParts(second)];
}

/** The messages of a request. Neighbours of one role are merged, as most templates want alternating roles; a conversation that begins
 * with an answer loses it. An empty answer at the end, which is about to be written, is left out. */
export async function messagesFor(path: Message[], settings: ChatSettings, summary: string, read: ReadFiles): Promise<ApiMessage[]> {
  const list = (await Promise.all(path.map((message) => expanded(message, read)))).flat();
  const messages: ApiMessage[] = [];
  if (list.at(-1)?.role === 'assistant' && !list.at(-1)?.content && !list.at(-1)?.tool_calls) list.pop();
  for (const message of list) {
    const last = messages.at(-1);
    const isText = message.role !== 'tool' && !message.tool_calls;
    if (isText && last?.role === message.role && !last.tool_calls) last.content = merged(last.content, message.content);
    else if (last || message.role === 'user') messages.push(message);
  }
  const system = [settings.system?.trim(), summary && `Summary of the conversation so far:\n${summary}`].filter(Boolean).join('\n\n');
  if (system) messages.unshift({ role: 'system', content: system });
  return messages;
}

/** Whether a text is a JSON schema as far as its syntax tells: an object. */
export function schemaProblem(text: string): string {
  try {
    const value: unknown = JSON.parse(text);
    return value && typeof value === 'object' && !Array.isArray(value) ? '' : 'A schema is a JSON object.';
  } catch (error) {
    return error instanceof Error ? error.message : 'This is no JSON.';
  }
}

/** The fields of a request that the settings say. What the user left to the model is not sent. */
export function fieldsOf(settings: ChatSettings, canThink: boolean): Record<string, unknown> {
  const { sampling = {}, json, schema } = settings;
  const fields: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(sampling)) if (value !== undefined && !(Array.isArray(value) && !value.length)) fields[name] = value;
  if (canThink && settings.think === false) fields.enable_thinking = false;
  if (canThink && settings.think !== false) {
    if (settings.think) fields.enable_thinking = true;
    if (settings.effort) fields.reasoning_effort = settings.effort;
  }
  if (json) {
    fields.response_format =
      schema?.trim() && !schemaProblem(schema)
        ? { type: 'json_schema', json_schema: { name: 'answer', schema: JSON.parse(schema) } }
        : { type: 'json_object' };
  }
  return fields;
}

/** An answer that is being received. `bytes`: those of its body that the events so far take up. */
export interface EventStream {
  /** The id under which the stream can be resumed; undefined if the server does not offer that. */
  id?: string;
  loadSeconds?: number;
  events: AsyncGenerator<{ event: ChatEvent; bytes: number }>;
}

function streamOf(response: Response, start: number, id?: string): EventStream {
  const load = Number(response.headers.get('x-model-load-seconds'));
  return { id: response.headers.get('x-stream-id') ?? id, loadSeconds: load || undefined, events: eventsOf(response, start) };
}

async function* eventsOf(response: Response, start: number): AsyncGenerator<{ event: ChatEvent; bytes: number }> {
  const lines = new Lines(start);
  const reader = response.body!.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error: unknown) => {
        if (error instanceof DOMException && error.name === 'AbortError') throw error;
        throw new ConnectionError('The connection was lost.');
      });
      if (done) return;
      for (const line of lines.add(value)) {
        const data = dataOf(line);
        if (!data || data === '[DONE]') continue;
        let event: ChatEvent;
        try {
          event = JSON.parse(data) as ChatEvent;
        } catch {
          throw new ServerError('The server sent what is no answer.', response.status, '');
        }
        if (event.error) throw errorOf(event, response.status);
        yield { event, bytes: lines.end };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Begins an answer. */
export async function complete(body: Record<string, unknown>, signal: AbortSignal): Promise<EventStream> {
  const options = { method: 'POST', body: JSON.stringify(body), headers: { 'X-Resumable': '1' }, signal };
  return streamOf(await send('v1/chat/completions', options), 0);
}

/** Continues an answer after `bytes` of its body. */
export async function resume(id: string, bytes: number, signal: AbortSignal): Promise<EventStream> {
  return streamOf(await send(`v1/streams/${encodeURIComponent(id)}?after=${bytes}`, { signal }), bytes, id);
}

/** Stops an answer on the server, which would keep it for a client that has gone. */
export const stopStream = (id: string): void => {
  send(`v1/streams/${encodeURIComponent(id)}`, { method: 'DELETE', keepalive: true }).catch(() => {});
};
