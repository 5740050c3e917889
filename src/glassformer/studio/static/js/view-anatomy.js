/* Anatomy view: block diagram of the model; formula, parameters and FLOPs of a part; its tensors; one element. */
import { post, postTensor } from "./api.js";
import { cellPanel } from "./cell.js";
import { diagram } from "./diagram.js";
import { count, field, fill, h, inspect, mathml, number, percent, visible } from "./dom.js";
import { heatMap } from "./maps.js";
import { store } from "./store.js";
import { panel, View } from "./view.js";

/* Sites of a part, in addition to the one that the server names. */
const INSIDE = {
  attention: ["normed", "q", "k", "v", "scores", "pattern", "heads", "out"],
  cross: ["normed", "q", "k", "v", "scores", "pattern", "heads", "out"],
  feedforward: ["normed", "pre", "post", "router", "out"],
};
const SIGNED = { pattern: "viridis", router: "viridis" };

class Anatomy extends View {
  #parts = null;
  #of = null;

  build() {
    this.left = panel({
      title: "Block diagram", name: "diagram", figure: () => this.diagram.root.firstChild, python: () => ({
        view: "anatomy", model: store.get("model"),
      }),
      hint: "From tokens at the top to logits at the bottom. The length of a bar shows the number of parameters.",
    });
    this.diagram = diagram({ pick: (path) => this.pick(path), open: (stack, layer) => this.open(stack, layer) });
    this.totals = h("p", { class: "small soft" });
    this.left.body.append(this.diagram.root, this.totals);
    this.right = panel({
      title: "Part", name: "part", figure: () => (this.tensor ? this.map.root : null),
      python: () => ({
        view: "tensor", ...store.about, site: this.sites.value, head: this.headOf(),
      }),
    });
    this.words = h("div", {});
    this.sites = h(
      "select", { class: "mono", on: { change: () => (store.set({ site: this.sites.value }), this.drawTensor()) } },
    );
    this.heads = h("select", { class: "mono", on: { change: () => store.set({ head: Number(this.heads.value) }) } });
    this.headField = field("Head", this.heads);
    this.map = heatMap({
      label: "The tensor at this site; select an element to see its arithmetic", pick: (t, i) => this.cell.ask(
        this.sites.value, this.index(t, i),
      ),
      describe: (t, i, v) => `${this.rowName(t)}, ${this.columnName(i)}: ${number(v, 4)}`,
    });
    this.right.body.append(
      this.words, h("div", { class: "row" }, h("div", { class: "grow" }, field("Tensor", this.sites)), this.headField),
      this.map.root,
    );
    this.cell = cellPanel(this);
    this.append(this.left.root, this.right.root, this.cell.root);
  }

  async update(changed) {
    if (changed.has("model") || changed.has("state")) await this.load();
    else if (changed.has("part") || changed.has("layer") || changed.has("site")) this.drawPart();
    else if (changed.has("ids") || changed.has("head")) this.drawTensor();
  }

