/* Two panels of the heads view: head scores, and ablation of heads.
 *
 *   headScores(view) -> {root, ask(), mark(layer, head), summary(layer, head)}
 *   ablation(view)   -> {root, ask(), clear(), offer(layer, head), heads}    heads: a Set of "layer.head"
 */
import { post } from "./api.js";
import { fill, h, number, percent, visible } from "./dom.js";
import { css, inkOn } from "./maps.js";
import { store } from "./store.js";
import { panel } from "./view.js";

const SHARES = new Set([
  "induction", "prefix_matching", "previous_token", "duplicate_token", "current_token", "first_token",
  "relative_entropy",
]);

export function headScores(view) {
  const at = { rows: [], by: "induction", notes: {}, model: null };
  const where = panel({
    title: "Head scores", name: "scores", wide: true, figure: () => at.rows.length && table,
    python: () => ({ view: "heads", model: store.get("model"), seed: 0 }),
    hint:
      "Mean attention on repeated random tokens, over the queries that can see the position in question. Click a " +
      "column title to sort, a row to select the head.",
  });
  const table = h("table", {});
  const notes = h("div", { class: "small soft" });
  where.body.append(
    h("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Scores of all heads" }, table), notes,
  );

  async function ask() {
    const model = store.get("model");
    if (at.model === model || !store.model) return;
    if (store.model.kind === "seq2seq") {
      fill(table);
      where.say("Head scores are not available for an encoder-decoder: select a decoder or an encoder.");
      return;
    }
    const got = await view.work(where, "scores", (signal) => post("heads", { model, seed: 0 }, { signal }));
    if (!got) return;
    Object.assign(at, { rows: got.rows, notes: got.notes ?? {}, model });
    draw();
    mark(store.get("layer") ?? 0, store.get("head") ?? 0);
  }

  function draw() {
    const names = Object.keys(at.rows[0]?.scores ?? {});
    if (!names.includes(at.by)) at.by = names[0];
    const order = [...at.rows].sort((a, b) => (b.scores[at.by] ?? -Infinity) - (a.scores[at.by] ?? -Infinity));
    const title = (name) =>
      h("th", { class: "n", "aria-sort": name === at.by ? "descending" : "none" },
        h(
          "button",
          {
            class: "quiet", text: `${name.replaceAll("_", " ")}${name === at.by ? " ↓" : ""}`,
            on: { click: () => ((at.by = name), draw(), mark(store.get("layer") ?? 0, store.get("head") ?? 0)) },
          },
        ));
    const cell = (name, value) => {
      const td = h("td", { class: "n", text: number(value, 2) });
      if (SHARES.has(name) && value !== null) Object.assign(
        td.style, { background: css("viridis", value), color: inkOn("viridis", value) },
      );
      return td;
    };
    fill(table, h("thead", {}, h("tr", {}, h("th", { text: "head" }), names.map(title))),
      h("tbody", {}, order.map((row) =>
        h("tr", { dataset: { head: `${row.layer}.${row.head}` } },
          h(
            "td", {},
            h(
              "button",
              {
                class: "quiet mono", text: `${row.layer}.${row.head}`,
                on: { click: () => store.set({ layer: row.layer, head: row.head }) },
              },
            ),
          ),
          names.map((name) => cell(name, row.scores[name]))))));
    fill(
      notes, Object.entries(at.notes).map(([name, text]) => h("p", { text: `${name.replaceAll("_", " ")}: ${text}` })),
    );
  }

  function mark(layer, head) {
    for (const row of table.querySelectorAll("tbody tr")) row.classList.toggle(
      "chosen", row.dataset.head === `${layer}.${head}`,
    );
  }

  function summary(layer, head) {
    const row = at.model === store.get("model") && at.rows.find((one) => one.layer === layer && one.head === head);
    if (!row) return "";
    const named = Object.entries(row.scores).filter(
      ([name, value]) => SHARES.has(name) && name !== "relative_entropy" && value !== null
    );
    const [name, value] = named.sort((a, b) => b[1] - a[1])[0] ?? [];
    return name ? `: ${name.replaceAll("_", " ")} ${number(value, 2)}` : "";
  }

  return { root: where.root, ask, mark, summary };
}

export function ablation(view) {
  const heads = new Set();
  let mode = "zero";
  let offered = [0, 0];
  const where = panel({
    title: "Ablation", name: "ablate", wide: true, figure: () => (heads.size ? result : null),
    python: () => ({ view: "ablate", ...store.about, heads: pairs(), mode }),
    hint:
      "Ablate heads and see how the next-token distribution changes. zero: the head's output is set to zero; mean: " +
      "it is replaced by its mean over the text.",
  });
  const pairs = () => [...heads].map((name) => name.split(".").map(Number));
  const toggle = h("button", { on: { click: () => flip(offered.join(".")) } });
  const modes = h("div", { class: "segments", role: "group", "aria-label": "How heads are ablated" });
  for (const name of ["zero", "mean"])
    modes.append(h("button", { text: name, "aria-pressed": String(name === mode), on: { click: () => choose(name) } }));
  const none = h("button", { class: "quiet", text: "Restore all", on: { click: () => (clear(), view.drawChoice()) } });
  const chosen = h("span", { class: "row" });
  const result = h("div", {});
  where.body.append(h("div", { class: "row" }, toggle, modes, none, chosen), result);

  function choose(name) {
    mode = name;
    [...modes.children].forEach((one) => one.setAttribute("aria-pressed", String(one.textContent === name)));
    ask();
  }

  function flip(name) {
    if (!heads.delete(name)) heads.add(name);
    view.drawChoice();
    ask();
  }

  function offer(layer, head) {
    offered = [layer, head];
    const out = heads.has(offered.join("."));
    toggle.textContent = `${out ? "Restore" : "Ablate"} head ${layer}.${head}`;
    none.disabled = !heads.size;
    fill(
      chosen,
      [...heads].map((name) => h(
        "button",
        { class: "chip", text: `${name} ×`, "aria-label": `Restore head ${name}`, on: { click: () => flip(name) } },
      )),
    );
  }

  function clear() {
    heads.clear();
    view.stop("ablate");
    fill(result);
    offer(...offered);
  }

  function column(title, rows, other) {
    const before = new Map(other.map((one) => [one.id, one.p]));
    return h("div", {}, h("h3", { text: title }), h("table", {}, h("tbody", {}, rows.map((one) => {
      const bar = h("span", { class: "is" });
      bar.style.width = `${100 * one.p}%`;
      const change = before.has(one.id) ? one.p - before.get(one.id) : null;
      const difference = change === null ? "new" : `${change >= 0 ? "+" : "−"}${percent(Math.abs(change))}`;
      return h("tr", {}, h("td", { class: "mono", text: visible(one.piece) }), h(
        "td", { class: "share" }, h("span", { class: "track" }, bar),
      ),
        h("td", { class: "n", text: percent(one.p) }),
        h("td", { class: "n soft", text: rows === other ? "" : difference }));
    }))));
  }

  async function ask() {
    if (!heads.size || !store.ids.length) return fill(result);
    const body = { ...store.about, heads: pairs(), mode };
    const got = await view.work(where, "ablate", (signal) => post("ablate", body, { signal }));
    if (!got) return undefined;
    where.root.dataset.kl = got.kl;
    return fill(result, h("p", { text: `KL(before ‖ after) = ${number(got.kl, 3)} nats at the last position.` }),
      h(
        "div", { class: "before-after" }, column("Whole model", got.before, got.before),
        column(`Without ${[...heads].join(", ")}`, got.after, got.before),
      ));
  }

  return { root: where.root, ask, clear, offer, heads };
}
