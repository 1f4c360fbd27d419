// A server that plays scripted answers in the formats of the real one: thoughts, tool calls, slow and broken streams that can be
// resumed, models that load, downloads, errors. The question says which answer; without a word of the script it is a short text.
// `node tests/mock-server.ts [PORT]` serves the built page, too.
import { createServer, type IncomingMessage, type ServerResponse } from 'node:http';
import { existsSync, readFileSync } from 'node:fs';
import { createRequire } from 'node:module';
import { extname, join, normalize } from 'node:path';
import { fileURLToPath } from 'node:url';
import { AWKWARD, RAIN, SLOW, longText } from './answers.ts';

interface ApiMessage {
  role: string;
  content: string | { type: string; text?: string }[];
}
interface Body {
  model?: string;
  name?: string;
  messages?: ApiMessage[];
  stream?: boolean;
  max_tokens?: number;
  tools?: unknown[];
  keep_alive?: number;
  content?: string;
  enable_thinking?: boolean;
  response_format?: unknown;
  temperature?: number;
}
interface StoredStream {
  chunks: Buffer[];
  isDone: boolean;
  wake: (() => void)[];
}

const GB = 1e9;
const MODELS = [
  { name: 'Qwen3.5 4B', size: 3.1 * GB, memory: 4.3 * GB, can: ['completion', 'vision', 'thinking', 'tools'] },
  { name: 'gpt-oss 20B', size: 12.1 * GB, memory: 13.4 * GB, can: ['completion', 'thinking', 'tools'] },
  { name: 'Qwen3.5 9B', size: 6.6 * GB, memory: 8.1 * GB, can: ['completion', 'vision', 'thinking', 'tools'] },
];
/** A model that is there only where a test wants it: it loads. */
const EXTRA = { name: 'Gemma 4 E4B', size: 3.0 * GB, memory: 0, can: ['completion', 'vision', 'tools'] };
const POLICY =
  "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob:; font-src 'self'; worker-src 'self'; manifest-src 'self'; " +
  "base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const TYPES: Record<string, string> = { '.html': 'text/html', '.js': 'text/javascript', '.mjs': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.png': 'image/png', '.woff2': 'font/woff2', '.webmanifest': 'application/manifest+json' };
const { resolve: packaged } = createRequire(import.meta.url);
/** What tests load into the page, which takes it from its own origin only: accessibility checks, fonts for screenshots. */
const TEST_FILES: Record<string, string> = {
  '/test/axe.js': packaged('axe-core/axe.min.js'),
  '/test/text.woff2': packaged('@fontsource-variable/inter/files/inter-latin-opsz-normal.woff2'),
  '/test/code.woff2': packaged('@fontsource-variable/jetbrains-mono/files/jetbrains-mono-latin-wght-normal.woff2'),
};
const sleep = (ms: number) => new Promise((resolve) => setTimeout(resolve, ms));

export interface MockServer {
  url: string;
  models: typeof MODELS;
  /** The bodies of chat completions that arrived. */
  requests: Body[];
  /** Streams that were stopped by DELETE. */
  stopped: string[];
  state: { isAway: boolean; key: string; pace: number; loaded: string[]; loading: string; /** Milliseconds of a load. */ loadTime: number; /** Models whose load was cancelled. */ cancelled: string[]; hasResumable: boolean; /** Bytes that other programs use. */ other: number; /** A model that loads, and downloads that stand still. */ extra: boolean; /** Pieces of an answer after which it stands still while this is so. */ holdAt: number; /** Questions that fit into the context where the last one is too long. */ nFitting: number };
  /** A resumable stream that has this text, and no end. */
  hold: (id: string, text: string) => void;
  /** Ends all connections at once. */
  cut: () => void;
  close: () => Promise<void>;
}

/** What an answer consists of. */
interface Script {
  thoughts?: string;
  text: string;
  call?: { name: string; arguments: string };
  delay?: number;
  cutAfter?: number;
  error?: { status: number; code: string; message: string };
  reason?: string;
}

