// What the browser keeps. Each message has a key of its own that one tab writes, so tabs add to each other's conversations
// and never overwrite them. Whatever is found there may be anything: what is no message is left where it is, and passed over.

const ID = /^[0-9a-z]{14}$/;
const KEY = /^chat\/[0-9a-z]{14}\/[0-9a-z]{14}$/;
const DAY = 86_400_000;

/** The messages of all conversations by key, whether or not the browser could keep them. */
const messages = new Map();
/** The keys of messages that the browser did not take: they live as long as the page. */
const unkept = new Set();
/** The time in the newest id. */
let newest = 0;
let tellUnkept = () => {};

/** What `area` ("localStorage" or "sessionStorage") has under `key`; null where it has nothing, or is off. */
export function read(area, key) {
  try {
    return window[area].getItem(key);
  } catch {
    return null;
  }
}

/** Whether `area` took it: it may be full, or off. */
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
    // Where storage is off, nothing is in it.
  }
}

/** The value of a JSON text, or null. */
export function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

/** The steps of an answer, each with the calls of tools that it ended in, where they are of a known form. */
function checkedSteps(steps) {
  const isText = (value) => typeof value === "string";
  const isMaybeText = (value) => value === undefined || isText(value);
  const isCall = (call) => [call?.id, call?.name, call?.arguments].every(isText) && [call.server, call.tool, call.result].every(isMaybeText);
  const isStep = (step) => isText(step?.content) && isMaybeText(step.reasoning_content) && Array.isArray(step.calls) && step.calls.every(isCall);
  return Array.isArray(steps) && steps.length && steps.every(isStep) ? { steps } : {};
}

/** A message of a known form, or null. `cut` says why it is not whole. */
function checked(value) {
  if (!["user", "assistant"].includes(value?.role) || typeof value.content !== "string") return null;
  const message = { role: value.role, content: value.content, ...checkedSteps(value.steps) };
  for (const name of ["reasoning_content", "numbers", "cut"]) if (typeof value[name] === "string") message[name] = value[name];
  return message;
}

/** Later ids sort behind earlier ones, those of this tab and those that it has seen. */
export function newId() {
  newest = Math.max(Date.now(), newest + 1);
  const random = Math.floor(Math.random() * 36 ** 5);
  return newest.toString(36).padStart(9, "0") + random.toString(36).padStart(5, "0");
}

export const isId = (text) => ID.test(text);
export const newKey = (conversation) => `chat/${conversation}/${newId()}`;
export const conversationOf = (key) => key.slice(5, 19);

function remember(key, message) {
  if (!message) return;
  messages.set(key, message);
  const time = parseInt(key.slice(20, 29), 36);
  if (time < Date.now() + DAY) newest = Math.max(newest, time);
}

/** The keys and messages of a conversation in their order. */
export function messagesOf(conversation) {
  const start = `chat/${conversation}/`;
  return [...messages].filter(([key]) => key.startsWith(start)).sort(([a], [b]) => (a < b ? -1 : 1));
}

/** The id and first words of each conversation, the one with the newest message first. */
export function conversations() {
  const found = new Map();
  for (const [key, { role, content }] of [...messages].sort(([a], [b]) => (a < b ? -1 : 1))) {
    const id = conversationOf(key);
    const one = found.get(id) ?? { id };
    found.set(id, one);
    one.last = key.slice(20);
    if (role === "user") one.title ??= content.trim().slice(0, 60).split("\n")[0];
  }
  return [...found.values()].sort((a, b) => (a.last < b.last ? 1 : -1));
}

export function put(key, message) {
  remember(key, message);
  unkept.add(key);
  keep();
}

function keep() {
  for (const key of unkept) if (write("localStorage", key, JSON.stringify(messages.get(key)))) unkept.delete(key);
  tellUnkept(unkept.size > 0);
}

/** Takes messages away and returns them with their keys, to be put back. */
export function remove(keys) {
  const removed = keys.filter((key) => messages.has(key)).map((key) => [key, messages.get(key)]);
  for (const key of keys) {
    messages.delete(key);
    unkept.delete(key);
    erase(key);
  }
  // There may be room now.
  keep();
  return removed;
}

/** The one conversation that earlier versions kept becomes one of many; what of it cannot be read is set aside. */
function takeOver() {
  const text = read("localStorage", "conversation");
  if (text === null) return;
  const value = parsed(text);
  const list = Array.isArray(value) ? value.map(checked) : [null];
  erase("conversation");
  if (list.includes(null)) write("localStorage", "conversation.unreadable", text);
  const conversation = newId();
  for (const message of list) if (message) put(newKey(conversation), message);
}

/** Reads everything. `onUnkept` hears whether there is something that the browser cannot keep, `onChange` of keys that
 * other tabs wrote or (with false) removed. */
export function load(onUnkept, onChange) {
  tellUnkept = onUnkept;
  try {
    for (const key of Object.keys(localStorage)) if (KEY.test(key)) remember(key, checked(parsed(localStorage.getItem(key))));
  } catch {
    // Storage is off.
  }
  takeOver();
  addEventListener("storage", ({ storageArea, key, newValue }) => {
    if (key === null || storageArea === sessionStorage) return;
    if (KEY.test(key)) {
      if (newValue === null) messages.delete(key);
      else remember(key, checked(parsed(newValue)));
    }
    onChange(key, newValue !== null);
  });
}
