/* "Copy as Python": show the snippet that computes the numbers on screen, and copy it to the clipboard.
 *
 *   showPython(parameters)   parameters {view, model, ...}, sent as the query of /api/python
 *   pythonFor(parameters)    the text alone
 */
import { get } from "./api.js";
import { h } from "./dom.js";

/* The server parses each value as JSON if possible: a text that is valid JSON ("12") is sent in quotes. */
function encodeValue(value) {
  if (typeof value !== "string") return JSON.stringify(value);
  try {
    JSON.parse(value);
    return JSON.stringify(value);
  } catch {
    return value;
  }
}

export async function pythonFor(parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    if (value !== null && value !== undefined) query.set(key, encodeValue(value));
  return (await get(`python?${query}`)).python;
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not allowed (no focus, or not a secure context): the user can copy the text by hand
  }
}

export async function showPython(parameters) {
  const text = await pythonFor(parameters);
  const copied = await toClipboard(text);
  const status = h("p", { class: "soft", text: copied ? "Copied to the clipboard." : "Select the text and copy it." });
  const code = h("pre", { class: "code", tabindex: 0, text });
  const dialog = h("dialog", { class: "python", "aria-label": "Compute this in Python" });
  const close = h("button", { text: "Close", on: { click: () => dialog.close() } });
  dialog.append(h("h2", { text: "Compute this in Python" }), code, h("div", { class: "row" }, status, close));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return text;
}
