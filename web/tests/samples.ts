// Conversations for screenshots, with fixed times and numbers, and the picture that belongs to one of them.
import type { Conversation, Message, Stats, StoredFile } from '../src/lib/types';
import { RAIN } from './answers';

/** The moment at which screenshots are taken; their browser is in this time zone. */
export const NOW = Date.UTC(2026, 6, 6, 10, 45);
const HOUR = 3_600_000;
const MODEL = 'Qwen3.5 4B';
export const QUESTION = 'How do I turn the bucket counts of this gauge into millimetres? Use the readings of last week.';
export const NEXT = 'And how large is the error if the funnel stands askew?';
/** Rates of an answer, one for each bar of its trace. */
export const TRACE = [22, 41, 62, 66, 71, 69, 74, 77, 64, 72, 80, 83, 87, 85, 70, 79, 88, 76, 82, 90, 81, 73, 92, 86];
const TABLE = ['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday'].map((day, i) => `{ "day": "${day}", "tips": ${[12, 0, 47, 5, 0, 0, 0][i]} }`).join('\n');

/** What becomes of the answer to the first question. */
export type End = 'done' | 'writing' | 'cut' | 'full';

/** The stream of an answer that is being written; the server holds it. */
export const HELD = 'held';
export const HELD_TEXT = RAIN.slice(0, RAIN.indexOf('its area') + 'its area'.length);
const CUT_TEXT = `${RAIN.slice(0, RAIN.indexOf('\n\n- one'))} one tip is 5.0 ml of`;

export const PICTURE = `<svg xmlns="http://www.w3.org/2000/svg" width="448" height="288" viewBox="0 0 112 72">
<rect width="112" height="72" fill="#bcd3d8"/><circle cx="88" cy="16" r="8" fill="#f6dfa4"/>
<path d="M0 46q28-14 60-4t52-6v36H0z" fill="#8fb08f"/><path d="M0 56q34-10 62-3t50-5v24H0z" fill="#5b8061"/>
<path d="M48 22h18l-2 28a2 2 0 0 1-2 2H52a2 2 0 0 1-2-2z" fill="#f4f8f8"/><path d="M49.300 38h15.400l-.8 12a2 2 0 0 1-2 2H52a2 2 0 0 1-2-2z" fill="#3f8aa6"/>
<path d="M45 16h24l-3 6H48z" fill="#2f4a44"/><path d="M59 28h5M59 33h5M59 38h5M59 43h5" stroke="#5b6b66" stroke-width="1"/></svg>`;

const id = (n: number) => String(n).padStart(14, '0');
export const RAIN_ID = id(10);

function statsOf(end: End): Stats | undefined {
  if (end === 'cut') return { first: 210, tokens: 61, seconds: 0, requests: 1, trace: [] };
  const context = end === 'full' ? { prompt: 32_090, cached: 31_000, last: 420 } : { prompt: 12_010, cached: 9800, last: 390 };
  return { first: 210, tokens: 412, seconds: 410 / 84.2, requests: 2, trace: TRACE, ...context };
}

function rainMessages(end: End): Message[] {
  const conversation = RAIN_ID;
  const created = NOW - 4 * 60_000;
  const question: Message = {
    id: id(100), conversation, parent: '', role: 'user', content: QUESTION, created, state: 'done',
    files: [{ id: id(1), name: 'gauge.png', kind: 'picture' }, { id: id(2), name: 'gauge-manual.pdf', kind: 'pdf', pages: 14, tokens: 6100 }],
  };
  const steps = [
    {
      content: '',
      thoughts: 'The user wants millimetres. I need the area of the funnel first, then the depth of one tip.',
      thoughtSeconds: 3.2,
      calls: [{ id: 'call_1', name: 'read_rain_log', arguments: '{"week": 27}', server: 'weather-log', tool: 'read_rain_log', result: TABLE, seconds: 0.04 }],
    },
  ];
  const answer: Message = { id: id(102), conversation, parent: question.id, role: 'assistant', content: RAIN, created, state: 'done', model: MODEL, steps, stats: statsOf(end) };
  if (end === 'cut') return [question, { ...answer, content: CUT_TEXT, steps: undefined, state: 'cut', error: { code: 'connection', message: 'The server cannot be reached.' } }];
  if (end === 'writing') return [question, { ...answer, content: '', state: 'writing', stats: { ...statsOf(end)!, trace: [] }, stream: { id: HELD, bytes: 0 } }];
  return [question, { ...answer, id: id(101) }, answer, { ...answer, id: id(103) }];
}

export interface Samples {
  conversations: Conversation[];
  messages: Message[];
  files: StoredFile[];
}

export function samples(end: End): Samples {
  const conversation = (n: number, title: string, hoursAgo: number, pinned = false): Conversation => ({
    id: id(n), title, titleBy: 'user', created: NOW - hoursAgo * HOUR, updated: NOW - hoursAgo * HOUR, pinned, chosen: {},
    settings: { servers: ['garden-files', 'weather-log'] },
  });
  const rain = { ...conversation(10, 'Rain gauge for the garden', 4 / 60), chosen: { [id(100)]: id(102) } };
  const conversations = [
    rain,
    conversation(9, 'Bread timetable', 20, true),
    conversation(8, 'Compare three ways to sort a list', 2),
    conversation(7, 'Packing list, four days by train', 3),
    conversation(6, 'Why the sky turns green before hail', 24),
    conversation(5, 'Regular expression for dates', 26),
    conversation(4, 'Tomato seedlings, week by week', 30 * 24),
    conversation(3, 'Shell script: rename by date taken', 31 * 24),
    conversation(2, 'Summary of the bicycle manual', 33 * 24),
  ];
  const said = (n: number, owner: number, content: string): Message => ({ id: id(n), conversation: id(owner), parent: '', role: 'assistant', content, created: NOW, state: 'done' });
  return {
    conversations,
    messages: [
      ...rainMessages(end),
      said(200, 4, 'They need even moisture while they are small: water when the rain gauge shows less than 10 mm in a week, and early in the morning rather than at night.'),
      said(201, 6, 'Hail needs a strong updraft, and after such a storm a rain gauge reads too low, since hail bounces out of the funnel before it melts.'),
    ],
    files: [
      { id: id(1), conversation: RAIN_ID, name: 'gauge.png' },
      { id: id(2), conversation: RAIN_ID, name: 'gauge-manual.pdf', text: 'Page 4\nPlace the rain gauge level, at least twice as far from a wall as the wall is high.\nPage 5\nEmpty it once a week.' },
    ],
  };
}
