// The files of messages: reads dropped files, stores them, and makes what a request has of them.
import { newId } from './ids';
import type { Part } from './api/chat';
import * as db from './store/db';
import type { FileRef, Message, StoredFile } from './types';

/** The types of pictures that the server reads. Others are converted, if the browser reads them. */
const TYPES = ['image/jpeg', 'image/png', 'image/webp', 'image/bmp', 'image/gif'];
/** Maximum bytes of a picture that is sent unchanged. */
const LARGEST_PICTURE = 20 << 20;
/** The longer side of a picture that is converted, in pixels. */
const LONGEST_SIDE = 4096;
/** Maximum characters of a file's text. */
const LONGEST_TEXT = 2_000_000;

/** A file that is held for a message. */
export interface HeldFile extends FileRef {
  blob?: Blob;
  text?: string;
}

const cached = new Map<string, StoredFile>();
const urls = new Map<string, string>();

async function converted(bitmap: ImageBitmap, type: string): Promise<Blob | null> {
  const factor = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement('canvas');
  canvas.width = Math.max(1, Math.round(factor * bitmap.width));
  canvas.height = Math.max(1, Math.round(factor * bitmap.height));
  const context = canvas.getContext('2d')!;
  context.imageSmoothingQuality = 'high';
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => canvas.toBlob(resolve, type, 0.92));
}

async function readPicture(file: File): Promise<HeldFile> {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw new Error(`${file.name} is no picture that this browser reads.`);
  const isLarge = file.size > LARGEST_PICTURE;
  const sent = isLarge || !TYPES.includes(file.type) ? await converted(bitmap, isLarge ? 'image/jpeg' : 'image/png') : file;
  bitmap.close();
  if (!sent) throw new Error(`${file.name} could not be converted.`);
  // A Blob of its own: a File names a file of the disk, which may change.
  const blob = new Blob([await sent.arrayBuffer()], { type: sent.type });
  return { id: newId(), name: file.name || 'picture', kind: 'picture', blob };
}

async function readText(file: File): Promise<HeldFile> {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text: string;
  try {
    text = new TextDecoder('utf-8', { fatal: true }).decode(bytes);
  } catch {
    throw new Error(`${file.name} is no text.`);
  }
  if (text.includes('\0')) throw new Error(`${file.name} is no text.`);
  if (text.length > LONGEST_TEXT) throw new Error(`${file.name} has more than ${LONGEST_TEXT / 1e6} million characters.`);
  return { id: newId(), name: file.name, kind: 'text', text, tokens: Math.ceil(text.length / 4) };
}

/** Reads a file for a message. Fails with a text for the user. */
export async function readFile(file: File): Promise<HeldFile> {
  if (file.type.startsWith('image/') && file.type !== 'image/svg+xml') return readPicture(file);
  if (file.type !== 'application/pdf' && !file.name.toLowerCase().endsWith('.pdf')) return readText(file);
  const { readPdf } = await import('./pdf');
  const { text, pages } = await readPdf(file);
  if (!text.trim()) throw new Error(`${file.name} has no text: its pages are pictures.`);
  return { id: newId(), name: file.name, kind: 'pdf', pages, text: text.slice(0, LONGEST_TEXT), tokens: Math.ceil(text.length / 4) };
}

/** Stores held files as those of a conversation. */
export async function keepFiles(files: HeldFile[], conversation: string): Promise<void> {
  for (const { id, name, blob, text } of files) {
    const stored = { id, conversation, name, ...(blob ? { blob } : {}), ...(text === undefined ? {} : { text }) };
    cached.set(id, stored);
    await db.putFile(stored).catch(() => {});
  }
}

export async function fileOf(id: string): Promise<StoredFile | undefined> {
  const file = cached.get(id) ?? (await db.get<StoredFile>('files', id).catch(() => undefined));
  if (file) cached.set(id, file);
  return file;
}

/** The address of a picture within the page; undefined if it is lost. */
export async function urlOf(id: string): Promise<string | undefined> {
  const blob = (await fileOf(id))?.blob;
  return blob && heldUrl({ id, blob });
}

/** The address of a held picture. */
export function heldUrl({ id, blob }: { id: string; blob?: Blob }): string {
  if (!urls.has(id) && blob) urls.set(id, URL.createObjectURL(blob));
  return urls.get(id) ?? '';
}

async function dataUrl(blob: Blob): Promise<string> {
  const reader = new FileReader();
  reader.readAsDataURL(blob);
  await new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = () => reject(reader.error);
  });
  return reader.result as string;
}

/** What a request has of a message's files. */
export async function partsOf(message: Message): Promise<{ pictures: Part[]; texts: string[] }> {
  const pictures: Part[] = [];
  const texts: string[] = [];
  for (const { id, name } of message.files ?? []) {
    const file = await fileOf(id);
    if (file?.blob) pictures.push({ type: 'image_url', image_url: { url: await dataUrl(file.blob) } });
    else if (file?.text !== undefined) texts.push(`The file ${name}:\n\n${fenced(file.text)}`);
  }
  return { pictures, texts };
}

/** A text between fences that are longer than any in it. */
function fenced(text: string): string {
  const longest = Math.max(2, ...[...text.matchAll(/`{3,}/g)].map(([mark]) => mark.length));
  const fence = '`'.repeat(longest + 1);
  return `${fence}\n${text.replace(/\n$/, '')}\n${fence}`;
}
