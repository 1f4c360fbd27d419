// The elements of messages: text, thoughts, tool calls, and buttons.
import { copied } from "./clipboard.js";
import { Growing } from "./markdown.js";
import { urlOf } from "./pictures.js";
import { underWay } from "./tools.js";

const COPY = "M9 9h10v10H9zM5 15V5h10";
const AGAIN = "M20 11a8 8 0 1 0-2.3 6.3M20 5v6h-6";
const EDIT = "M4 20l1-5L16 4l4 4L9 19z";
export const CLOSE = "M6 6l12 12M18 6L6 18";
const DELETE = "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13";

export const $ = (id) => document.getElementById(id);
/** Announces `text` to screen readers. */
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

export function tool(label, path, action) {
  const button = textTool("", action);
  button.className = "quiet";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.append(svg(path));
  return button;
}

/** The element of a picture: a button that shows it large. */
export function pictureButton(picture) {
  const name = visible(picture.name);
  const image = element("img", "");
  image.alt = "";
  const button = textTool("", () => showLarge(picture, image.src));
  button.className = "picture";
  button.title = name;
  button.setAttribute("aria-label", `Show the picture ${name}`);
  button.append(image);
  const lost = () => {
    button.replaceChildren("The picture is no longer there.");
    button.disabled = true;
  };
  image.addEventListener("error", lost);
  urlOf(picture).then((url) => {
    if (url) image.src = url;
    else lost();
  });
  return button;
}

function showLarge({ name }, url) {
  if (!url) return;
  $("large-image").src = url;
  $("large-image").alt = visible(name);
  $("large").showModal();
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

const bar = (...buttons) => element("div", "tools", ...buttons);

/** `text` with characters escaped that are invisible or change the order of others. */
export const visible = (text) =>
  text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (c) => (c === "\n" ? c : `\\u{${c.codePointAt(0).toString(16)}}`));

function element(name, className, ...children) {
  const node = document.createElement(name);
  node.className = className;
  node.append(...children);
  return node;
}

function details(className, title, isOpen, ...children) {
  const node = element("details", className, element("summary", "", ...title), ...children);
  node.open = isOpen;
  return node;
}

/** The arguments of a call, exactly as they are sent: numbers that are parsed and formatted again would lose digits. */
const argumentsOf = ({ arguments: text }) => element("pre", "", visible(text));

/** The result of a call; undefined while it runs. */
const resultOf = (call) => (underWay.has(call) ? undefined : call.result);

/** The element of a tool call: the request for consent, or the call with its result. */
function callNode(call) {
  const name = element("code", "", visible(call.tool ?? call.name));
  const server = call.server ? ` of the server ${call.server}` : "";
  if (call.decide) {
    const allow = textTool("Allow once", () => call.decide("once"));
    allow.className = "primary";
    const others = [["Always allow", "always"], ["Refuse", "refuse"]].map(([label, answer]) => textTool(label, () => call.decide(answer)));
    const node = element("div", "consent", element("p", "", "Call ", name, `${server}?`), argumentsOf(call), bar(allow, ...others));
    node.tabIndex = -1;
    node.setAttribute("role", "group");
    node.setAttribute("aria-label", "Consent to a call of a tool");
    return node;
  }
  const result = resultOf(call);
  const isDone = result !== undefined;
  return details("call", [name, `${server}${isDone ? "" : " …"}`], false, argumentsOf(call), ...(isDone ? [element("pre", "", result)] : []));
}

/** The view of a step of an answer: the text before tool calls, and the calls. */
class StepView {
  #calls;
  /** By call: the state that its element shows. */
  #states = [];

