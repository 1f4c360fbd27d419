// Writes the PNG icons of the manifest: the four bars of icon.svg on a full ground, as maskable icons need it.
import { writeFileSync } from 'node:fs';
import { deflateSync } from 'node:zlib';

const GROUND = [0x10, 0x15, 0x16];
const INK = [0xe9, 0xef, 0xed];
const LIVE = [0x4f, 0xdc, 0xc6];
/** x, y, width, height and colour of the bars in the 32 units of icon.svg, drawn at 80 percent for the safe zone. */
const BARS = [[7, 17, 3, 7, INK], [12, 13, 3, 11, INK], [17, 15, 3, 9, INK], [22, 8, 3, 16, LIVE]];

/** The colour at a point in units of icon.svg. */
function colour(x, y) {
  const [u, v] = [(x - 16) / 0.9 + 16, (y - 16) / 0.9 + 16];
  for (const [left, top, width, height, ink] of BARS) {
    const dx = Math.max(left + 1 - u, u - (left + width - 1), 0);
    const dy = Math.max(top + 1 - v, v - (top + height - 1), 0);
    if (Math.hypot(dx, dy) <= 1) return ink;
  }
  return GROUND;
}

function chunk(name, data) {
  const body = Buffer.concat([Buffer.from(name), data]);
  const out = Buffer.alloc(body.length + 8);
  out.writeUInt32BE(data.length, 0);
  body.copy(out, 4);
  out.writeUInt32BE(crcOf(body) >>> 0, body.length + 4);
  return out;
}

/** CRC-32. */
function crcOf(bytes) {
  let crc = ~0;
  for (const byte of bytes) {
    crc ^= byte;
    for (let k = 0; k < 8; k++) crc = (crc >>> 1) ^ (crc & 1 ? 0xedb88320 : 0);
  }
  return ~crc;
}

function png(size) {
  const rows = Buffer.alloc(size * (size * 3 + 1));
  const fine = 4;
  for (let y = 0; y < size; y++) {
    for (let x = 0; x < size; x++) {
      const sum = [0, 0, 0];
      for (let k = 0; k < fine * fine; k++) {
        const c = colour(((x + ((k % fine) + 0.5) / fine) * 32) / size, ((y + (Math.floor(k / fine) + 0.5) / fine) * 32) / size);
        for (let i = 0; i < 3; i++) sum[i] += c[i];
      }
      for (let i = 0; i < 3; i++) rows[y * (size * 3 + 1) + 1 + x * 3 + i] = Math.round(sum[i] / (fine * fine));
    }
  }
  const head = Buffer.alloc(13);
  head.writeUInt32BE(size, 0);
  head.writeUInt32BE(size, 4);
  head.set([8, 2, 0, 0, 0], 8);
  const signature = Buffer.from([0x89, 0x50, 0x4e, 0x47, 13, 10, 26, 10]);
  return Buffer.concat([signature, chunk('IHDR', head), chunk('IDAT', deflateSync(rows, { level: 9 })), chunk('IEND', Buffer.alloc(0))]);
}

for (const size of [192, 512]) writeFileSync(new URL(`../public/icon-${size}.png`, import.meta.url), png(size));
