// The conversations, and the messages of the shown one. Everything here is stored as it changes, and follows what other tabs store.
import { SvelteMap } from 'svelte/reactivity';
import { newId } from '../ids';
import * as db from '../store/db';
import { draftOf, read, readJson, write, writeJson } from '../store/local';
import { migrate } from '../store/migrate';
import { type Note, listen, tell } from '../store/tabs';
import { type Children, childrenOf, choosing, pathOf, subtreeOf, versionsOf } from '../tree';
import type { ChatSettings, Conversation, Message } from '../types';
import { ui } from './ui.svelte';

class Library {
  conversations = new SvelteMap<string, Conversation>();
  currentId = $state('');
  messages = new SvelteMap<string, Message>();
  /** The tree of the shown conversation. It changes with its messages, not with their texts. */
  children = $state.raw<Children>(new Map());
  isLoaded = $state(false);
  /** A message that is to be scrolled to. */
  revealed = $state('');
  /** The settings of conversations that begin. */
  defaults = $state<ChatSettings>(readJson<ChatSettings>('defaults') ?? {});
  /** The settings of the shown conversation while it is not stored. */
  #unsaved = $state<ChatSettings | null>(null);
  #opening = 0;
  /** By conversation: how many writes to the database are pending. */
  #pendingWrites = new Map<string, number>();

  /** The shown conversation, if it is stored. */
  get current(): Conversation | undefined {
    return this.conversations.get(this.currentId);
  }

  get settings(): ChatSettings {
    return this.current?.settings ?? this.#unsaved ?? this.defaults;
  }

  /** The ids of the shown path. */
  path = $derived.by(() => pathOf(this.children, this.current?.chosen ?? {}).map(({ id }) => id));

  /** Messages at the beginning of the path that requests do not have, or have as a summary. */
  nLeftOut = $derived(this.current?.summary ? this.path.indexOf(this.current.summary.until) + 1 : 0);

  get leftOutAs(): string {
    return this.current?.summary?.text ? 'sent as a summary' : 'not sent';
  }

