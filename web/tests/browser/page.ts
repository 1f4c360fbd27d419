// The page as scenarios see it: what can be done, and waiting for what is to be seen.
import type { Conversation, Message } from '../../src/lib/types';
import type { MockServer } from '../mock-server';
import type { Profile, Tab } from './driver';

export class Chat {
  constructor(
    readonly tab: Tab,
    readonly url: string,
  ) {}

  async open(): Promise<void> {
    await this.tab.goto(this.url);
    await this.see('textarea.field');
    await this.see('.start h2, .turn');
  }

  /** Waits until a conversation in the page's database is as `check` says. */
  async untilStored(what: string, check: (conversation: Conversation) => boolean): Promise<void> {
    const end = Date.now() + 25_000;
    while (!(await stored(this.tab)).some(check)) {
      if (Date.now() > end) throw new Error(`not stored: ${what}`);
      await new Promise((resolve) => setTimeout(resolve, 40));
    }
  }

  /** Loads the page again, and waits for what it then shows. */
  async reload(selector: string): Promise<void> {
    await this.tab.reload();
    await this.see(selector);
  }

  /** Waits until `check` holds in the page. It returns no element: drivers do not pass these on alike. */
  async until<A>(what: string, check: (argument: A) => unknown, argument?: A, timeout = 25_000): Promise<void> {
    const end = Date.now() + timeout;
    for (;;) {
      if (await this.tab.eval(check as never, argument as never).catch(() => false)) return;
      if (Date.now() > end) throw new Error(`not seen: ${what}; the page shows: ${(await this.tab.eval(() => document.body.innerText)).slice(0, 600)}`);
      await new Promise((resolve) => setTimeout(resolve, 40));
    }
  }

  see(selector: string, timeout?: number): Promise<void> {
    return this.until(selector, (wanted: string) => Boolean(document.querySelector(wanted)), selector, timeout);
  }

  gone(selector: string): Promise<void> {
    return this.until(`no ${selector}`, (wanted: string) => !document.querySelector(wanted), selector);
  }

  seeText(text: string, timeout?: number): Promise<void> {
    return this.until(text, (wanted: string) => document.body.innerText.includes(wanted), text, timeout);
  }

  async text(selector: string): Promise<string> {
    return this.tab.eval((wanted: string) => (document.querySelector(wanted) as HTMLElement | null)?.innerText ?? '', selector);
  }

  count(selector: string): Promise<number> {
    return this.tab.eval((wanted: string) => document.querySelectorAll(wanted).length, selector);
  }

  button(label: string): Promise<void> {
    return this.tab.click(`button[aria-label="${label}"]`);
  }

  /** Clicks the button with this text. */
  async press(text: string): Promise<void> {
    await this.until(`a button ${text}`, (wanted: string) => {
      const button = [...document.querySelectorAll<HTMLButtonElement>('button')].find((one) => one.innerText.trim().startsWith(wanted) && !one.disabled);
      button?.click();
      return Boolean(button);
    }, text);
  }

  async write(text: string): Promise<void> {
    await this.tab.click('textarea.field');
    await this.tab.type(text);
  }

  /** Asks, without waiting for the answer. */
  async ask(text: string): Promise<void> {
    await this.write(text);
    await this.tab.press('Enter');
    await this.until('an empty field', () => (document.querySelector('textarea.field') as HTMLTextAreaElement).value === '');
  }

  /** Waits until no answer is written. */
  async idle(timeout = 90_000): Promise<void> {
    await this.until('the end of the answer', () => !document.querySelector('.send.stop') && Boolean([...document.querySelectorAll('.turn.a')].at(-1)?.querySelector('.under')), undefined, timeout);
  }

  async answer(text: string): Promise<string> {
    const before = await this.count('.turn.a');
    await this.ask(text);
    await this.until('an answer', (n: number) => document.querySelectorAll('.turn.a').length > n, before);
    await this.idle();
    return this.lastAnswer();
  }

  /** Shows the first of these conversations, which are stored first. */
  async openWith(data: Parameters<typeof store>[1]): Promise<void> {
    await store(this.tab, data);
    await this.tab.eval((hash: string) => void (location.hash = hash), data.conversations[0]!.id);
    await this.reload('.turn');
  }

  lastAnswer(): Promise<string> {
    return this.tab.eval(() => ([...document.querySelectorAll<HTMLElement>('.turn.a .prose')].at(-1)?.innerText ?? '').trim());
  }
}

const id = (n: number) => String(n).padStart(14, '0');

export const conversationOf = (n: number, title: string): Conversation => ({ id: id(n), title, titleBy: 'user', created: n, updated: Date.now() - 60_000 * n, pinned: false, chosen: {}, settings: {} });

export const messageOf = (n: number, conversation: number, parent: number, content: string): Message => ({
  id: id(n), conversation: id(conversation), parent: parent ? id(parent) : '', role: n % 2 ? 'user' : 'assistant', content, created: n, state: 'done',
});

/** Stores conversations in the page's database. The page sees them when it is loaded again. */
export async function store(tab: Tab, data: { conversations: Conversation[]; messages: Message[] }): Promise<void> {
  await tab.eval(async ({ conversations, messages }: typeof data) => {
    const database = await new Promise<IDBDatabase>((resolve) => {
      const request = indexedDB.open('metal-attention');
      request.onsuccess = () => resolve(request.result);
    });
    const tx = database.transaction(['conversations', 'messages'], 'readwrite');
    for (const value of conversations) tx.objectStore('conversations').put(value);
    for (const value of messages) tx.objectStore('messages').put(value);
    await new Promise((resolve) => (tx.oncomplete = resolve));
    database.close();
  }, data);
}

/** The conversations in the page's database. */
const stored = (tab: Tab): Promise<Conversation[]> =>
  tab.eval(async () => {
    const result = <T>(request: IDBRequest<T>) => new Promise<T>((resolve) => (request.onsuccess = () => resolve(request.result)));
    const database = await result(indexedDB.open('metal-attention'));
    const conversations = await result(database.transaction('conversations').objectStore('conversations').getAll() as IDBRequest<Conversation[]>);
    database.close();
    return conversations;
  });

export interface Context {
  mock: MockServer;
  profile: Profile;
  chat: Chat;
  /** Another tab of the same profile. */
  another(): Promise<Chat>;
}

export function expect(isTrue: unknown, message: string): asserts isTrue {
  if (!isTrue) throw new Error(message);
}
