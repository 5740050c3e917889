/* Charts with plotly.js from the installed plotly package; it is loaded when the first chart is drawn.
 *
 *   await plot(node, traces, layout, {click})   draw or redraw; colours, fonts and margins follow the theme. A trace's
 *                                      `colour: "accent"` (a name of colours(), or a number of its series) is set
 *                                      for the current theme. A layout may be a function of whether the node is
 *                                      narrow (under 480 pixels): it is drawn again when that changes
 *   await extend(node, {x: [[..]], y: [[..]]}, [trace numbers], keep)   add points at the end (training curves)
 *   line(x, y, {name, colour, dash, width, markers})   a line trace;  bars(x, y, {name, colour, text, horizontal})
 *   heat(z, {x, y, low, high, scale, name})            a heat map trace, "viridis" or "rdbu"
 *   colours() -> {ink, soft, edge, paper, panel, accent, orange, good, bad, series: [...]}
 */
import { stops } from "./maps.js";
import { onTheme } from "./theming.js";

let loaded = null;

export function plotly() {
  loaded ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loaded = null;
      reject(new Error("plotly.js did not load: is the plotly package installed?"));
    };
    document.head.append(script);
  });
  return loaded;
}

const NAMES = ["ink", "soft", "edge", "paper", "panel", "accent", "orange", "good", "bad"];

export function colours() {
  const style = getComputedStyle(document.documentElement);
  const found = Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
  found.series = [1, 2, 3, 4, 5, 6, 7].map((n) => style.getPropertyValue(`--series-${n}`).trim());
  return found;
}

function merge(base, extra) {
  const out = { ...base };
  for (const [key, value] of Object.entries(extra ?? {}))
    out[key] = value?.constructor === Object && base[key]?.constructor === Object ? merge(base[key], value) : value;
  return out;
}

function axis(c) {
  return {
    gridcolor: c.edge, linecolor: c.edge, zerolinecolor: c.edge, tickcolor: c.edge, automargin: true,
    title: { standoff: 8, font: { size: 12, color: c.soft } }, tickfont: { size: 11 },
  };
}

function dress(trace, c, number) {
  const numbered = c.series[(typeof trace.colour === "number" ? trace.colour : number) % c.series.length];
  const colour = typeof trace.colour === "string" ? (c[trace.colour] ?? trace.colour) : numbered;
  const { colour: _, ...rest } = trace;
  if (trace.type === "heatmap") return rest;
  const line = { color: colour, width: 2, ...rest.line };
  return { ...rest, line, marker: { color: colour, ...rest.marker } };
}

function layoutFor(layout, c) {
  const base = {
    autosize: true, margin: { l: 48, r: 12, t: 12, b: 40 }, height: 280,
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: c.ink },
    xaxis: axis(c), yaxis: axis(c), legend: { orientation: "h", y: 1.02, yanchor: "bottom", font: { size: 11 } },
    hoverlabel: { bgcolor: c.panel, bordercolor: c.edge, font: { color: c.ink } }, colorway: c.series,
    separators: ". ",
  };
  const given = { ...layout };
  for (const key of Object.keys(given)) if (/^[xy]axis\d/.test(key)) base[key] = axis(c);
  for (const key of Object.keys(given))
    if (/^[xy]axis/.test(key) && typeof given[key]?.title === "string") given[key] = {
      ...given[key], title: { text: given[key].title },
    };
  const made = merge(base, given);
  made.shapes = made.shapes?.map((one) => ({
    ...one, line: { ...one.line, color: c[one.line?.color] ?? one.line?.color ?? c.soft },
  }));
  made.annotations = made.annotations?.map((one) => ({ ...one, font: { size: 11, color: c.soft, ...one.font } }));
  return made;
}

const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false, doubleClick: "reset" };
const NARROW = 480;
const drawn = new WeakMap();
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const last = drawn.get(target);
    if (typeof last?.layout !== "function" || !target.clientWidth) continue;
    const narrow = target.clientWidth < NARROW;
    if (last.narrow !== undefined && last.narrow !== narrow) plot(target, last.traces, last.layout);
  }
});
const nodes = new Set();
onTheme(() => {
  for (const reference of nodes) {
    const node = reference.deref();
    const last = node && drawn.get(node);
    if (!last) nodes.delete(reference);
    else if (node.isConnected) plot(node, last.traces, last.layout);
  }
});

export async function plot(node, traces, layout = {}, { click } = {}) {
  const first = !drawn.has(node);
  drawn.set(node, { traces, layout });
  if (first) nodes.add(new WeakRef(node)), widths.observe(node);
  const library = await plotly();
  const now = drawn.get(node);
  if (now.traces !== traces || now.layout !== layout) return node; // superseded by a later call
  const c = colours();
  now.narrow = node.clientWidth < NARROW;
  const wanted = typeof layout === "function" ? layout(now.narrow) : layout;
  const made = layoutFor(wanted, c);
  node.style.height = `${made.height}px`; // plotly reads the height of the node when it is resized
  await library.react(node, traces.map((trace, i) => dress(trace, c, i)), made, CONFIG);
  node.classList.add("chart");
  if (first && click) node.on("plotly_click", (event) => click(event.points[0], event));
  return node;
}

export async function extend(node, update, traces, keep) {
  const library = await plotly();
  await library.extendTraces(node, update, traces, keep);
}

export const line = (x, y, { name, colour, dash, width, markers = false, ...rest } = {}) => ({
  type: "scatter", mode: markers ? "lines+markers" : "lines", x, y, name, colour, line: clean({ dash, width }), ...rest,
});

export const bars = (x, y, { name, colour, text, horizontal = false, ...rest } = {}) => ({
  type: "bar", x: horizontal ? y : x, y: horizontal ? x : y, orientation: horizontal ? "h"
    : "v", name, colour, text, ...rest,
});

export const heat = (z, { x, y, low, high, scale = "viridis", name, ...rest } = {}) => ({
  type: "heatmap", z, x, y, zmin: low, zmax: high, colorscale: stops(scale), name,
  colorbar: { thickness: 10, outlinewidth: 0 }, ...rest,
});

const clean = (object) => Object.fromEntries(Object.entries(object).filter(([, value]) => value !== undefined));
