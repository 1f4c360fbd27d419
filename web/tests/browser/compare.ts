// Compares two pictures of the page, so that a moved panel, a lost text or a broken theme is seen, and another rasterizer's edges of
// letters are not: means of blocks of 8 by 8 points are compared, each with the nearest of those up to one point away.
import type { Tab } from './driver';

/** Levels, of 255, by which the mean of a block may differ in each channel. */
const LEVELS = 14;
/** Blocks that may differ by more. A word of small text is about ten. */
const BLOCKS = 6;

export interface Difference {
  /** Blocks that differ; -1: the sizes do. */
  n: number;
  isDifferent: boolean;
  /** Where the first of them are: x and y in points. */
  places: string;
}

/** Compares two PNG files, which the browser decodes. */
export async function difference(tab: Tab, one: Uint8Array, other: Uint8Array): Promise<Difference> {
  const found = await tab.eval(
    async ({ a, b, levels }: { a: string; b: string; levels: number }) => {
      const SIZE = 8;
      /** Sums over all points above and to the left, for each channel. */
      const sumsOf = async (text: string) => {
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        const { width, height, data } = await (async () => {
          const bitmap = await createImageBitmap(new Blob([bytes], { type: 'image/png' }));
          const context = new OffscreenCanvas(bitmap.width, bitmap.height).getContext('2d')!;
          context.drawImage(bitmap, 0, 0);
          return context.getImageData(0, 0, bitmap.width, bitmap.height);
        })();
        const stride = width + 1;
        const sums = [0, 1, 2].map((channel) => {
          const sum = new Float64Array(stride * (height + 1));
          for (let y = 0; y < height; y++) {
            let row = 0;
            for (let x = 0; x < width; x++) {
              row += data[4 * (y * width + x) + channel]!;
              sum[(y + 1) * stride + x + 1] = sum[y * stride + x + 1]! + row;
            }
          }
          return sum;
        });
        return { width, height, mean: (channel: number, x: number, y: number) => {
          const sum = sums[channel]!;
          const [top, low] = [y * stride + x, (y + SIZE) * stride + x];
          return (sum[low + SIZE]! - sum[low]! - sum[top + SIZE]! + sum[top]!) / (SIZE * SIZE);
        } };
      };
      const [first, second] = [await sumsOf(a), await sumsOf(b)];
      const { width, height } = first;
      if (width !== second.width || height !== second.height) return null;
      const places: [number, number][] = [];
      for (let y = 0; y + SIZE <= height; y += SIZE) {
        for (let x = 0; x + SIZE <= width; x += SIZE) {
          let least = 255;
          for (let dy = -1; dy <= 1 && least > levels; dy++) {
            for (let dx = -1; dx <= 1 && least > levels; dx++) {
              const [u, v] = [x + dx, y + dy];
              if (u < 0 || v < 0 || u + SIZE > width || v + SIZE > height) continue;
              least = Math.min(least, Math.max(...[0, 1, 2].map((channel) => Math.abs(first.mean(channel, x, y) - second.mean(channel, u, v)))));
            }
          }
          if (least > levels) places.push([x, y]);
        }
      }
      return places;
    },
    { a: Buffer.from(one).toString('base64'), b: Buffer.from(other).toString('base64'), levels: LEVELS },
  );
  if (!found) return { n: -1, isDifferent: true, places: 'the sizes differ' };
  return { n: found.length, isDifferent: found.length > BLOCKS, places: found.slice(0, 4).map(([x, y]) => `${x},${y}`).join(' ') };
}
