// The conversation: what is kept, what is shown, what is asked.
import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const DEFAULTS = { system: "", temperature: 0.8, topP: 0.95, maxTokens: "" };

const kept = (key, otherwise) => {
  try {
    return JSON.parse(localStorage.getItem(key)) ?? otherwise;
  } catch {
    return otherwise;
  }
};
const keep = (key, value) => {
  try {
    localStorage.setItem(key, JSON.stringify(value));
  } catch {
    // Where storage is full or off, the conversation lives as long as the page.
  }
};

/** Messages as the server takes them; those of the model also have `numbers`. */
let messages = kept("conversation", []);
let settings = { ...DEFAULTS, ...kept("settings", {}) };
/** Ends the answer that is being written; null where there is none. */
let running = null;

// Showing

function svg(path) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  node.setAttribute("viewBox", "0 0 24 24");
  node.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  node.append(line);
  return node;
}

function tool(label, path, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(svg(path));
  button.addEventListener("click", () => action(button));
  return button;
}

function bubble(kind, speaker) {
  const node = document.createElement("article");
  node.className = `message ${kind}`;
  node.setAttribute("aria-label", speaker);
  const body = document.createElement("div");
  body.className = "body";
  node.append(body);
  $("log").append(node);
  return node;
}

function fill(node, message) {
  const body = node.querySelector(".body");
  const wasOpen = body.querySelector("details")?.open ?? false;
  const parts = [];
  if (message.reasoning_content) {
    const details = document.createElement("details");
    details.className = "thoughts";
    details.open = wasOpen || !message.content;
    const summary = document.createElement("summary");
    summary.textContent = "Thoughts";
    details.append(summary, markdown(message.reasoning_content));
    parts.push(details);
  }
  parts.push(markdown(message.content));
  body.replaceChildren(...parts);
}

function addTools(node, message, isLast) {
  node.querySelector(".tools")?.remove();
  const bar = document.createElement("div");
  bar.className = "tools";
  bar.append(tool("Copy this answer", "M9 9h10v10H9zM5 15V5h10", async (button) => {
    await navigator.clipboard?.writeText(message.content);
    say("Copied.");
    button.replaceChildren(svg("M5 13l4 4L19 7"));
    setTimeout(() => button.replaceChildren(svg("M9 9h10v10H9zM5 15V5h10")), 1500);
  }));
  if (isLast) bar.append(tool("Answer again", "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6", regenerate));
  if (message.numbers) {
    const numbers = document.createElement("span");
    numbers.className = "numbers";
    numbers.textContent = message.numbers;
    bar.append(numbers);
  }
  node.append(bar);
}

function showAll() {
  $("log").replaceChildren();
  $("empty").hidden = messages.length > 0;
  messages.forEach((message, i) => {
    if (message.role === "user") {
      bubble("user", "You").querySelector(".body").textContent = message.content;
    } else {
      const node = bubble("assistant", "Model");
      fill(node, message);
      addTools(node, message, i === messages.length - 1);
    }
  });
  toEnd();
}

function showError(text) {
  const node = bubble("error", "Error");
  node.setAttribute("role", "alert");
  node.querySelector(".body").textContent = text;
  if (messages.at(-1)?.role === "user") {
    const bar = document.createElement("div");
    bar.className = "tools";
    bar.append(tool("Try again", "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6", answer));
    node.append(bar);
  }
  toEnd();
}

const say = (text) => { $("status").textContent = text; };
const toEnd = () => { $("scroll").scrollTop = $("scroll").scrollHeight; };
const isAtEnd = () => $("scroll").scrollHeight - $("scroll").scrollTop - $("scroll").clientHeight < 80;

// Asking

