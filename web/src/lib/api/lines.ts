// Lines of a streamed body, with the number of bytes that have been read as whole lines.

/** Maximum bytes of a line. */
const LONGEST = 1 << 24;
const NEWLINE = 10;

/** Splits bytes into lines. */
export class Lines {
  /** The bytes up to the end of the last line that was yielded, its line end included. */
  end: number;
  #rest: Uint8Array[] = [];
  #size = 0;
  #decoder = new TextDecoder();

  constructor(start = 0) {
    this.end = start;
  }

  /** Adds bytes, and yields each line that is whole now. */
  *add(chunk: Uint8Array): Generator<string> {
    let start = 0;
    for (let end = chunk.indexOf(NEWLINE); end >= 0; end = chunk.indexOf(NEWLINE, start)) {
      this.#rest.push(chunk.subarray(start, end));
      const size = this.#size + end - start + 1;
      const text = this.#take();
      start = end + 1;
      this.#size = 0;
      this.end += size;
      yield text;
    }
    if (start < chunk.length) {
      this.#rest.push(chunk.slice(start));
      this.#size += chunk.length - start;
    }
    if (this.#size > LONGEST) throw new Error('The server sent a line without an end.');
  }

  #take(): string {
    const parts = this.#rest;
    this.#rest = [];
    if (parts.length === 1) return this.#decoder.decode(parts[0]).replace(/\r$/, '');
    const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of parts) {
      whole.set(part, at);
      at += part.length;
    }
    return this.#decoder.decode(whole).replace(/\r$/, '');
  }
}

/** The data of a line of server-sent events; undefined for other lines. */
export const dataOf = (line: string): string | undefined => (line.startsWith('data:') ? line.slice(5).trim() : undefined);
