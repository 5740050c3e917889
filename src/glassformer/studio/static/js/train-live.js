/* Live display of one training run: its events become curves, numbers and samples. view-train.js passes the events.
 *
 *   new LiveRun() -> .roots (panels), .clear(), .take(event, data), .about(description of the run), .finished
 *   apart(positions, gap)   sorted positions, moved down so that each is at least a gap below the one before it
 *   thin(x, y, most)     a curve with at most about `most` points that keeps the minimum and maximum of each interval
 */
import { bars, line, plot } from "./charts.js";
import { bytes, count, fill, h, percent } from "./dom.js";
import { panel } from "./view.js";

const MOST = 2000;
const SAMPLES = 20;
const LOSS = { height: 320, above: 36, below: 48 }; // pixels of the chart, and of its margins

export function thin(x, y, most = MOST) {
  if (x.length <= most) return [x, y];
  const stretch = Math.ceil((2 * x.length) / most);
  const [xs, ys] = [[], []];
  for (let start = 0; start < x.length; start += stretch) {
    const end = Math.min(start + stretch, x.length);
    let [low, high] = [start, start];
    for (let i = start; i < end; i++) {
      if (y[i] < y[low]) low = i;
      if (y[i] > y[high]) high = i;
    }
    for (const i of new Set([Math.min(low, high), Math.max(low, high)])) xs.push(x[i]), ys.push(y[i]);
  }
  return [xs, ys];
}

export function apart(positions, gap) {
  const moved = [];
  for (const position of positions) moved.push(Math.max(position, (moved.at(-1) ?? -Infinity) + gap));
  return moved;
}

/* The range of all values with a margin; never empty. */
function stretch(values) {
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const room = 0.06 * (high - low) || 0.5;
  return low <= high ? [low - room, high + room] : [0, 1];
}

class Curve {
  x = [];
  y = [];

  add(x, y) {
    if (!Number.isFinite(y)) return;
    // a resumed run repeats some steps: they replace the old ones
    while (this.x.length && this.x.at(-1) >= x) this.x.pop(), this.y.pop();
    this.x.push(x);
    this.y.push(y);
  }

  /* New arrays each time: plotly redraws only if the arrays are different objects. */
  line(options) {
    return line(...thin(this.x, this.y).map((values) => values.slice()), options);
  }
}

const tile = (value, name, state = "plain") =>
  h("div", { class: "tile", dataset: { state } }, h("b", { text: value }), h("span", { text: name }));

export class LiveRun {
  constructor() {
    const python = () => ({ view: "train", run: this.run?.run });
    const chart = (title, name, hint, wide = false) => {
      const node = h("div");
      const made = panel({ title, name, hint, wide, figure: () => (this.facts ? node : null), python });
      made.body.append(node);
      return { ...made, node };
    };
    this.loss = chart("Loss", "loss",
      "Nats per token. Dashed: baselines on the same text (uniform guessing and n-gram models).", true);
    this.gradient = chart("Gradient norm", "gradient", "Before clipping.");
    this.speed = chart("Speed", "speed", "Tokens per second.");
    this.heads = chart("Head scores", "head-scores",
      "Scores of every head on repeated random tokens: induction and previous-token attention.");
    this.memory = chart("Memory", "memory",
      "Memory of the training process, including Python and torch. Predicted: peak of weights, optimizer state, " +
        "activations and gradients.");
    this.score = h("select", { "aria-label": "Which score", on: { change: () => this.drawHeads() } });
    this.heads.tools.append(this.score);
    this.samples = panel({ title: "Samples", name: "samples", wide: true, python });
    this.tiles = h("div", { class: "tiles roomy" });
    this.progress = h("progress", { max: 1, value: 0, "aria-label": "Steps done" });
    this.loss.body.prepend(this.progress, this.tiles);
    this.roots = [this.loss, this.gradient, this.speed, this.heads, this.memory, this.samples].map((one) => one.root);
    this.clear();
  }

  clear() {
    clearTimeout(this.timer);
    this.timer = null;
    this.curves = Object.fromEntries(["loss", "validation", "gradient", "tokens"].map((name) => [name, new Curve()]));
    Object.assign(this, { facts: null, last: null, run: null, predicted: null, rss: null, peak: 0, finished: false });
    Object.assign(this, { probes: [], texts: [], changed: new Set() });
    fill(this.tiles);
    delete this.loss.root.dataset.points;
    this.progress.value = 0;
    fill(this.samples.body, h("p", { class: "empty", text: "No sample yet." }));
    for (const one of [this.loss, this.gradient, this.speed, this.heads, this.memory]) one.node.hidden = true;
    this.heads.say("No scores yet: they are measured by the probes.");
    this.score.hidden = true;
  }