  async start(): Promise<void> {
    try {
      const n = await migrate();
      if (n) ui.toast(n === 1 ? 'One conversation of the earlier page is here.' : `${n} conversations of the earlier page are here.`);
      for (const conversation of await db.getAll<Conversation>('conversations')) this.conversations.set(conversation.id, conversation);
      void navigator.storage?.persist?.();
    } catch {
      ui.unkept = true;
    }
    listen((note) => void this.#follow(note));
    const last = location.hash.slice(1) || (sessionRead() ?? '');
    await this.open(this.conversations.has(last) ? last : this.#newOne(last));
    this.isLoaded = true;
    addEventListener('hashchange', () => {
      const id = location.hash.slice(1);
      if (this.conversations.has(id) && id !== this.currentId) void this.open(id);
    });
  }

  async open(id: string): Promise<void> {
    const opening = ++this.#opening;
    const list = this.conversations.has(id) ? await db.messagesOf(id).catch(() => []) : [];
    if (opening !== this.#opening) return;
    this.messages.clear();
    for (const message of list) this.messages.set(message.id, message);
    this.#unsaved = null;
    this.currentId = id;
    this.#retree();
    try {
      sessionStorage.setItem('conversation', id);
    } catch {
      // Without it the page opens with a new conversation.
    }
    history.replaceState(null, '', this.conversations.has(id) ? `#${id}` : location.pathname + location.search);
  }

  /** The conversation that is not stored yet and in which something was typed, or a new one. */
  #newOne(last: string): string {
    for (const id of [last, read('new') ?? '']) if (/^[0-9a-z]{14}$/.test(id) && !this.conversations.has(id) && draftOf(id)) return id;
    const id = newId();
    write('new', id);
    return id;
  }

  async startNew(): Promise<void> {
    if (this.current || !this.currentId) await this.open(this.#newOne(''));
  }

  #retree(): void {
    this.children = childrenOf(this.messages.values());
  }

  versions(id: string): { ids: string[]; index: number } {
    const message = this.messages.get(id);
    if (!message) return { ids: [id], index: 0 };
    const { list, index } = versionsOf(this.children, message);
    return { ids: list.map((one) => one.id), index };
  }

  /** Stores a conversation if it is not stored yet. */
  async ensure(title: string): Promise<Conversation> {
    const known = this.current;
    if (known) return known;
    const now = Date.now();
    const conversation: Conversation = {
      id: this.currentId,
      title,
      titleBy: 'question',
      created: now,
      updated: now,
      pinned: false,
      chosen: {},
      settings: structuredClone($state.snapshot(this.settings)) as ChatSettings,
    };
    this.conversations.set(conversation.id, conversation);
    history.replaceState(null, '', `#${conversation.id}`);
    await this.#kept(db.putConversation(conversation));
    tell({ kind: 'conversation', id: conversation.id });
    return conversation;
  }

  async #kept(stored: Promise<unknown>): Promise<void> {
    try {
      await stored;
      ui.unkept = false;
    } catch {
      ui.unkept = true;
    }
  }

  /** Changes a conversation, in the database too. `change` gets the stored state. */
  async patch(id: string, change: Partial<Conversation> | ((old: Conversation) => Partial<Conversation> | undefined)): Promise<void> {
    const apply = typeof change === 'function' ? change : () => change;
    const known = this.conversations.get(id);
    const patch = known && apply(known);
    if (known && patch) this.conversations.set(id, { ...known, ...patch });
    this.#pendingWrites.set(id, (this.#pendingWrites.get(id) ?? 0) + 1);
    const patched = db
      .patchConversation(id, apply)
      .finally(() => this.#pendingWrites.set(id, this.#pendingWrites.get(id)! - 1))
      .then((stored) => {
        // The state between two changes would hide the later one.
        if (stored && !this.#pendingWrites.get(id) && this.conversations.has(id)) this.conversations.set(id, stored);
        if (stored) tell({ kind: 'conversation', id });
      });
    await this.#kept(patched);
  }

  /** Changes the settings of the shown conversation. They become those of the next ones, too, except for its own tools and schema. */
  setSettings(change: Partial<ChatSettings>): void {
    const settings = JSON.parse(JSON.stringify({ ...$state.snapshot(this.settings), ...change })) as ChatSettings;
    if (this.current) void this.patch(this.currentId, { settings });
    else this.#unsaved = settings;
    const { allowed: _, json: _json, schema: _schema, ...defaults } = settings;
    this.defaults = defaults;
    writeJson('defaults', defaults);
  }

  /** Shows a message in its place, without storing it. */
  show(message: Message): void {
    if (message.conversation !== this.currentId) return;
    const isNew = !this.messages.has(message.id);
    this.messages.set(message.id, message);
    if (isNew) this.#retree();
  }

  async put(message: Message): Promise<void> {
    this.show(message);
    await this.#kept(db.putMessage($state.snapshot(message) as Message));
    tell({ kind: 'message', conversation: message.conversation, id: message.id });
  }

  /** Adds a message and puts it on the path. */
  async add(message: Message): Promise<void> {
    await this.put(message);
    await this.patch(message.conversation, (old) => ({ updated: Date.now(), chosen: { ...old.chosen, [message.parent]: message.id } }));
  }

  /** Puts a message on the path. */
  choose(id: string): void {
    const message = this.messages.get(id);
    if (!message) return;
    void this.patch(this.currentId, (old) => ({ chosen: { ...old.chosen, [this.messages.has(message.parent) ? message.parent : '']: id } }));
  }

  /** Shows a message of any conversation. */
  async reveal(conversation: string, id: string): Promise<void> {
    if (conversation !== this.currentId) await this.open(conversation);
    if (!this.messages.has(id)) return;
    await this.patch(conversation, (old) => ({ chosen: choosing(this.messages, old.chosen, id) }));
    this.revealed = id;
  }

  rename(id: string, title: string): void {
    if (title.trim()) void this.patch(id, { title: title.trim().slice(0, 200), titleBy: 'user' });
  }

  pin(id: string): void {
    void this.patch(id, (old) => ({ pinned: !old.pinned }));
  }

  /** Deletes a conversation, with a way back. */
  async remove(id: string): Promise<void> {
    const title = this.conversations.get(id)?.title ?? '';
    this.conversations.delete(id);
    const bundle = await db.deleteConversation(id).catch(() => undefined);
    tell({ kind: 'conversation-deleted', id });
    if (id === this.currentId) await this.startNew();
    if (!bundle) return;
    ui.toast(`“${title}” is deleted.`, {
      label: 'Undo',
      run: () =>
        void db.putBundles([bundle]).then(async () => {
          this.conversations.set(id, bundle.conversation);
          tell({ kind: 'conversation', id });
          await this.open(id);
        }),
    });
  }

  /** Deletes a message and what follows it, with a way back. */
  async removeMessage(id: string): Promise<void> {
    const ids = subtreeOf(this.children, id);
    const removed = ids.flatMap((one) => this.messages.get(one) ?? []);
    for (const one of ids) this.messages.delete(one);
    this.#retree();
    await this.#kept(db.deleteMessages(ids));
    tell({ kind: 'messages-deleted', conversation: this.currentId, ids });
    ui.toast(ids.length === 1 ? 'The message is deleted.' : `${ids.length} messages are deleted.`, {
      label: 'Undo',
      run: () => {
        for (const message of removed) void this.put(message);
      },
    });
  }

  async import(bundles: db.Bundle[]): Promise<void> {
    await db.putBundles(bundles);
    for (const { conversation } of bundles) {
      this.conversations.set(conversation.id, conversation);
      tell({ kind: 'conversation', id: conversation.id });
    }
    if (bundles[0]) await this.open(bundles[0].conversation.id);
  }

  /** Reads again what another tab has stored. */
  async #follow(note: Note): Promise<void> {
    if (note.kind === 'conversation') {
      const stored = await db.get<Conversation>('conversations', note.id);
      if (stored) this.conversations.set(note.id, stored);
    } else if (note.kind === 'conversation-deleted') {
      this.conversations.delete(note.id);
      if (note.id === this.currentId) await this.startNew();
    } else if (note.kind === 'message' && note.conversation === this.currentId) {
      const stored = await db.get<Message>('messages', note.id);
      if (stored) this.show(stored);
    } else if (note.kind === 'messages-deleted' && note.conversation === this.currentId) {
      for (const id of note.ids) this.messages.delete(id);
      this.#retree();
    }
  }
}

function sessionRead(): string | null {
  try {
    return sessionStorage.getItem('conversation');
  } catch {
    return null;
  }
}

export const library = new Library();

/** The presets of system prompts, by name. */
class Presets {
  list = $state<{ name: string; text: string }[]>(
    readJson('presets') ?? [
      { name: 'Short answers', text: 'Answer in at most five sentences. Give units with every number.' },
      { name: 'Code', text: 'You are a careful programmer. Answer with complete, tested code first and a short explanation after it.' },
      { name: 'Tutor', text: 'Explain step by step, and end with a question that checks what was understood.' },
    ],
  );

  save(name: string, text: string): void {
    this.list = [...this.list.filter((preset) => preset.name !== name), { name, text }];
    writeJson('presets', this.list);
  }

  remove(name: string): void {
    this.list = this.list.filter((preset) => preset.name !== name);
    writeJson('presets', this.list);
  }
}

export const presets = new Presets();
