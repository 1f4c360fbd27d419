// The chat page: shows the current conversation, sends questions to /v1/chat/completions, and writes the streamed answers.
//
// A conversation is a list of messages in the browser's storage (store.js). A run is an answer that is being written; it
// continues while another conversation is shown. Views (view.js) are the elements of the shown messages.
import { hasPictures, isReading, listen, offerPictures, takePictures } from "./attachments.js";
import { keepPictures, open, partOf } from "./pictures.js";
import { conversations, conversationOf, isId, load, messagesOf, newId, newKey, parsed, put, read, remove, write } from "./store.js";
import { MAX_ROUNDS, addCalls, callTool, functionsOf, hasTools, listServers } from "./tools.js";
import { $, View, failure, say, textTool, visible } from "./view.js";

const UNFINISHED = "Not whole: it was left before its end, or another tab is still writing it.";
/** Maximum characters of an event of a stream. */
const LONGEST_LINE = 1 << 22;
/** The number of messages of a long conversation that are shown at first. */
const SHOWN_AT_FIRST = 200;

/** The runs, by conversation. */
const runs = new Map();
/** The elements of errors without an answer, by conversation. */
const failures = new Map();
/** The views of the shown messages, by key. */
const views = new Map();
/** The id of the shown conversation. */
let current;
/** The maximum number of shown messages. */
let nShown = SHOWN_AT_FIRST;

// Showing

const toEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };
const isAtEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;

