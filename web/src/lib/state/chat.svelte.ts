// What the user does with the shown conversation: asks, edits, repeats, continues, stops; titles and summaries.
import { tick } from 'svelte';
import { messagesFor } from '../api/chat';
import { postJson } from '../api/client';
import { countTokens } from '../api/models';
import { type OldestTurns, TOKENS_PER_CHARACTER, oldestTurns, textOf } from '../context';
import { type HeldFile, fileOf, keepFiles, partsOf, readFile } from '../files';
import { newId } from '../ids';
import * as db from '../store/db';
import { draftOf, keepDraft } from '../store/local';
import { asWriter, whenFree } from '../store/tabs';
import type { Message } from '../types';
import { Run, runs } from './answer.svelte';
import { engine } from './engine.svelte';
import { library } from './library.svelte';
import { ui } from './ui.svelte';

class Chat {
  /** What is being typed. It is kept with its conversation. */
  draft = $state('');
  held = $state.raw<HeldFile[]>([]);
  /** Files that are being read. */
  nReading = $state(0);
  /** A question with pictures that the model cannot see waits for a decision. */
  picturesRefused = $state(false);
  /** The message that is edited. */
  editing = $state('');
  isSummarising = $state(false);
  #drafts = new Map<string, HeldFile[]>();
  #titling: AbortController | undefined;

  get path(): Message[] {
    return library.path.flatMap((id) => library.messages.get(id) ?? []);
  }

  get run(): Run | undefined {
    return runs.of(library.currentId);
  }

  setDraft(text: string): void {
    this.draft = text;
    if (!keepDraft(library.currentId, text)) ui.unkept = true;
  }

  /** Switches to the draft of another conversation. */
  switched(from: string, to: string): void {
    if (from) this.#drafts.set(from, this.held);
    this.held = this.#drafts.get(to) ?? [];
    this.draft = draftOf(to);
    this.editing = '';
    this.picturesRefused = false;
  }

  async attach(files: File[]): Promise<void> {
    this.nReading++;
    for (const file of files) {
      try {
        const held = await readFile(file);
        this.held = [...this.held, held];
        ui.announce(`${held.name} is added.`);
        const model = engine.model(library.settings.model);
        if (held.text && held.text.length < 1_000_000 && model?.loaded) {
          const tokens = await countTokens(model.name, held.text).catch(() => held.tokens);
          this.held = this.held.map((one) => (one.id === held.id ? { ...one, tokens } : one));
        }
      } catch (error) {
        ui.toast(error instanceof Error ? error.message : `${file.name} was not read.`);
      }
    }
    this.nReading--;
  }

  dropFile(id: string): void {
    this.held = this.held.filter((file) => file.id !== id);
    if (!this.held.some((file) => file.kind === 'picture')) this.picturesRefused = false;
  }

  get canSend(): boolean {
    return !this.run && this.nReading === 0 && (Boolean(this.draft.trim()) || this.held.length > 0);
  }

  /** Sends what is typed. `withoutPictures`: held pictures are left out. */
  async send(withoutPictures = false): Promise<void> {
    if (!this.canSend) return;
    const model = engine.model(library.settings.model);
    const hasPictures = this.held.some((file) => file.kind === 'picture');
    if (hasPictures && model?.vision === false && !withoutPictures) {
      this.picturesRefused = true;
      return;
    }
    const text = this.draft.trim();
    const files = this.held.filter((file) => !(withoutPictures && file.kind === 'picture'));
    this.held = [];
    this.picturesRefused = false;
    this.setDraft('');
    await this.ask(text, files, library.path.at(-1) ?? '');
  }

  /** Adds a question after `parent`, and answers it. */
  async ask(text: string, files: HeldFile[], parent: string): Promise<void> {
    this.#titling?.abort();
    const title = text.split('\n')[0]!.trim().slice(0, 60) || files[0]?.name || 'New chat';
    const conversation = await library.ensure(title);
    await keepFiles(files, conversation.id);
    const refs = files.map(({ blob: _, text: _text, ...ref }) => ref);
    const question: Message = {
      id: newId(),
      conversation: conversation.id,
      parent,
      role: 'user',
      content: text,
      created: Date.now(),
      state: 'done',
      ...(refs.length ? { files: refs } : {}),
    };
    await library.add(question);
    await this.answer(question.id);
  }