function textOf(message: ApiMessage | undefined): string {
  if (!message) return '';
  return typeof message.content === 'string' ? message.content : message.content.map((part) => part.text ?? '').join('');
}

function scriptOf(body: Body, nFitting: number): Script {
  const messages = body.messages ?? [];
  const last = messages.at(-1);
  const asked = textOf(messages.findLast(({ role }) => role === 'user'));
  if (/^Write a title/.test(asked)) return { text: 'Rain gauge for the garden' };
  if (/^Summarise this/.test(asked)) return { text: 'The user measures rain with a gauge of 198 cm².' };
  if (last?.role === 'assistant') return { text: ' and this is the rest of the sentence.' };
  if (last?.role === 'tool') return /rain gauge|bucket/.test(asked) ? { text: RAIN } : { text: `The tool said: ${textOf(last).slice(0, 80)}` };
  if (/refuse/.test(asked)) return { text: '', error: { status: 400, code: 'unsupported_by_model', message: 'the model cannot do this' } };
  if (/too long|askew/.test(asked) && messages.filter(({ role }) => role === 'user').length > nFitting)
    return { text: '', error: { status: 400, code: 'context_length_exceeded', message: 'the prompt has 33000 tokens, the context 32768' } };
  if (/fill up/.test(asked)) return { text: 'The text ends here because', reason: 'length' };
  if (/think/.test(asked)) return { thoughts: 'First I look at the question. Then I answer it.', text: 'Thought through: **42**.' };
  if (body.tools?.length && /write a file/.test(asked)) return { text: 'I have the readings. To keep the result I would like to write a table next to your log.', call: { name: 'write_file', arguments: '{"path": "rain/week-27.csv", "text": "day,tips,mm\\nMonday,12,3.0"}' } };
  if (body.tools?.length && /bucket/.test(asked)) return { thoughts: 'The user wants millimetres. I need the area first, then the depth per tip.', text: '', call: { name: 'read_rain_log', arguments: '{"week": 27}' } };
  if (body.response_format) return { text: '{ "day": "Monday", "mm": 3.0 }' };
  if (/long (\d+)/.test(asked)) return { text: longText(Number(/long (\d+)/.exec(asked)![1])) };
  if (/break off/.test(asked)) return { text: longText(1500), cutAfter: 60, delay: 10 };
  if (/awkward/.test(asked)) return { text: AWKWARD };
  if (/slow/.test(asked)) return { text: longText(SLOW), delay: 30 };
  if (/rain|bucket/.test(asked)) return { text: RAIN };
  return { text: `You asked: ${asked.slice(0, 200)}` };
}