  async load() {
    const model = store.get("model");
    if (this.#of === model) return this.drawPart();
    const got = await this.work(this.left, "anatomy", (signal) => post("anatomy", { model }, { signal }));
    if (!got) return undefined;
    this.#parts = got.parts;
    this.#of = model;
    this.letters = got.letters;
    this.sum = got.totals;
    this.totals.textContent =
      `${count(got.totals.parameters)} parameters; ${count(got.totals.flops_per_token)} FLOPs ` +
      `per token at ${got.totals.context} tokens of context. ` +
      Object.entries(got.letters).filter(([, size]) => size).map(([letter, size]) => `${letter} = ${size}`).join(", ");
    return this.drawPart();
  }

  opened() {
    const [stack] = (store.get("part") ?? "").match(/^(encoder|decoder)\./) ?? [
      this.#parts.some((one) => one.path.startsWith("decoder.")) ? "decoder." : ""
    ];
    return { stack, layer: store.get("layer") ?? 0 };
  }

  open(stack, layer) {
    store.set({ layer, part: `${stack}blocks.${layer}.attention` });
  }

  pick(path) {
    const block = path.match(/blocks\.(\d+)\./);
    store.set({ part: path, site: null, ...(block ? { layer: Number(block[1]) } : {}) });
  }

  /* The selected part. It follows the layer selected elsewhere; if the model lacks the part, attention is selected. */
  part() {
    const { stack, layer } = this.opened();
    const selected = store.get("part") ?? `${stack}blocks.${layer}.attention`;
    const wanted = selected.replace(/blocks\.\d+\./, `blocks.${layer}.`);
    const attention = this.#parts.find((one) => one.path.includes("attention"));
    return this.#parts.find((one) => one.path === wanted) ?? attention ?? this.#parts[0];
  }

  drawPart() {
    if (!this.#parts) return undefined;
    const part = this.part();
    this.diagram.draw(this.#parts, { opened: this.opened(), chosen: part.path, placement: store.model?.placement });
    this.right.root.querySelector("h2").textContent = `${part.title} (${part.path})`;
    const fact = (name, value) => [h("dt", { text: name }), h("dd", { text: value })];
    fill(this.words, h("div", { class: "formula" }, mathml(part.mathml)), h("dl", { class: "facts" },
      fact("output", `(${part.letters})`), fact(
        "parameters",
        `${part.parameters.toLocaleString("en")} (${percent(part.parameters / this.sum.parameters)} of all)`,
      ),
      fact(
        "FLOPs per token",
        `${count(part.flops_per_token)} (${percent(part.flops_per_token / (this.sum.flops_per_token || 1))})`,
      )));
    inspect(part.title, part.params.length
      ? h("table", {}, h(
        "thead", {}, h("tr", {}, h("th", { text: "parameter" }), h("th", { class: "n", text: "shape" })),
      ),
        h(
          "tbody", {},
          part.params.map((one) => h(
            "tr", {}, h("td", { class: "mono small", text: one.name }),
            h("td", { class: "n mono small", text: one.shape.join("×") }),
          )),
        ))
      : h("p", { class: "soft", text: "This part has no parameters." }));
    this.offer(part);
    return this.drawTensor();
  }

  offer(part) {
    const name = part.path.split(".").at(-1);
    const inside = part.path.includes("blocks.") ? INSIDE[name] : undefined;
    const skip = (site) =>
      (site === "normed" && store.model?.placement === "post") || (
        site === "router" && !/moe|experts/i.test(store.model?.feedforward ?? "")
      ) ||
      ((site === "pre" || site === "post") && /moe|experts/i.test(store.model?.feedforward ?? ""));
    const sites = inside ? inside.filter((site) => !skip(site)).map((site) => `${part.path}.${site}`) : [part.site];
    fill(this.sites, sites.map((site) => h("option", { value: site, text: site })));
    const wanted = store.get("site");
    this.sites.value = sites.includes(wanted) ? wanted : name === "attention" && sites.length > 1
      ? `${part.path}.pattern` : sites.at(-1);
  }

  headsHere() {
    const name = this.sites.value.split(".").at(-1);
    if (["q", "scores", "pattern", "heads"].includes(name)) return this.letters.H;
    return name === "k" || name === "v" ? this.letters.G : 0;
  }

  headOf() {
    const many = this.headsHere();
    return many ? Math.min(many - 1, store.get("head") ?? 0) : null;
  }

  index(t, i) {
    const head = this.headOf();
    return head === null ? [t, i] : [head, t, i];
  }

  rowName = (t) => `position ${t} “${visible(this.pieces[t] ?? "")}”`;
  columnName = (i) => (
    this.letter === "S" ? `position ${i} “${visible(this.pieces[i] ?? "")}”` : this.letter === "V" ? `token ${i}`
      : `component ${i}`
  );

  async drawTensor() {
    if (!this.#parts || !this.sites.value) return;
    const many = this.headsHere();
    this.headField.hidden = !many;
    if (this.heads.length !== many) fill(
      this.heads, Array.from({ length: many }, (_, i) => h("option", { value: i, text: i })),
    );
    const [site, head] = [this.sites.value, this.headOf()];
    if (head !== null) this.heads.value = head;
    if (!store.ids.length) return this.right.say("Type a prompt to see its tensors.");
    const body = { ...store.about, site, ...(head === null ? {} : { head }) };
    const got = await this.work(this.right, "tensor", (signal) => postTensor("tensor", body, { signal }));
    if (!got) return;
    this.tensor = Object.values(got.tensors)[0];
    this.pieces = got.meta.pieces;
    this.letter = got.meta.letters.split(",").at(-1);
    const name = site.split(".").at(-1);
    const words = this.pieces.map(visible);
    this.map.draw({
      tensor: this.tensor, scale: SIGNED[name] ?? "rdbu", rows: words, columns: this.letter === "S" ? words
        : undefined, cell: [2, 24],
      square: this.letter === "S", rowTitle: got.meta.letters.split(",").at(-2), columnTitle: this.letter, ...(
        name === "pattern" ? { low: 0, high: 1 } : {}
      ),
    });
    this.right.root.dataset.site = site;
    this.cell.reset(site);
  }
}

customElements.define("glass-anatomy", Anatomy);
