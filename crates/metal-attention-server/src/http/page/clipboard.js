// Copies to the clipboard, also on a page without TLS, where `navigator.clipboard` does not exist.

/** Copies `text`. Returns whether it succeeded. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copiedFromField(text);
  }
}

/** Copies `text` from an invisible field: the older command copies the selection. */
function copiedFromField(text) {
  const focused = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.readOnly = true;
  field.className = "unseen";
  document.body.append(field);
  field.focus({ preventScroll: true });
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return isCopied;
}
