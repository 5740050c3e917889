/* The size sheet and the compute-optimal plot: panels of the view "doctor" (created by view-doctor.js).
 *
 *   sizePanels(view) -> {roots: [node, ...], update(changed)}   view: the View that runs the requests
 *
 * The server computes every number (glassformer.sizing); the page only draws it.
 */
import { get, post } from "./api.js";
import { bars, line, plot } from "./charts.js";
import { bytes, count, field, fill, h, later, number, slider } from "./dom.js";
import { latest } from "./latest.js";
import { store } from "./store.js";
import { panel } from "./view.js";

const DTYPES = ["float32", "bfloat16", "float16", "int8", "int4", "float64"];
const NAMES = {
  embedding: "token embedding", cross: "cross-attention", feedforward: "feed-forward", mix: "attention × values",
};
const named = (key) => NAMES[key] ?? key.replaceAll("_", " ");
const entries = (object) => Object.entries(object ?? {}).filter(([, value]) => value > 0);

function horizontal(node, pairs, { write, colour }) {
  const shown = [...pairs].reverse();
  const traces = [
    bars(shown.map(([name]) => named(name)), shown.map(([, value]) => value), {
      horizontal: true, colour, text: shown.map(([, value]) => write(value)), textposition: "auto", cliponaxis: false,
      hovertemplate: "%{y}: %{text}<extra></extra>",
    }),
  ];
  const margin = { l: 8, r: 16, t: 4, b: 26 };
  const layout = { height: 44 + 30 * shown.length, margin, xaxis: { nticks: 5 }, bargap: 0.25, showlegend: false };
  return plot(node, traces, layout);
}

/* Peak memory in bytes, stacked: what is kept, and what is temporary. */
function memoryChart(node, { training, inference }) {
  const cache = inference.cache + inference.cross_cache;
  const temporary = Math.max(inference.prefill_peak, inference.decode_peak) - inference.weights - cache;
  const pieces = {
    weights: [inference.weights, training?.weights],
    "KV cache": [cache, 0],
    "optimizer state": [0, training?.optimizer],
    "saved for backward": [0, training?.saved],
    "temporary: gradients, activations": [temporary, training?.transient],
  };
  const where = training ? ["inference", "training"] : ["inference"];
  const look = { horizontal: true, textposition: "inside", insidetextanchor: "middle", textangle: 0 };
  const traces = [];
  for (const [name, values] of Object.entries(pieces)) {
    const sizes = where.map((_, i) => Math.max(0, values[i] ?? 0));
    if (!sizes.some((v) => v > 0)) continue;
    const text = sizes.map((v) => (v ? bytes(v) : ""));
    const hovertemplate = `${name}: %{text}<extra>%{y}</extra>`;
    traces.push(bars(where, sizes.map((v) => v / 2 ** 20), { ...look, name, text, hovertemplate }));
  }
  return plot(node, traces, (narrow) => {
    const room = narrow ? 20 * traces.length : 0; // the legend needs a line for each
    return {
      barmode: "stack", height: 110 + 44 * where.length + room, margin: { l: 8, r: 16, t: 10 + room, b: 36 },
      xaxis: { title: "MiB", nticks: 6 }, uniformtext: { minsize: 9, mode: "hide" }, legend: { traceorder: "normal" },
    };
  });
}

function facts(sheet) {
  const { parameters, flops, memory } = sheet;
  const rows = [
    ["parameters", parameters.total.toLocaleString("en")],
    parameters.active !== parameters.total && ["active per token", parameters.active.toLocaleString("en")],
    ["FLOPs of one forward pass", number(flops.total_forward)],
    ["FLOPs of one training step", number(flops.training)],
    ["estimate 6·N·D", number(flops.rule_6nd)],
    flops.total_decode_per_token > 0 && ["FLOPs of one decoded token", number(flops.total_decode_per_token)],
    ["weights", bytes(memory.inference.weights)],
    memory.inference.cache > 0 && ["KV cache", bytes(memory.inference.cache)],
    memory.training && [`training, peak at the ${memory.training.moment}`, bytes(memory.training.peak)],
  ];
  const tile = ([name, value]) => h("div", { class: "tile" }, h("b", { text: value }), h("span", { text: name }));
  return rows.filter(Boolean).map(tile);
}

