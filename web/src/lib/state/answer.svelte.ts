// A run: an answer that is being written, from the request to its end, with the tools that it calls. It goes on while another
// conversation is shown, over lost connections, and, if the server keeps its stream, after the page was loaded again.
import type { ApiMessage, EventStream, FunctionTool } from '../api/chat';
import { complete, fieldsOf, messagesFor, resume, stopStream } from '../api/chat';
import { ConnectionError, ServerError } from '../api/client';
import { type Decision, MAX_ROUNDS, STOPPED, addCalls, callTool } from '../api/tools';
import { partsOf } from '../files';
import { Counter, noStats } from '../rate';
import { asWriter } from '../store/tabs';
import type { ChatSettings, Message, ToolCall } from '../types';
import { engine } from './engine.svelte';
import { library } from './library.svelte';
import { tools } from './tools.svelte';
import { ui } from './ui.svelte';

/** Milliseconds between two writes of an answer to the database. */
const SAVE_EVERY = 600;
/** How often a lost stream is asked for again. */
const RESUME_TRIES = 8;

export type Phase = 'waiting' | 'thinking' | 'answering' | 'tool' | 'consent' | 'away';

export interface Consent {
  call: ToolCall;
  decide: (decision: Decision | 'chat') => void;
}

export class Run {
  readonly conversation: string;
  readonly id: string;
  phase = $state<Phase>('waiting');
  rate = $state(0);
  nTokens = $state(0);
  trace = $state.raw<number[]>([]);
  consent = $state<Consent | null>(null);
  /** The call that runs. */
  calling = $state('');
  readonly begun = performance.now();
  message: Message;
  readonly abort = new AbortController();
  #counter = new Counter(performance.now());
  #frame = 0;
  #saveTimer: ReturnType<typeof setTimeout> | undefined;
  #thinkingSince = 0;

  constructor(message: Message) {
    this.message = message;
    this.conversation = message.conversation;
    this.id = message.id;
  }

  /** Stops the answer; what is there stays. */
  stop(): void {
    if (this.message.stream) stopStream(this.message.stream.id);
    this.abort.abort(new DOMException('stopped', 'AbortError'));
  }

  /** Writes the answer to the messages of `path`. `isResumed`: its stream is asked for again first. */
  async write(path: Message[], settings: ChatSettings, summary: string, isResumed: boolean): Promise<void> {
    await asWriter(this.id, async () => {
      runs.set(this);
      ui.announce('The model is answering.');
      let end: Partial<Message> = { state: 'done' };
      try {
        end = await this.#write(path, settings, summary, isResumed);
      } catch (error) {
        end = this.#failure(error);
      }
      cancelAnimationFrame(this.#frame);
      this.#endThoughts();
      const { stream: _, calls: _calls, error: _error, ...message } = this.message;
      this.message = { ...message, ...end };
      clearTimeout(this.#saveTimer);
      await library.put(this.message);
      runs.delete(this);
      const words: Record<string, string> = { done: 'The answer is complete.', stopped: 'The answer is stopped.', failed: 'The answer failed.', cut: 'The answer was cut off.' };
      ui.announce(`${words[this.message.state] ?? 'The answer ended before its end.'} ${this.message.error?.message ?? ''}`.trim());
    });
  }

  #failure(error: unknown): Partial<Message> {
    if (this.abort.signal.aborted) return { state: 'stopped' };
    const hasText = Boolean(this.message.content || this.message.thoughts || this.message.steps?.length);
    const code = error instanceof ServerError ? error.code || String(error.status) : error instanceof ConnectionError ? 'connection' : 'defect';
    if (error instanceof ConnectionError) engine.lost();
    return { state: hasText ? 'cut' : 'failed', error: { code, message: error instanceof Error ? error.message : 'The answer failed.' } };
  }

  async #write(path: Message[], settings: ChatSettings, summary: string, isResumed: boolean): Promise<Partial<Message>> {
    const { signal } = this.abort;
    const model = engine.model(settings.model);
    const functions = settings.servers?.length ? await tools.functionsOf(settings.servers, signal) : [];
    for (let round = 0; round < MAX_ROUNDS; round++) {
      let stream: EventStream | undefined;
      if (isResumed && round === 0) stream = await this.#resumed();
      if (isResumed && !stream && round === 0) return { state: 'cut', error: { code: 'gone', message: 'The page was closed while the answer was written.' } };
      const body = await this.#body(path, settings, summary, functions, Boolean(model?.thinking));
      const { reason, isLimited } = await this.#receive(body, stream);
      const calls = this.message.calls ?? [];
      if (reason !== 'tool_calls' || !calls.length) {
        if (reason === 'stop') return { state: 'done' };
        return { state: isLimited ? 'length' : 'full' };
      }
      await this.#call(calls, settings);
    }
    return { state: 'cut', error: { code: 'rounds', message: `The model called tools ${MAX_ROUNDS} times in a row, and is not asked again.` } };
  }

