/* Heads view: attention of every head as a small map, one large, head scores, and ablation. */
import { postTensor } from "./api.js";
import { attentionLines, LONGEST } from "./attention-lines.js";
import { Chips } from "./chips.js";
import { h, inspect, number, percent, visible } from "./dom.js";
import { HeadGrid } from "./head-grid.js";
import { ablation, headScores } from "./head-panels.js";
import { css, heatMap, inkOn } from "./maps.js";
import { store } from "./store.js";
import { onTheme } from "./theming.js";
import { panel, View } from "./view.js";

const segment = (text, pressed, action) =>
  h("button", { text, "aria-pressed": String(pressed), on: { click: action } });

class Heads extends View {
  #drawnKey = null;
  patterns = null;
  gamma = 1;
  form = "map";

  build() {
    const location = () => (this.whereField.hidden ? {} : { where: this.where.value });
    this.grid = panel({
      title: "All heads", name: "grid", figure: () => this.patterns && this.all.canvas,
      python: () => ({ view: "patterns", ...store.about, ...location() }),
      hint:
        "A row per layer, a column per head; bright means large weights. Each pixel of a small map is the largest " +
        "weight that it covers.",
    });
    this.all = new HeadGrid({ pick: (layer, head) => this.choose(layer, head), hover: (which) => this.pointed(which) });
    this.tip = h("p", { class: "readout small", "aria-live": "polite" });
    this.scales = h("div", { class: "segments", role: "group", "aria-label": "Colour scale" });
    for (const [name, gamma] of [["linear", 1], ["√", 0.5]])
      this.scales.append(segment(name, gamma === 1, () => this.scale(gamma)));
    this.where = h("select", { "aria-label": "Which attention", on: { change: () => this.ask() } },
      ["self", "cross", "encoder"].map((value) => h("option", { value, text: value })));
    this.whereField = h("span", { hidden: true }, this.where);
    this.grid.tools.append(this.scales, this.whereField);
    this.grid.body.append(this.all.root, this.tip);
    this.large = panel({
      title: "Head", name: "head", figure: () => this.patterns && (
        this.lines.root.hidden ? this.map.root : this.lines.root.firstChild
      ),
      python: () => ({
        view: "tensor", ...store.about, site: this.site.replace("*", this.chosen()[0]),
        head: this.chosen()[1],
      }),
    });
    this.forms = h("div", { class: "segments", role: "group", "aria-label": "How the head is drawn" });
    for (const form of ["map", "lines"]) this.forms.append(segment(form, form === "map", () => this.shape(form)));
    this.large.tools.append(this.forms);
    this.map = heatMap({
      label: "Attention of one head: a row per query, a column per key", hover: (t) => this.shown(t),
      pick: (t) => this.lock(t),
      describe: (t, s, w) => `${visible(this.words[t])} → ${visible(this.keys[s])}: ${number(w, 3)}`,
    });
    this.lines = attentionLines({ hover: (t) => this.shown(t), pick: (t) => this.lock(t) });
    this.strip = new Chips();
    this.strip.setAttribute("aria-label", "Attention of the query");
    this.strip.addEventListener("pick", (event) => this.lock(event.detail));
    this.caption = h("p", { class: "small soft" });
    this.large.body.append(this.map.root, this.lines.root, this.caption, this.strip);
    this.ablation = ablation(this);
    this.scores = headScores(this);
    this.append(this.grid.root, this.large.root, this.ablation.root, this.scores.root);
    onTheme(() => {
      if (!this.patterns || this.hidden) return;
      this.all.mark(...this.chosen(), this.ablation.heads);
    });
  }

  chosen() {
    return [store.get("layer") ?? 0, store.get("head") ?? 0];
  }

  choose(layer, head) {
    store.set({ layer, head });
  }

  lock(query) {
    store.set({ token: query === store.get("token") ? null : query });
  }

  scale(gamma) {
    this.gamma = gamma;
    [...this.scales.children].forEach((one, i) => one.setAttribute("aria-pressed", String(gamma === [1, 0.5][i])));
    if (this.patterns) this.all.draw(this.patterns, gamma), this.drawLarge();
  }

  shape(form) {
    this.form = form;
    [...this.forms.children].forEach((one) => one.setAttribute("aria-pressed", String(one.textContent === form)));
    if (this.patterns) this.drawLarge();
  }

