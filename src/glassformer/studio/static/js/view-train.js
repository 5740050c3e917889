/* Train view: select a text, a preset and fields; start, pause, resume and stop runs; watch them. The run is in the URL
 * (`run`), and the server stores every event, so that a reload shows the whole run again.
 */
import { aborted, events, get, post, upload } from "./api.js";
import { bytes, count, field, fill, h } from "./dom.js";
import { store } from "./store.js";
import { LiveRun } from "./train-live.js";
import { View, panel } from "./view.js";

const GOING = new Set(["running", "pausing", "stopping"]);
const RETRY_MS = 1000;
const LIST_MS = 3000;
const SECTIONS = {
  model: "Model", data: "Data", optim: "Optimizer", schedule: "Learning rate schedule", loss: "Loss",
  loop: "Training loop", probe: "Probes", run: "Seed",
};

/* A control for one field of the run, from its kind and limits. */
function control({ kind, choices, low, high, default: value, optional }) {
  if (kind === "bool") return h("input", { type: "checkbox", checked: value === true });
  const option = (one) => h("option", { value: one, text: one, selected: one === value });
  if (choices.length) return h("select", {}, choices.map(option));
  if (kind === "text") return h("input", { type: "text", value: value ?? "", maxlength: 200 });
  const step = kind === "int" ? 1 : "any";
  const empty = optional ? { placeholder: "none" } : { required: true };
  return h("input", { type: "number", min: low, max: high, step, value: value ?? "", ...empty });
}

function valueOf({ kind, node }) {
  if (kind === "bool") return node.checked;
  if (node.value === "") return null;
  return kind === "int" || kind === "float" ? Number(node.value) : node.value;
}

const LABELS = {
  "model.n_layers": "Layers L", "model.d_model": "Width D", "model.n_heads": "Heads H",
  "model.n_kv_heads": "Key/value heads G", "model.d_ff": "Feed-forward width F", "model.max_len": "Context length",
  "optim.lr": "Learning rate", "optim.muon_lr": "Muon's learning rate", "optim.ema": "Averaging (EMA)",
  "data.vocab_size": "Vocabulary V", "loss.z_loss": "z-loss", "loop.context": "Context while training",
  "optim.kind": "Optimizer", "schedule.kind": "Shape", "probe.every": "Probe every", "probe.heads": "Head scores",
  "probe.norms": "Weight norms",
};

function labelOf(name) {
  const words = name.split(".").at(-1).replaceAll("_", " ");
  return LABELS[name] ?? words[0].toUpperCase() + words.slice(1);
}

function shown(one) {
  const limits = one.low === null ? "" : one.high === null ? `${one.low} or more` : `${one.low} to ${one.high}`;
  if (one.kind === "bool") return h("label", { class: "check small", title: one.doc }, one.node, labelOf(one.name));
  one.node.title = [one.doc, limits].filter(Boolean).join(" ");
  return field(labelOf(one.name), one.node, one.main ? limits : one.doc || limits);
}

class NewRun {
  fields = [];

  constructor(view) {
    this.view = view;
    const python = () => ({ view: "train", ...this.request() });
    this.panel = panel({ title: "New run", name: "new-run", wide: true, python });
    this.corpus = h("select");
    this.preset = h("select", { on: { change: () => this.choosePreset() } });
    this.file = h("input", { type: "file", accept: ".txt,.md,text/plain", on: { change: () => this.send() } });
    this.start = h("button", { class: "primary", text: "Start training", on: { click: () => this.go() } });
    this.file.disabled = this.start.disabled = true; // until the server has sent the form
    this.main = h("div", { class: "controls" });
    this.more = h("div", { class: "folds" });
    const upload = field("Or upload a text", this.file, "plain text, at most 20 MB");
    upload.classList.add("two-wide");
    this.panel.body.append(
      h("div", { class: "controls" }, field("Text", this.corpus), upload, field("Model", this.preset)), this.main,
      h("details", { class: "fold" }, h("summary", { text: "All fields" }), this.more), this.start);
  }