  constructor(step) {
    this.step = step;
    this.node = element("div", "step");
    if (step.reasoning_content) {
      const text = element("div", "body");
      new Growing(text).show(step.reasoning_content);
      this.node.append(details("thoughts", ["Thoughts"], false, text));
    }
    if (step.content) {
      const text = element("div", "body");
      new Growing(text).show(step.content);
      this.node.append(text);
    }
    this.#calls = element("div", "");
    this.node.append(this.#calls);
  }

  /** Shows the present states of the calls. */
  show() {
    this.step.calls.forEach((call, i) => {
      const state = [Boolean(call.decide), call.server, resultOf(call)].join();
      if (this.#states[i] === state) return;
      this.#states[i] = state;
      if (this.#calls.childNodes[i]) this.#calls.childNodes[i].replaceWith(callNode(call));
      else this.#calls.append(callNode(call));
    });
  }
}

/** The view of a message, also while it is written. `actions`: the actions of its buttons. */
export class View {
  #message = null;
  #isWriting = false;
  #actions;
  #body;
  #text;
  #steps = [];
  #thoughts = null;
  /** Closes the thoughts when the answer starts; null if the user has opened or closed them. */
  #closeThoughts = null;

  constructor(role, actions) {
    this.node = role === "user" ? bubble("user", "You") : bubble("assistant", "Model");
    this.#actions = actions;
    this.#body = this.node.querySelector(".body");
    this.#text = new Growing(this.#body);
  }

  /** Shows `message`. `isWriting`: it is being written. */
  show(message, isWriting) {
    if (message === this.#message && isWriting === this.#isWriting) return;
    this.#message = message;
    this.#isWriting = isWriting;
    this.grow();
    this.node.classList.toggle("writing", isWriting);
    this.node.querySelectorAll(":scope > :is(.pictures, .cut, .tools)").forEach((node) => node.remove());
    if (isWriting) return;
    if (message.pictures) this.#body.before(element("div", "pictures", ...message.pictures.map(pictureButton)));
    this.#body.hidden = Boolean(message.pictures) && !message.content;
    if (message.cut) {
      const cut = document.createElement("p");
      cut.className = "cut";
      cut.textContent = message.cut;
      this.node.append(cut);
    }
    this.node.append(this.#tools());
  }

  /** Shows the present contents of the message. */
  grow() {
    const { role, content, reasoning_content, steps = [] } = this.#message;
    steps.forEach((step, i) => this.#showStep(step, i));
    if (role === "user") this.#body.textContent = content;
    else this.#text.show(content);
    if (!reasoning_content) {
      // They have become part of a step.
      this.node.querySelector(":scope > .thoughts")?.remove();
      this.#thoughts = this.#closeThoughts = null;
      return;
    }
    this.#thoughts ??= this.#addThoughts(!content);
    this.#thoughts.show(reasoning_content);
    if (content) this.#closeThoughts?.();
  }

  #showStep(step, i) {
    const old = this.#steps[i];
    if (old?.step !== step) {
      this.#steps[i] = new StepView(step);
      if (old) old.node.replaceWith(this.#steps[i].node);
      else (this.node.querySelector(":scope > .thoughts") ?? this.#body).before(this.#steps[i].node);
    }
    this.#steps[i].show();
  }

  /** Focuses the request for consent, if there is one. */
  focusConsent() {
    this.node.querySelector(".consent")?.focus();
  }

  /** Shows an editor in place of the message's text. `done` receives the edited text. */
  edit(done) {
    if (this.node.querySelector(":scope > .editor")) return;
    const { content, pictures } = this.#message;
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
      if (!text.trim() && !pictures) return;
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
    const text = element("div", "body");
    const thoughts = details("thoughts", ["Thoughts"], isOpen, text);
    this.#body.before(thoughts);
    this.#closeThoughts = () => {
      thoughts.open = false;
      this.#closeThoughts = null;
    };
    thoughts.firstChild.addEventListener("click", () => { this.#closeThoughts = null; });
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

/** The element of an error without an answer. `more`: further buttons. */
export function failure(text, again, more = []) {
  const node = bubble("error", "Error");
  node.setAttribute("role", "alert");
  node.querySelector(".body").textContent = text;
  node.append(bar(tool("Try again", AGAIN, again), ...more));
  return node;
}
