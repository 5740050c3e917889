/* "Copy as Python": the lines that give the numbers on screen, from the server, shown and put on the clipboard.
 *
 *   showPython(parameters)   parameters {view, model, ...}: sent as the query of /api/python
 *   pythonFor(parameters)    the text alone
 */
import { get } from "./api.js";
import { h } from "./dom.js";

/* The server reads each value as JSON where it is some: a text that looks like JSON ("12") goes in quotes. */
function written(value) {
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
    if (value !== null && value !== undefined) query.set(key, written(value));
  return (await get(`python?${query}`)).python;
}

async function toClipboard(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false; // not allowed here (no focus, or not a secure context): the text is on screen to be copied by hand
  }
}

export async function showPython(parameters) {
  const text = await pythonFor(parameters);
  const copied = await toClipboard(text);
  const said = h("p", { class: "soft", text: copied ? "Copied to the clipboard." : "Select the lines and copy them." });
  const code = h("pre", { class: "code", tabindex: 0, text });
  const dialog = h("dialog", { class: "python", "aria-label": "These numbers from Python" });
  const close = h("button", { text: "Close", on: { click: () => dialog.close() } });
  dialog.append(h("h2", { text: "These numbers from Python" }), code, h("div", { class: "row" }, said, close));
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return text;
}