/** Shows the current conversation. Elements of unchanged messages are reused. */
function show() {
  const run = runs.get(current);
  const entries = messagesOf(current);
  if (run && !entries.some(([key]) => key === run.key)) entries.push([run.key, run.message]);
  const nodes = [];
  if (entries.length > nShown) {
    nodes.push(textTool("Show earlier messages", () => { nShown += SHOWN_AT_FIRST; show(); }));
    nodes[0].classList.add("earlier");
  }
  const old = new Set(views.keys());
  for (const [key, message] of entries.slice(-nShown)) {
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

/** Fills the list of conversations, unless it is unchanged. */
function showList() {
  const list = conversations().map(({ id, title }) => ({ id, title: `${runs.has(id) ? "… " : ""}${title || "(no question)"}` }));
  $("conversations").hidden = !list.length;
  if (!list.some(({ id }) => id === current)) list.unshift({ id: current, title: "New conversation" });
  const state = JSON.stringify([current, list]);
  if ($("conversations").dataset.state === state) return;
  $("conversations").dataset.state = state;
  $("conversations").replaceChildren(...list.map(({ id, title }) => new Option(title, id, false, id === current)));
}

/** Switches to another conversation. */
function switchTo(conversation) {
  current = conversation;
  nShown = SHOWN_AT_FIRST;
  write("sessionStorage", "conversation", conversation);
  show();
  toEnd();
}

/** Shows a notice; `undo` is the action of its Undo button, if there is one. */
function notify(text, undo) {
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

/** Deletes messages, with a notice whose Undo button restores them in place of the messages `instead`. */
function forget(keys, text, instead = []) {
  const removed = remove(keys);
  dropRuns(keys);
  show();
  notify(text, () => {
    remove(instead);
    dropRuns(instead);
    for (const [key, message] of removed) {
      put(key, message);
      keepPictures(message.pictures);
    }
    if (removed.length) switchTo(conversationOf(removed[0][0]));
    notify("");
    $("input").focus();
  });
}

/** Aborts runs whose answer or conversation was deleted. */
function dropRuns(keys) {
  for (const [conversation, run] of runs) {
    if (!keys.includes(run.key) && messagesOf(conversation).length) continue;
    run.isDropped = true;
    run.ending.abort();
  }
}

/** Copies a part of a conversation to a new one, and switches to that. */
function branch(entries) {
  const conversation = newId();
  for (const [, message] of entries) put(newKey(conversation), { ...message });
  switchTo(conversation);
  notify("This goes on in a new conversation. The one before is in the list, as it was.");
}

/** Shows an editor in place of a question; the edited question continues in a new conversation. */
function edit(key) {
  views.get(key).edit((text) => {
    const entries = messagesOf(current);
    branch(entries.slice(0, entries.findIndex(([other]) => other === key)));
    const { pictures } = entries.find(([other]) => other === key)[1];
    put(newKey(current), { role: "user", content: text, ...(pictures ? { pictures } : {}) });
    answer(current);
  });
}

/** Repeats the last question in a new conversation with the newer half of the messages before it. */
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

/** The messages of a conversation up to its last question. */
function question(conversation) {
  const entries = messagesOf(conversation);
  return entries.slice(0, entries.findLastIndex(([, { role }]) => role === "user") + 1);
}

/** The messages of the request for one message: an answer with tool calls is several messages. The content of a message with
 * pictures is a list of parts. */
async function expanded({ role, content, pictures = [], steps = [] }) {
  const list = steps.flatMap(({ calls, ...text }) => [
    { role, ...text, tool_calls: calls.map(({ id, name, arguments: values }) => ({ id, type: "function", function: { name, arguments: values } })) },
    ...calls.map(({ id, name, result }) => ({ role: "tool", tool_call_id: id, name, content: result ?? "The tool was not called." })),
  ]);
  const parts = (await Promise.all(pictures.map(partOf))).filter(Boolean);
  if (parts.length) list.push({ role, content: [...parts, ...textParts(content)] });
  else if (content || !list.length) list.push({ role, content });
  return list;
}

/** A message's content as a list of parts. */
const textParts = (content) => (typeof content !== "string" ? content : content ? [{ type: "text", text: content }] : []);

/** The contents of two messages as one. */
function merged(first, second) {
  if (typeof first === "string" && typeof second === "string") return `${first}\n\n${second}`;
  return [...textParts(first), { type: "text", text: "\n\n" }, ...textParts(second)];
}

async function requestBody(entries) {
  const messages = [];
  // After deletions, neighbouring messages of one role are merged: most templates require alternating roles.
  for (const message of (await Promise.all(entries.map(([, entry]) => expanded(entry)))).flat()) {
    const last = messages.at(-1);
    const isText = message.role !== "tool" && !message.tool_calls;
    if (isText && last?.role === message.role && !last.tool_calls) last.content = merged(last.content, message.content);
    else if (last || message.role === "user") messages.push(message);
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
  const tools = functionsOf(settings.servers);
  if (tools.length) body.tools = tools;
  return body;
}

/** An Error for an error response of the server. `isTooLong`: a shorter conversation would be accepted. */
function serverError(error, status) {
  const text = typeof error?.message === "string" ? error.message : `The server answered with status ${status}, and did not say why.`;
  return Object.assign(new Error(text), { isTooLong: status === 413 || error?.code === "context_length_exceeded" });
}

/** Yields the objects of a stream of server-sent events, each of which is one line. */
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
      if (event?.error) throw serverError(event.error, response.status);
      if (!event) throw new Error("The server sent what is no answer.");
      yield event;
    }
    if (done) return;
    if (rest.length > LONGEST_LINE) throw new Error("The server sent what is no answer.");
  }
}

/** Limits how often `action` runs: the pause is ten times its duration, at least `minPause` and at most 1000 milliseconds.
 * Returns functions that run it now, after the pause, or not at all. */
function paced(action, minPause) {
  let timer = 0;
  let pause = minPause;
  const now = () => {
    clearTimeout(timer);
    timer = 0;
    const start = performance.now();
    action();
    pause = Math.min(1000, Math.max(minPause, 10 * (performance.now() - start)));
  };
  return { now, soon: () => { timer ||= setTimeout(now, pause); }, stop: () => clearTimeout(timer) };
}

async function refusal(response, conversation) {
  if (response.status === 401 && conversation === current) {
    openSettings();
    $("key").focus();
  }
  return serverError(parsed(await response.text())?.error, response.status);
}

/** Sends one request of a run, and appends the streamed text to the run's message. Returns the reason for its end, the tool
 * calls, and whether the limit of tokens ended it. */
async function complete(run, body) {
  const { message, count } = run;
  const { signal } = run.ending;
  const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw await refusal(response, run.conversation);
  const calls = [];
  let first = null;
  let usage = null;
  let reason = null;
  for await (const event of events(response)) {
    const choice = event.choices?.[0];
    usage = event.usage ?? usage;
    reason = choice?.finish_reason ?? reason;
    const { content, reasoning_content, tool_calls } = choice?.delta ?? {};
    if (tool_calls) addCalls(calls, tool_calls);
    if (reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + reasoning_content;
    if (content) message.content += message.content ? content : content.trimStart();
    if (!content && !reasoning_content && !tool_calls) continue;
    first ??= performance.now();
    count.first ??= first;
    run.draw.soon();
    run.save.soon();
  }
  if (!reason) throw new Error("The connection ended before the answer did.");
  if (usage && first !== null) {
    count.tokens += usage.completion_tokens;
    count.seconds += (performance.now() - first) / 1000;
    count.requests += 1;
  }
  return { reason, calls: reason === "tool_calls" ? calls : [], isLimited: usage?.completion_tokens >= body.max_tokens };
}

/** Generates the answer of a run: sends a request, calls the requested tools, and repeats until there are none. Returns the
 * reason why the answer is incomplete; undefined if it is complete. */
async function writeAnswer(run, entries) {
  const { message } = run;
  // The MCP servers may still be starting.
  await unlessAborted(servers, run.ending.signal);
  for (let round = 0; round < MAX_ROUNDS; round++) {
    const { reason, calls, isLimited } = await complete(run, await requestBody(message.steps ? [...entries, [run.key, message]] : entries));
    if (!calls.length) return reason === "stop" ? undefined : cutBy(reason, isLimited);
    const { content, reasoning_content } = message;
    message.steps = [...(message.steps ?? []), { content, ...(reasoning_content ? { reasoning_content } : {}), calls }];
    message.content = "";
    delete message.reasoning_content;
    for (const call of calls) {
      run.draw.now();
      const consent = () => consentTo(call, run);
      await callTool(call, settings.servers, { headers: headers(), signal: run.ending.signal, consent });
      run.save.now();
    }
    run.draw.now();
  }
  return `The model called tools ${MAX_ROUNDS} times in a row, and is not asked again.`;
}

/** Waits for a promise; fails as soon as `signal` is aborted. */
function unlessAborted(promise, signal) {
  const aborted = new Promise((_, reject) => { signal.addEventListener("abort", () => reject(signal.reason), { once: true }); });
  return Promise.race([promise, aborted]);
}

/** Waits for the user's consent to a call: the call's view shows a button for each decision. */
async function consentTo(call, run) {
  try {
    const answered = new Promise((resolve) => { call.decide = resolve; });
    run.draw.now();
    if (run.conversation === current) {
      say(`The model wants to call the tool ${call.tool} of ${call.server}.`);
      // The focus is not on a button: a key that is meant for something else must not be a consent.
      if (!$("input").value) views.get(run.key)?.focusConsent();
    }
    return await unlessAborted(answered, run.ending.signal);
  } finally {
    delete call.decide;
    run.draw.now();
  }
}

/** Starts a run that answers the last question of a conversation and replaces its present answers. */
async function answer(conversation) {
  const entries = question(conversation);
  if (runs.has(conversation) || !entries.length) return;
  const replaced = messagesOf(conversation).slice(entries.length).map(([key]) => key);
  const message = { role: "assistant", content: "", cut: UNFINISHED };
  const key = newKey(conversation);
  const hasText = () => Boolean(message.content || message.reasoning_content || message.steps);
  const draw = paced(() => {
    if (conversation !== current) return;
    const follow = isAtEnd();
    views.get(key)?.grow();
    if (follow) toEnd();
  }, 16);
  // The answer is saved while it is written.
  const save = paced(() => {
    if (run.isDropped || !hasText()) return;
    put(key, message);
    if (replaced.length) forget(replaced.splice(0), "This is in place of the answer before.", [key]);
  }, 300);
  const count = { start: performance.now(), first: null, tokens: 0, seconds: 0, requests: 0 };
  const run = { conversation, key, message, draw, save, count, ending: new AbortController(), isDropped: false };
  const { signal } = run.ending;
  runs.set(conversation, run);
  failures.delete(conversation);
  show();
  toEnd();
  say("The model is answering.");
  let cut;
  let error = null;
  try {
    cut = await writeAnswer(run, entries);
  } catch (caught) {
    const isLost = caught instanceof TypeError;
    error = isLost ? new Error(count.first === null ? "The server cannot be reached." : "The connection was lost.") : caught;
    cut = signal.aborted ? "Stopped before its end." : `Cut off: ${error.message}`;
  }
  draw.stop();
  runs.delete(conversation);
  if (cut) message.cut = cut;
  else delete message.cut;
  message.numbers = numbers(count);
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

/** The element of an error without an answer, with possible remedies. */
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

/** The text that explains why an answer that ended with `reason` is incomplete. */
function cutBy(reason, isLimited) {
  if (reason !== "length") return `Cut off by the server (${reason}).`;
  if (isLimited) return "Cut off: the settings allow no more tokens in an answer.";
  return "Cut off: the model's context is full. Delete or edit messages to make room.";
}

/** The text with the number of tokens and the times of an answer. */
function numbers({ start, first, tokens, seconds, requests }) {
  if (first === null) return "";
  const wait = `first after ${((first - start) / 1000).toFixed(2)} s`;
  if (!requests) return wait;
  const speed = tokens > requests && seconds > 0 ? `, ${((tokens - requests) / seconds).toFixed(1)} tokens/s` : "";
  return `${tokens} tokens${speed}, ${wait}`;
}

/** Appends a question to the current conversation, and answers it. */
function ask(text, pictures = []) {
  put(newKey(current), { role: "user", content: text, ...(pictures.length ? { pictures } : {}) });
  keepPictures(pictures);
  notify("");
  answer(current);
}

// Writing

function send() {
  const text = $("input").value;
  if (runs.has(current) || !isReady()) return;
  $("input").value = "";
  const pictures = takePictures();
  grow();
  ask(text, pictures);
}

/** Whether there is a message to send: a text or pictures, all of which have been read. */
const isReady = () => !isReading() && (Boolean($("input").value.trim()) || hasPictures());
const showReady = () => { $("send").disabled = !isReady(); };

function grow() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  showReady();
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
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) runs.get(current)?.ending.abort();
});
$("ideas").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") ask(event.target.textContent);
});
$("new").addEventListener("click", () => {
  if (messagesOf(current).length) switchTo(newId());
  say("New conversation.");
  $("input").focus();
});
$("conversations").addEventListener("change", () => switchTo($("conversations").value));
$("delete").addEventListener("click", () => {
  runs.get(current)?.save.now();
  forget(messagesOf(current).map(([key]) => key), "The conversation is deleted.");
  switchTo(conversations()[0]?.id ?? newId());
  $("undo").focus();
});
const saveAll = () => runs.forEach(({ save }) => save.now());
addEventListener("pagehide", saveAll);
document.addEventListener("visibilitychange", saveAll);

