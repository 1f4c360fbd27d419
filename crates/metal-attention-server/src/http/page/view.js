// Messages as elements.
import { copied } from "./clipboard.js";
import { Growing } from "./markdown.js";

const COPY = "M9 9h10v10H9zM5 15V5h10";
const AGAIN = "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6";
const EDIT = "M4 20l1-5L16 4l4 4L9 19z";
const DELETE = "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13";

export const $ = (id) => document.getElementById(id);
/** Tells readers of the screen. */
export const say = (text) => { $("status").textContent = text; };

function svg(path) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  node.setAttribute("viewBox", "0 0 24 24");
  node.setAttribute("aria-hidden", "true");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  line.setAttribute("d", path);
  node.append(line);
  return node;
}

export function textTool(label, action) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet text";
  button.textContent = label;
  button.addEventListener("click", () => action(button));
  return button;
}

function tool(label, path, action) {
  const button = textTool("", action);
  button.className = "quiet";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(svg(path));
  return button;
}

async function copy(button, text) {
  if (!(await copied(text))) {
    say("The browser does not let this page copy.");
    return;
  }
  say("Copied.");
  button.replaceChildren(svg("M5 13l4 4L19 7"));
  setTimeout(() => button.replaceChildren(svg(COPY)), 1500);
}

function bubble(kind, speaker) {
  const node = document.createElement("article");
  node.className = `message ${kind}`;
  node.setAttribute("aria-label", speaker);
  const body = document.createElement("div");
  body.className = "body";
  node.append(body);
  return node;
}

function bar(...buttons) {
  const node = document.createElement("div");
  node.className = "tools";
  node.append(...buttons);
  return node;
}

/** One message, also while it grows. `actions` are what its buttons do. */
export class View {
  #message = null;
  #isWriting = false;
  #actions;
  #body;
  #text;
  #thoughts = null;
  /** Closes the thoughts when the answer begins, unless the reader has opened or closed them. */
  #closeThoughts = null;

  constructor(role, actions) {
    this.node = role === "user" ? bubble("user", "You") : bubble("assistant", "Model");
    this.#actions = actions;
    this.#body = this.node.querySelector(".body");
    this.#text = new Growing(this.#body);
  }

  /** Shows another state of the message, or the same one. */
  show(message, isWriting) {
    if (message === this.#message && isWriting === this.#isWriting) return;
    this.#message = message;
    this.#isWriting = isWriting;
    this.grow();
    this.node.classList.toggle("writing", isWriting);
    this.node.querySelectorAll(":scope > :is(.cut, .tools)").forEach((node) => node.remove());
    if (isWriting) return;
    if (message.cut) {
      const cut = document.createElement("p");
      cut.className = "cut";
      cut.textContent = message.cut;
      this.node.append(cut);
    }
    this.node.append(this.#tools());
  }

  /** Shows what the message has now. */
  grow() {
    const { role, content, reasoning_content } = this.#message;
    if (role === "user") this.#body.textContent = content;
    else this.#text.show(content);
    if (!reasoning_content) return;
    this.#thoughts ??= this.#addThoughts(!content);
    this.#thoughts.show(reasoning_content);
    if (content) this.#closeThoughts?.();
  }

  /** Shows the message's text in a field, in its place; `done` gets what becomes of it. */
  edit(done) {
    if (this.node.querySelector(":scope > .editor")) return;
    const { content } = this.#message;
    const editor = document.createElement("form");
    editor.className = "editor";
    const field = document.createElement("textarea");
    field.value = content;
    field.rows = Math.min(12, content.split("\n").length + 1);
    field.setAttribute("aria-label", "The message");
    const close = () => {
      editor.remove();
      this.node.classList.remove("editing");
    };
    const send = () => {
      const text = field.value;
      if (!text.trim()) return;
      close();
      done(text);
    };
    editor.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        close();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send();
      }
    });
    editor.append(field, bar(textTool("Send", send), textTool("Cancel", close)));
    this.#body.after(editor);
    this.node.classList.add("editing");
    field.focus();
  }

  #addThoughts(isOpen) {
    const details = document.createElement("details");
    details.className = "thoughts";
    details.open = isOpen;
    const summary = document.createElement("summary");
    summary.textContent = "Thoughts";
    const text = document.createElement("div");
    text.className = "body";
    details.append(summary, text);
    this.#body.before(details);
    this.#closeThoughts = () => {
      details.open = false;
      this.#closeThoughts = null;
    };
    summary.addEventListener("click", () => { this.#closeThoughts = null; });
    return new Growing(text);
  }

  #tools() {
    const { role, content, cut, numbers } = this.#message;
    const { goOn, again, edit, forget } = this.#actions;
    const tools = bar(tool("Copy this message", COPY, (button) => copy(button, content)));
    if (role === "user") tools.append(tool("Edit this message", EDIT, edit));
    tools.append(tool(role === "user" ? "Ask again" : "Answer again", AGAIN, again));
    tools.lastChild.classList.add("only-last");
    tools.append(tool("Delete this message", DELETE, forget));
    if (cut) {
      tools.prepend(textTool("Continue", goOn));
      tools.firstChild.classList.add("only-last");
    }
    const counted = document.createElement("span");
    counted.className = "numbers";
    counted.textContent = numbers ?? "";
    tools.append(counted);
    return tools;
  }
}

/** Why there is no answer, and what can be done. */
export function failure(text, again, more = []) {
  const node = bubble("error", "Error");
  node.setAttribute("role", "alert");
  node.querySelector(".body").textContent = text;
  node.append(bar(tool("Try again", AGAIN, again), ...more));
  return node;
}