class SizeSheet {
  constructor(view) {
    this.view = view;
    this.panel = panel({
      title: "Size sheet", name: "size", wide: true,
      hint: "Parameters, FLOPs and memory of a model before it is built.",
      figure: () => this.sheet && this.figures, python: () => ({ view: "size", ...this.request() }),
    });
    this.subject = h("select", { on: { change: () => this.ask() } });
    const whole = (value, max) =>
      h("input", { type: "number", min: 1, max, step: 1, value, on: { input: later(() => this.ask(), 200) } });
    this.batch = whole(1, 65536);
    this.context = whole("", 1048576);
    this.context.placeholder = "maximum";
    this.dtype = h("select", { on: { change: () => this.ask() } },
      DTYPES.map((name) => h("option", { value: name, text: name })));
    this.tiles = h("div", { class: "tiles roomy" });
    this.charts = Object.fromEntries(["parameters", "flops", "memory"].map((name) => [name, h("div")]));
    const chart = (title, node) => h("figure", { class: "sub" }, h("figcaption", { text: title }), node);
    this.figures = h("div", { class: "subs" }, chart("Parameters by part", this.charts.parameters),
      chart("FLOPs of a forward pass by part", this.charts.flops), chart("Peak memory", this.charts.memory));
    const controls = [field("Model or preset", this.subject), field("Batch", this.batch),
      field("Context", this.context), field("Dtype", this.dtype)];
    this.panel.body.append(h("div", { class: "controls" }, controls), this.tiles, this.figures);
  }

  request() {
    const [kind, name] = this.subject.value.split(/:(.*)/s);
    const body = { [kind]: name, batch: Number(this.batch.value) || 1, dtype: this.dtype.value };
    if (this.context.value) body.context = Number(this.context.value);
    return body;
  }

  fillSubjects(presets) {
    const before = this.subject.value;
    const group = (label, kind, names) =>
      h("optgroup", { label }, names.map((name) => h("option", { value: `${kind}:${name}`, text: name })));
    fill(this.subject, group("Models", "model", store.models.map((one) => one.name)),
      group("Presets", "preset", presets.map((one) => one.name)));
    this.subject.value = before || `model:${store.get("model")}`;
  }

  ask = latest(async () => {
    if (!this.subject.value || this.view.hidden) return;
    const request = this.request();
    const sheet = await this.view.work(this.panel, "size", (signal) => post("size", request, { signal }));
    if (!sheet) return;
    this.sheet = sheet;
    fill(this.tiles, facts(sheet));
    this.panel.say(sheet.note ?? "");
    await Promise.all([
      horizontal(this.charts.parameters, entries(sheet.parameters.parts), { write: count, colour: "accent" }),
      horizontal(this.charts.flops, entries(sheet.flops.forward), { write: number, colour: "orange" }),
      memoryChart(this.charts.memory, sheet.memory),
    ]);
    this.panel.root.dataset.ready = JSON.stringify(request);
  });
}

const ENDS = [1e17, 1e26];
const METHODS = ["accent", "orange", "good"];
const POWERS = { type: "log", exponentformat: "power" };

class Chinchilla {
  constructor(view) {
    this.view = view;
    this.panel = panel({
      title: "Compute-optimal training", name: "chinchilla", wide: true,
      hint: "How to split a budget C = 6·N·D between parameters N and tokens D. The rule of thumb optimizes nothing; " +
        "the others minimize a fitted loss.",
      figure: () => this.lines && this.figures, python: () => ({ view: "chinchilla", flops: this.flops }),
    });
    this.budget = slider({
      label: "Budget C, FLOPs", min: ENDS[0], max: ENDS[1], value: 1.2e24, scale: "log", format: (v) => number(v),
      input: later(() => this.ask(), 60),
    });
    this.chart = h("div");
    this.valley = h("div");
    this.table = h("tbody");
    const head = ["", "N parameters", "D tokens", "D/N", "predicted loss"]
      .map((text, i) => h("th", { scope: "col", class: i ? "n" : "", text }));
    this.figures = h("div", { class: "two" }, this.chart, this.valley);
    this.panel.body.append(h("div", { class: "budget" }, this.budget.root), this.figures,
      h("div", { class: "scroll-x" }, h("table", {}, h("thead", {}, h("tr", {}, head)), this.table)));
  }

