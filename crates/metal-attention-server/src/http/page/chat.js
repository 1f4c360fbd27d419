// The conversations: what is shown, what is asked.
import { conversations, conversationOf, isId, load, messagesOf, newId, newKey, parsed, put, read, remove, write } from "./store.js";
import { $, View, failure, say, textTool } from "./view.js";

const UNFINISHED = "Not whole: it was left before its end, or another tab is still writing it.";
/** No event of a stream is as long. */
const LONGEST_LINE = 1 << 22;
/** How many messages of a long conversation are shown at first. */
const FEW = 200;

/** The answers that are being written, by conversation. They go on, whichever one is shown. */
const runs = new Map();
/** Why there is no answer, by conversation. */
const failures = new Map();
/** The messages that are shown, by key. */
const views = new Map();
/** The conversation that is shown. */
let current;
let most = FEW;

// Showing

const toEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };
const isAtEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;

/** Shows the current conversation. What has not changed stays as it is. */
function show() {
  const run = runs.get(current);
  const entries = messagesOf(current);
  if (run && !entries.some(([key]) => key === run.key)) entries.push([run.key, run.message]);
  const nodes = [];
  if (entries.length > most) {
    nodes.push(textTool("Show earlier messages", () => { most += FEW; show(); }));
    nodes[0].classList.add("earlier");
  }
  const old = new Set(views.keys());
  for (const [key, message] of entries.slice(-most)) {
    if (!views.has(key)) views.set(key, new View(message.role, actions(key)));
    views.get(key).show(message, run?.key === key);
    nodes.push(views.get(key).node);
    old.delete(key);
  }
  for (const key of old) views.delete(key);
  const failed = failures.get(current);
  if (failed && entries.length) nodes.push(failed);
  const log = $("log");
  if (nodes.length !== log.childNodes.length || nodes.some((node, i) => node !== log.childNodes[i])) log.replaceChildren(...nodes);
  log.setAttribute("aria-busy", String(Boolean(run)));
  $("empty").hidden = nodes.length > 0;
  $("delete").hidden = !entries.length;
  $("send").hidden = Boolean(run);
  $("stop").hidden = !run;
  showList();
}

/** Names the conversations; the list stays as it is while it says the same. */
function showList() {
  const list = conversations().map(({ id, title }) => ({ id, title: `${runs.has(id) ? "… " : ""}${title || "(no question)"}` }));
  $("conversations").hidden = !list.length;
  if (!list.some(({ id }) => id === current)) list.unshift({ id: current, title: "New conversation" });
  const state = JSON.stringify([current, list]);
  if ($("conversations").dataset.state === state) return;
  $("conversations").dataset.state = state;
  $("conversations").replaceChildren(...list.map(({ id, title }) => new Option(title, id, false, id === current)));
}

/** Shows a conversation. */
function turnTo(conversation) {
  current = conversation;
  most = FEW;
  write("sessionStorage", "conversation", conversation);
  show();
  toEnd();
}

/** What was done, with a way back where there is one. */
function tell(text, undo) {
  say(text);
  $("notice").hidden = !text;
  $("notice-text").textContent = text;
  $("undo").hidden = !undo;
  $("undo").onclick = undo;
}

// Changing

const actions = (key) => ({
  goOn: () => ask("Continue where you stopped."),
  again: () => answer(current),
  edit: () => edit(key),
  forget: () => {
    forget([key], "The message is deleted.");
    $("undo").focus();
  },
});

/** Takes messages away; they can be had back, in place of the messages `instead`. */
function forget(keys, text, instead = []) {
  const removed = remove(keys);
  dropRuns(keys);
  show();
  tell(text, () => {
    remove(instead);
    dropRuns(instead);
    for (const [key, message] of removed) put(key, message);
    if (removed.length) turnTo(conversationOf(removed[0][0]));
    tell("");
    $("input").focus();
  });
}