  /** The path up to and including a message. */
  #pathTo(id: string): Message[] {
    const path: Message[] = [];
    for (let message = library.messages.get(id); message; message = library.messages.get(message.parent)) path.unshift(message);
    return path;
  }

  /** What a request has of a path: the messages after those that are left out, and the summary of these. */
  #withSummary(path: Message[]): { path: Message[]; summary: string } {
    const summary = library.current?.summary;
    const at = summary ? path.findIndex(({ id }) => id === summary.until) : -1;
    return at < 0 ? { path, summary: '' } : { path: path.slice(at + 1), summary: summary!.text };
  }

  /** Writes a new answer to the question `id`. */
  async answer(id: string): Promise<void> {
    this.#titling?.abort();
    const { currentId } = library;
    if (runs.of(currentId)) return;
    const settings = $state.snapshot(library.settings) as typeof library.settings;
    const model = engine.model(settings.model)?.name;
    const message: Message = { id: newId(), conversation: currentId, parent: id, role: 'assistant', content: '', created: Date.now(), state: 'writing', model };
    await library.add(message);
    await this.#run(message, this.#pathTo(id), false);
  }

  async #run(message: Message, path: Message[], isResumed: boolean): Promise<void> {
    const settings = JSON.parse(JSON.stringify(library.settings)) as typeof library.settings;
    const sent = this.#withSummary(path);
    const run = new Run(message);
    const isFirst = path.length === 1;
    await run.write(sent.path, settings, sent.summary, isResumed);
    void engine.refresh();
    if (isFirst && run.message.state === 'done') void this.#makeTitle(run.message, path);
  }

  /** Another answer to the same question. Of a question: an answer to it. */
  async again(id: string): Promise<void> {
    const message = library.messages.get(id);
    if (message) await this.answer(message.role === 'user' ? id : message.parent);
  }

  /** Goes on with an answer that is not whole: it is sent as the beginning of the answer. */
  async goOn(id: string): Promise<void> {
    const old = library.messages.get(id);
    if (!old || this.run) return;
    if (!old.content && !old.steps?.length) return this.again(id);
    const { error: _, ...message } = old;
    await this.#run({ ...message, state: 'writing' }, this.#pathTo(old.parent), false);
  }

  /** A changed question is a new branch; a changed answer is, too, and is not sent again by itself. */
  async edit(id: string, text: string): Promise<void> {
    const old = library.messages.get(id);
    this.editing = '';
    if (!old || !text.trim() || text === old.content) return;
    const { stats: _, error: _error, stream: _stream, ...kept } = old;
    const changed: Message = { ...kept, id: newId(), content: text.trim(), created: Date.now(), state: 'done' };
    await library.add(changed);
    if (old.role === 'user') await this.answer(changed.id);
  }

  stop(): void {
    this.run?.stop();
  }

  async #recoverLater(id: string): Promise<void> {
    const stored = await db.get<Message>('messages', id).catch(() => undefined);
    if (!stored || stored.conversation !== library.currentId) return;
    library.show(stored);
    if (stored.state === 'writing') await this.recover();
  }

  /** Takes over answers whose page was closed: asks for their streams again, or marks them as cut off. */
  async recover(): Promise<void> {
    for (const message of [...library.messages.values()].filter(({ state }) => state === 'writing')) {
      if (runs.of(message.conversation)) continue;
      const isFree = await asWriter(message.id, () => Promise.resolve(true));
      if (!isFree) {
        // Another tab writes it. Should that tab be closed before the end, this one goes on.
        void whenFree(message.id).then(() => this.#recoverLater(message.id));
        continue;
      }
      const error = { code: 'gone', message: 'The page was closed while the answer was written.' };
      if (message.stream) await this.#run({ ...message }, this.#pathTo(message.parent), true);
      else await library.put({ ...message, state: message.content || message.thoughts || message.steps?.length ? 'cut' : 'failed', error });
    }
  }

  /** Asks for a short text, off the stream of answers. */
  async #shortAnswer(messages: unknown[], maxTokens: number, signal: AbortSignal): Promise<string> {
    type Completion = { choices: { message: { content: string | null } }[] };
    const model = engine.model(library.settings.model)?.name;
    const body = { ...(model ? { model } : {}), messages, max_tokens: maxTokens, temperature: 0.3, reasoning_effort: 'none', stream: false };
    const { choices } = await postJson<Completion>('v1/chat/completions', body, signal);
    return choices[0]?.message.content ?? '';
  }

  /** Asks the model for a title when nothing else runs. The next question ends that. */
  async #makeTitle(answer: Message, path: Message[]): Promise<void> {
    if (!ui.titles) return;
    const abort = (this.#titling = new AbortController());
    try {
      await new Promise((resolve) => setTimeout(resolve, 400));
      if (abort.signal.aborted || runs.any || library.conversations.get(answer.conversation)?.titleBy !== 'question') return;
      const messages = await messagesFor([...path, { ...answer, thoughts: undefined }], library.settings, '', partsOf);
      messages.push({ role: 'user', content: 'Write a title for this conversation: three to six words, no quotation marks, no full stop, in its language. Answer with the title only.' });
      const title = cleanTitle(await this.#shortAnswer(messages, 24, abort.signal));
      if (!title) return;
      await library.patch(answer.conversation, (old) => (old.titleBy === 'question' ? { title, titleBy: 'model' } : undefined));
    } catch {
      // The start of the question stays the title.
    }
  }

  /** Tokens of a character of the conversation, by the model's tokenizer. */
  async tokensPerCharacter(): Promise<number> {
    const model = engine.model(library.settings.model);
    const text = this.path.map(textOf).join('\n').slice(0, 200_000);
    if (!model?.loaded || !text) return TOKENS_PER_CHARACTER;
    return countTokens(model.name, text).then((n) => n / text.length, () => TOKENS_PER_CHARACTER);
  }

  /** The oldest turns without which the answer `id` fits; undefined if there is none but its own. */
  oldestTurns(id: string, tokensPerCharacter: number): OldestTurns | undefined {
    const sent = this.#withSummary(this.#pathTo(id)).path;
    return oldestTurns(sent, engine.model(library.settings.model)?.context ?? 0, tokensPerCharacter);
  }

  /** Leaves the messages up to `until` out of requests, and asks for the answer `id` again, or for the rest of it. The page keeps them. */
  async leaveOut(until: string, id: string): Promise<void> {
    const { summary: text } = this.#withSummary(this.#pathTo(id));
    await library.patch(library.currentId, { summary: { until, text } });
    await this.goOn(id);
  }

  /** The same, with a summary by the model in their place. */
  async summarise(until: string, id: string): Promise<void> {
    this.isSummarising = true;
    try {
      const older = this.#withSummary(this.#pathTo(until));
      const messages = await messagesFor(older.path, library.settings, older.summary, partsOf);
      messages.push({ role: 'user', content: 'Summarise this conversation so far in at most 200 words. Keep names, numbers, decisions and open questions.' });
      const text = (await this.#shortAnswer(messages, 400, new AbortController().signal)).trim();
      if (!text) throw new Error('The model wrote no summary.');
      await library.patch(library.currentId, { summary: { until, text } });
    } finally {
      this.isSummarising = false;
    }
    await this.goOn(id);
  }

  /** Requests have all messages again. */
  leaveOutNothing(): void {
    void library.patch(library.currentId, { summary: undefined });
  }

  /** Begins a conversation with the question `id` and its files, which wait to be sent. */
  async askAnew(id: string): Promise<void> {
    const { content = '', files = [] } = library.messages.get(id) ?? {};
    const held = await Promise.all(files.map(async (file): Promise<HeldFile> => ({ ...(await fileOf(file.id)), ...file, id: newId() })));
    await library.startNew();
    // The page shows the draft of the new conversation first. What was typed there stays.
    await tick();
    this.held = [...this.held, ...held];
    this.setDraft([this.draft, content].filter(Boolean).join('\n\n'));
  }
}

/** A title as the model wrote it, as one short line; empty if it is none. */
export function cleanTitle(text: string): string {
  const line = text.replace(/<think>[\s\S]*?<\/think>/g, '').trim().split('\n')[0]!.replace(/^(?:title:\s*|["'“#*\s]+)+|["'”.*\s]+$/gi, '');
  return line.length <= 80 && line.split(/\s+/).length <= 10 ? line : '';
}

export const chat = new Chat();
