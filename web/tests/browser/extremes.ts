// Scenarios of much, long and awkward things: what few people do, and what must not break the page.
import { type Chat, conversationOf, expect, messageOf } from './page';
import type { Scenario } from './scenarios';

/** What reaches over the right edge of the page, though it does not scroll by itself. */
async function expectNothingWide(chat: Chat, state: string): Promise<void> {
  const wide = await chat.tab.eval(() =>
    [...document.querySelectorAll<HTMLElement>('.main, .main > *, .row, .turn, .prose > *, .card, .chip, .box, .foot > *, .menu-pop, .m, .top h1, .panel, .panel .in > *')]
      .filter((one) => one.checkVisibility() && one.getBoundingClientRect().width > 1 && (one.getBoundingClientRect().right > innerWidth + 1 || one.getBoundingClientRect().left < -1))
      .map((one) => `${one.tagName}.${one.className}`),
  );
  expect(!wide.length, `${state}: over the edge reach ${wide.join(', ')}`);
}

export const extremes: Scenario[] = [
  {
    name: 'five hundred messages open at their end, and the first one is found',
    run: async ({ chat }) => {
      const messages = Array.from({ length: 500 }, (_, i) => messageOf(i + 1, 1, i, i === 2 ? 'the word kingfisher is here' : `Message ${i + 1}, with **some** text.`));
      await chat.openWith({ conversations: [conversationOf(1, 'Long talk')], messages });
      await chat.seeText('Message 500,');
      expect((await chat.count('.turn')) <= 60, 'the earlier ones wait');
      await chat.ask('one more');
      await chat.seeText('You asked: one more');
      await chat.idle();
      await chat.tab.press('Control+k');
      await chat.see('.dialog.find');
      await chat.tab.type('kingfisher');
      await chat.see('.hit');
      await chat.tab.press('Enter');
      await chat.until('the message on the screen', () => {
        const turn = [...document.querySelectorAll('.turn')].find((one) => one.textContent?.includes('kingfisher'));
        const { top, bottom } = turn?.getBoundingClientRect() ?? { top: -1, bottom: -1 };
        return top > 0 && bottom < innerHeight;
      });
      await chat.button('Jump to the newest');
      await chat.until('the end', () => document.querySelector('.scroll')!.scrollHeight - document.querySelector('.scroll')!.scrollTop - document.querySelector('.scroll')!.clientHeight < 80);
    },
  },
  {
    name: 'two hundred conversations are listed, opened and searched',
    run: async ({ chat }) => {
      const n = 200;
      await chat.openWith({
        conversations: Array.from({ length: n }, (_, i) => conversationOf(i + 1, `Conversation ${i + 1}`)),
        messages: Array.from({ length: n }, (_, i) => messageOf(2 * i + 1001, i + 1, 0, `what was asked in number ${i + 1}`)),
      });
      expect((await chat.count('.conv')) === n, 'all are listed');
      await chat.tab.eval(() => [...document.querySelectorAll<HTMLElement>('.conv a')].at(-1)!.click());
      await chat.seeText('asked in number 200');
      await chat.tab.press('Control+k');
      await chat.see('.dialog.find');
      await chat.tab.type('asked');
      await chat.seeText('200 places in 200 chats');
      expect((await chat.count('.hit')) === 50, 'the first fifty are shown');
    },
  },
  {
    name: 'a long text that is pasted becomes a file, and one that is too long says so',
    run: async ({ chat, mock }) => {
      const paste = (n: number) =>
        chat.tab.eval((length: number) => {
          const data = new DataTransfer();
          data.setData('text/plain', 'many words, '.repeat(length / 12));
          // Firefox leaves out what a script gives to the event's constructor.
          const event = Object.defineProperty(new Event('paste', { bubbles: true, cancelable: true }), 'clipboardData', { value: data });
          document.querySelector('textarea.field')!.dispatchEvent(event);
        }, n);
      await paste(120_000);
      await chat.see('.held .chip');
      expect((await chat.text('.held')).includes('pasted.txt'), 'it has a name');
      expect((await chat.tab.eval(() => (document.querySelector('textarea.field') as HTMLTextAreaElement).value)) === '', 'the field is empty');
      await paste(5_000_000);
      await chat.seeText('more than 2 million characters');
      await chat.answer('sum it up');
      expect(JSON.stringify(mock.requests.find((body) => body.stream)).length > 120_000, 'it is sent');
    },
  },
  {
    name: 'names of three hundred characters stay within the page',
    run: async ({ chat, mock }) => {
      const name = 'model-name-'.repeat(27) + 'end';
      Object.assign(mock.models[0]!, { name });
      mock.state.loaded = [name];
      await chat.reload('.spec');
      await expectNothingWide(chat, 'start');
      expect((await chat.tab.eval(() => document.querySelector<HTMLElement>('.start h2')!.offsetHeight)) < 120, 'the name has two lines at most');
      await chat.openWith({ conversations: [conversationOf(1, 'title '.repeat(50))], messages: [messageOf(1, 1, 0, 'q'.repeat(300)), { ...messageOf(2, 1, 1, 'answer'), model: name }] });
      await expectNothingWide(chat, 'conversation');
      expect((await chat.tab.eval(() => document.querySelector<HTMLElement>('.note .who')!.offsetHeight)) < 60, 'the name in the margin, too');
      await chat.tab.click('button.model');
      await chat.see('.menu-pop');
      await expectNothingWide(chat, 'models');
      await chat.tab.press('Escape');
      await chat.button('Settings of this chat');
      await chat.see('.panel');
      await expectNothingWide(chat, 'panel');
    },
  },
  {
    name: 'wide tables, wrong formulas and text from the right stay within the page',
    view: { width: 390, height: 844, isPhone: true },
    run: async ({ chat }) => {
      await chat.write('awkward things');
      await chat.button('Send');
      await chat.idle();
      await chat.see('.katex');
      await expectNothingWide(chat, 'answer');
      expect((await chat.count('.formula.source')) === 2, 'what is no formula is shown as it was written');
      const { table, right, list } = await chat.tab.eval(() => {
        const frame = document.querySelector('.prose .table')!;
        const range = document.createRange();
        const p = [...document.querySelectorAll('.prose > p')].find((one) => /هذا/.test(one.textContent ?? ''))!;
        range.selectNodeContents(p);
        return { table: frame.scrollWidth > 2 * frame.clientWidth, right: p.getBoundingClientRect().right - Math.max(...[...range.getClientRects()].map((rect) => rect.right)), list: getComputedStyle(document.querySelector('.prose ul')!).direction };
      });
      expect(table, 'the table scrolls sideways');
      expect(right < 2, `Arabic begins at the right: ${right}`);
      expect(list === 'rtl', 'the marks of a Hebrew list are at the right');
    },
  },
  {
    name: 'at twice the size everything is in reach',
    view: { width: 640, height: 400 },
    run: async ({ chat }) => {
      await chat.answer('rain');
      await expectNothingWide(chat, 'conversation');
      expect((await chat.tab.eval(() => document.querySelector('.scroll')!.clientHeight)) > 180, 'there is room to read');
      await chat.tab.click('button.model');
      await chat.see('.menu-pop');
      const { top, bottom } = await chat.tab.eval(() => document.querySelector('.menu-pop')!.getBoundingClientRect().toJSON() as DOMRect);
      expect(top >= 0 && bottom <= 400, `the menu is on the screen: ${top} to ${bottom}`);
      await chat.tab.press('Escape');
      await chat.tab.press('Alt+p');
      await chat.see('.panel');
      await expectNothingWide(chat, 'panel');
      await chat.tab.press('Escape');
      await chat.gone('.panel');
    },
  },
  {
    name: 'a reload while a call waits for consent runs nothing, and goes on when asked to',
    run: async ({ chat, mock }) => {
      await chat.tab.eval(() => localStorage.setItem('defaults', '{"servers": ["garden-files"]}'));
      await chat.reload('.spec');
      await chat.ask('write a file');
      await chat.see('.ask');
      await new Promise((resolve) => setTimeout(resolve, 800));
      await chat.reload('.turn.a');
      await chat.seeText('cut off');
      expect((await chat.count('.ask')) === 0, 'the question is gone');
      expect((await chat.text('.turn.a')).includes('not called'), 'the call was not made');
      await chat.press('Continue');
      await chat.idle();
      const last = mock.requests.findLast((body) => body.stream)!;
      const calls = JSON.stringify(last.messages).match(/"tool_call_id"/g)?.length ?? 0;
      const asked = JSON.stringify(last.messages).match(/"tool_calls"/g)?.length ?? 0;
      expect(calls === asked, 'each call that is sent has a result');
    },
  },
  {
    name: 'the keyboard alone is enough',
    run: async ({ chat }) => {
      // Browsers divide the text of a button into lines in ways of their own.
      const focused = () =>
        chat.tab.eval(() => document.activeElement?.getAttribute('aria-label') ?? document.activeElement?.getAttribute('title') ?? '');
      const tabTo = async (label: string, key = 'Tab') => {
        for (let n = 0; n < 40; n++) {
          if ((await focused()) === label) return;
          await chat.tab.press(key);
          const isSeen = await chat.tab.eval(() => {
            const one = document.activeElement as HTMLElement;
            return one === document.body || one.checkVisibility({ opacityProperty: true, visibilityProperty: true });
          });
          expect(isSeen, `what has the focus is seen: ${await focused()}`);
        }
        throw new Error(`the Tab key does not reach ${label}`);
      };
      await chat.tab.click('textarea.field');
      await chat.tab.type('by keys');
      await chat.tab.press('Enter');
      await chat.idle();
      await tabTo('Edit the question', 'Shift+Tab');
      await chat.tab.press('Enter');
      await chat.see('.editor textarea');
      await chat.tab.press('Escape');
      await chat.gone('.editor');
      await chat.tab.click('textarea.field');
      await tabTo('Models');
      await chat.tab.press('Enter');
      await chat.see('.menu-pop');
      await chat.tab.press('Escape');
      await chat.gone('.menu-pop');
      await tabTo('Settings of this page', 'Shift+Tab');
      await chat.tab.press('Enter');
      await chat.see('.dialog');
      await chat.tab.press('Escape');
      await chat.gone('.dialog');
      expect((await focused()) === 'Settings of this page', 'the focus is back');
    },
  },
];