  async load() {
    const answer = await this.view.work(this.panel, "presets", (signal) => get("train/presets", { signal }));
    if (!answer) return;
    this.answer = answer;
    const option = ({ name, text }) => h("option", { value: name, text });
    const corpus = ({ name, title, bytes: size }) => ({ name, text: size ? `${title} (${bytes(size)})` : title });
    const preset = ({ name, parameters }) => ({ name, text: `${name} (${count(parameters)})` });
    fill(this.corpus, answer.corpora.map(corpus).map(option));
    fill(this.preset, answer.presets.map(preset).map(option));
    this.choosePreset();
    this.file.disabled = this.start.disabled = false;
  }

  /* Fields start with the values of the preset; unchanged fields are not sent. */
  choosePreset() {
    const { values } = this.answer.presets.find((one) => one.name === this.preset.value);
    const has = (one) => one.section !== "model" || one.name in values;
    this.fields = this.answer.fields.filter(has).map((one) => ({ ...one, default: values[one.name] ?? one.default }));
    for (const one of this.fields) one.node = control(one);
    fill(this.main, this.fields.filter((one) => one.main).map(shown));
    const group = ([key, title]) => {
      const fields = this.fields.filter((one) => !one.main && one.section === key).map(shown);
      const inside = [h("legend", { text: title }), h("div", { class: "controls" }, fields)];
      return fields.length ? h("fieldset", {}, inside) : [];
    };
    fill(this.more, Object.entries(SECTIONS).map(group));
  }

  request() {
    const changed = this.fields.filter((one) => valueOf(one) !== (one.default ?? null));
    const fields = Object.fromEntries(changed.map((one) => [one.name, valueOf(one)]));
    return { corpus: this.corpus.value, preset: this.preset.value, fields };
  }

  async send() {
    const [file] = this.file.files;
    if (!file) return;
    const path = `train/upload?${new URLSearchParams({ name: file.name })}`;
    const answer = await this.view.work(this.panel, "upload", (signal) => upload(path, file, { signal }));
    if (!answer) return;
    this.answer.corpora.push({ name: answer.corpus, title: answer.title });
    this.corpus.append(h("option", { value: answer.corpus, text: `${answer.title} (${bytes(answer.bytes)})` }));
    this.corpus.value = answer.corpus;
    this.panel.say(`${answer.title}: ${answer.characters.toLocaleString("en")} characters, selected.`);
  }

  async go() {
    for (const one of this.fields) {
      if (one.node.checkValidity()) continue;
      const fold = one.node.closest("details");
      if (fold) fold.open = true;
      return void one.node.reportValidity();
    }
    const answer = await this.view.work(this.panel, "start", (signal) => post("train", this.request(), { signal }));
    if (answer) this.view.choose(answer.run);
  }
}

/* A long-running request shows no loading bar. */
const quiet = (where) => ({ busy() {}, say: (...message) => where.say(...message) });

export class Train extends View {
  build() {
    this.form = new NewRun(this);
    this.runs = panel({ title: "Runs", name: "runs", wide: true });
    this.table = h("div", { class: "scroll-x" }, h("p", { class: "empty", text: "No run yet." }));
    this.runs.body.append(this.table);
    this.live = new LiveRun();
    this.append(this.form.panel.root, this.runs.root, ...this.live.roots);
  }

  async update(changed) {
    if (!this.form.answer && !this.busy("presets")) this.form.load().then(() => this.showRuns());
    if (changed.has("view") || changed.has("run")) this.list();
    const run = store.get("run");
    if (run !== this.followed) this.follow(run);
    for (const root of this.live.roots) root.hidden = !run;
  }

  leave() {
    clearTimeout(this.timer);
    this.followed = null;
  }

  choose(run) {
    if (store.get("run") === run) this.follow(run);
    else store.set({ run });
  }

