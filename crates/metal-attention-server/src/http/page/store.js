// Conversations and settings in the browser's storage. Each message has its own key, which only one tab writes, so several tabs
// can extend a conversation without overwriting each other. Stored values are checked: invalid ones are ignored, and kept.
//
// Keys of messages: chat/CONVERSATION/MESSAGE, both ids of 14 characters (9 for the time, 5 random) that sort by time.

const ID = /^[0-9a-z]{14}$/;
const KEY = /^chat\/[0-9a-z]{14}\/[0-9a-z]{14}$/;
const DAY = 86_400_000;

/** The messages of all conversations by key, whether or not they could be stored. */
const messages = new Map();
/** The keys of messages that could not be stored: they are lost with the page. */
const unstored = new Set();
/** The time in the newest id, in milliseconds. */
let newest = 0;
/** Reports whether there are unstored messages. */
let reportUnstored = () => {};

/** Reads `key` of `area` ("localStorage" or "sessionStorage"); null if it is missing or storage is disabled. */
export function read(area, key) {
  try {
    return window[area].getItem(key);
  } catch {
    return null;
  }
}

/** Writes `key` of `area`. Returns whether it is stored: storage may be full or disabled. */
export function write(area, key, text) {
  try {
    window[area].setItem(key, text);
    return true;
  } catch {
    return false;
  }
}

function erase(key) {
  try {
    localStorage.removeItem(key);
  } catch {
    // Disabled storage is empty.
  }
}

/** The value of a JSON text; null if it is invalid. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The steps of an answer (a text and the tool calls after it), if they are valid. */
function checkedSteps(steps) {
  const isText = (value) => typeof value === "string";
  const isMaybeText = (value) => value === undefined || isText(value);
  const isCall = (call) => [call?.id, call?.name, call?.arguments].every(isText) && [call.server, call.tool, call.result].every(isMaybeText);
  const isStep = (step) => isText(step?.content) && isMaybeText(step.reasoning_content) && Array.isArray(step.calls) && step.calls.every(isCall);
  return Array.isArray(steps) && steps.length && steps.every(isStep) ? { steps } : {};
}

/** The ids and names of a message's pictures (pictures.js), if they are valid. */
function checkedPictures(pictures) {
  const isValid = (picture) => typeof picture?.id === "string" && isId(picture.id) && typeof picture.name === "string";
  if (!Array.isArray(pictures) || !pictures.length || !pictures.every(isValid)) return {};
  return { pictures: pictures.map(({ id, name }) => ({ id, name })) };
}

/** The valid fields of a message; null if it is invalid. `cut` is the reason why it is incomplete. */
function checked(value) {
  if (!["user", "assistant"].includes(value?.role) || typeof value.content !== "string") return null;
  const message = { role: value.role, content: value.content, ...checkedSteps(value.steps), ...checkedPictures(value.pictures) };
  for (const name of ["reasoning_content", "numbers", "cut"]) if (typeof value[name] === "string") message[name] = value[name];
  return message;
}

/** A new id. It sorts after all ids that this tab has created or read. */
export function newId() {
  newest = Math.max(Date.now(), newest + 1);
  const random = Math.floor(Math.random() * 36 ** 5);
  return newest.toString(36).padStart(9, "0") + random.toString(36).padStart(5, "0");
}

export const isId = (text) => ID.test(text);
export const newKey = (conversation) => `chat/${conversation}/${newId()}`;
export const conversationOf = (key) => key.slice(5, 19);

function addMessage(key, message) {
  if (!message) return;
  messages.set(key, message);
  const time = parseInt(key.slice(20, 29), 36);
  if (time < Date.now() + DAY) newest = Math.max(newest, time);
}

/** The keys and messages of a conversation in order. */
export function messagesOf(conversation) {
  const start = `chat/${conversation}/`;
  return [...messages].filter(([key]) => key.startsWith(start)).sort(([a], [b]) => (a < b ? -1 : 1));
}

/** The id and title (the start of its first question, or the name of its first picture) of each conversation, the one with the
 * newest message first. */
export function conversations() {
  const found = new Map();
  for (const [key, { role, content, pictures }] of [...messages].sort(([a], [b]) => (a < b ? -1 : 1))) {
    const id = conversationOf(key);
    const one = found.get(id) ?? { id };
    found.set(id, one);
    one.last = key.slice(20);
    if (role === "user") one.title ??= content.trim().slice(0, 60).split("\n")[0] || pictures?.[0].name;
  }
  return [...found.values()].sort((a, b) => (a.last < b.last ? 1 : -1));
}

export function put(key, message) {
  addMessage(key, message);
  unstored.add(key);
  storePending();
}

function storePending() {
  for (const key of unstored) if (write("localStorage", key, JSON.stringify(messages.get(key)))) unstored.delete(key);
  reportUnstored(unstored.size > 0);
}

/** The ids of the pictures of all stored messages, also of those that other tabs have just written. */
export function storedPictures() {
  const stored = Object.keys(localStorage).filter((key) => KEY.test(key)).map((key) => checked(parsed(localStorage.getItem(key))));
  return new Set(stored.flatMap((message) => message?.pictures ?? []).map(({ id }) => id));
}

/** Removes messages, and returns them with their keys, so that they can be restored. */
export function remove(keys) {
  const removed = keys.filter((key) => messages.has(key)).map((key) => [key, messages.get(key)]);
  for (const key of keys) {
    messages.delete(key);
    unstored.delete(key);
    erase(key);
  }
  // Storage may have free space now.
  storePending();
  return removed;
}

/** Converts the single conversation of earlier versions. If a part of it is invalid, its text is kept under another key. */
function convertOldConversation() {
  const text = read("localStorage", "conversation");
  if (text === null) return;
  const value = parsed(text);
  const list = Array.isArray(value) ? value.map(checked) : [null];
  erase("conversation");
  if (list.includes(null)) write("localStorage", "conversation.unreadable", text);
  const conversation = newId();
  for (const message of list) if (message) put(newKey(conversation), message);
}

/** Reads all messages. `onUnstored` is called with whether there are unstored messages, `onChange` with keys that other tabs
 * have written (true) or removed (false). */
export function load(onUnstored, onChange) {
  reportUnstored = onUnstored;
  try {
    for (const key of Object.keys(localStorage)) if (KEY.test(key)) addMessage(key, checked(parsed(localStorage.getItem(key))));
  } catch {
    // Storage is disabled.
  }
  convertOldConversation();
  addEventListener("storage", ({ storageArea, key, newValue }) => {
    if (key === null || storageArea === sessionStorage) return;
    if (KEY.test(key)) {
      if (newValue === null) messages.delete(key);
      else addMessage(key, checked(parsed(newValue)));
    }
    onChange(key, newValue !== null);
  });
}
