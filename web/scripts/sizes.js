// Prints the gzip sizes of the built page, and fails if the first view is larger than its budget.
import { readFileSync, readdirSync } from 'node:fs';
import { gzipSync } from 'node:zlib';

const BUDGET = 150 * 1024;
const dist = new URL('../../crates/metal-attention-server/page/', import.meta.url);
const size = (name) => gzipSync(readFileSync(new URL(name, dist)), { level: 9 }).length;
const html = readFileSync(new URL('index.html', dist), 'utf8');
const first = ['index.html', ...[...html.matchAll(/(?:src|href)="\.\/(assets\/[^"]+)"/g)].map((match) => match[1])];
const total = first.reduce((sum, name) => sum + size(name), 0);
for (const name of readdirSync(new URL('assets/', dist)).sort()) {
  if (!name.endsWith('.woff2')) console.log(`${String(size(`assets/${name}`)).padStart(8)}  ${name}`);
}
console.log(`first view: ${total} bytes gzip of at most ${BUDGET}`);
if (total > BUDGET) process.exit(1);