  async list() {
    clearTimeout(this.timer);
    const answer = await this.work(quiet(this.runs), "runs", (signal) => get("train", { signal }));
    if (this.hidden) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.list(), LIST_MS);
    if (!answer) return;
    this.known = answer.runs;
    this.showRuns();
  }

  showRuns() {
    if (!this.known?.length) return;
    const names = ["run", "text", "model", "steps", "validation", "state", ""];
    const head = names.map((text) => h("th", { scope: "col", text }));
    const focused = document.activeElement?.dataset?.act; // the table is rebuilt: restore the focus
    const rows = this.known.map((one) => this.row(one));
    fill(this.table, h("table", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows)));
    if (focused) this.table.querySelector(`[data-act="${CSS.escape(focused)}"]`)?.focus();
    const chosen = this.known.find((one) => one.run === store.get("run"));
    if (!chosen) return;
    this.live.about(chosen);
    if (this.offered === `${chosen.run} ${chosen.state} ${chosen.model}`) return;
    this.offered = `${chosen.run} ${chosen.state} ${chosen.model}`;
    const state = h("span", { class: "run-state", dataset: { state: chosen.state }, text: chosen.state });
    fill(this.live.loss.tools, state, this.buttons(chosen));
  }

  row(one) {
    const link = h("a", { href: store.link({ run: one.run }), text: one.name || one.run });
    link.dataset.act = `${one.run}/open`;
    link.addEventListener("click", (event) => (event.preventDefault(), this.choose(one.run)));
    const state = h("span", { class: "run-state", dataset: { state: one.state }, text: one.state });
    return h("tr", { class: one.run === store.get("run") ? "chosen" : "", dataset: { run: one.run } },
      h("th", { scope: "row" }, link),
      h("td", { text: this.titleOf(one.corpus) }),
      h("td", { text: one.preset ?? "" }),
      h("td", { class: "num", text: `${one.step} / ${one.steps ?? "?"}` }),
      h("td", { class: "num", text: one.best === null ? "" : one.best.toFixed(3) }),
      h("td", {}, state, one.error && h("small", { class: "bad", text: ` ${one.error}` })),
      h("td", {}, h("div", { class: "row" }, this.buttons(one))));
  }

  titleOf(corpus) {
    return this.form.answer?.corpora.find((one) => one.name === corpus)?.title ?? corpus ?? "";
  }

  buttons(one) {
    const button = (action, text, click) =>
      h("button", { class: "small", text, dataset: { act: `${one.run}/${action}` }, on: { click } });
    const act = (action, text) => button(action, text, () => this.act(one.run, action));
    const made = [];
    if (one.state === "running") made.push(act("pause", "Pause"), act("stop", "Stop"));
    if (["paused", "stopped", "failed"].includes(one.state)) made.push(act("resume", "Resume"));
    if (one.state === "paused") made.push(act("stop", "Stop"));
    if (one.model) made.push(button("use", "Open in playground", () => this.use(one.model)));
    return made;
  }

  /* Open the best model so far in the playground. */
  async use(model) {
    const state = await this.work(this.runs, "state", (signal) => get("state", { signal }));
    if (!state) return;
    store.setState(state);
    store.set({ model, view: "playground" });
  }

  async act(run, action) {
    await this.work(this.runs, "act", (signal) => post(`train/${encodeURIComponent(run)}/${action}`, {}, { signal }));
    if (action === "resume" && run === store.get("run")) this.follow(run, true);
    this.list();
  }

  /* All events from the start, then new ones; a lost connection continues after the last event. */
  async follow(run, again = false) {
    this.followed = run;
    if (!again) {
      this.live.clear();
      this.seen = null;
    }
    if (!run) return;
    await this.work(quiet(this.live.loss), "events", async (signal) => {
      while (!signal.aborted) {
        try {
          const path = `train/${encodeURIComponent(run)}/events`;
          for await (const { event, data, id } of events(path, { signal, last: this.seen })) {
            if (id !== null) this.seen = id;
            this.live.take(event, data);
            if (event === "state" && !GOING.has(data.state)) return;
          }
          if (this.live.finished) return;
        } catch (error) {
          if (aborted(error) || error.status > 0) throw error; // the server's error; else the connection was lost
        }
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    });
    this.list();
  }
}

customElements.define("glass-train", Train);