/** Ends answers that were deleted while they were written, or whose conversation was. */
function dropRuns(keys) {
  for (const [conversation, run] of runs) {
    if (!keys.includes(run.key) && messagesOf(conversation).length) continue;
    run.isDropped = true;
    run.ending.abort();
  }
}

/** Goes on with a part of a conversation as a new one: the whole one stays. */
function branch(entries) {
  const conversation = newId();
  for (const [, message] of entries) put(newKey(conversation), { ...message });
  turnTo(conversation);
  tell("This goes on in a new conversation. The one before is in the list, as it was.");
}

/** Has a question edited where it stands; the edited one goes on in a new conversation. */
function edit(key) {
  views.get(key).edit((text) => {
    const entries = messagesOf(current);
    branch(entries.slice(0, entries.findIndex(([other]) => other === key)));
    put(newKey(current), { role: "user", content: text });
    answer(current);
  });
}

/** Asks again with the newer half of what came before the question. */
function answerWithoutOlder() {
  const entries = question(current);
  branch(entries.slice(Math.ceil((entries.length - 1) / 2)));
  answer(current);
}

// Asking

function headers() {
  if (!/^[\x20-\x7e]*$/.test(apiKey)) throw new Error("The API key in the settings has characters that no key can have.");
  return { "Content-Type": "application/json", ...(apiKey ? { Authorization: `Bearer ${apiKey}` } : {}) };
}

/** A conversation up to its last question. */
function question(conversation) {
  const entries = messagesOf(conversation);
  return entries.slice(0, entries.findLastIndex(([, { role }]) => role === "user") + 1);
}

function requestBody(entries) {
  const messages = [];
  // Where messages were deleted, questions and answers still take turns: most templates want it.
  for (const [, { role, content }] of entries) {
    const last = messages.at(-1);
    if (last?.role === role) last.content += `\n\n${content}`;
    else if (last || role === "user") messages.push({ role, content });
  }
  if (settings.system.trim()) messages.unshift({ role: "system", content: settings.system });
  const body = {
    messages,
    temperature: Number(settings.temperature),
    top_p: Number(settings.topP),
    stream: true,
    stream_options: { include_usage: true },
  };
  const limit = parseInt(settings.maxTokens, 10);
  if (limit > 0) body.max_tokens = limit;
  return body;
}

/** An error that the server tells of; `isTooLong` where less text would help. */
function told(error, status) {
  const text = typeof error?.message === "string" ? error.message : `The server answered with status ${status}, and did not say why.`;
  return Object.assign(new Error(text), { isTooLong: status === 413 || error?.code === "context_length_exceeded" });
}

/** The objects of a stream of server-sent events, each of which is one line. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value = "\n" } = await reader.read();
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (!data || data === "[DONE]") continue;
      const event = parsed(data);
      if (event?.error) throw told(event.error, response.status);
      if (!event) throw new Error("The server sent what is no answer.");
      yield event;
    }
    if (done) return;
    if (rest.length > LONGEST_LINE) throw new Error("The server sent what is no answer.");
  }
}

/** Runs `action` soon, and then no sooner than after ten times as long as it took (a second at most): most of the time is
 * left to others. */
function paced(action, least) {
  let timer = 0;
  let pause = least;
  const now = () => {
    clearTimeout(timer);
    timer = 0;
    const start = performance.now();
    action();
    pause = Math.min(1000, Math.max(least, 10 * (performance.now() - start)));
  };
  return { now, soon: () => { timer ||= setTimeout(now, pause); }, stop: () => clearTimeout(timer) };
}

async function refusal(response, conversation) {
  if (response.status === 401 && conversation === current) {
    openSettings();
    $("key").focus();
  }
  return told(parsed(await response.text())?.error, response.status);
}

