/* Activation patching between two texts of equal length: which positions carry the difference.
 *
 *   patching(view) -> {root, start()}
 */
import { events } from "./api.js";
import { field, h, number, visible } from "./dom.js";
import { heatMap } from "./maps.js";
import { store } from "./store.js";
import { panel } from "./view.js";
import { Tensor } from "./tensors.js";

const EXAMPLES = {
  bard: ["KING HENRY:\nMy lord the kin", "KING HENRY:\nMy lord the que"],
  induction: ["H7KQ2M8XB7KQ2", "H7KQ2D8XB7KQ2"],
};
const SITES = {
  resid_pre: "the residual stream before each block",
  "attention.heads": "each head",
  "attention.out": "the attention output",
  "feedforward.out": "the feed-forward output",
};

export function patching(view) {
  const at = { body: null, done: null, started: false, axis: "position", columns: [] };
  const where = panel({
    title: "Patching between two prompts", name: "patch", wide: true, figure: () => (at.done ? map.root
      : null), python: () => ({ view: "patch", ...at.body }),
    hint:
      "The model runs on the second text, with one activation replaced by that of the first text. 1: this activation " +
      "alone restores the prediction of the first text; 0: it changes nothing.",
  });
  const clean = h("input", { class: "mono", spellcheck: "false", autocomplete: "off" });
  const corrupt = h("input", { class: "mono", spellcheck: "false", autocomplete: "off" });
  const site = h("select", {}, Object.entries(SITES).map(([value, text]) => h("option", { value, text })));
  const go = h("button", { class: "primary", text: "Patch", on: { click: run } });
  const stop = h("button", { text: "Stop", disabled: true, on: { click: () => view.stop("patch") } });
  const status = h("p", { class: "small" });
  const map = heatMap({
    label: "Effect of patching each activation",
    describe: (layer, i, v) => `block ${layer}, ${at.axis === "head" ? `head ${i}`
      : `position ${i} “${at.columns[i] ?? ""}”`}: ${number(v, 3)}`,
  });
  map.root.hidden = true;
  const box = (node) => h("div", { class: "grow" }, node);
  where.body.append(h("div", { class: "texts" }, field("First (clean) text", clean), field(
    "Second (corrupt) text", corrupt,
  )),
    h("div", { class: "row end" }, box(field("What is patched", site)), go, stop), status, map.root);

  function start() {
    const model = store.get("model");
    const attentionOnly = /none/i.test(store.model?.feedforward ?? "");
    [...site.options].forEach((one) => (one.hidden = one.disabled = attentionOnly && one.value === "feedforward.out"));
    if (at.started === model) return;
    at.started = model;
    const lines = EXAMPLES[model] ?? ["", ""];
    [clean.value, corrupt.value] = lines.map((text) => text.replaceAll("\n", "⏎"));
    map.root.hidden = true;
    status.textContent = "";
    at.done = null;
  }

  /* An input has no line breaks, so ⏎ stands for one. A model without a tokenizer takes token ids. */
  function read(input) {
    if (store.model?.tokenizer === false) return input.value.split(/[\s,]+/).filter(Boolean).map(Number);
    return input.value.replaceAll("⏎", "\n");
  }

  async function run() {
    const body = { model: store.get("model"), clean: read(clean), corrupt: read(corrupt), site: site.value };
    const rows = [];
    const working = view.work(where, "patch", async (signal) => {
      for await (const { event, data } of events("patch", { body, signal })) {
        if (event === "layer") {
          rows.push(data.effects);
          status.textContent = `block ${data.layer + 1} of ${data.layers}`;
        } else if (event === "done") return data;
      }
      throw new Error("patching ended early: try again.");
    });
    [go.disabled, stop.disabled] = [true, false];
    const done = await working;
    [go.disabled, stop.disabled] = [false, true];
    if (!done) return;
    at.body = { ...body, answer: done.answer.id, wrong: done.wrong.id };
    at.done = done;
    draw(done);
  }

  function draw(done) {
    const [L, n] = [done.effects.length, done.effects[0].length];
    at.axis = done.axis;
    at.columns = done.pieces.corrupt.map(visible);
    map.root.hidden = false;
    const words = done.pieces.corrupt.map(
      (piece, i) => (
        piece === done.pieces.clean[i] ? visible(piece) : `${visible(done.pieces.clean[i])}→${visible(piece)}`
      )
    );
    const columns = done.axis === "head" ? Array.from({ length: n }, (_, i) => `head ${i}`) : words;
    map.draw({
      tensor: new Tensor("effects", "F32", [L, n], new Float32Array(done.effects.flat())), scale: "rdbu", columns,
      rows: Array.from({ length: L }, (_, i) => `block ${i}`), cell: [8, 34], square: false,
      columnTitle: done.axis === "head" ? "" : "position", low: -1, high: 1,
    });
    status.textContent =
      `Logit difference of “${visible(done.answer.piece)}” and “${visible(done.wrong.piece)}”: ` +
      `${number(done.clean_difference, 4)} on the first text, ${number(done.corrupt_difference, 4)} on the second.`;
    where.root.dataset.ready = done.site;
  }

  return { root: where.root, start };
}
