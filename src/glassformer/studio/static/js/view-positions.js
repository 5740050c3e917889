/* Positions view: five schemes. What is added to the embedding or to the score as a heat map, the score as a function
 * of the offset, and the rotation of one pair of components.
 *
 * The server computes everything with the functions of the model; the sliders send new requests while they move.
 */
import { postTensor } from "./api.js";
import { line, plot } from "./charts.js";
import { fill, h, later, number, slider, svg } from "./dom.js";
import { latest } from "./latest.js";
import { plainMap } from "./plain-map.js";
import { store } from "./store.js";
import { View, panel } from "./view.js";

const KINDS = [
  ["sinusoidal", "Sinusoidal", "Waves of fixed frequencies are added to the embedding. Curve: dot product of two " +
    "positions, relative to offset 0."],
  ["rotary", "Rotary", "Queries and keys are rotated, pair by pair. Curve: score of equal q and k, relative to " +
    "offset 0."],
  ["alibi", "ALiBi", "A penalty on distance is added to the score, steeper for some heads. Curve: one line per head."],
  ["t5", "T5 bias", "A trained number per head and bucket of distance is added to the score. Without such a model: " +
    "the bucket."],
  ["learned", "Learned", "A trained vector per position is added to the embedding. Curve: cosine of two rows, mean " +
    "over positions."],
];
const whole = (v) => String(Math.round(v)).replace("-", "−");

/* Two vectors on a circle: before and after the rotation. */
function dial(turn) {
  const [cx, cy, r] = [70, 70, 56];
  const at = ([x, y]) => [cx + r * x, cy - r * y];
  const ends = [[1, 0], [turn.cos, turn.sin]];
  const [from, to] = ends.map(at);
  const large = Math.abs(turn.shown) > Math.PI ? 1 : 0;
  const sweep = turn.shown > 0 ? 0 : 1;
  const arc = (radius, [x, y]) => `${cx + radius * x} ${cy - radius * y}`;
  const look = { viewBox: "0 0 140 140", width: 140, height: 140, class: "dial figure-svg", role: "img" };
  return svg("svg", { ...look, "aria-label": turn.text },
    svg("circle", { cx, cy, r, class: "dial-ring" }),
    svg("line", { x1: cx - r, x2: cx + r, y1: cy, y2: cy, class: "dial-axis" }),
    svg("line", { x1: cx, x2: cx, y1: cy - r, y2: cy + r, class: "dial-axis" }),
    svg("path", { d: `M${arc(22, ends[0])} A22 22 0 ${large} ${sweep} ${arc(22, ends[1])}`, class: "dial-arc" }),
    svg("line", { x1: cx, y1: cy, x2: from[0], y2: from[1], class: "dial-from" }),
    svg("circle", { cx: from[0], cy: from[1], r: 3.5, class: "dial-from-end" }),
    svg("line", { x1: cx, y1: cy, x2: to[0], y2: to[1], class: "dial-to" }),
    svg("circle", { cx: to[0], cy: to[1], r: 4.5, class: "dial-to-end" }));
}

const TURN = 2 * Math.PI;
const NO_TABLE =
  "Learned positions need a model that has them, and there is none here: train the preset nano in Train, or start " +
  "glass serve --model FOLDER.";

class Scheme {
  constructor(view, [kind, title, hint]) {
    Object.assign(this, { view, kind, title });
    this.panel = panel({
      title, hint, name: `positions-${kind}`, figure: () => (this.answer ? this.figures : null),
      python: () => ({ view: "positions", ...(view.request(kind) ?? { kind }) }),
    });
    this.map = plainMap({ label: `${title}: heat map`, describe: (...cell) => this.describe(...cell) });
    this.curve = h("div");
    this.turn = h("div", { class: "turn" });
    this.figures = h("div", { class: "scheme" }, this.map.root,
      h("div", { class: "scheme-low" }, this.curve, this.turn));
    this.panel.body.append(this.figures);
  }

  ask = latest(async () => {
    if (this.view.hidden) return;
    const request = this.view.request(this.kind);
    this.figures.hidden = !request;
    if (!request) return void this.panel.say(NO_TABLE);
    const ask = (signal) => postTensor("positions", request, { signal });
    const answer = await this.view.work(this.panel, this.kind, ask);
    if (!answer) return;
    this.answer = answer;
    this.request = request;
    this.drawMap();
    this.drawTurn();
    await this.drawCurve();
    this.panel.root.dataset.ready = JSON.stringify(request);
  });

  describe(row, column, value) {
    const { rows, columns } = this.answer.meta;
    return `${rows} ${row}, ${columns} ${column}: ${number(value)}`;
  }