  about(run) {
    const changed = this.predicted !== run.predicted;
    this.run = run;
    this.predicted = run.predicted;
    this.peak = Math.max(this.peak, run.peak ?? 0);
    if (changed) this.redraw("memory");
  }

  take(event, data) {
    if (event === "start") {
      this.facts = data;
      this.redraw("loss");
    } else if (event === "step") this.step(data);
    else if (event === "validation") {
      this.curves.validation.add(data.step, data.loss);
      this.redraw("loss");
    } else if (event === "probe") {
      this.probes = [...this.probes.filter((one) => one.step < data.step), data];
      this.redraw("heads");
    } else if (event === "sample") {
      this.texts = [data, ...this.texts.filter((one) => one.step < data.step)].slice(0, SAMPLES);
      this.redraw("samples");
    } else if (event === "memory") {
      this.rss = data.bytes ?? null;
      this.peak = Math.max(this.peak, data.peak ?? 0);
      this.redraw("memory");
    } else if (event === "end") {
      this.finished = true;
      this.redraw("loss");
    } else if (event === "state") {
      this.rss = null;
      this.about(data);
      this.redraw("memory");
    }
  }

  step(data) {
    this.last = data;
    this.curves.loss.add(data.step, data.loss);
    this.curves.gradient.add(data.step, data.gradient_norm);
    this.curves.tokens.add(data.step, data.steps_per_second * (this.facts?.tokens_per_step ?? NaN));
    for (const name of ["loss", "gradient", "speed"]) this.redraw(name);
  }

  /* Collect events and redraw at most every 250 ms; every point is kept. */
  redraw(name) {
    this.changed.add(name);
    this.timer ??= setTimeout(() => this.draw(), 250);
  }

  async draw() {
    const began = performance.now();
    const changed = this.changed;
    this.changed = new Set();
    if (changed.has("loss")) this.drawLoss();
    if (changed.has("gradient")) this.drawCurve(this.gradient, this.curves.gradient, "gradient norm", { type: "log" });
    if (changed.has("speed"))
      this.drawCurve(this.speed, this.curves.tokens, "tokens per second", { rangemode: "tozero" });
    if (changed.has("heads")) this.drawHeads();
    if (changed.has("memory")) this.drawMemory();
    if (changed.has("samples")) this.drawSamples();
    const pause = Math.max(250, 3 * (performance.now() - began));
    this.timer = setTimeout(() => {
      this.timer = null;
      if (this.changed.size) this.draw();
    }, pause);
  }

  drawLoss() {
    const { loss, validation } = this.curves;
    this.showTiles();
    this.loss.node.hidden = false;
    const lines = this.baselines();
    const end = Math.max(this.facts?.steps ?? 0, loss.x.at(-1) ?? 1);
    const traces = [
      loss.line({ name: "training", colour: "accent", width: 1.3 }),
      validation.line({ name: "validation", colour: "orange", markers: true, width: 2.2 }),
    ];
    const dashed = { dash: "dash", width: 1, color: "soft" };
    const shapes = lines.map(([, y]) => ({ type: "line", x0: 0, x1: end, y0: y, y1: y, line: dashed }));
    const range = stretch([...loss.y, ...validation.y, ...lines.map(([, y]) => y)]);
    const layout = { height: LOSS.height, shapes, xaxis: { title: "step", range: [0, end] } };
    plot(this.loss.node, traces, (narrow) => ({
      ...layout, annotations: this.labels(lines, range, narrow), yaxis: { title: "nats per token", range },
      margin: { t: LOSS.above, r: narrow ? 58 : 88 },
    }));
    this.loss.root.dataset.points = String(loss.x.length);
  }

  /* Labels of the baselines, to the right of the plot so that they do not cover the curves. */
  labels(lines, [low, high], narrow) {
    const pixels = (LOSS.height - LOSS.above - LOSS.below) / (high - low);
    const positions = lines.map(([, y]) => (high - y) * pixels);
    const moved = apart(positions, narrow ? 28 : 15);
    const style = { xref: "paper", x: 1, xshift: 6, xanchor: "left", yanchor: "middle", align: "left" };
    const text = ([name, y]) => `${name}${narrow ? "<br>" : " "}${y.toFixed(2)}`;
    return lines.map((one, i) => ({
      ...style, showarrow: false, y: one[1], yshift: positions[i] - moved[i], text: text(one),
    }));
  }