  get flops() {
    return Number(this.budget.value.toPrecision(6));
  }

  ask = latest(async () => {
    if (this.view.hidden) return;
    const answer = await this.view.work(this.panel, "chinchilla", async (signal) => {
      const at = (C) => get(`size/chinchilla?${new URLSearchParams({ flops: C })}`, { signal });
      // N and D are powers of C, so two points give the whole line of a log-log plot
      this.lines ??= await Promise.all(ENDS.map(at));
      return at(this.flops);
    });
    if (!answer) return;
    const numbers = (one) => [one.parameters, one.tokens, one.tokens_per_parameter, one.loss];
    fill(this.table, answer.allocations.map((one) =>
      h("tr", {}, h("th", { scope: "row", text: one.method }),
        numbers(one).map((v) => h("td", { class: "n", text: number(v) })))));
    await Promise.all([this.draw(answer), this.drawValley(answer)]);
    this.panel.root.dataset.ready = String(answer.value);
  });

  draw({ allocations, value }) {
    const x = this.lines.map((end) => end.value);
    const traces = allocations.map((one, i) =>
      line(x, this.lines.map((end) => end.allocations[i].parameters), { name: one.method, colour: METHODS[i] }));
    const hovertemplate = "C %{x:.3g}, N %{y:.3g}<extra></extra>";
    const dots = { name: "this budget", colour: "ink", mode: "markers", marker: { size: 9 }, hovertemplate };
    traces.push(line(allocations.map(() => value), allocations.map((one) => one.parameters), dots));
    const { name, parameters: own } = store.model ?? {};
    if (own) traces.push(line(ENDS, [own, own], { name: `${name}: N`, colour: "soft", dash: "dot", width: 1.5 }));
    return plot(this.chart, traces, (narrow) => ({
      height: narrow ? 380 : 320, margin: { t: narrow ? 110 : 60 },
      xaxis: { ...POWERS, title: "budget C, FLOPs", dtick: 2 },
      yaxis: { ...POWERS, title: "parameters N" },
    }));
  }

  /* Loss along the budget: a smaller model sees more tokens, a larger one fewer; each fit has one optimum. */
  drawValley({ curves, allocations }) {
    const hovertemplate = "best: N %{x:.3g}, loss %{y:.4f}<extra></extra>";
    const traces = curves.flatMap(({ method, parameters, loss }) => {
      const at = allocations.findIndex((one) => one.method === method);
      const [best, colour] = [allocations[at], METHODS[at]];
      const dot = { mode: "markers", marker: { size: 9 }, colour, showlegend: false, hovertemplate };
      return [line(parameters, loss, { name: method, colour }), line([best.parameters], [best.loss], dot)];
    });
    return plot(this.valley, traces, {
      height: 320, margin: { t: 60 }, xaxis: { ...POWERS, title: "parameters N, at this budget", dtick: 1 },
      yaxis: { title: "predicted loss, nats per token" },
    });
  }
}

export function sizePanels(view) {
  const [sheet, plan] = [new SizeSheet(view), new Chinchilla(view)];
  let presets = null;
  return {
    roots: [sheet.panel.root, plan.panel.root],
    async update(changed) {
      presets ??= (await view.work(sheet.panel, "presets", (signal) => get("size/presets", { signal })))?.presets;
      if (!store.models.length) return;
      sheet.fillSubjects(presets ?? []);
      const own = sheet.subject.value.startsWith("model:");
      if (changed.has("model") && own) sheet.subject.value = `model:${store.get("model")}`;
      sheet.ask();
      plan.ask();
    },
  };
}
