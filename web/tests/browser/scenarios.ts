// The scenarios: what a person does with the page, and what the page then shows.
import { writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { View } from './driver';
import { extremes } from './extremes';
import { type Chat, type Context, expect } from './page';
import { trouble } from './trouble';

export interface Scenario {
  name: string;
  run: (context: Context) => Promise<void>;
  view?: View;
  /** Browsers that cannot do what it needs, with the reason. */
  not?: Partial<Record<string, string>>;
}

const rows = (chat: Chat) => chat.tab.eval(() => [...document.querySelectorAll<HTMLElement>('.conv a')].map((row) => row.innerText));
const chooseServers = async (chat: Chat) => {
  await chat.button('Settings of this chat');
  await chat.see('button[aria-label="garden-files"]');
  await chat.button('garden-files');
  await chat.button('weather-log');
  await chat.button('Close the settings');
};

const conversation: Scenario[] = [
  {
    name: 'an answer streams, with its numbers in the margin',
    run: async ({ chat }) => {
      await chat.answer('rain');
      await chat.see('.prose .katex');
      await chat.see('.prose .hljs-keyword');
      expect((await chat.count('.prose .table td')) === 16, 'the table has 16 cells');
      expect(/tok\/s[\s\S]*first token[\s\S]*9.8k tokens reused/.test(await chat.text('.turn.a .note')), 'the numbers are in the margin');
      expect(/12\.\dk of 32\.8k/.test(await chat.text('.gauge')), 'the gauge counts the context');
    },
  },
  {
    name: 'a title comes from the model, not over one by the user',
    run: async ({ chat, mock }) => {
      await chat.answer('hello');
      await chat.until('the title', () => document.querySelector('.top h1')?.textContent?.trim() === 'Rain gauge for the garden');
      await chat.press('New chat');
      await chat.see('.start');
      mock.state.holdAt = 20;
      await chat.ask('slow');
      await chat.see('.send.stop');
      await chat.tab.hover('.conv.is-current');
      await chat.tab.click('.conv.is-current button[aria-label="Rename"]');
      await chat.tab.press('Control+a');
      await chat.tab.type('Mine');
      await chat.tab.press('Enter');
      await chat.button('Stop');
      await chat.idle();
      await new Promise((resolve) => setTimeout(resolve, 900));
      expect((await rows(chat)).includes('Mine'), 'the name stays');
    },
  },
  {
    name: 'stop keeps what is there, continue goes on with it',
    run: async ({ chat, mock }) => {
      mock.state.holdAt = 20;
      await chat.ask('slow');
      await chat.until('some text', () => (document.querySelector<HTMLElement>('.turn.a .prose')?.innerText.length ?? 0) > 20);
      await chat.button('Stop');
      mock.state.holdAt = Infinity;
      await chat.idle();
      expect(mock.stopped.length === 1, 'the server is told to stop');
      await chat.seeText('stopped');
      const text = await chat.lastAnswer();
      await chat.press('Continue');
      await chat.seeText('the rest of the sentence.');
      await chat.idle();
      const whole = await chat.lastAnswer();
      expect(whole.startsWith(text.slice(0, 20)), 'the text so far stays');
      const last = mock.requests.findLast((body) => body.stream)!;
      expect(last.messages?.at(-1)?.role === 'assistant', 'the text so far is sent as the beginning of the answer');
    },
  },
  {
    name: 'an answer again and an edited question are versions in place',
    run: async ({ chat }) => {
      await chat.answer('first question');
      await chat.button('Answer again');
      await chat.until('two versions', () => document.querySelector('.turn.a .branch')?.textContent?.includes('2/2'));
      await chat.idle();
      await chat.answer('second question');
      await chat.tab.hover('.turn.u');
      await chat.tab.click('.turn.u button[aria-label="Edit the question"]');
      await chat.tab.press('Control+a');
      await chat.tab.type('changed question');
      await chat.tab.press('Enter');
      await chat.seeText('You asked: changed question');
      await chat.idle();
      expect((await chat.count('.turn')) === 2, 'what followed belongs to the other version');
      await chat.tab.click('.turn.u button[aria-label="Earlier version"]');
      await chat.seeText('You asked: second question');
      await chat.tab.press('Alt+ArrowLeft');
      await chat.until('the earlier answer', () => document.querySelector('.turn.a .branch')?.textContent?.includes('1/2'));
      // The page shows a choice before it is stored.
      const id = await chat.tab.eval(() => document.querySelector<HTMLElement>('.turn.a')!.dataset.id!);
      await chat.untilStored('the choice', ({ chosen }) => Object.values(chosen).includes(id));
      await chat.reload('.turn');
      await chat.until('the chosen version', () => document.querySelector('.turn.a .branch')?.textContent?.includes('1/2'));
    },
  },
  {
    name: 'arrow up edits the last question, an answer can be edited, too',
    run: async ({ chat, mock }) => {
      await chat.answer('one');
      await chat.tab.click('textarea.field');
      await chat.tab.press('ArrowUp');
      await chat.see('.editor textarea');
      await chat.tab.press('Escape');
      await chat.gone('.editor');
      await chat.button('Edit the answer');
      await chat.tab.press('Control+a');
      await chat.tab.type('my own answer');
      await chat.tab.press('Enter');
      await chat.seeText('my own answer');
      await chat.answer('next');
      expect(JSON.stringify(mock.requests.at(-1)?.messages ?? mock.requests).includes('my own answer') || mock.requests.some((body) => JSON.stringify(body).includes('my own answer')), 'the edited answer is sent');
    },
  },
  {
    name: 'thoughts are closed with their time, and the switch turns them off',
    run: async ({ chat, mock }) => {
      await chat.answer('think please');
      await chat.seeText('Thought for');
      expect(!(await chat.text('.turn.a')).includes('First I look'), 'they are closed');
      await chat.tab.click('.step');
      await chat.seeText('First I look at the question.');
      await chat.tab.click('.foot .switch');
      await chat.answer('think again');
      expect(mock.requests.findLast((body) => body.stream)?.enable_thinking === false, 'the request says so');
    },
  },
  {
    name: 'tools run with consent, always in this chat runs without',
    run: async ({ chat }) => {
      await chooseServers(chat);
      await chat.ask('write a file');
      await chat.see('.ask');
      expect((await chat.text('.ask')).includes('rain/week-27.csv'), 'the arguments are shown');
      expect(await chat.tab.eval(() => document.activeElement?.classList.contains('ask')), 'the question has the focus, not a button');
      await chat.press('Always in this chat');
      await chat.seeText('The tool said: written');
      await chat.idle();
      await chat.answer('write a file again');
      expect((await chat.lastAnswer()).includes('The tool said'), 'it ran without a question');
    },
  },
  {
    name: 'a refused call is not run, an allowed tool runs at once',
    run: async ({ chat }) => {
      await chooseServers(chat);
      await chat.ask('write a file');
      await chat.see('.ask');
      await chat.press('Refuse');
      await chat.seeText('The user does not want this call');
      await chat.idle();
      await chat.answer('bucket');
      await chat.seeText('read_rain_log');
      expect((await chat.text('.thread')).includes('2 lines in'), 'the result is summed up');
    },
  },
  {
    name: 'messages are deleted, and come back',
    run: async ({ chat }) => {
      await chat.answer('keep me');
      await chat.button('Delete the answer and what follows');
      await chat.until('one message', () => document.querySelectorAll('.turn').length === 1);
      await chat.press('Undo');
      await chat.seeText('You asked: keep me');
    },
  },
];

const files: Scenario[] = [
  {
    name: 'pictures, texts and PDFs go with the question',
    run: async ({ chat, mock }) => {
      const text = join(tmpdir(), 'notes.txt');
      writeFileSync(text, 'the notes say seven');
      const pdf = join(tmpdir(), 'manual.pdf');
      writeFileSync(pdf, pdfOf('Hello from page one'));
      await chat.tab.files('.foot input[type=file]', [text, pdf, new URL('../../public/icon-192.png', import.meta.url).pathname]);
      await chat.until('three files', () => document.querySelectorAll('.held .heldpic').length === 3 && !document.querySelector('.reading'), undefined, 60_000);
      expect((await chat.text('.held')).includes('1 page'), 'the PDF has its number of pages');
      await chat.answer('look at these');
      const sent = JSON.stringify(mock.requests.find((body) => body.stream));
      expect(sent.includes('the notes say seven') && sent.includes('Hello from page one') && sent.includes('data:image/png;base64,'), 'all are sent');
      await chat.reload('.turn.u .pic img');
      await chat.seeText('notes.txt');
    },
  },
  {
    name: 'a picture for a model that sees none asks what to do',
    run: async ({ chat, mock }) => {
      mock.state.loaded.push('gpt-oss 20B');
      await chat.tab.files('.foot input[type=file]', [new URL('../../public/icon-192.png', import.meta.url).pathname]);
      await chat.see('.held .pic');
      await chat.tab.click('button.model');
      await chat.see('.menu-pop');
      await chat.until('the model', () => {
        const pick = [...document.querySelectorAll<HTMLElement>('.m .pick')].find((one) => one.innerText.includes('gpt-oss'));
        pick?.click();
        return Boolean(pick);
      });
      await chat.write('what is this');
      await chat.tab.press('Enter');
      await chat.seeText('gpt-oss 20B sees no pictures');
      await chat.press('Switch to Qwen3.5 4B');
      await chat.seeText('You asked: what is this');
    },
  },
];

const panel: Scenario[] = [
  {
    name: 'settings are sent, and only those that were moved',
    run: async ({ chat, mock }) => {
      await chat.tab.press('Alt+p');
      await chat.see('.panel');
      await chat.press('Short answers');
      await chat.tab.eval(() => {
        const slider = document.querySelector<HTMLInputElement>('.sl input[aria-label="Temperature"]')!;
        slider.value = '0.3';
        slider.dispatchEvent(new Event('input', { bubbles: true }));
      });
      await chat.tab.click('.panel button[aria-label="Answer as JSON"]');
      await chat.tab.click('textarea[aria-label="JSON schema"]');
      await chat.tab.type('{"type": "object"');
      await chat.see('.verdict.bad');
      await chat.tab.type('}');
      await chat.seeText('Valid JSON');
      await chat.answer('as JSON');
      const body = mock.requests.find((one) => one.stream)! as unknown as Record<string, unknown>;
      expect(body.temperature === 0.3 && !('top_p' in body), 'the temperature alone');
      expect(JSON.stringify(body.response_format).includes('json_schema'), 'the schema');
      expect(JSON.stringify(body.messages).includes('at most five sentences'), 'the system prompt');
    },
  },
  {
    name: 'presets are saved by name',
    run: async ({ chat }) => {
      await chat.tab.press('Alt+p');
      await chat.see('.panel');
      await chat.tab.click('textarea[aria-label="System prompt"]');
      await chat.tab.type('Speak like a sailor.');
      await chat.press('Save as preset');
      await chat.see('input[name=name]');
      await chat.tab.type('Sailor');
      await chat.tab.press('Enter');
      await chat.until('the preset', () => [...document.querySelectorAll('.presets button[aria-pressed=true]')].some((one) => one.textContent === 'Sailor'));
    },
  },
  {
    name: 'models are loaded, unloaded and pulled',
    run: async ({ chat, mock }) => {
      await chat.tab.press('Alt+m');
      await chat.see('.menu-pop');
      await chat.press('Load');
      await chat.until('two loaded', () => [...document.querySelectorAll('.m .btn')].filter((one) => one.textContent === 'Unload').length === 2);
      await chat.press('Unload');
      await chat.until('one loaded', () => [...document.querySelectorAll('.m .btn')].filter((one) => one.textContent === 'Unload').length === 1);
      expect(mock.state.loaded.length === 1, 'the server knows');
      mock.state.loadTime = 20_000;
      await chat.press('Load');
      await chat.tab.click('.m.prog [title="Stop loading"]');
      await chat.until('a model that can be loaded again', () => !document.querySelector('.m.prog'));
      expect(mock.state.cancelled.length === 1 && mock.state.loaded.length === 1, 'the server ends the load');
      await chat.tab.click('.pull input');
      await chat.tab.type('owner/slow');
      await chat.tab.press('Enter');
      await chat.seeText('GB, ');
      await chat.button('Stop the download of owner/slow');
      await chat.seeText('is stopped');
      expect(
        await chat.tab.eval(() => {
          const { left, top, width, height } = document.querySelector('.pull input')!.getBoundingClientRect();
          return document.elementFromPoint(left + width / 2, top + height / 2)?.matches('.pull input');
        }),
        'no note lies over the field',
      );
      await chat.tab.click('.pull input');
      await chat.tab.type('missing');
      await chat.tab.press('Enter');
      await chat.seeText('the hub has no such model');
      await chat.tab.press('Escape');
      await chat.gone('.menu-pop');
    },
  },
];

const sidebar: Scenario[] = [
  {
    name: 'conversations are pinned, deleted and brought back',
    run: async ({ chat }) => {
      await chat.answer('about apples');
      await chat.press('New chat');
      await chat.see('.start');
      await chat.answer('about pears');
      await chat.tab.hover('.conv.is-current');
      await chat.tab.click('.conv.is-current button[aria-label="Pin"]');
      await chat.until('pinned', () => document.querySelector('.list h2')?.textContent === 'Pinned');
      await chat.tab.hover('.conv.is-current');
      await chat.tab.click('.conv.is-current button[aria-label="Delete"]');
      await chat.until('one left', () => document.querySelectorAll('.conv').length === 1);
      await chat.press('Undo');
      await chat.until('two again', () => document.querySelectorAll('.conv').length === 2);
      await chat.seeText('You asked: about pears');
    },
  },
  {
    name: 'search finds words in all conversations, with marks',
    run: async ({ chat }) => {
      await chat.answer('a zebra in the garden');
      await chat.press('New chat');
      await chat.answer('a lion');
      await chat.tab.press('Control+k');
      await chat.see('.dialog.find');
      await chat.tab.type('zebra');
      await chat.see('.hit mark');
      expect((await chat.count('.hit')) === 1, 'one conversation has it');
      await chat.tab.press('Enter');
      await chat.seeText('You asked: a zebra in the garden');
      await chat.tab.press('Control+k');
      await chat.see('.dialog.find');
      await chat.tab.type('nowhere at all');
      await chat.seeText('Nothing has');
      await chat.tab.press('Escape');
      await chat.gone('.dialog');
    },
  },
  {
    name: 'what is exported can be imported',
    run: async ({ chat }) => {
      await chat.answer('remember me');
      await chat.tab.eval(() => {
        const original = URL.createObjectURL.bind(URL);
        URL.createObjectURL = (blob: Blob) => {
          void blob.text().then((text) => ((window as unknown as { saved: string }).saved = text));
          return original(blob);
        };
        HTMLAnchorElement.prototype.click = () => {};
      });
      await chat.button('Settings of this page');
      await chat.press('Save all as JSON');
      await chat.until('the file', () => (window as unknown as { saved?: string }).saved);
      const path = join(tmpdir(), 'conversations.json');
      writeFileSync(path, await chat.tab.eval(() => (window as unknown as { saved: string }).saved));
      await chat.tab.files('.dialog input[type=file]', [path]);
      await chat.until('two conversations', () => document.querySelectorAll('.conv').length === 2);
      await chat.seeText('You asked: remember me');
    },
  },
  {
    name: 'keys open and close, and the focus returns',
    run: async ({ chat }) => {
      await chat.tab.click('textarea.field');
      await chat.tab.press('Control+k');
      await chat.see('.dialog.find');
      await chat.tab.press('Escape');
      await chat.gone('.dialog');
      expect(await chat.tab.eval(() => document.activeElement?.matches('textarea.field')), 'the focus is back');
      await chat.tab.press('Alt+p');
      await chat.see('.panel');
      await chat.tab.press('Alt+p');
      await chat.gone('.panel');
      await chat.tab.eval(() => (document.activeElement as HTMLElement).blur());
      await chat.tab.press('?');
      await chat.seeText('Search all conversations');
      await chat.tab.press('Escape');
      await chat.gone('.dialog');
      await chat.answer('something');
      await chat.tab.press('Alt+n');
      await chat.see('.start');
    },
  },
  {
    name: 'looks follow the system, or are chosen',
    run: async ({ chat }) => {
      const ground = () => chat.tab.eval(() => getComputedStyle(document.body).backgroundColor);
      const light = await ground();
      await chat.tab.click('.tools button[aria-label^="Looks"]');
      await chat.tab.click('.tools button[aria-label^="Looks"]');
      expect((await ground()) !== light, 'it is dark');
      await chat.reload('.start');
      expect((await ground()) !== light, 'it stays dark');
    },
  },
];

const rest: Scenario[] = [
  {
    name: 'conversations of the earlier page are there',
    run: async ({ chat }) => {
      await chat.tab.eval(() => {
        const id = 'l0000000000000'.slice(0, 14);
        localStorage.setItem(`chat/${id}/l0000000000001`, JSON.stringify({ role: 'user', content: 'an old question' }));
        localStorage.setItem(`chat/${id}/l0000000000002`, JSON.stringify({ role: 'assistant', content: 'an old answer' }));
      });
      await chat.tab.reload();
      await chat.until('the conversation', () => [...document.querySelectorAll<HTMLElement>('.conv a')].some((row) => row.innerText === 'an old question'));
      await chat.tab.click('.conv a');
      await chat.seeText('an old answer');
      expect(await chat.tab.eval(() => Object.keys(localStorage).every((key) => !key.startsWith('chat/'))), 'the old entries are gone');
    },
  },
  {
    name: 'code is copied, and links open on their own',
    run: async ({ chat }) => {
      await chat.answer('long 700');
      await chat.tab.click('.code button[aria-label="Copy code"]');
      await chat.until('the text', async () => (await navigator.clipboard.readText()).includes('const sum'));
      expect(await chat.tab.eval(() => document.querySelector<HTMLAnchorElement>('.prose a')?.rel === 'noopener noreferrer'), 'links have noopener');
    },
  },
  {
    name: 'the time for a chunk does not grow with the answer',
    run: async ({ chat, mock }) => {
      mock.state.pace = 20;
      await chat.tab.eval(() => {
        const spans: [number, number][] = ((window as unknown as { spans: [number, number][] }).spans = []);
        const original = requestAnimationFrame.bind(window);
        window.requestAnimationFrame = (callback) =>
          original((time) => {
            const begun = performance.now();
            callback(time);
            queueMicrotask(() => {
              const time = performance.now() - begun;
              spans.push([document.querySelector('.turn.a .prose')?.textContent?.length ?? 0, time]);
            });
          });
      });
      await chat.ask('long 60000');
      // Chunks come singly where frames are measured, so that frames of the early and of the late part have as many; fast in between.
      const longer = (n: number) => chat.until(`${n} characters`, (wanted: number) => (document.querySelector('.turn.a .prose')?.textContent?.length ?? 0) > wanted, n, 120_000);
      await longer(4000);
      Object.assign(mock.state, { pace: 0, holdAt: 1200 });
      await longer(40_000);
      Object.assign(mock.state, { pace: 20, holdAt: Infinity });
      await chat.idle(240_000);
      const spans = await chat.tab.eval(() => (window as unknown as { spans: [number, number][] }).spans);
      // The clock is coarse, and on a busy machine many frames wait for others in the middle: the mean of the fastest quarter of each part.
      const best = (from: number, to: number) => {
        const times = spans.filter(([length]) => length >= from && length < to).map(([, time]) => time);
        const fastest = times.sort((a, b) => a - b).slice(0, Math.ceil(times.length / 4));
        return fastest.reduce((sum, time) => sum + time, 0) / fastest.length;
      };
      const [early, late] = [best(500, 4000), best(41_000, 1e9)];
      console.log(`    script time of a frame: ${early.toFixed(2)} ms at 4k characters, ${late.toFixed(2)} ms at the end of 60k`);
      expect(Number.isFinite(early) && late < 1.5 * early + 0.25, `it grows from ${early} to ${late} ms`);
    },
  },
  {
    name: 'the page opens without its server',
    view: { width: 1280, height: 800, hasWorker: true },
    run: async ({ chat, mock }) => {
      await chat.answer('keep this');
      await chat.until('the worker', () => navigator.serviceWorker.ready.then(() => Boolean(navigator.serviceWorker.controller)), undefined, 60_000);
      const kept = await chat.tab.eval(async () => {
        const names: string[] = [];
        for (const name of await caches.keys()) for (const request of await (await caches.open(name)).keys()) names.push(new URL(request.url).pathname);
        return names;
      });
      expect(kept.includes('/') && !kept.some((name) => /^\/(v1|api|mcp|props)/.test(name)), 'the page is kept, and no answer of the API');
      await mock.close();
      await chat.tab.reload();
      await chat.seeText('You asked: keep this');
      await chat.seeText('The engine does not answer');
    },
  },
  {
    name: 'on a phone conversations are in a drawer, and targets are large',
    view: { width: 390, height: 844, isPhone: true },
    run: async ({ chat }) => {
      await chat.write('How do I turn the bucket counts of this rain gauge into millimetres? Use the readings of last week.');
      await chat.button('Send');
      await chat.idle();
      const wide = await chat.tab.eval(() =>
        [...document.querySelectorAll('.main > *, .row, .turn, textarea.field')].filter((one) => one.getBoundingClientRect().right > 391).map((one) => one.className),
      );
      expect(!wide.length, `wider than the screen: ${wide.join(', ')}`);
      await chat.button('Conversations');
      await chat.see('.side.open');
      await chat.tab.press('Escape');
      await chat.gone('.side.open');
      const small = await chat.tab.eval(() =>
        [...document.querySelectorAll<HTMLElement>('.top button, .foot button:not(.switch), .under button')].filter((one) => one.offsetParent && Math.min(one.offsetWidth, one.offsetHeight) < 40).map((one) => one.getAttribute('aria-label') ?? one.innerText),
      );
      expect(!small.length, `too small: ${small.join(', ')}`);
      expect((await chat.tab.eval(() => parseFloat(getComputedStyle(document.querySelector('textarea.field')!).fontSize))) >= 16, 'the field does not zoom');
    },
  },
  {
    name: 'axe finds nothing',
    run: async ({ chat }) => {
      const check = async (state: string) => {
        await chat.tab.eval(async () => {
          if ('axe' in window) return;
          // From the page's own origin: its policy allows no other script.
          const script = document.createElement('script');
          script.src = 'test/axe.js';
          document.head.append(script);
          await new Promise((resolve, reject) => ((script.onload = resolve), (script.onerror = () => reject(new Error('axe is not there')))));
        });
        const problems = await chat.tab.eval(async () => {
          const { axe } = window as unknown as { axe: { run: (options: unknown) => Promise<{ violations: { id: string; nodes: { html: string; failureSummary: string }[] }[] }> } };
          const { violations } = await axe.run({ resultTypes: ['violations'] });
          return violations.flatMap(({ id, nodes }) => nodes.map(({ html, failureSummary }) => `${id}: ${html.slice(0, 140)} ${failureSummary.slice(0, 200)}`));
        });
        expect(!problems.length, `${state}: ${problems.slice(0, 6).join('\n')}`);
      };
      await check('start');
      await chat.answer('rain');
      await chat.see('.katex');
      await check('conversation');
      await chat.tab.press('Alt+p');
      await chat.see('.panel');
      await check('panel');
      await chat.tab.press('Alt+p');
      await chat.tab.press('Alt+m');
      await chat.see('.menu-pop');
      await check('models');
      await chat.tab.press('Escape');
      await chat.tab.press('Control+k');
      await chat.see('.dialog');
      await chat.tab.type('rain');
      await chat.see('.hit');
      await check('search');
      await chat.tab.press('Escape');
      await chat.tab.click('.tools button[aria-label^="Looks"]');
      await chat.tab.click('.tools button[aria-label^="Looks"]');
      await check('dark');
    },
  },
];

/** A PDF of one page with this text. */
function pdfOf(text: string): string {
  const content = `BT /F1 24 Tf 72 720 Td (${text}) Tj ET`;
  const objects = [
    '<< /Type /Catalog /Pages 2 0 R >>',
    '<< /Type /Pages /Kids [3 0 R] /Count 1 >>',
    '<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>',
    `<< /Length ${content.length} >>\nstream\n${content}\nendstream`,
    '<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>',
  ];
  let file = '%PDF-1.4\n';
  const starts = objects.map((object, index) => {
    const start = file.length;
    file += `${index + 1} 0 obj\n${object}\nendobj\n`;
    return start;
  });
  const table = file.length;
  file += `xref\n0 6\n0000000000 65535 f \n${starts.map((start) => `${String(start).padStart(10, '0')} 00000 n \n`).join('')}`;
  return `${file}trailer << /Size 6 /Root 1 0 R >>\nstartxref\n${table}\n%%EOF\n`;
}

export const scenarios: Scenario[] = [...conversation, ...files, ...panel, ...sidebar, ...trouble, ...extremes, ...rest];
