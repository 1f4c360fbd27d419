// What a conversation takes of the model's context, and what to leave out of requests so that the next answer fits.
import type { Message } from './types';

/** The share of the context that is used at most after turns were left out: the rest is for the next answers. */
const SHARE_USED = 0.75;
/** Tokens of a picture, by a guess: they depend on the model. */
const PICTURE_TOKENS = 500;
/** Tokens of a character, by a guess. */
export const TOKENS_PER_CHARACTER = 0.25;

/** The turns of a path: each question with what answers it. */
export function turnsOf(path: Message[]): Message[][] {
  const turns: Message[][] = [];
  for (const message of path) {
    if (message.role === 'user' || !turns.length) turns.push([]);
    turns.at(-1)!.push(message);
  }
  return turns;
}

/** What a request has of a message, without its files. */
export const textOf = ({ content, steps = [] }: Message): string =>
  [...steps.flatMap((step) => [step.content, step.thoughts ?? '', ...step.calls.flatMap((call) => [call.arguments, call.result ?? ''])]), content].join('\n');

function tokensOf(messages: Message[], tokensPerCharacter: number): number {
  return messages.reduce((sum, message) => {
    const files = (message.files ?? []).reduce((n, file) => n + (file.kind === 'picture' ? PICTURE_TOKENS : (file.tokens ?? 0)), 0);
    return sum + files + tokensPerCharacter * textOf(message).length;
  }, 0);
}

export interface OldestTurns {
  /** The last message of them. */
  until: string;
  nTurns: number;
  /** Tokens of them, about. */
  tokens: number;
}

/** The fewest of the oldest turns without which `path`, which does not fit into `context` tokens, leaves room for answers.
 * Undefined: it has only one turn. */
export function oldestTurns(path: Message[], context: number, tokensPerCharacter: number): OldestTurns | undefined {
  const turns = turnsOf(path).map((turn) => ({ until: turn.at(-1)!.id, tokens: tokensOf(turn, tokensPerCharacter) }));
  const all = turns.reduce((sum, { tokens }) => sum + tokens, 0);
  // The guess does not know the template and the tools: the path has at least as many tokens as the context.
  const missing = Math.max(all, context) - SHARE_USED * (context || all);
  let [nTurns, tokens] = [0, 0];
  while (nTurns < turns.length - 1 && (nTurns === 0 || tokens < missing)) tokens += turns[nTurns++]!.tokens;
  return nTurns ? { until: turns[nTurns - 1]!.until, nTurns, tokens: Math.round(tokens) } : undefined;
}
