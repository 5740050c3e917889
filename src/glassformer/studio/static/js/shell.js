/* The frame around the views: navigation, model, prompt and its tokens, theme, inspector, notifications.
 *
 * A view is a module `view-NAME.js` that defines the custom element `glass-NAME` (a View of view.js). It is imported
 * when it is first selected. The last view, `doctor`, shows the doctor and the size sheet.
 */
import { aborted, get, post } from "./api.js";
import "./chips.js";
import { fill, h, later, svg, toast } from "./dom.js";
import { store } from "./store.js";

const VIEWS = [
  ["playground", "Playground", "M4 6h16M4 12h10M4 18h6M17 14l3 3-3 3", "Play"],
  ["anatomy", "Anatomy", "M6 3h12v4H6zM6 10h12v4H6zM6 17h12v4H6zM12 7v3M12 14v3"],
  ["heads", "Heads", "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z"],
  ["stream", "Residual stream", "M12 3v18M12 7h6M12 12H6M12 17h6", "Stream"],
  ["positions", "Positions", "M3 12c3-8 6-8 9 0s6 8 9 0M3 12h18", "Pos."],
  ["theory", "Theory", "M6 4h9l3 3v13H6zM9 11h6M9 15h6"],
  ["course", "Course", "M4 5h7v14H4zM13 5h7v14h-7M6 9h3M6 12h3M15 12l2 2 3-4"],
  ["train", "Train", "M4 4v16h16M7 8c2 7 5 8 12 9"],
  ["doctor", "Doctor, size", "M12 4v16M4 12h16M7 4h10M7 20h10", "Doctor"],
];

const $ = (id) => document.getElementById(id);
const shown = new Map();

function icon(path) {
  return svg("svg", { viewBox: "0 0 24 24", "aria-hidden": "true", class: "icon" }, svg("path", { d: path }));
}

function buildRail() {
  fill($("views"), VIEWS.map(([name, title, path, short = title]) =>
    h(
      "li", {},
      h("a", { href: store.link({ view: name }), dataset: { view: name } }, icon(path),
        h("span", { class: "long", text: title }), h("span", { class: "short", text: short })),
    )));
  $("views").addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    store.set({ view: link.dataset.view });
  });
}

async function element(name) {
  if (!shown.has(name)) {
    const tag = `glass-${name}`;
    await import(`./view-${name}.js`);
    if (!shown.has(name)) {
      const view = document.createElement(tag);
      view.hidden = true;
      shown.set(name, view);
      $("main").append(view);
    }
  }
  return shown.get(name);
}

let current = null;