  drawMap() {
    const { tensors, meta } = this.answer;
    const buckets = this.kind === "t5" && meta.labels[0] === "bucket";
    const columnTitle = this.kind === "alibi" ? `${meta.labels[0]}: ${meta.columns}` : meta.columns;
    this.map.draw({ tensor: tensors.map, scale: buckets ? "viridis" : "rdbu", rowTitle: meta.rows, columnTitle });
  }

  drawCurve() {
    const { tensors, meta } = this.answer;
    const { offset } = this.request;
    const offsets = Array.from(tensors.offsets.data);
    const many = meta.labels.length > 1;
    const hovertemplate = "offset %{x}: %{y:.3g}<extra>%{fullData.name}</extra>";
    const traces = meta.labels.map((name, i) =>
      line(offsets, Array.from(tensors.curves.part(i).data), {
        name, width: 1.6, colour: many ? undefined : "accent", hovertemplate,
      }));
    const dots = { color: "orange", width: 1.5, dash: "dot" };
    const shapes = [{ type: "line", x0: offset, x1: offset, yref: "paper", y0: 0, y1: 1, line: dots }];
    const at = offsets.indexOf(offset);
    const value = at < 0 ? "" : `at ${whole(offset)}: ${number(tensors.curves.at(0, at))}`;
    const text = many && value ? `${meta.labels[0]} ${value}` : value;
    const corner = { x: 1, xref: "paper", xanchor: "right", y: 1.02, yref: "paper", yanchor: "bottom" };
    return plot(this.curve, traces, {
      height: 185, showlegend: false, shapes, annotations: [{ ...corner, text, showarrow: false }],
      margin: { l: 40, r: 8, t: 22, b: 34 }, yaxis: { nticks: 5 },
      xaxis: { title: "offset: key − query", range: [offsets[0], offsets.at(-1)] },
    });
  }

  drawTurn() {
    const turn = this.answer.meta.rotation;
    if (!turn) return void fill(this.turn);
    const shown = turn.angle % TURN;
    const product = `${whole(this.request.offset)} × ${number(turn.frequency)} = ${number(turn.angle, 4)} rad`;
    const text = `pair ${turn.pair}: ${product}`;
    const full = Math.abs(Math.trunc(turn.angle / TURN));
    const rest = `${full} full rotation${full === 1 ? "" : "s"} and ${number(shown)} rad`;
    fill(this.turn, dial({ ...turn, shown, text }), h("p", { class: "small", text }),
      full ? h("p", { class: "small soft", text: rest }) : null);
  }
}

export class Positions extends View {
  build() {
    const input = later(() => this.ask(), 60);
    const ranged = (label, min, max, step, value, then = input) =>
      slider({ label, min, max, step, value, format: whole, input: then });
    const format = (v) => number(v);
    this.width = ranged("Width D", 4, 256, 4, 64, () => (this.fitPair(), input()));
    this.base = slider({ label: "Base", min: 10, max: 1e6, value: 10000, scale: "log", format, input });
    this.length = ranged("Length T", 8, 256, 8, 128);
    this.offset = ranged("Offset", -128, 128, 1, -8);
    this.heads = ranged("Heads", 1, 16, 1, 8);
    this.pair = ranged("Rotated pair", 0, 31, 1, 4);
    this.controls = panel({ title: "Position schemes", name: "positions", wide: true,
      hint: "Without positions, attention ignores the order of tokens. Five schemes with the same settings." });
    const all = [this.width, this.base, this.length, this.offset, this.heads, this.pair];
    this.controls.body.append(h("div", { class: "sliders" }, all.map((one) => one.root)));
    this.schemes = KINDS.map((kind) => new Scheme(this, kind));
    this.append(this.controls.root, ...this.schemes.map((one) => one.panel.root));
  }

  /* There are half as many pairs as components. */
  fitPair() {
    const most = Math.floor(this.width.value / 2) - 1;
    this.pair.control.max = String(most);
    this.pair.value = Math.min(this.pair.value, most);
  }

  update(changed) {
    if (!changed.has("view") && !changed.has("model") && !changed.has("state")) return;
    if (store.models.length) this.ask();
  }

  request(kind) {
    const body = { kind, base: Number(this.base.value.toPrecision(6)) };
    for (const name of ["width", "length", "offset", "heads", "pair"]) body[name] = Math.round(this[name].value);
    const trained = { learned: "learned", t5: "t5_bias" }[kind];
    if (!trained) return body;
    // a trained table needs a model: the selected one, or the first that has a table
    const owner = [store.model, ...store.models].find((one) => one?.position === trained);
    if (owner) return { ...body, model: owner.name };
    return kind === "learned" ? null : body;
  }

  ask() {
    for (const scheme of this.schemes) scheme.ask();
  }
}

customElements.define("glass-positions", Positions);