  async update(changed) {
    if (changed.has("model")) this.ablation.clear();
    if (changed.has("model") || changed.has("state")) this.scores.ask();
    if (changed.has("ids")) {
      this.ablation.ask();
      await this.ask();
    } else if (changed.has("layer") || changed.has("head") || changed.has("token")) this.drawChoice();
  }

  async ask() {
    this.whereField.hidden = store.model?.kind !== "seq2seq";
    const body = {
      ...store.about, where: this.whereField.hidden ? "self" : this.where.value,
    };
    if (!body.ids.length) return this.grid.say("Type a prompt to see its attention.");
    const key = JSON.stringify(body);
    if (key === this.#drawnKey && this.patterns) return this.drawChoice();
    const got = await this.work(this.grid, "patterns", (signal) => postTensor("patterns", body, { signal }));
    if (!got) return;
    this.#drawnKey = key;
    this.words = got.meta.pieces;
    this.keys = got.meta.keys;
    this.site = got.meta.site;
    this.same = !this.site.includes("cross");
    this.patterns = Object.values(got.tensors)[0];
    const started = performance.now();
    this.all.draw(this.patterns, this.gamma);
    this.drawChoice();
    this.grid.root.dataset.drawn = (performance.now() - started).toFixed(1);
  }

  drawChoice() {
    if (!this.patterns) return;
    const [L, H] = this.patterns.shape;
    const [layer, head] = this.chosen();
    if (layer >= L || head >= H) return store.set({ layer: 0, head: 0 });
    this.all.mark(layer, head, this.ablation.heads);
    this.large.root.querySelector("h2").textContent = `Head ${layer}.${head}`;
    this.scores.mark(layer, head);
    this.ablation.offer(layer, head);
    this.drawLarge();
  }

  drawLarge() {
    const pattern = this.patterns.part(...this.chosen());
    const short = pattern.shape[0] <= LONGEST;
    const form = short ? this.form : "map";
    this.forms.lastChild.disabled = !short;
    this.forms.lastChild.title = short ? "" : `lines are drawn for at most ${LONGEST} tokens`;
    this.map.root.hidden = form !== "map";
    this.lines.root.hidden = form !== "lines";
    if (form === "lines") this.lines.draw(pattern, this.words, this.keys);
    else
      this.map.draw({
        tensor: pattern, gamma: this.gamma, rows: this.words.map(visible), columns: this.keys.map(visible),
        rowTitle: "query", columnTitle: "key", cell: [1, 26],
      });
    this.shown(null);
  }

  pointed(which) {
    this.tip.textContent = which ? `head ${which[0]}.${which[1]}${this.scores.summary(...which)}` : "";
  }

  /* Attention of one query: the locked one, else the one under the pointer, else the last. */
  shown(hovered) {
    if (!this.patterns) return;
    const pattern = this.patterns.part(...this.chosen());
    const last = pattern.shape[0] - 1;
    const locked = store.get("token");
    const t = Math.min(last, locked ?? hovered ?? last);
    const row = pattern.part(t);
    const weights = Array.from({ length: row.shape[0] }, (_, s) => row.at(s));
    const most = Math.max(...weights, 1e-9);
    this.lines.lock(locked ?? hovered);
    this.caption.textContent =
      `“${visible(this.words[t])}” (position ${t}${t === locked ? ", locked: click to unlock" : ""}) attends to; ` +
      `largest weight ${percent(most)}:`;
    this.strip.show(
      this.keys, [],
      { colours: weights.map((w) => css("viridis", w / most)), notes: weights.map((w) => percent(w, 2)) },
    );
    [...this.strip.children].forEach((chip, s) => {
      chip.style.color = inkOn("viridis", weights[s] / most);
      chip.style.outline = s === t && this.same ? "2px solid var(--orange)" : "";
    });
    const best = weights.map((w, s) => [w, s]).sort((a, b) => b[0] - a[0]).slice(0, 10);
    inspect(`Head ${this.chosen().join(".")} from “${visible(this.words[t])}”`, h("table", {},
      h("thead", {}, h("tr", {},
        ...["key", "position", "weight"].map((text, i) => h("th", { text, class: i && "n" })))),
      h(
        "tbody", {},
        best.map(([w, s]) => h(
          "tr", {}, h("td", { class: "mono", text: visible(this.keys[s]) }), h("td", { class: "n", text: s }),
          h("td", { class: "n", text: percent(w, 2) }),
        )),
      )));
  }
}

customElements.define("glass-heads", Heads);
