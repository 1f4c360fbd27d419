// The pictures of the next message: added with the button, by dropping files onto the page, or from the clipboard, and shown above
// the input.
import { dropPicture, isPicture, readPicture } from "./pictures.js";
import { $, pictureButton, say, tool, CLOSE } from "./view.js";

/** The pictures, in the order in which they were added. */
let pictures = [];
/** Files that are being read. */
let nReading = 0;
/** Whether the model sees pictures; undefined until that is known. */
let isOffered;
let notify = () => {};
let changed = () => {};

/** Shows the pictures, each with a button that removes it. */
function show() {
  const nodes = pictures.map((picture) => {
    const node = document.createElement("div");
    node.className = "attachment";
    const label = `Remove the picture ${picture.name}`;
    node.append(pictureButton(picture), tool(label, CLOSE, () => removePicture(picture)));
    return node;
  });
  $("attachments").replaceChildren(...nodes);
  $("attachments").hidden = !nodes.length;
  changed();
}

function removePicture(picture) {
  const at = pictures.indexOf(picture);
  pictures.splice(at, 1);
  dropPicture(picture);
  show();
  say(`The picture ${picture.name} is removed.`);
  // The focus moves to the next one.
  const buttons = $("attachments").querySelectorAll(".attachment > .quiet");
  (buttons[Math.min(at, buttons.length - 1)] ?? $("input")).focus();
}

/** Adds files to the next message. What is no picture is left out, with a notice. */
async function add(list) {
  if (!isOffered) {
    notify(isOffered === false ? "This model does not see pictures." : "The model is still loading: it is not known whether it sees pictures.");
    return;
  }
  const found = list.filter(isPicture);
  const refused = list.filter((file) => !isPicture(file));
  nReading++;
  changed();
  for (const file of found) {
    const picture = await readPicture(file).catch(() => null);
    if (picture) pictures.push(picture);
    else refused.push(file);
    show();
  }
  nReading--;
  changed();
  const names = refused.map(({ name }) => name).join(", ");
  notify(refused.length ? `Not read as a picture: ${names}.` : "");
  const n = list.length - refused.length;
  if (n && !refused.length) say(n === 1 ? "A picture is added." : `${n} pictures are added.`);
  $("input").focus();
}

/** Offers pictures or not: whether the model sees them. */
export function offerPictures(isSeeing) {
  isOffered = isSeeing;
  $("attach").hidden = !isSeeing;
}

/** Whether there are pictures, all of which have been read. */
export const hasPictures = () => pictures.length > 0 && nReading === 0;
/** Whether files are being read. */
export const isReading = () => nReading > 0;

/** Takes the pictures for a message. */
export function takePictures() {
  const taken = pictures;
  pictures = [];
  show();
  return taken;
}

const hasFiles = ({ dataTransfer }) => dataTransfer?.types.includes("Files") ?? false;

/** Listens for pictures. `onNotice` shows a notice; `onChange` is called when the pictures have changed. */
export function listen(onNotice, onChange) {
  notify = onNotice;
  changed = onChange;
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", () => {
    const list = [...$("files").files];
    // The same file can be chosen again.
    $("files").value = "";
    if (list.length) add(list);
  });
  document.addEventListener("paste", (event) => {
    const list = [...(event.clipboardData?.files ?? [])].filter(isPicture);
    // A text that programs copy along with its picture is pasted as text.
    if (!list.length || event.clipboardData.types.includes("text/plain")) return;
    event.preventDefault();
    add(list);
  });
  const mark = (isOver) => document.body.classList.toggle("dropping", isOver);
  document.addEventListener("dragover", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    event.dataTransfer.dropEffect = "copy";
    mark(Boolean(isOffered));
  });
  document.addEventListener("dragleave", (event) => {
    if (!event.relatedTarget) mark(false);
  });
  document.addEventListener("drop", (event) => {
    mark(false);
    if (!hasFiles(event)) return;
    // Without this the browser would leave the page for the file.
    event.preventDefault();
    const list = [...event.dataTransfer.files];
    if (list.length) add(list);
  });
}
