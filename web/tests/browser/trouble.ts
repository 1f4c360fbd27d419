// Scenarios of what goes wrong: lost servers and connections, closed pages, other tabs, full contexts, refusals, keys.
import { writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { SLOW, longText } from '../answers';
import { conversationOf, expect, messageOf } from './page';
import type { Scenario } from './scenarios';

export const trouble: Scenario[] = [
  {
    name: 'the server goes away and comes back: what was asked is answered',
    run: async ({ chat, mock }) => {
      mock.state.isAway = true;
      mock.cut();
      await chat.ask('are you there');
      await chat.seeText('The engine does not answer');
      await chat.seeText('Next try in');
      await chat.write('typed meanwhile');
      mock.state.isAway = false;
      await chat.press('Try now');
      await chat.seeText('You asked: are you there');
      expect((await chat.tab.eval(() => (document.querySelector('textarea.field') as HTMLTextAreaElement).value)) === 'typed meanwhile', 'what was typed is there');
    },
  },
  {
    name: 'a lost connection is made again, without a gap',
    run: async ({ chat, mock }) => {
      mock.state.holdAt = 30;
      await chat.ask('slow');
      await chat.until('some text', () => (document.querySelector<HTMLElement>('.turn.a .prose')?.innerText.length ?? 0) > 60);
      mock.cut();
      mock.state.holdAt = Infinity;
      await chat.idle();
      const answer = await chat.lastAnswer();
      const words = (text: string) => text.replace(/[^a-z0-9]/gi, '');
      expect(words(answer).includes(words('What is measured twice')) && words(answer).startsWith(words(longText(100)).slice(0, 60)), 'all of it is there, once');
      expect((answer.match(/wind does not carry/g) ?? []).length === (longText(SLOW).match(/wind does not carry/g) ?? []).length, 'nothing is there twice');
    },
  },
  {
    name: 'a reload goes on with the answer',
    run: async ({ chat, mock }) => {
      mock.state.holdAt = 30;
      await chat.ask('slow');
      await chat.until('some text', () => (document.querySelector<HTMLElement>('.turn.a .prose')?.innerText.length ?? 0) > 60);
      await chat.reload('.turn.a');
      await chat.see('.send.stop');
      mock.state.holdAt = Infinity;
      await chat.idle();
      const answer = await chat.lastAnswer();
      expect((answer.match(/wind does not carry/g) ?? []).length === (longText(SLOW).match(/wind does not carry/g) ?? []).length, `nothing is lost or there twice: ${answer.slice(0, 200)}`);
      expect(mock.requests.filter((body) => body.stream).length === 1, 'it was asked once');
    },
  },
  {
    name: 'without resumable streams an answer is cut off, and continues',
    run: async ({ chat, mock }) => {
      mock.state.hasResumable = false;
      await chat.ask('break off');
      await chat.seeText('cut off', 20_000);
      await chat.idle();
      await chat.press('Continue');
      await chat.seeText('the rest of the sentence.');
    },
  },
  {
    name: 'a page that is closed while it writes loses nothing',
    run: async ({ chat, mock, another }) => {
      mock.state.hasResumable = false;
      mock.state.holdAt = 30;
      await chat.ask('slow');
      await chat.until('some text', () => (document.querySelector<HTMLElement>('.turn.a .prose')?.innerText.length ?? 0) > 40);
      await chat.write('a draft');
      await new Promise((resolve) => setTimeout(resolve, 900));
      const hash = await chat.tab.eval(() => location.hash);
      await chat.tab.close();
      const other = await another();
      await other.tab.goto(chat.url + hash);
      await other.see('.turn.a');
      await other.seeText('cut off');
      expect((await other.lastAnswer()).length > 30, 'the text is there');
      expect((await other.tab.eval(() => (document.querySelector('textarea.field') as HTMLTextAreaElement).value)) === 'a draft', 'the draft is there');
    },
  },
  {
    name: 'two tabs see each other’s messages and names',
    run: async ({ chat, another }) => {
      await chat.answer('from the first tab');
      await chat.seeText('Rain gauge for the garden');
      const hash = await chat.tab.eval(() => location.hash);
      const other = await another();
      await other.tab.goto(chat.url + hash);
      await other.seeText('You asked: from the first tab');
      await other.answer('from the second tab');
      await chat.seeText('You asked: from the second tab');
      await chat.tab.hover('.conv.is-current');
      await chat.tab.click('.conv.is-current button[aria-label="Rename"]');
      await chat.tab.press('Control+a');
      await chat.tab.type('Renamed here');
      await chat.tab.press('Enter');
      await other.until('the name', () => document.querySelector('.top h1')?.textContent?.trim() === 'Renamed here');
    },
  },
  {
    name: 'a full context is summarised',
    run: async ({ chat, mock }) => {
      await chat.answer('first things');
      await chat.ask('this is too long');
      await chat.seeText('The context is full');
      await chat.press('Summarise it');
      await chat.seeText('You asked: this is too long');
      expect(JSON.stringify(mock.requests.findLast((body) => body.stream)?.messages).includes('198 cm²'), 'the summary is sent');
      expect((await chat.text('.thread')).includes('first things'), 'the page keeps all');
      expect((await chat.text('.end-of-left-out')).includes('The turn above is sent as a summary.'), 'it says so');
    },
  },
  {
    name: 'of a full context the oldest turns are left out, and sent again when asked to',
    run: async ({ chat, mock }) => {
      const messages = Array.from({ length: 8 }, (_, i) => messageOf(i + 1, 1, i, `${i % 2 ? 'answer' : 'question'} ${i + 1}`));
      for (const message of messages) if (message.role === 'user') message.files = [{ id: `file ${message.id}`, name: 'book.txt', kind: 'text', tokens: 10_000 }];
      await chat.openWith({ conversations: [conversationOf(1, 'Long talk')], messages });
      mock.state.nFitting = 3;
      const sent = () => JSON.stringify(mock.requests.findLast((body) => body.stream)?.messages);
      await chat.ask('this is too long');
      await chat.seeText('Leaving out the 2 oldest turns frees about 20.0k tokens.');
      await chat.seeText('--ctx-size');
      await chat.press('Leave out the 2 oldest turns');
      await chat.seeText('You asked: this is too long');
      await chat.idle();
      expect(!sent().includes('answer 4') && sent().includes('question 5'), 'the first two turns are not sent');
      expect((await chat.count('.turn.left-out')) === 4 && (await chat.text('.turn.left-out .note')).includes('not sent'), 'they are there, and marked');
      await chat.tab.reload();
      await chat.seeText('The 2 turns above are not sent.');
      await chat.press('Send them again');
      await chat.gone('.left-out');
      await chat.answer('and now');
      expect(sent().includes('question 1'), 'they are sent');
    },
  },
  {
    name: 'of a full context the last question goes to a new chat, with its files',
    run: async ({ chat, mock }) => {
      await chat.answer('first things');
      const path = join(tmpdir(), 'seven.txt');
      writeFileSync(path, 'the notes say seven');
      await chat.tab.files('.foot input[type=file]', [path]);
      await chat.see('.held .chip');
      await chat.ask('this is too long');
      await chat.press('New chat with this question');
      await chat.see('.start');
      await chat.see('.held .chip');
      await chat.button('Send');
      await chat.seeText('this is too long');
      await chat.idle();
      const sent = JSON.stringify(mock.requests.findLast((body) => body.stream)?.messages);
      expect(sent.includes('the notes say seven') && !sent.includes('first things'), 'it is sent alone, with its file');
      expect((await chat.count('.conv')) === 2, 'the first chat stays');
    },
  },
  {
    name: 'a refused request says why, and can be changed',
    run: async ({ chat }) => {
      await chat.ask('refuse this');
      await chat.seeText('The request was refused');
      await chat.seeText('the model cannot do this');
      await chat.press('Edit the question');
      await chat.see('.editor textarea');
      await chat.tab.press('Control+a');
      await chat.tab.type('take this');
      await chat.tab.press('Enter');
      await chat.seeText('You asked: take this');
    },
  },
  {
    name: 'a key is asked for and kept',
    run: async ({ chat, mock }) => {
      mock.state.key = 'secret';
      await chat.tab.reload();
      await chat.seeText('The server wants an API key');
      await chat.tab.type('secret');
      await chat.tab.press('Enter');
      await chat.gone('.dialog');
      await chat.answer('with a key');
      await chat.tab.reload();
      await chat.seeText('You asked: with a key');
      expect((await chat.count('.dialog')) === 0, 'it is not asked for again');
    },
  },
  {
    name: 'a model that loads answers when it is loaded',
    run: async ({ chat, mock }) => {
      mock.state.loading = 'Qwen3.5 4B';
      await chat.tab.reload();
      await chat.seeText('Loading, 62%');
      await chat.ask('early question');
      await chat.see('.send.stop');
      mock.state.loading = '';
      await chat.seeText('You asked: early question');
    },
  },
];