/** Has the model answer the last question of a conversation, in place of the answers that it has. */
async function answer(conversation) {
  const entries = question(conversation);
  if (runs.has(conversation) || !entries.length) return;
  const replaced = messagesOf(conversation).slice(entries.length).map(([key]) => key);
  const message = { role: "assistant", content: "", cut: UNFINISHED };
  const key = newKey(conversation);
  const hasText = () => Boolean(message.content || message.reasoning_content);
  const draw = paced(() => {
    if (conversation !== current) return;
    const follow = isAtEnd();
    views.get(key)?.grow();
    if (follow) toEnd();
  }, 16);
  // What has come is kept as it comes.
  const save = paced(() => {
    if (run.isDropped || !hasText()) return;
    put(key, message);
    if (replaced.length) forget(replaced.splice(0), "This is in place of the answer before.", [key]);
  }, 300);
  const run = { key, message, save, ending: new AbortController(), isDropped: false };
  const { signal } = run.ending;
  runs.set(conversation, run);
  failures.delete(conversation);
  show();
  toEnd();
  say("The model is answering.");
  const start = performance.now();
  let first = null;
  let usage = null;
  let reason = null;
  let error = null;
  const body = requestBody(entries);
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
    if (!response.ok) throw await refusal(response, conversation);
    for await (const event of events(response)) {
      const choice = event.choices?.[0];
      usage = event.usage ?? usage;
      reason = choice?.finish_reason ?? reason;
      const { content, reasoning_content } = choice?.delta ?? {};
      if (reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + reasoning_content;
      if (content) message.content += message.content ? content : content.trimStart();
      if (!content && !reasoning_content) continue;
      first ??= performance.now();
      draw.soon();
      save.soon();
    }
    if (!reason) error = new Error("The connection ended before the answer did.");
  } catch (caught) {
    const isLost = caught instanceof TypeError;
    error = isLost ? new Error(first === null ? "The server cannot be reached." : "The connection was lost.") : caught;
  }
  draw.stop();
  runs.delete(conversation);
  if (signal.aborted) message.cut = "Stopped before its end.";
  else if (error) message.cut = `Cut off: ${error.message}`;
  else if (reason === "stop") delete message.cut;
  else message.cut = cutBy(reason, usage?.completion_tokens >= body.max_tokens);
  message.numbers = numbers(usage, start, first);
  save.now();
  if (!hasText() && !signal.aborted) {
    error ??= new Error("The model ended its answer without a word.");
    failures.set(conversation, failed(conversation, error));
  }
  const follow = isAtEnd();
  show();
  if (conversation !== current) return;
  if (follow) toEnd();
  say(signal.aborted ? "Stopped." : (message.cut ?? "The answer is complete."));
  if (!$("settings").open) $("input").focus();
}

/** What went wrong where nothing came, and what can be done about it. */
function failed(conversation, { message, isTooLong }) {
  const again = () => answer(conversation);
  if (!isTooLong) return failure(message, again);
  const text = message.replace(/\.$/, "");
  if (question(conversation).length < 2) {
    return failure(`${text}. Edit the message to make it shorter; a system message (in the settings) takes room, too.`, again);
  }
  const advice = "Delete or edit messages, ask without the older half, or begin a new conversation.";
  return failure(`${text}. ${advice}`, again, [textTool("Ask without the older half", answerWithoutOlder)]);
}

/** Why an answer that ended for this reason is not whole. */
function cutBy(reason, isLimited) {
  if (reason !== "length") return `Cut off by the server (${reason}).`;
  if (isLimited) return "Cut off: the settings allow no more tokens in an answer.";
  return "Cut off: the model's context is full. Delete or edit messages to make room.";
}

function numbers(usage, start, first) {
  if (first === null) return "";
  const wait = `first after ${((first - start) / 1000).toFixed(2)} s`;
  if (!usage) return wait;
  const n = usage.completion_tokens;
  const seconds = (performance.now() - first) / 1000;
  const speed = n > 1 && seconds > 0 ? `, ${((n - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${n} tokens${speed}, ${wait}`;
}

/** Asks something in the current conversation. */
function ask(text) {
  put(newKey(current), { role: "user", content: text });
  tell("");
  answer(current);
}

// Writing

function send() {
  const text = $("input").value;
  if (runs.has(current) || !text.trim()) return;
  $("input").value = "";
  grow();
  ask(text);
}

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  $("send").disabled = !input.value.trim();
}