  baselines() {
    const lines = { uniform: this.facts?.uniform, ...this.facts?.baselines };
    return Object.entries(lines).filter(([, value]) => Number.isFinite(value)).sort((a, b) => b[1] - a[1]);
  }

  showTiles() {
    const { facts, last } = this;
    if (!facts) return;
    const step = this.finished ? facts.steps : (last?.step ?? facts.step);
    this.progress.value = step / facts.steps;
    const rate = last?.steps_per_second;
    const best = Math.min(...this.curves.validation.y);
    const beaten = this.baselines().filter(([, value]) => best < value).map(([name]) => name);
    const left = this.finished ? 0 : (last?.seconds_left ?? 0);
    const share = rate && facts.peak_flops ? (rate * facts.flops_per_step) / facts.peak_flops : null;
    const lines = `${beaten.length} of ${this.baselines().length}`;
    fill(this.tiles, [
      tile(`${step.toLocaleString("en")} / ${facts.steps.toLocaleString("en")}`, "steps"),
      last && tile(last.loss.toFixed(3), "training loss"),
      Number.isFinite(best) && tile(best.toFixed(3), "best validation loss"),
      beaten.length ? tile(lines, `baselines beaten: ${beaten.at(-1)}`, "good") : tile("none yet", "baselines beaten"),
      rate && tile(count(Math.round(rate * facts.tokens_per_step)), "tokens per second"),
      share !== null && tile(percent(share, 0), "of matmul throughput"),
      left > 0 && tile(left > 90 ? `${(left / 60).toFixed(1)} min` : `${Math.round(left)} s`, "remaining"),
      tile(count(facts.parameters), `parameters, ${facts.device}`),
    ].filter(Boolean));
  }

  drawCurve(where, curve, title, axis) {
    where.node.hidden = false;
    const layout = { height: 220, showlegend: false, xaxis: { title: "step" }, yaxis: { title, ...axis } };
    plot(where.node, [curve.line({ name: title, colour: "accent", width: 1.5 })], layout);
  }

  drawHeads() {
    const measured = this.probes.filter((one) => one.heads);
    if (!measured.length) return void this.heads.say("This run does not measure head scores: enable probe.heads.");
    this.heads.say("");
    const scores = Object.keys(measured[0].heads);
    if (this.score.options.length !== scores.length)
      fill(this.score, scores.map((name) => h("option", { value: name, text: name })));
    this.score.hidden = false;
    const score = this.score.value || scores[0];
    const steps = measured.map((one) => one.step);
    const dashes = ["solid", "dash", "dot", "dashdot"]; // by layer; colours by head
    const look = (layer, head) => ({
      name: `layer ${layer} head ${head}`, markers: steps.length < 12, width: 1.5, dash: dashes[layer % 4],
      colour: head,
    });
    const curve = (layer, head) => measured.map((one) => one.heads[score][layer][head]);
    const traces = measured[0].heads[score].flatMap((row, layer) =>
      row.map((_, head) => line(steps, curve(layer, head), look(layer, head))));
    this.heads.node.hidden = false;
    plot(this.heads.node, traces, {
      height: 290, xaxis: { title: "step" }, yaxis: { title: `${score} score`, range: [0, 1.02] },
      showlegend: traces.length <= 8, legend: { y: -0.42, yanchor: "top" },
    });
  }

  drawMemory() {
    const now = this.finished ? null : this.rss;
    const all = [["predicted", this.predicted], ["peak", this.peak], ["now", now]]; // plotly draws from bottom to top
    const rows = all.filter(([, value]) => value);
    if (!rows.length) return;
    this.memory.node.hidden = false;
    const text = rows.map(([, value]) => bytes(value));
    const look = { horizontal: true, colour: "accent", text, textposition: "auto" };
    const trace = bars(rows.map(([name]) => name), rows.map(([, value]) => value / 2 ** 20), look);
    const layout = { height: 70 + 34 * rows.length, showlegend: false, xaxis: { title: "MiB" }, bargap: 0.3 };
    plot(this.memory.node, [trace], layout);
  }

  drawSamples() {
    const figure = ({ step, text }) =>
      h("figure", { class: "sample" }, h("figcaption", { text: `step ${step}` }), h("pre", { text }));
    fill(this.samples.body, this.texts.map(figure));
  }
}
