// States of the page as screenshots in docs/page, compared with those that are there. Their conversations, times and numbers are fixed
// (tests/samples.ts), and so are their fonts, which the test's server has: the page's own fonts are those of the machine.
import { mkdirSync, mkdtempSync, readFileSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { type MockServer, startMock } from '../mock-server';
import { type End, HELD, HELD_TEXT, NEXT, NOW, PICTURE, RAIN_ID, TRACE, samples } from '../samples';
import { difference } from './compare';
import type { Browser, Tab, View } from './driver';
import { Chat } from './page';

const FOLDER = fileURLToPath(new URL('../../../docs/page/', import.meta.url));

interface Shot {
  chat: Chat;
  mock: MockServer;
  /** A file with the picture of the samples. */
  picture: string;
}

interface State {
  name: string;
  view: View;
  end?: End;
  /** Shows the start instead of the conversation. */
  isStart?: boolean;
  /** Changes of the server before the page is loaded. */
  server?: (mock: MockServer) => void;
  make?: (shot: Shot) => Promise<void>;
}

const WIDE = { width: 1280, height: 800 };
const DARK = { ...WIDE, isDark: true };
const PHONE = { width: 390, height: 844, isPhone: true };
const scrollTo = (chat: Chat, y: number) => chat.tab.eval((top: number) => document.querySelector('.scroll')!.scrollTo(0, top), y);
const hasManyModels = (mock: MockServer) => (mock.state.extra = true);

async function openModels({ chat }: Shot): Promise<void> {
  await chat.tab.click('button.model');
  await chat.see('.menu-pop .key');
  await chat.tab.click('.pull input');
  await chat.tab.type('google/Gemma 4 26B');
  await chat.tab.press('Enter');
  await chat.seeText('6.2 of 15.1 GB');
  await chat.tab.eval(() => {
    (document.activeElement as HTMLElement).blur();
    document.querySelector('.menu-pop')!.scrollTo(0, 0);
  });
}

const STATES: State[] = [
  { name: 'start', view: WIDE, isStart: true },
  { name: 'conversation', view: WIDE, make: ({ chat }) => scrollTo(chat, 0) },
  { name: 'conversation-dark', view: DARK },
  { name: 'streaming-dark', view: DARK, end: 'writing', make: async ({ chat }) => (await chat.seeText('so its area'), scrollTo(chat, 0)) },
  {
    name: 'panel',
    view: { width: 1280, height: 960 },
    make: async ({ chat }) => {
      await chat.button('Settings of this chat');
      await chat.see('.panel .tool');
      await chat.press('Short answers');
      await scrollTo(chat, 0);
    },
  },
  {
    name: 'panel-over-dark',
    view: { width: 1100, height: 800, isDark: true },
    make: async ({ chat }) => {
      await chat.button('Settings of this chat');
      await chat.see('.panel .tool');
      await scrollTo(chat, 0);
    },
  },
  { name: 'models', view: WIDE, server: hasManyModels, make: async (shot) => (await scrollTo(shot.chat, 0), openModels(shot)) },
  {
    name: 'search',
    view: WIDE,
    make: async ({ chat }) => {
      await scrollTo(chat, 0);
      await chat.tab.press('Control+k');
      await chat.see('.dialog');
      await chat.tab.type('rain gauge');
      await chat.until('four results', () => document.querySelectorAll('.hit').length === 4);
    },
  },
  { name: 'consent', view: WIDE, make: async ({ chat }) => (await chat.ask('Please write a file with the readings.'), chat.see('.ask')) },
  {
    name: 'error-server',
    view: WIDE,
    end: 'cut',
    make: async ({ chat, mock }) => {
      await chat.write(NEXT);
      mock.state.isAway = true;
      await chat.tab.eval(() => void dispatchEvent(new Event('online')));
      await chat.seeText('The engine does not answer');
    },
  },
  { name: 'error-context', view: WIDE, end: 'full', make: async ({ chat }) => (await chat.ask(NEXT), await chat.seeText('The context is full'), chat.idle()) },
  {
    name: 'error-picture-dark',
    view: DARK,
    server: (mock) => Object.assign(mock.state, { loaded: ['gpt-oss 20B'], other: 1.3e9 }),
    make: async ({ chat, picture }) => {
      await chat.tab.files('.foot input[type=file]', [picture]);
      await chat.see('.held .pic img');
      await chat.write('What does the scale show?');
      await chat.button('Send');
      await chat.seeText('sees no pictures');
    },
  },
  { name: 'phone', view: PHONE, make: ({ chat }) => scrollTo(chat, 0) },
  { name: 'phone-end', view: PHONE },
  { name: 'phone-drawer', view: PHONE, make: async ({ chat }) => (await scrollTo(chat, 0), await chat.button('Conversations'), chat.see('.side.open')) },
  { name: 'phone-models-dark', view: { ...PHONE, isDark: true }, server: hasManyModels, make: async (shot) => (await scrollTo(shot.chat, 0), openModels(shot)) },
];

/** Stores the samples in the page's database, with the picture as PNG, which it returns. */
async function seed(tab: Tab, end: End): Promise<string> {
  return tab.eval(
    async ({ data, svg }: { data: ReturnType<typeof samples>; svg: string }) => {
      const image = new Image();
      const address = URL.createObjectURL(new Blob([svg], { type: 'image/svg+xml' }));
      image.src = address;
      await image.decode();
      const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
      canvas.getContext('2d')!.drawImage(image, 0, 0);
      const blob = await canvas.convertToBlob({ type: 'image/png' });
      data.files[0]!.blob = blob;
      const database = await new Promise<IDBDatabase>((resolve) => {
        const request = indexedDB.open('metal-attention');
        request.onsuccess = () => resolve(request.result);
      });
      const tx = database.transaction(['conversations', 'messages', 'files'], 'readwrite');
      for (const table of ['conversations', 'messages', 'files'] as const) for (const value of data[table]) tx.objectStore(table).put(value);
      await new Promise((resolve) => (tx.oncomplete = resolve));
      localStorage.setItem('defaults', JSON.stringify({ servers: ['garden-files', 'weather-log'] }));
      let text = '';
      for (const byte of new Uint8Array(await blob.arrayBuffer())) text += String.fromCharCode(byte);
      return btoa(text);
    },
    { data: samples(end), svg: PICTURE },
  );
}

/** Gives the page the fonts of the test. */
async function setFonts(tab: Tab): Promise<void> {
  await tab.eval(async () => {
    for (const [family, name] of [['Inter', 'text'], ['JetBrains Mono', 'code']] as const) {
      const face = new FontFace(family, `url(test/${name}.woff2)`, { weight: '100 900' });
      document.fonts.add(await face.load());
    }
    const sheet = new CSSStyleSheet();
    sheet.replaceSync(':root { --font: Inter; --mono: "JetBrains Mono"; } * { caret-color: transparent !important; animation: none !important; transition: none !important; }');
    document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  });
}

/** Stops all timers, and writes fixed numbers where the page has those of this run. */
async function freeze(tab: Tab): Promise<void> {
  await tab.eval(async (trace: number[]) => {
    await document.fonts.ready;
    for (let timer = Number(setTimeout(() => {})); timer > 0; timer--) clearTimeout(timer);
    const set = (selector: string, change: (element: HTMLElement) => void) => document.querySelectorAll<HTMLElement>(selector).forEach(change);
    set('.find footer [role=status]', (one) => (one.textContent = one.textContent!.replace(/\d+ ms/, '3 ms')));
    set('.strip .notice p', (one) => (one.textContent = 'Next try in 4 s (third try). What you write stays here.'));
    set('.live-rate', (one) => (one.textContent = '86.1'));
    set('.now .fig span:last-child', (one) => (one.textContent = '148 tokens so far'));
    set('.now .trace', (svg) => {
      const bars = trace.map((rate, i) => `<rect x="${4 * i}" y="${20 - rate / 5}" width="2.5" height="${rate / 5}" rx="1"${i === trace.length - 1 ? ' class="now"' : ''}></rect>`);
      svg.innerHTML = bars.join('');
    });
  }, TRACE);
  await new Promise((resolve) => setTimeout(resolve, 300));
}

async function take(browser: Browser, { view, end = 'done', isStart, server, make }: State, compare: (tab: Tab, shot: Uint8Array) => Promise<void>): Promise<void> {
  const mock = await startMock();
  mock.hold(HELD, HELD_TEXT);
  server?.(mock);
  const profile = await browser.profile({ ...view, now: NOW });
  try {
    const tab = await profile.tab();
    const chat = new Chat(tab, mock.url);
    await chat.open();
    const picture = join(mkdtempSync(join(tmpdir(), 'page-shot-')), 'gauge.png');
    writeFileSync(picture, Buffer.from(await seed(tab, end), 'base64'));
    if (!isStart) await tab.eval((id: string) => void (location.hash = id), RAIN_ID);
    await chat.reload(isStart ? '.spec' : '.turn.a');
    await setFonts(tab);
    await chat.until('the model', () => document.querySelector('.model .num')?.textContent);
    if (!isStart && end !== 'cut' && end !== 'writing') await chat.see('.katex');
    if (!isStart) await chat.until('the picture', () => document.querySelector<HTMLImageElement>('.turn.u .pic img')?.complete);
    // The end is shown at first, also after the fonts have changed the heights.
    await tab.eval(() => document.querySelector('.scroll')!.scrollTo(0, 1e6));
    await make?.({ chat, mock, picture });
    await tab.rest();
    await freeze(tab);
    await compare(tab, await tab.screenshot());
  } finally {
    await profile.close();
    await mock.close();
  }
}

/** Takes all screenshots. Without `update` they must be those that are there; what differs is written beside them to a folder. */
export async function shoot(browser: Browser, update: boolean, only: string): Promise<void> {
  mkdirSync(FOLDER, { recursive: true });
  const folder = process.env.SHOTS ?? mkdtempSync(join(tmpdir(), 'page-shots-'));
  const wrong: string[] = [];
  for (const state of STATES) {
    if (!state.name.includes(only)) continue;
    const check = () =>
      take(browser, state, async (tab, shot) => {
        const path = `${FOLDER}${state.name}.png`;
        if (update) return writeFileSync(path, shot);
        const { n, isDifferent, places } = await difference(tab, shot, readFileSync(path));
        if (process.env.SHOTS) console.log(`    ${state.name}: ${n} blocks differ ${places}`);
        if (!isDifferent) return;
        writeFileSync(join(folder, `${state.name}.png`), shot);
        wrong.push(`${state.name} differs in ${n} blocks (at ${places})`);
      });
    // A browser that stands still on a busy machine gets a second try; a picture that differs does not.
    await check().catch(check).catch((error: unknown) => wrong.push(`${state.name}: ${error instanceof Error ? error.message : String(error)}`));
  }
  if (wrong.length) throw new Error(`${wrong.join('; ')}; what was seen is in ${folder}`);
}