async function showView() {
  const known = VIEWS.find(([name]) => name === store.get("view")) ?? VIEWS[0];
  const [name, title] = known;
  for (const link of $("views").querySelectorAll("a")) {
    link.href = store.link({ view: link.dataset.view });
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${title} · glassformer studio`;
  document.body.dataset.view = name;
  if (current === name) return;
  const before = current;
  current = name;
  try {
    const view = await element(name);
    if (current !== name) return;
    if (before) shown.get(before)?.hide();
    resetInspector();
    view.show();
    $("main").scrollTo(0, 0);
  } catch (error) {
    current = before;
    toast(`the view ${title} did not load: ${error.message}`);
  }
}

let controller = null;
let tokensOf = null;

/* Token ids instead of text for a model without a tokenizer: "3 1 4". The decoder's input is added if it was typed. */
function request() {
  const [text, target] = [store.get("prompt") ?? "", store.get("answered") ?? ""];
  const model = store.get("model");
  const hasTarget = Boolean(target) && store.model?.kind === "seq2seq";
  if (!store.model || store.model.tokenizer) return { model, text, ...(hasTarget ? { target_text: target } : {}) };
  const read = (line) => line.split(/[\s,]+/).filter((word) => /^\d{1,9}$/.test(word)).map(Number);
  return { model, ids: read(text), ...(hasTarget && read(target).length ? { target: read(target) } : {}) };
}

async function tokenize() {
  const body = request();
  const key = JSON.stringify(body);
  if (key === tokensOf && store.ids.length) return;
  tokensOf = key;
  controller?.abort();
  controller = new AbortController();
  try {
    const empty = { ids: [], pieces: [] };
    const tokens = body.ids?.length === 0 ? empty : await post("tokens", body, { signal: controller.signal });
    if (tokensOf === key) store.setTokens(tokens);
    $("prompt").setAttribute("aria-invalid", "false");
    $("prompt-hint").textContent = "";
  } catch (error) {
    if (aborted(error)) return;
    tokensOf = null;
    store.setTokens({ ids: [], pieces: [] });
    $("prompt").setAttribute("aria-invalid", "true");
    $("prompt-hint").textContent = error.message;
  }
}

const tokenizeSoon = later(tokenize, 120);

function showTokens() {
  const { target } = store;
  $("tokens").show(store.pieces, store.ids, { selected: target ? null : store.get("token") });
  $("target-strip").hidden = !target;
  $("target-tokens").show(target?.pieces ?? [], target?.ids ?? [], { selected: store.get("token") });
  $("target-count").textContent = `${target?.ids.length ?? 0} in the decoder`;
  const limit = store.model?.context;
  const many = store.ids.length;
  $("token-count").textContent = `${many} token${many === 1 ? "" : "s"}${limit ? ` of ${limit}` : ""}`;
}

/* An unchanged example prompt is replaced by the example of the other model; the server sends these examples. */
function chooseModel(name) {
  const examples = store.state?.recorded?.prompts ?? {};
  const untouched = Object.values(examples).includes(store.get("prompt"));
  const prompt = untouched && examples[name] ? examples[name] : store.get("prompt");
  store.set({ model: name, prompt });
}

function buildTop() {
  $("model").addEventListener("change", (event) => chooseModel(event.target.value));
  $("prompt").addEventListener("input", (event) => store.set({ prompt: event.target.value }));
  $("target").addEventListener("input", (event) => store.set({ answered: event.target.value || null }));
  for (const id of ["tokens", "target-tokens"])
    $(id).addEventListener("pick", (event) => {
      if (store.target && id === "tokens") $(id).selected = null; // positions are those of the decoder
      else store.set({ token: event.detail });
    });
}

function showSelection(changed) {
  if (changed.has("state"))
    fill($("model"), store.models.map((one) =>
      h(
        "option",
        { value: one.name, text: one.title && one.title !== one.name ? `${one.name}: ${one.title}` : one.name },
      )));
  if (changed.has("state") || changed.has("model")) {
    $("model").value = store.get("model");
    const idsOnly = store.model?.tokenizer === false;
    if (idle) resetInspector();
    $("target-field").hidden = store.model?.kind !== "seq2seq";
    $("prompt").placeholder = idsOnly ? "token ids: 3 1 4" : "Text for the model";
  }
  if (changed.has("prompt") && $("prompt").value !== store.get("prompt")) $("prompt").value = store.get("prompt") ?? "";
  if (changed.has("answered") && $("target").value !== (store.get("answered") ?? ""))
    $("target").value = store.get("answered") ?? "";
  if (["model", "prompt", "answered"].some((key) => changed.has(key))) tokenizeSoon();
  if (changed.has("state")) tokenize();
  if (changed.has("ids")) showTokens();
  else if (changed.has("token")) $(store.target ? "target-tokens" : "tokens").selected = store.get("token");
  showView();
}

const THEMES = ["system", "light", "dark"];

function buildTheme() {
  const button = $("theme");
  const showTheme = () => {
    const now = document.documentElement.dataset.theme ?? "system";
    button.textContent = `Theme: ${now}`;
    button.setAttribute("aria-label", `Theme: ${now}. Press to change it.`);
  };
  button.addEventListener("click", () => {
    const now = document.documentElement.dataset.theme ?? "system";
    const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    localStorage.setItem("glass-theme", next);
    showTheme();
  });
  showTheme();
}

/* Before anything is selected, the inspector describes the model. */
const FACTS = {
  kind: "kind", parameters: "parameters", layers: "layers (L)", heads: "heads (H)", kv_heads: "key/value heads (G)",
  d_model: "width (D)", d_head: "head width (K)", d_ff: "feed-forward (F)", vocab: "vocabulary (V)",
  context: "context", position: "positions", norm: "norm", placement: "norm placement",
  feedforward: "feed-forward kind",
};
let idle = true;

function resetInspector() {
  idle = true;
  const model = store.model;
  $("inspector-title").textContent = model?.name ?? "Inspector";
  if (!model) return fill($("inspector-body"));
  const known = Object.entries(FACTS).filter(([key]) => model[key] !== null && model[key] !== undefined);
  const format = (value) => (typeof value === "number"
    ? value.toLocaleString("en") : String(value).replaceAll("_", " "));
  return fill($("inspector-body"), h("p", { class: "soft", text: model.title ?? "" }),
    h(
      "dl", { class: "facts" },
      known.map(([key, name]) => [h("dt", { text: name }), h("dd", { text: format(model[key]) })]),
    ));
}

function buildNotices() {
  document.addEventListener("glass-inspect", ({ detail }) => {
    idle = false;
    $("inspector-title").textContent = detail.title;
    fill($("inspector-body"), detail.nodes);
  });
  document.addEventListener("glass-toast", ({ detail }) => {
    const close = h("button", { class: "quiet", "aria-label": "Dismiss", text: "×" });
    const one = h("div", { class: "toast", dataset: { kind: detail.kind } }, h("p", { text: detail.message }), close);
    close.addEventListener("click", () => one.remove());
    $("toasts").append(one);
    if ($("toasts").children.length > 3) $("toasts").firstChild.remove();
    setTimeout(() => one.remove(), 12000);
  });
  document.addEventListener("glass-loading", ({ detail }) => {
    $("torch-status").textContent = detail.loading ? "Importing torch …" : "";
    const blank = store.models.some((one) => one.layers === null); // a config that needs torch to be read
    if (!detail.loading && blank) get("state").then((state) => store.setState(state), () => {});
  });
}

async function start() {
  buildRail();
  buildTop();
  buildTheme();
  buildNotices();
  $("prompt").value = store.get("prompt") ?? "";
  $("target").value = store.get("answered") ?? "";
  store.subscribe(showSelection);
  showView();
  try {
    store.setState(await get("state"));
  } catch (error) {
    toast(error.message);
  }
}

start();