// Settings

/** Default settings. `servers`: the MCP servers whose tools the model may call. */
const DEFAULTS = { system: "", temperature: 0.8, topP: 0.95, maxTokens: "", servers: [] };
const FIELDS = { system: "system", temperature: "temperature", topP: "top-p", maxTokens: "max-tokens" };

let settings = savedSettings();
let apiKey = read("sessionStorage", "key") ?? "";

/** The saved settings, with the default for each missing or invalid one. */
function savedSettings() {
  const saved = parsed(read("localStorage", "settings")) ?? {};
  const within = (name, min, max) => {
    const isNumber = ["number", "string"].includes(typeof saved[name]) && saved[name] !== "" && saved[name] >= min && saved[name] <= max;
    return isNumber ? saved[name] : DEFAULTS[name];
  };
  return {
    system: typeof saved.system === "string" ? saved.system : DEFAULTS.system,
    temperature: within("temperature", 0, 2),
    topP: within("topP", 0.05, 1),
    maxTokens: within("maxTokens", 1, 1e6),
    servers: Array.isArray(saved.servers) ? saved.servers.filter((name) => typeof name === "string") : DEFAULTS.servers,
  };
}

const saveSettings = () => write("localStorage", "settings", JSON.stringify(settings));

function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) $(id).value = settings[name];
  for (const id of ["temperature", "top-p"]) $(`${id}-value`).textContent = Number($(id).value).toFixed(2);
  $("key").value = apiKey;
  for (const box of $("servers").querySelectorAll("input")) box.checked = settings.servers.includes(box.value);
}

