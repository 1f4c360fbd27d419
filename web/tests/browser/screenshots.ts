// Ten states as screenshots in docs/page, compared with those that are there. Small differences of letters are allowed.
import { existsSync, mkdirSync, readFileSync, writeFileSync } from 'node:fs';
import { fileURLToPath } from 'node:url';
import { startMock } from '../mock-server';
import type { Browser, Tab, View } from './driver';
import { Chat } from './page';

const FOLDER = fileURLToPath(new URL('../../../docs/page/', import.meta.url));
/** The share of points that may differ visibly. */
const TOLERANCE = 0.02;

interface State {
  name: string;
  view: View;
  make: (chat: Chat, mock: Awaited<ReturnType<typeof startMock>>) => Promise<void>;
}

const WIDE = { width: 1280, height: 800 };
const PHONE = { width: 390, height: 844, isPhone: true };
const QUESTION = 'How do I turn the bucket counts of this gauge into millimetres? Use the readings of last week.';
const rain = async (chat: Chat) => {
  await chat.answer(QUESTION);
  await chat.see('.katex');
  await chat.seeText('Rain gauge for the garden');
};
const toStart = (chat: Chat) => chat.tab.eval(() => document.querySelector('.scroll')!.scrollTo(0, 0));

const STATES: State[] = [
  { name: 'start', view: WIDE, make: async () => {} },
  { name: 'conversation', view: WIDE, make: async (chat) => (await rain(chat), toStart(chat)) },
  { name: 'conversation-dark', view: { ...WIDE, isDark: true }, make: rain },
  {
    name: 'models',
    view: WIDE,
    make: async (chat) => {
      await rain(chat);
      await chat.tab.press('Alt+m');
      await chat.see('.menu-pop .key');
    },
  },
  {
    name: 'panel',
    view: { width: 1280, height: 960 },
    make: async (chat) => {
      await rain(chat);
      await chat.tab.press('Alt+p');
      await chat.see('.panel .tool');
    },
  },
  {
    name: 'search',
    view: WIDE,
    make: async (chat) => {
      await rain(chat);
      await chat.tab.press('Control+k');
      await chat.see('.dialog');
      await chat.tab.type('tips');
      await chat.see('.hit');
    },
  },
  {
    name: 'consent',
    view: WIDE,
    make: async (chat) => {
      await chat.button('Settings of this chat');
      await chat.see('button[aria-label="garden-files"]');
      await chat.button('garden-files');
      await chat.button('Close the settings');
      await chat.ask('Please write a file with the readings.');
      await chat.see('.ask');
    },
  },
  {
    name: 'context-full',
    view: { ...WIDE, isDark: true },
    make: async (chat) => {
      await rain(chat);
      await chat.ask('And all of this once more, which is too long?');
      await chat.seeText('The context is full');
      await chat.idle();
    },
  },
  { name: 'phone', view: PHONE, make: async (chat) => (await chat.write(QUESTION), await chat.button('Send'), await chat.idle(), await chat.see('.katex'), toStart(chat)) },
  {
    name: 'phone-models-dark',
    view: { ...PHONE, isDark: true },
    make: async (chat) => {
      await chat.tab.click('button.model');
      await chat.see('.menu-pop .key');
    },
  },
];

/** The share of points of two PNG files that differ visibly, computed by the browser. */
async function difference(tab: Tab, one: Uint8Array, other: Uint8Array): Promise<number> {
  return tab.eval(
    async ([a, b]: string[]) => {
      const pixels = async (text: string) => {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        const bitmap = await createImageBitmap(new Blob([bytes], { type: 'image/png' }));
        const canvas = new OffscreenCanvas(bitmap.width, bitmap.height);
        const context = canvas.getContext('2d')!;
        context.drawImage(bitmap, 0, 0);
        return context.getImageData(0, 0, bitmap.width, bitmap.height);
      };
      const [first, second] = [await pixels(a!), await pixels(b!)];
      if (first.width !== second.width || first.height !== second.height) return 1;
      let n = 0;
      for (let i = 0; i < first.data.length; i += 4) {
        const step = Math.abs(first.data[i]! - second.data[i]!) + Math.abs(first.data[i + 1]! - second.data[i + 1]!) + Math.abs(first.data[i + 2]! - second.data[i + 2]!);
        if (step > 90) n++;
      }
      return n / (first.data.length / 4);
    },
    [Buffer.from(one).toString('base64'), Buffer.from(other).toString('base64')],
  );
}

/** Takes all screenshots. Without `update` they must be those that are there. */
export async function shoot(browser: Browser, update: boolean, only: string): Promise<void> {
  mkdirSync(FOLDER, { recursive: true });
  const wrong: string[] = [];
  for (const { name, view, make } of STATES) {
    if (!name.includes(only)) continue;
    const mock = await startMock();
    mock.state.pace = 2;
    const profile = await browser.profile(view);
    const tab = await profile.tab();
    const chat = new Chat(tab, mock.url);
    await chat.open();
    await chat.see('.spec');
    await make(chat, mock);
    // What differs from run to run: times, rates, and the caret.
    await tab.eval(() => {
      const sheet = new CSSStyleSheet();
      sheet.replaceSync('.note .fig, .turn.u .note, .under .line, .start .aside, .toasts, .find footer, .hit .num { visibility: hidden } * { caret-color: transparent !important; animation: none !important }');
      document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
      return document.fonts.ready.then(() => {});
    });
    await new Promise((resolve) => setTimeout(resolve, 300));
    const path = `${FOLDER}${name}.png`;
    const shot = await tab.screenshot();
    if (update || !existsSync(path)) writeFileSync(path, shot);
    else {
      const share = await difference(tab, shot, readFileSync(path));
      if (share > TOLERANCE) wrong.push(`${name} differs in ${(100 * share).toFixed(1)} % of its points`);
    }
    await profile.close();
    await mock.close();
  }
  if (wrong.length) throw new Error(wrong.join('; '));
}
