// The parts of a parsed text that do not change once the next part has begun: blocks, items of lists, rows of tables.
import type { Token } from './parser';

export interface Unit {
  /** The element that the unit belongs to, for items of lists and rows of tables. */
  container?: { kind: 'list' | 'table'; open: Token; /** Its place among the containers of this parse. */ index: number };
  tokens: Token[];
  /** The first line of the unit. */
  line: number;
}

/** The index after the token that closes the one at `start`. */
function end(tokens: Token[], start: number): number {
  if (tokens[start]!.nesting !== 1) return start + 1;
  const { level } = tokens[start]!;
  let at = start + 1;
  while (at < tokens.length && !(tokens[at]!.nesting === -1 && tokens[at]!.level === level)) at++;
  return at + 1;
}

export function unitsOf(tokens: Token[]): Unit[] {
  const units: Unit[] = [];
  let index = -1;
  for (let at = 0; at < tokens.length; at = end(tokens, at)) {
    const open = tokens[at]!;
    const close = end(tokens, at);
    const line = open.map?.[0] ?? 0;
    const isList = open.type === 'bullet_list_open' || open.type === 'ordered_list_open';
    if (!isList && open.type !== 'table_open') {
      units.push({ tokens: tokens.slice(at, close), line });
      continue;
    }
    index++;
    const container = { kind: isList ? ('list' as const) : ('table' as const), open, index };
    for (let part = at + 1; part < close - 1; part = end(tokens, part)) {
      const { type, map } = tokens[part]!;
      if (type !== 'tbody_open') {
        units.push({ container, tokens: tokens.slice(part, end(tokens, part)), line: map?.[0] ?? line });
        continue;
      }
      const bodyEnd = end(tokens, part);
      for (let row = part + 1; row < bodyEnd - 1; row = end(tokens, row)) {
        units.push({ container, tokens: tokens.slice(row, end(tokens, row)), line: tokens[row]!.map?.[0] ?? line });
      }
    }
  }
  return units;
}