/** Resolves when the MCP servers have been listed. */
let servers = Promise.resolve();

/** Lists the MCP servers in the settings, each with a checkbox that offers its tools to the model. */
function showServers() {
  $("tools").hidden = !hasTools;
  if (!hasTools) return;
  $("servers").textContent = "Starting the servers …";
  servers = (async () => listServers(headers()))().then(
    (listed) => $("servers").replaceChildren(...listed.map(serverNode)),
    ({ message }) => { $("servers").textContent = message; },
  );
}

function serverNode([name, { tools, problems }]) {
  const node = document.createElement("div");
  const label = document.createElement("label");
  const box = document.createElement("input");
  Object.assign(box, { type: "checkbox", value: name, checked: settings.servers.includes(name) });
  box.addEventListener("change", () => {
    const others = settings.servers.filter((other) => other !== name);
    settings.servers = box.checked ? [...others, name] : others;
    saveSettings();
  });
  label.append(box, name);
  node.append(label);
  for (const text of [tools.map(visible).join(", "), ...problems]) {
    const note = document.createElement("p");
    note.className = "note";
    note.textContent = text;
    if (text) node.append(note);
  }
  return node;
}

function openSettings() {
  showServers();
  showSettings();
  if (!$("settings").open) $("settings").showModal();
}

