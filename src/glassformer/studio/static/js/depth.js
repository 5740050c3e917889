/* Norm and rank of the residual stream by depth, compared with theory for random layers.
 *
 *   depthPanels(view) -> {roots, ask(), draw()}
 */
import { post } from "./api.js";
import { line, plot } from "./charts.js";
import { h } from "./dom.js";
import { store } from "./store.js";
import { panel } from "./view.js";

const mean = (row) => row.reduce((sum, v) => sum + v, 0) / row.length;

export function depthPanels(view) {
  const at = { got: null };
  const python = () => ({ view: "depth", ...store.about });
  const norms = panel({
    title: "Norms by depth", name: "norms", figure: () => (at.got ? lengths : null), python,
    hint: "Norm of the residual stream and of each branch output, for the selected token or as the mean over all.",
  });
  const rank = panel({
    title: "Rank by depth", name: "rank", figure: () => (at.got ? spread : null), python,
    hint:
      "Relative deviation from equal rows. Random attention without skip connections collapses doubly " +
      "exponentially; skip connections prevent it.",
  });
  const [lengths, spread, effective] = [h("div", {}), h("div", {}), h("p", { class: "small soft" })];
  norms.body.append(lengths);
  rank.body.append(spread, effective);

  async function ask() {
    if (!store.ids.length) return;
    const body = { ...store.about };
    const got = await view.work(norms, "depth", (signal) => post("depth", body, { signal }));
    if (!got) return;
    at.got = got;
    draw();
  }

  function draw() {
    if (!at.got) return;
    const { norms: found, rank: ranks, theory } = at.got;
    const token = store.get("token");
    const pick = (row) => (token !== null && token < row.length ? row[token] : mean(row));
    const depth = found.stream.map((_, i) => i);
    const named = {
      "attention.out": "attention output", "cross.out": "cross-attention output",
      "feedforward.out": "feed-forward output",
    };
    const stream = { name: "residual stream", colour: "accent", width: 2.5, markers: true };
    const lines = [line(depth, found.stream.map(pick), stream)];
    Object.entries(found.branches).forEach(([name, rows], i) =>
      lines.push(line(
        depth.slice(1), rows.map(pick),
        { name: named[name] ?? name, colour: ["orange", "good", "soft"][i], dash: "dot", markers: true },
      )));
    plot(
      lengths, lines,
      {
        height: 300, xaxis: { title: "block", dtick: depth.length > 14 ? undefined : 1 },
        yaxis: { title: "Euclidean norm", rangemode: "tozero" },
      },
    );
    const floor = (row) => row.map((v) => (v > 0 ? v : null));
    const least = Math.min(0.02, ...ranks.deviation, ...theory.skip) / 2; // pure attention falls below the axis
    plot(spread, [
      line(depth, floor(ranks.deviation), { name: "this model", colour: "accent", width: 2.5, markers: true }),
      line(depth, floor(theory.attention), { name: "random, no skip connections", colour: "orange", dash: "dash" }),
      line(depth, floor(theory.skip), { name: "random, skip connections", colour: "good" }),
      line(depth, floor(theory.skip_predicted), { name: "theory 2^(−l/2)", colour: "soft", dash: "dot" }),
    ], {
      height: 300, xaxis: { title: "block", dtick: depth.length > 14 ? undefined : 1 },
      yaxis: { title: "deviation from equal rows", type: "log", range: [Math.log10(least), 0.1], dtick: 1 },
    });
    effective.textContent =
      `Effective rank, embedding to last block: ${ranks.effective.map((v) => v.toFixed(1)).join(", ")} of at most ` +
      `${ranks.singular[0].length}.`;
    norms.root.dataset.ready = rank.root.dataset.ready = String(depth.length);
  }

  return { roots: [norms.root, rank.root], ask, draw };
}