function headers() {
  const key = sessionStorage.getItem("key");
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

function requestBody() {
  const asked = messages.map(({ role, content }) => ({ role, content }));
  const body = {
    messages: settings.system.trim() ? [{ role: "system", content: settings.system }, ...asked] : asked,
    temperature: Number(settings.temperature),
    top_p: Number(settings.topP),
    stream: true,
    stream_options: { include_usage: true },
  };
  const most = parseInt(settings.maxTokens, 10);
  if (most > 0) body.max_tokens = most;
  return JSON.stringify(body);
}

/** The objects of a stream of server-sent events. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    text += value;
    let end;
    while ((end = text.indexOf("\n\n")) >= 0) {
      const data = text.slice(0, end).split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
      text = text.slice(end + 2);
      if (!data.length || data[0] === "[DONE]") continue;
      const event = JSON.parse(data.join("\n"));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function problem(response) {
  let text = `The server answered with status ${response.status}.`;
  try {
    text = (await response.json()).error.message;
  } catch {
    // Not the server's own answer.
  }
  if (response.status === 401) {
    openSettings();
    $("key").focus();
  }
  return new Error(text);
}

/** Has the model answer the last message. */
async function answer() {
  if (running) return;
  showAll();
  running = new AbortController();
  const { signal } = running;
  setBusy(true);
  say("The model is answering.");
  const node = bubble("assistant", "Model");
  node.classList.add("writing");
  toEnd();
  const message = { role: "assistant", content: "" };
  const start = performance.now();
  let first = null;
  let usage = null;
  let frame = 0;
  const draw = () => {
    frame = 0;
    const follow = isAtEnd();
    fill(node, message);
    if (follow) toEnd();
  };
  let error = null;
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: headers(), body: requestBody(), signal });
    if (!response.ok) throw await problem(response);
    for await (const event of events(response)) {
      usage = event.usage ?? usage;
      const delta = event.choices[0]?.delta ?? {};
      if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
      if (delta.content) message.content += delta.content;
      if (delta.content || delta.reasoning_content) first ??= performance.now();
      frame ||= requestAnimationFrame(draw);
    }
  } catch (caught) {
    if (caught.name !== "AbortError") error = caught;
  }
  cancelAnimationFrame(frame);
  const stopped = signal.aborted;
  running = null;
  node.classList.remove("writing");
  if (message.content || message.reasoning_content || (usage && !error)) {
    message.content = message.content.trimStart();
    message.numbers = numbers(usage, start, first, stopped);
    messages.push(message);
    keep("conversation", messages);
    draw();
    addTools(node, message, true);
  } else {
    node.remove();
  }
  setBusy(false);
  if (error) showError(error instanceof TypeError ? "The server cannot be reached." : error.message);
  say(error ? "" : stopped ? "Stopped." : "The answer is complete.");
  if (!$("settings").open) $("input").focus();
}

function numbers(usage, start, first, stopped) {
  if (first === null) return stopped ? "stopped" : "";
  const wait = `first after ${((first - start) / 1000).toFixed(2)} s`;
  if (!usage) return stopped ? `stopped, ${wait}` : wait;
  const n = usage.completion_tokens;
  const seconds = (performance.now() - first) / 1000;
  const speed = n > 1 && seconds > 0 ? `, ${((n - 1) / seconds).toFixed(1)} tokens/s` : "";
  return `${n} tokens${speed}, ${wait}`;
}

function ask(text) {
  if (running || !text.trim()) return;
  messages.push({ role: "user", content: text });
  keep("conversation", messages);
  $("input").value = "";
  grow();
  answer();
}

function regenerate() {
  if (running) return;
  while (messages.length && messages.at(-1).role === "assistant") messages.pop();
  keep("conversation", messages);
  answer();
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("log").setAttribute("aria-busy", String(busy));
  grow();
}

// Writing

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
    ask($("input").value);
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  ask($("input").value);
});
$("stop").addEventListener("click", () => running?.abort());
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !$("settings").open) running.abort();
});
$("ideas").addEventListener("click", (event) => {
  if (event.target.tagName === "BUTTON") ask(event.target.textContent);
});
$("new").addEventListener("click", () => {
  running?.abort();
  messages = [];
  keep("conversation", messages);
  showAll();
  say("New conversation.");
  $("input").focus();
});

// Settings

const FIELDS = { system: "system", temperature: "temperature", topP: "top-p", maxTokens: "max-tokens" };

function showSettings() {
  for (const [name, id] of Object.entries(FIELDS)) $(id).value = settings[name];
  for (const id of ["temperature", "top-p"]) $(`${id}-value`).textContent = Number($(id).value).toFixed(2);
  $("key").value = sessionStorage.getItem("key") ?? "";
}

function openSettings() {
  showSettings();
  if (!$("settings").open) $("settings").showModal();
}

$("open-settings").addEventListener("click", openSettings);
for (const [name, id] of Object.entries(FIELDS)) {
  $(id).addEventListener("input", () => {
    settings[name] = $(id).value;
    keep("settings", settings);
    const shown = $(`${id}-value`);
    if (shown) shown.textContent = Number($(id).value).toFixed(2);
  });
}
$("key").addEventListener("input", () => sessionStorage.setItem("key", $("key").value.trim()));
$("settings").addEventListener("close", () => {
  showModel();
  $("input").focus();
});
$("reset").addEventListener("click", () => {
  settings = { ...DEFAULTS };
  keep("settings", settings);
  showSettings();
});

const darkWanted = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (darkWanted.matches ? "dark" : "light")) === "dark";
$("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  keep("theme", theme);
});
const theme = kept("theme", null);
if (theme) document.documentElement.dataset.theme = theme;

// The model's name, as soon as there is one to tell.
async function showModel() {
  try {
    const response = await fetch("v1/models", { headers: headers() });
    if (!response.ok) return;
    const model = (await response.json()).data[0];
    $("model").textContent = model.meta ? model.id : `${model.id} is loading`;
    document.title = `${model.id}, metal-attention`;
    if (!model.meta) setTimeout(showModel, 1000);
  } catch {
    setTimeout(showModel, 3000);
  }
}

showAll();
showModel();
grow();
$("input").focus();