$("input").addEventListener("input", grow);
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => runs.get(current)?.ending.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !$("settings").open) runs.get(current)?.ending.abort();
});
$("ideas").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") ask(event.target.textContent);
});
$("new").addEventListener("click", () => {
  if (messagesOf(current).length) turnTo(newId());
  say("New conversation.");
  $("input").focus();
});
$("conversations").addEventListener("change", () => turnTo($("conversations").value));
$("delete").addEventListener("click", () => {
  runs.get(current)?.save.now();
  forget(messagesOf(current).map(([key]) => key), "The conversation is deleted.");
  turnTo(conversations()[0]?.id ?? newId());
  $("undo").focus();
});
const saveAll = () => runs.forEach(({ save }) => save.now());
addEventListener("pagehide", saveAll);
document.addEventListener("visibilitychange", saveAll);

// Settings

const DEFAULTS = { system: "", temperature: 0.8, topP: 0.95, maxTokens: "" };
const FIELDS = { system: "system", temperature: "temperature", topP: "top-p", maxTokens: "max-tokens" };

let settings = keptSettings();
let apiKey = read("sessionStorage", "key") ?? "";

/** The settings that were kept; the default where one is none. */
function keptSettings() {
  const kept = parsed(read("localStorage", "settings")) ?? {};
  const within = (name, least, most) => {
    const isNumber = ["number", "string"].includes(typeof kept[name]) && kept[name] !== "" && kept[name] >= least && kept[name] <= most;
    return isNumber ? kept[name] : DEFAULTS[name];
  };
  return {
    system: typeof kept.system === "string" ? kept.system : DEFAULTS.system,
    temperature: within("temperature", 0, 2),
    topP: within("topP", 0.05, 1),
    maxTokens: within("maxTokens", 1, 1e6),
  };
}

const keepSettings = () => write("localStorage", "settings", JSON.stringify(settings));

function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) $(id).value = settings[name];
  for (const id of ["temperature", "top-p"]) $(`${id}-value`).textContent = Number($(id).value).toFixed(2);
  $("key").value = apiKey;
}

function openSettings() {
  showSettings();
  if (!$("settings").open) $("settings").showModal();
}

$("open-settings").addEventListener("click", openSettings);
for (const [name, id] of Object.entries(FIELDS)) {
  $(id).addEventListener("input", () => {
    settings[name] = $(id).value;
    keepSettings();
    const shown = $(`${id}-value`);
    if (shown) shown.textContent = Number($(id).value).toFixed(2);
  });
}
$("key").addEventListener("input", () => {
  apiKey = $("key").value.trim();
  write("sessionStorage", "key", apiKey);
});
$("settings").addEventListener("close", () => {
  showModel();
  $("input").focus();
});
$("reset").addEventListener("click", () => {
  settings = { ...DEFAULTS };
  keepSettings();
  showSettings();
});

const darkWanted = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (darkWanted.matches ? "dark" : "light")) === "dark";
$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  write("localStorage", "theme", JSON.stringify(theme));
});
const theme = parsed(read("localStorage", "theme"));
if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;

// The model's name, as soon as there is one to tell.
let asking = 0;
async function showModel() {
  clearTimeout(asking);
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return;
    const model = (await response.json()).data[0];
    $("model").textContent = model.meta ? model.id : `${model.id} is loading`;
    document.title = `${model.id}, metal-attention`;
    if (!model.meta) asking = setTimeout(showModel, 1000);
  } catch {
    asking = setTimeout(showModel, 3000);
  }
}

load((isUnkept) => { $("unkept").hidden = !isUnkept; }, (key, isThere) => {
  if (key === "settings") settings = keptSettings();
  if (!isThere) dropRuns([key]);
  const follow = isAtEnd();
  show();
  if (follow) toEnd();
});
const last = read("sessionStorage", "conversation") ?? "";
turnTo(isId(last) ? last : (conversations()[0]?.id ?? newId()));
showModel();
grow();
$("input").focus();