$("open-settings").addEventListener("click", openSettings);
for (const [name, id] of Object.entries(FIELDS)) {
  $(id).addEventListener("input", () => {
    settings[name] = $(id).value;
    saveSettings();
    const shown = $(`${id}-value`);
    if (shown) shown.textContent = Number($(id).value).toFixed(2);
  });
}
$("key").addEventListener("input", () => {
  apiKey = $("key").value.trim();
  write("sessionStorage", "key", apiKey);
});
// The list may differ with another key.
$("key").addEventListener("change", showServers);
$("settings").addEventListener("close", () => {
  showModel();
  $("input").focus();
});
$("reset").addEventListener("click", () => {
  settings = { ...DEFAULTS };
  saveSettings();
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

/** The timer of the next request in `showModel`. */
let modelTimer = 0;
/** Shows the model's name; repeats until the model is loaded. */
async function showModel() {
  clearTimeout(modelTimer);
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return;
    const model = (await response.json()).data[0];
    $("model").textContent = model.meta ? model.id : `${model.id} is loading`;
    document.title = `${model.id}, metal-attention`;
    offerPictures(model.meta?.vision);
    if (!model.meta) modelTimer = setTimeout(showModel, 1000);
  } catch {
    modelTimer = setTimeout(showModel, 3000);
  }
}

/** Whether there are messages and pictures that are not stored. */
const unstored = { messages: false, pictures: false };
const reportUnstored = (what) => (isUnstored) => {
  unstored[what] = isUnstored;
  $("unkept").hidden = !(unstored.messages || unstored.pictures);
};

listen(notify, showReady);
$("large").addEventListener("click", ({ target }) => {
  if (target === $("large") || target === $("large-image")) $("large").close();
});
load(reportUnstored("messages"), (key, isThere) => {
  if (key === "settings") settings = savedSettings();
  if (!isThere) dropRuns([key]);
  const follow = isAtEnd();
  show();
  if (follow) toEnd();
});
open(reportUnstored("pictures"));
const last = read("sessionStorage", "conversation") ?? "";
switchTo(isId(last) ? last : (conversations()[0]?.id ?? newId()));
showModel();
if (settings.servers.length) showServers();
grow();
$("input").focus();
