/* The selection that all views share. It is stored in the URL's hash, so that links and the Back button restore it.
 *
 *   store.get(key)              a value: view, model, prompt (strings), token, layer, head (numbers or null), or any
 *                               other key (a string): store.set({claim: "x"}) adds it to the URL too
 *   store.set({key: value}, {replace})   change values; null removes. A change of view, model, or another key adds a
 *                               history entry unless `replace`; other changes replace the current entry
 *   store.subscribe(f)          f(changed: Set of keys) after every change; returns a function that unsubscribes
 *   store.models, store.model   from /api/state: all models, and the selected one (undefined until loaded)
 *   store.ids, store.pieces     the prompt's tokens (arrays; empty until loaded); changes are reported as "ids"
 *   store.target                decoder input of an encoder-decoder, {ids, pieces}; null for other models
 *   store.words                 the tokens that `token` indexes: those of the target if there is one, else the prompt's
 *   store.about                 {model, ids} or {model, ids, target}: the fields of a request about the prompt
 *   store.setTokens({ids, pieces, target}), store.setState(state)   for the shell
 *   store.state                 all of /api/state
 */

const NUMBERS = new Set(["token", "layer", "head"]);
const QUIET = new Set(["prompt", "answered", "token", "layer", "head"]);
const OF_A_MODEL = ["token", "layer", "head", "answer", "wrong", "part", "site", "answered"];
export const DEFAULTS = { view: "playground", model: "bard", prompt: "ROMEO:\nBut soft, what light" };

function parse(hash) {
  const found = new Map(Object.entries(DEFAULTS));
  for (const [key, value] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!NUMBERS.has(key)) found.set(key, value);
    else if (/^\d{1,6}$/.test(value)) found.set(key, Number(value));
  }
  return found;
}

class Store {
  #values = parse(location.hash);
  #listeners = new Set();
  state = null;
  models = [];
  ids = [];
  pieces = [];
  target = null;

  constructor() {
    addEventListener("popstate", () => this.#read());
    addEventListener("hashchange", () => this.#read());
  }

  get(key) {
    return this.#values.get(key) ?? null;
  }

  get model() {
    return this.models.find((one) => one.name === this.get("model"));
  }

  get words() {
    return this.target?.pieces ?? this.pieces;
  }

  get about() {
    const about = { model: this.get("model"), ids: this.ids };
    return this.target ? { ...about, target: this.target.ids } : about;
  }

  /* Positions, heads and tokens belong to one model: a change of the model clears them. */
  set(values, { replace = false } = {}) {
    const changed = new Set();
    const other = "model" in values && values.model !== this.get("model");
    const gone = other ? Object.fromEntries(OF_A_MODEL.map((key) => [key, null])) : {};
    if (other) this.#clearTokens();
    for (const [key, value] of Object.entries({ ...gone, ...values })) {
      if ((value ?? null) === this.get(key)) continue;
      changed.add(key);
      if (value === null || value === undefined) this.#values.delete(key);
      else this.#values.set(key, value);
    }
    if (!changed.size) return;
    const quiet = replace || [...changed].every((key) => QUIET.has(key));
    history[quiet ? "replaceState" : "pushState"](null, "", this.link());
    this.#notify(changed);
  }

  /* The URL of the current selection, with some values changed. */
  link(values = {}) {
    const all = new Map([...this.#values, ...Object.entries(values)]);
    const query = new URLSearchParams();
    for (const [key, value] of all) if (value !== null && value !== undefined) query.set(key, value);
    return `#${query}`;
  }

  setState(state) {
    this.state = state;
    this.models = state.models ?? [];
    if (this.models.length && !this.model) this.set({ model: this.models[0].name }, { replace: true });
    this.#notify(new Set(["state"]));
  }

  setTokens({ ids, pieces, target = null }) {
    Object.assign(this, { ids, pieces, target });
    const token = this.get("token");
    if (token !== null && token >= this.words.length) this.set({ token: null });
    this.#notify(new Set(["ids"]));
  }

  #clearTokens() {
    Object.assign(this, { ids: [], pieces: [], target: null });
  }

  subscribe(listener) {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  #read() {
    const before = this.#values;
    this.#values = parse(location.hash);
    const keys = new Set([...before.keys(), ...this.#values.keys()]);
    const changed = new Set([...keys].filter((key) => before.get(key) !== this.#values.get(key)));
    if (changed.has("model")) this.#clearTokens();
    if (changed.size) this.#notify(changed);
  }

  #notify(changed) {
    for (const listener of [...this.#listeners]) listener(changed);
  }
}

export const store = new Store();