export async function startMock(port = 0): Promise<MockServer> {
  const dist = fileURLToPath(new URL('../../crates/metal-attention-server/page/', import.meta.url));
  const streams = new Map<string, StoredStream>();
  const answering = new Set<ServerResponse>();
  let n = 0;
  const mock: MockServer = {
    url: '',
    models: MODELS.map((model) => ({ ...model })),
    requests: [],
    stopped: [],
    state: { isAway: false, key: '', pace: 4, loaded: ['Qwen3.5 4B'], loading: '', loadTime: 300, cancelled: [], hasResumable: true, other: 6.4 * GB, extra: false, holdAt: Infinity, nFitting: 1 },
    hold: (id, text) => {
      const event = { model: MODELS[0]!.name, choices: [{ index: 0, delta: { content: text }, finish_reason: null }] };
      streams.set(id, { chunks: [Buffer.from(`data: ${JSON.stringify(event)}\n\n`)], isDone: false, wake: [] });
    },
    cut: () => {
      for (const response of answering) response.destroy();
    },
    close: () =>
      new Promise((resolve) => {
        server.close(() => resolve());
        server.closeAllConnections();
      }),
  };

  const json = (response: ServerResponse, body: unknown, status = 200) => {
    response.writeHead(status, { 'content-type': 'application/json' });
    response.end(JSON.stringify(body));
  };
  const fail = (response: ServerResponse, status: number, code: string, message: string) => json(response, { error: { message, type: 'invalid_request_error', param: null, code } }, status);

  /** The pieces that a text arrives in. */
  const pieces = (text: string) => text.match(text.length > 10_000 ? /[^]{1,40}/g : /\s*\S{1,6}|\s+/g) ?? [];

  async function play(body: Body, script: Script, stored: StoredStream): Promise<void> {
    const id = `chatcmpl-${++n}`;
    const push = (data: unknown) => {
      stored.chunks.push(Buffer.from(`data: ${typeof data === 'string' ? data : JSON.stringify(data)}\n\n`));
      for (const wake of stored.wake.splice(0)) wake();
    };
    const chunk = (delta: unknown, finish: string | null = null) =>
      push({ id, object: 'chat.completion.chunk', created: 1, model: body.model ?? MODELS[0]!.name, choices: [{ index: 0, delta, logprobs: null, finish_reason: finish }] });
    chunk({ role: 'assistant', content: '' });
    let count = 0;
    const pause = () => sleep(script.delay ?? mock.state.pace);
    if (body.enable_thinking !== false) {
      for (const piece of pieces(script.thoughts ?? '')) {
        await pause();
        chunk({ reasoning_content: piece });
        count++;
      }
    }
    for (const piece of pieces(script.text)) {
      while (count >= mock.state.holdAt && !stored.isDone) await sleep(10);
      if (stored.isDone) return;
      if (body.max_tokens && count >= body.max_tokens) break;
      if (mock.state.pace || script.delay) await pause();
      else if (count % 50 === 0) await sleep(0);
      chunk({ content: piece });
      count++;
    }
    if (script.call) {
      chunk({ tool_calls: [{ index: 0, id: `call_${n}`, type: 'function', function: { name: script.call.name, arguments: '' } }] });
      for (const piece of pieces(script.call.arguments)) chunk({ tool_calls: [{ index: 0, function: { arguments: piece } }] });
    }
    chunk({}, script.reason ?? (script.call ? 'tool_calls' : body.max_tokens && count >= body.max_tokens ? 'length' : 'stop'));
    const characters = (body.messages ?? []).reduce((sum, message) => sum + textOf(message).length, 0);
    const prompt = /fill up/.test(textOf(body.messages?.at(-1))) ? 32700 : /rain|bucket/.test(JSON.stringify(body.messages)) ? 12_080 : 40 + Math.ceil(characters / 4);
    push({ id, object: 'chat.completion.chunk', created: 1, model: body.model, choices: [], usage: { prompt_tokens: prompt, completion_tokens: count, total_tokens: prompt + count, prompt_tokens_details: { cached_tokens: prompt > 12_000 && prompt < 13_000 ? 9800 : 0 } } });
    push('[DONE]');
    stored.isDone = true;
    for (const wake of stored.wake.splice(0)) wake();
  }

  /** Sends a stream from a byte on, and goes on live. */
  async function follow(response: ServerResponse, stored: StoredStream, after: number, cutAfter?: number): Promise<void> {
    answering.add(response);
    let skip = after;
    let sent = 0;
    for (let i = 0; !response.destroyed; ) {
      if (i < stored.chunks.length) {
        const bytes = stored.chunks[i++]!;
        if (skip >= bytes.length) {
          skip -= bytes.length;
          continue;
        }
        response.write(bytes.subarray(skip));
        skip = 0;
        if (cutAfter !== undefined && ++sent >= cutAfter) {
          // Lets what was written leave first.
          await sleep(30);
          response.destroy();
        }
      } else if (stored.isDone) break;
      else await new Promise<void>((resolve) => stored.wake.push(resolve));
    }
    answering.delete(response);
    if (!response.destroyed) response.end();
  }

  async function complete(body: Body, request: IncomingMessage, response: ServerResponse): Promise<void> {
    mock.requests.push(body);
    const script = scriptOf(body, mock.state.nFitting);
    if (mock.state.loading) return fail(response, 503, 'loading', 'the model is still loading: try again soon');
    if (script.error) return fail(response, script.error.status, script.error.code, script.error.message);
    if (!body.stream) {
      await sleep(20);
      return json(response, { choices: [{ index: 0, message: { role: 'assistant', content: script.text }, finish_reason: 'stop' }], usage: {} });
    }
    const id = `s${++n}`;
    const isResumable = mock.state.hasResumable && request.headers['x-resumable'] === '1';
    response.writeHead(200, { 'content-type': 'text/event-stream', ...(isResumable ? { 'x-stream-id': id } : {}) });
    const stored: StoredStream = { chunks: [], isDone: false, wake: [] };
    if (isResumable) streams.set(id, stored);
    else response.on('close', () => (stored.isDone = true));
    void play(body, script, stored);
    await follow(response, stored, 0, script.cutAfter);
  }

  async function pull(name: string, response: ServerResponse): Promise<void> {
    response.writeHead(200, { 'content-type': 'application/x-ndjson' });
    const line = (value: unknown) => response.write(`${JSON.stringify(value)}\n`);
    line({ status: 'pulling manifest' });
    if (/missing/.test(name)) {
      line({ error: 'the hub has no such model' });
      response.end();
      return;
    }
    const total = 15.1 * GB;
    if (mock.state.extra) {
      line({ status: `pulling ${name}`, digest: 'sha256:0', total, completed: 6.2 * GB });
      return void (await new Promise((resolve) => response.on('close', resolve)));
    }
    for (let completed = 5 * GB; completed < total && !response.destroyed; completed += /quick/.test(name) ? 5 * GB : 0.05 * GB) {
      line({ status: `pulling ${name}`, digest: 'sha256:0', total, completed });
      await sleep(100);
    }
    if (response.destroyed) return;
    line({ status: 'success' });
    response.end();
  }

  function file(path: string, response: ServerResponse): void {
    const name = normalize(path === '/' ? 'index.html' : path.slice(1));
    const at = TEST_FILES[path] ?? join(dist, name);
    if (name.startsWith('..') || !existsSync(at)) return fail(response, 404, 'route_not_found', `nothing is at ${path}`);
    response.writeHead(200, { 'content-type': TYPES[extname(at)] ?? 'application/octet-stream', 'content-security-policy': POLICY, 'cache-control': 'no-cache' });
    response.end(readFileSync(at));
  }

  async function handle(request: IncomingMessage, response: ServerResponse): Promise<void> {
    const { pathname, searchParams } = new URL(request.url ?? '/', 'http://mock');
    const isApi = /^\/(v1|api|mcp|props|tokenize|health)(\/|$)/.test(pathname);
    if (mock.state.isAway && isApi) return void request.socket.destroy();
    if (isApi && pathname !== '/health' && mock.state.key && request.headers.authorization !== `Bearer ${mock.state.key}`) return fail(response, 401, 'invalid_api_key', 'the key is missing or wrong');
    const parts: Buffer[] = [];
    for await (const part of request) parts.push(part as Buffer);
    const body = (parts.length ? JSON.parse(Buffer.concat(parts).toString() || '{}') : {}) as Body;
    const stream = /^\/v1\/streams\/(.+)$/.exec(pathname)?.[1];
    if (stream && request.method === 'DELETE') {
      mock.stopped.push(stream);
      const stored = streams.get(stream);
      if (stored) stored.isDone = true;
      for (const wake of stored?.wake.splice(0) ?? []) wake();
      return json(response, {});
    }
    if (stream) {
      const stored = streams.get(stream);
      if (!stored) return fail(response, 404, 'stream_not_found', 'the stream is gone');
      response.writeHead(200, { 'content-type': 'text/event-stream', 'x-stream-id': stream });
      return follow(response, stored, Number(searchParams.get('after') ?? 0));
    }
    const { loaded } = mock.state;
    const models = mock.state.extra ? [MODELS[0]!, EXTRA, MODELS[2]!, MODELS[1]!] : mock.models;
    const used = mock.models.filter(({ name }) => loaded.includes(name)).reduce((sum, model) => sum + model.memory, 0);
    const details = { family: 'mock', parameter_size: '4.0B', quantization_level: '4 bit' };
    switch (pathname) {
      case '/health':
        return json(response, { status: 'ok' });
      case '/v1/models':
        return json(response, {
          object: 'list',
          memory: { total: 16 * GB, free: Math.max(0, 16 * GB - used - mock.state.other) },
          data: models.map(({ name, size, can }) => {
            const isLoading = mock.state.loading === name || name === EXTRA.name;
            const isLoaded = loaded.includes(name) && !isLoading;
            return {
              id: name,
              meta: isLoaded ? { n_ctx: 32768, n_ctx_train: 131_072, size, vision: can.includes('vision') } : null,
              status: isLoading ? { value: 'loading', progress: 0.62 } : { value: isLoaded ? 'loaded' : 'unloaded' },
            };
          }),
        });
      case '/api/tags':
        return json(response, { models: models.map(({ name, size }) => ({ name, size, details })) });
      case '/api/ps':
        return json(response, { models: mock.models.filter(({ name }) => loaded.includes(name)).map(({ name, memory }) => ({ name, size: memory, size_vram: memory, context_length: 32768, details })) });
      case '/api/show':
        return json(response, { capabilities: mock.models.find(({ name }) => name === body.model)?.can ?? [] });
      case '/props':
        return json(response, { default_generation_settings: { n_ctx: 32768, params: { temperature: 0.7, top_p: 0.8, top_k: 20, min_p: 0, repeat_penalty: 1, presence_penalty: 0, frequency_penalty: 0 } } });
      case '/tokenize':
        return json(response, { tokens: Array.from({ length: Math.ceil((body.content ?? '').length / 5) }, (_, i) => i) });
      case '/api/generate':
        if (body.keep_alive === 0) {
          if (!loaded.includes(body.model ?? '')) mock.state.cancelled.push(body.model ?? '');
          await sleep(20);
          mock.state.loaded = loaded.filter((name) => name !== body.model);
        } else {
          await sleep(mock.state.loadTime);
          if (!response.destroyed) mock.state.loaded = [...new Set([...loaded, body.model ?? ''])];
        }
        return json(response, { done: true });
      case '/api/pull':
        return pull(body.model ?? '', response);
      case '/mcp/tools': {
        const tool = (server: string, name: string, allowed: boolean) => ({ server, tool: name, allowed, function: { type: 'function', function: { name, parameters: { type: 'object' } } } });
        return json(response, { tools: [tool('weather-log', 'read_rain_log', true), tool('garden-files', 'write_file', false)], problems: [{ server: 'web-reader', message: 'It did not start.' }] });
      }
      case '/mcp/call': {
        const call = body as unknown as { tool: string; consent?: string };
        if (call.tool === 'write_file' && !call.consent) return fail(response, 403, 'consent_needed', 'the call needs consent');
        await sleep(40);
        return json(response, { text: call.tool === 'write_file' ? 'written' : '[ { "day": "Monday", "tips": 12 },\n  { "day": "Tuesday", "tips": 0 } ]', is_error: false });
      }
      case '/v1/chat/completions':
        return complete(body, request, response);
      default:
        return isApi ? fail(response, 404, 'route_not_found', `nothing is at ${pathname}`) : file(pathname, response);
    }
  }

  const server = createServer((request, response) => {
    handle(request, response).catch((error: unknown) => {
      console.error(error);
      response.destroy();
    });
  });
  await new Promise<void>((resolve) => server.listen(port, '127.0.0.1', resolve));
  const address = server.address();
  mock.url = `http://127.0.0.1:${typeof address === 'object' && address ? address.port : port}/`;
  return mock;
}

if (process.argv[1] === fileURLToPath(import.meta.url)) {
  const mock = await startMock(Number(process.argv[2] ?? 8124));
  console.log(mock.url);
}
