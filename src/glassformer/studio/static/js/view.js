/* Base class of the views, and their panels.
 *
 *   class extends View          a custom element; the shell creates it once and shows or hides it
 *     build()                   create the panels, once
 *     update(changed)           when shown (all keys) and after each change of the selection while shown; a Set of keys
 *     leave()                   when hidden; requests started with `work` are aborted automatically
 *     work(panel, name, f)      run async f(signal) with the panel's loading bar; a newer call of the same name aborts
 *                               the older one; errors are shown in the panel. Returns f's result, or undefined if
 *                               it did not finish
 *     stop(name)                abort it;  busy(name) whether it is running
 *   panel({title, hint, name, figure, python, wide}) -> {root, body, tools, say(text, kind), busy(on)}
 *     figure() -> the node that "Save figure" saves (null: nothing yet); python() -> parameters for "Copy as Python";
 *     tools: container for controls next to the title; say("") clears the message; name: the file name
 */
import { aborted, warm } from "./api.js";
import { h, toast } from "./dom.js";
import { showPython } from "./python.js";
import { saveFigure } from "./save.js";
import { store } from "./store.js";

async function withToast(action) {
  try {
    await action();
  } catch (error) {
    if (!aborted(error)) toast(error.message);
  }
}

function saveMenu(name, figure) {
  const item = (kind, text) =>
    h("button", {
      text,
      on: {
        click: () => {
          menu.open = false;
          withToast(() => {
            const node = figure();
            if (!node) throw new Error("there is no figure yet: wait until it is drawn.");
            return saveFigure(node, name, kind);
          });
        },
      },
    });
  const menu = h("details", { class: "menu" }, h("summary", { class: "button quiet", text: "Save figure" }),
    h("div", { class: "menu-items" }, item("svg", "SVG"), item("png", "PNG")));
  menu.addEventListener("focusout", (event) => !menu.contains(event.relatedTarget) && (menu.open = false));
  menu.addEventListener("keydown", (event) => event.key === "Escape" && (menu.open = false));
  return menu;
}

export function panel({ title, hint, name, figure, python, wide = false }) {
  const body = h("div", { class: "panel-body" });
  const tools = h("div", { class: "tools" });
  const status = h("p", { class: "status", role: "status", hidden: true });
  const end = h("div", { class: "panel-end", "data-unsaved": true });
  const id = `panel-${name}`;
  if (python)
    end.append(h(
      "button", { class: "quiet", text: "Copy as Python", on: { click: () => withToast(() => showPython(python())) } },
    ));
  if (figure) end.append(saveMenu(name, figure));
  const head = h("header", { class: "panel-head" }, h("h2", { id, text: title }), tools, end);
  const root = h("section", { class: wide ? "panel wide" : "panel", "aria-labelledby": id, dataset: { panel: name } },
    head, hint && h("p", { class: "panel-hint", text: hint }), status, body);
  let running = 0;
  return {
    root, body, tools,
    say(text, kind = "info") {
      status.textContent = text;
      status.hidden = !text;
      status.dataset.kind = kind;
    },
    busy(on) {
      running += on ? 1 : -1;
      root.classList.toggle("busy", running > 0);
      root.setAttribute("aria-busy", String(running > 0));
    },
  };
}

const ALL = new Set(["view", "model", "prompt", "token", "layer", "head", "ids", "state"]);

export class View extends HTMLElement {
  #works = new Map();
  #built = false;
  #unsubscribe = null;

  show() {
    if (!this.#built) {
      this.#built = true;
      this.classList.add("view");
      this.build();
    }
    this.hidden = false;
    this.#unsubscribe ??= store.subscribe((changed) => this.#changed(changed));
    this.#changed(ALL);
  }

  hide() {
    this.hidden = true;
    this.#unsubscribe?.();
    this.#unsubscribe = null;
    for (const name of [...this.#works.keys()]) this.stop(name);
    this.leave();
  }

  #changed(changed) {
    if (!this.hidden) withToast(async () => this.update(changed));
  }

  build() {}
  update() {}
  leave() {}

  busy(name) {
    return this.#works.has(name);
  }

  stop(name) {
    this.#works.get(name)?.abort();
    this.#works.delete(name);
  }

  async work(where, name, f) {
    this.stop(name);
    const control = new AbortController();
    this.#works.set(name, control);
    where.busy(true);
    where.say("");
    try {
      const result = await f(control.signal);
      return control.signal.aborted ? undefined : result;
    } catch (error) {
      if (!aborted(error) && !control.signal.aborted) where.say(error.message, "error");
      return undefined;
    } finally {
      where.busy(false);
      if (this.#works.get(name) === control) this.#works.delete(name);
      if (!this.#works.size) warm();
    }
  }
}