  async #body(path: Message[], settings: ChatSettings, summary: string, functions: FunctionTool[], canThink: boolean): Promise<Record<string, unknown>> {
    const messages: ApiMessage[] = await messagesFor([...path, this.message], settings, summary, partsOf);
    const model = engine.model(settings.model)?.name;
    const isContinued = messages.at(-1)?.role === 'assistant';
    return {
      ...(model ? { model } : {}),
      messages,
      ...fieldsOf(settings, canThink),
      ...(isContinued ? { continue_final_message: true } : {}),
      ...(functions.length ? { tools: functions } : {}),
      stream: true,
      stream_options: { include_usage: true },
    };
  }

  async #resumed(): Promise<EventStream | undefined> {
    const { stream } = this.message;
    if (!stream) return undefined;
    for (let n = 1; ; n++) {
      try {
        return await resume(stream.id, stream.bytes, this.abort.signal);
      } catch (error) {
        if (!(error instanceof ConnectionError) || n === RESUME_TRIES) {
          if (this.abort.signal.aborted) throw error;
          return undefined;
        }
        this.phase = 'away';
        await engine.back(this.abort.signal);
      }
    }
  }

  /** Receives the stream of one request. A lost connection is made again where the server keeps the stream. A server that is not
   * there, or still loads its model, is asked again as long as nothing has arrived. */
  async #receive(body: Record<string, unknown>, begun?: EventStream): Promise<{ reason: string; isLimited: boolean }> {
    const { signal } = this.abort;
    this.#counter = new Counter(performance.now());
    this.phase = 'waiting';
    let stream = begun;
    let lost = 0;
    for (;;) {
      try {
        if (!stream) {
          stream = await complete(body, signal);
          // Stored at once: from here on the page may be closed.
          if (stream.id) this.message.stream = { id: stream.id, bytes: 0 };
          this.saveNow();
        }
        if (stream.loadSeconds && typeof body.model === 'string') engine.noteLoad(body.model, stream.loadSeconds);
        return await this.#read(stream, body);
      } catch (error) {
        if (signal.aborted) throw error;
        const isLoading = error instanceof ServerError && error.code === 'loading';
        if (isLoading) await new Promise((resolve) => setTimeout(resolve, 1000));
        else if (!(error instanceof ConnectionError) || ++lost > RESUME_TRIES) throw error;
        else if (stream?.id) {
          this.phase = 'away';
          await engine.back(signal);
          stream = await this.#resumed();
          if (!stream) throw error;
          continue;
        } else if (this.#counter.tokens) throw error;
        else {
          this.phase = 'away';
          await engine.back(signal);
          this.phase = 'waiting';
        }
        stream = undefined;
      }
    }
  }

  async #read(stream: EventStream, body: Record<string, unknown>): Promise<{ reason: string; isLimited: boolean }> {
    let usage;
    let reason: string | null | undefined;
    const calls = (this.message.calls ?? []).map((call) => ({ ...call }));
    for await (const { event, bytes } of stream.events) {
      const choice = event.choices?.[0];
      usage = event.usage ?? usage;
      reason = choice?.finish_reason ?? reason;
      const { content, reasoning_content, tool_calls } = choice?.delta ?? {};
      if (tool_calls) addCalls(calls, tool_calls);
      const { message } = this;
      if (reasoning_content) {
        this.#thinkingSince ||= performance.now();
        message.thoughts = (message.thoughts ?? '') + reasoning_content;
      }
      if (content) message.content += message.content ? content : content.trimStart();
      if (tool_calls) message.calls = calls;
      if (event.model) message.model = event.model;
      if (stream.id) message.stream = { id: stream.id, bytes };
      if (!content && !reasoning_content && !tool_calls) continue;
      if (content || tool_calls) this.#endThoughts();
      this.#counter.add(performance.now());
      this.phase = content || tool_calls ? 'answering' : 'thinking';
      this.#draw();
      this.#save();
    }
    if (!reason) throw new ConnectionError('The connection ended before the answer did.');
    const stats = this.#counter.addTo(this.message.stats ?? noStats(), usage);
    delete this.message.stream;
    this.message = { ...this.message, stats };
    this.#show();
    const limit = body.max_tokens;
    return { reason, isLimited: typeof limit === 'number' && stats.last !== undefined && stats.last >= limit };
  }

  #endThoughts(): void {
    if (!this.#thinkingSince) return;
    this.message.thoughtSeconds = (this.message.thoughtSeconds ?? 0) + (performance.now() - this.#thinkingSince) / 1000;
    this.#thinkingSince = 0;
  }

  /** Calls tools, and makes a step of the answer so far. */
  async #call(calls: ToolCall[], settings: ChatSettings): Promise<void> {
    const { content, thoughts, thoughtSeconds, calls: _, ...message } = this.message;
    const before = message.steps ?? [];
    const step = { content, thoughts, thoughtSeconds, calls: [...calls] };
    const update = (index: number, call: ToolCall) => {
      step.calls[index] = call;
      this.message = { ...message, content: '', steps: [...before, { ...step, calls: [...step.calls] }] };
      this.#show();
    };
    for (const [index, call] of calls.entries()) {
      const consent = async (asked: ToolCall): Promise<Decision> => {
        update(index, asked);
        const key = `${asked.server}/${asked.tool}`;
        if (library.conversations.get(this.conversation)?.settings.allowed?.includes(key)) return 'once';
        return this.#ask(asked, key);
      };
      const begun = (running: ToolCall) => {
        this.phase = 'tool';
        this.calling = running.id;
        update(index, running);
        void library.put(this.message);
      };
      update(index, call);
      const available = await tools.of(settings.servers ?? [], this.abort.signal);
      try {
        update(index, await callTool(call, available, { signal: this.abort.signal, consent, begun }));
      } catch (error) {
        if (step.calls[index]?.result === undefined) update(index, { ...call, result: 'The tool was not called.', isError: true });
        else if (step.calls[index]?.result === STOPPED) update(index, { ...step.calls[index]!, isError: true });
        throw error;
      } finally {
        this.calling = '';
      }
      await library.put(this.message);
    }
  }

  /** Waits for the user's consent to a call. */
  async #ask(call: ToolCall, key: string): Promise<Decision> {
    this.phase = 'consent';
    ui.announce(`The model wants to call the tool ${call.tool} of ${call.server}.`);
    try {
      const decision = await new Promise<Decision | 'chat'>((resolve, reject) => {
        this.consent = { call, decide: resolve };
        this.abort.signal.addEventListener('abort', () => reject(this.abort.signal.reason as Error), { once: true });
      });
      if (decision !== 'chat') return decision;
      const old = library.conversations.get(this.conversation);
      if (old) await library.patch(this.conversation, ({ settings }) => ({ settings: { ...settings, allowed: [...(settings.allowed ?? []), key] } }));
      return 'once';
    } finally {
      this.consent = null;
    }
  }

  #draw(): void {
    // Without a shown page there are no frames.
    if (this.#frame || document.visibilityState === 'hidden') return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      const now = performance.now();
      this.rate = this.#counter.rate(now);
      this.nTokens = (this.message.stats?.tokens ?? 0) + this.#counter.tokens;
      this.trace = this.#counter.trace;
      this.#show();
    });
  }

  #show(): void {
    library.show({ ...this.message, stats: this.message.stats ?? { ...noStats(), first: this.#counter.waited } });
  }

  #save(): void {
    this.#saveTimer ??= setTimeout(() => this.saveNow(), SAVE_EVERY);
  }

  saveNow(): void {
    clearTimeout(this.#saveTimer);
    this.#saveTimer = undefined;
    void library.put({ ...this.message });
  }
}

/** The runs of this page. */
class Runs {
  #byConversation = $state.raw<ReadonlyMap<string, Run>>(new Map());

  of(conversation: string): Run | undefined {
    return this.#byConversation.get(conversation);
  }

  get any(): boolean {
    return this.#byConversation.size > 0;
  }

  set(run: Run): void {
    this.#byConversation = new Map(this.#byConversation).set(run.conversation, run);
  }

  delete(run: Run): void {
    const others = new Map(this.#byConversation);
    if (others.get(run.conversation) === run) others.delete(run.conversation);
    this.#byConversation = others;
  }

  saveAll(): void {
    for (const run of this.#byConversation.values()) run.saveNow();
  }
}

export const runs = new Runs();
