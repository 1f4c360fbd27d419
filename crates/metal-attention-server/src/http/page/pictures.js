// The pictures of conversations: reads files, stores them in the browser, and makes their addresses for the page and for requests.
//
// Messages name pictures by id. Their files lie in IndexedDB, unchanged: localStorage is too small, and a picture with other pixels
// would be evaluated again by the model. A message is stored before its pictures, so a picture that no message names is a deleted one.
import { newId, storedPictures } from "./store.js";

/** The types of files that the server reads. Other pictures are converted, if the browser reads them. */
const TYPES = ["image/jpeg", "image/png", "image/webp", "image/bmp", "image/gif"];
/** Maximum bytes of a file that is sent unchanged. */
const LARGEST_FILE = 20 << 20;
/** The longer side of a picture that is converted, in pixels. */
const LONGEST_SIDE = 4096;
const DATABASE = "pictures";

/** The files of the pictures that this page has read, by id. */
const files = new Map();
/** The addresses of `files` in the page, by id. */
const urls = new Map();
/** The ids of pictures that could not be stored: they are lost with the page. */
const unstored = new Set();
/** Reports whether there are unstored pictures. */
let reportUnstored = () => {};
/** The promise of the open database; it fails if the browser has none. */
let database;

const finished = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

/** Calls `action` with the table of files in a transaction, and returns the result of its request after the transaction's end. */
async function inTable(mode, action) {
  const transaction = (await database).transaction(DATABASE, mode);
  const done = new Promise((resolve, reject) => {
    transaction.oncomplete = resolve;
    transaction.onabort = () => reject(transaction.error);
  });
  const result = await Promise.all([finished(action(transaction.objectStore(DATABASE))), done]);
  return result[0];
}

async function openDatabase() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(DATABASE);
  return finished(request);
}

/** Opens the stored pictures, and deletes those that no stored message names. `onUnstored` is called with whether there are
 * pictures that are not stored. */
export async function open(onUnstored) {
  reportUnstored = onUnstored;
  database = openDatabase();
  try {
    const ids = await inTable("readonly", (table) => table.getAllKeys());
    const named = ids.length ? storedPictures() : new Set();
    for (const id of ids) if (!named.has(id)) await inTable("readwrite", (table) => table.delete(id));
  } catch {
    // Without a database pictures live as long as the page.
  }
}

/** Whether a file is a picture by its type. */
export const isPicture = ({ type }) => type.startsWith("image/");

/** `bitmap` as a file, with at most LONGEST_SIDE pixels on a side. */
async function converted(bitmap, type) {
  const factor = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(factor * bitmap.width));
  canvas.height = Math.max(1, Math.round(factor * bitmap.height));
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve) => { canvas.toBlob(resolve, type, 0.92); });
}

/** Reads a file. Returns its picture, `{ id, name }`; null if the browser cannot read it. Only files that are too large or of a type
 * that the server does not read are converted. */
export async function readPicture(file) {
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) return null;
  const isLarge = file.size > LARGEST_FILE;
  const sent = isLarge || !TYPES.includes(file.type) ? await converted(bitmap, isLarge ? "image/jpeg" : "image/png") : file;
  bitmap.close();
  if (!sent) return null;
  const picture = { id: newId(), name: file.name || "picture" };
  // A Blob of its own: a File would name a file of the disk, which may change.
  files.set(picture.id, new Blob([await sent.arrayBuffer()], { type: sent.type }));
  return picture;
}

/** Stores the pictures of a message which is stored itself. */
export async function keepPictures(pictures = []) {
  for (const { id } of pictures) {
    const file = files.get(id);
    if (!file) continue;
    try {
      await inTable("readwrite", (table) => table.put(file, id));
      unstored.delete(id);
    } catch {
      unstored.add(id);
    }
  }
  reportUnstored(unstored.size > 0);
}

/** Forgets a picture that is in no message. */
export function dropPicture({ id }) {
  URL.revokeObjectURL(urls.get(id) ?? "");
  urls.delete(id);
  files.delete(id);
}

/** The file of a picture; undefined if it is lost. */
async function fileOf({ id }) {
  if (!files.has(id)) {
    const file = await inTable("readonly", (table) => table.get(id)).catch(() => undefined);
    if (file instanceof Blob) files.set(id, file);
  }
  return files.get(id);
}

/** The address of a picture in the page; undefined if it is lost. */
export async function urlOf(picture) {
  const file = await fileOf(picture);
  if (file && !urls.has(picture.id)) urls.set(picture.id, URL.createObjectURL(file));
  return urls.get(picture.id);
}

/** The part of a request for a picture; undefined if it is lost. */
export async function partOf(picture) {
  const file = await fileOf(picture);
  if (!file) return undefined;
  const reader = new FileReader();
  reader.readAsDataURL(file);
  await new Promise((resolve, reject) => {
    reader.onload = resolve;
    reader.onerror = () => reject(reader.error);
  });
  return { type: "image_url", image_url: { url: reader.result } };
}
