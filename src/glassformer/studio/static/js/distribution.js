/* Panel of the next-token distribution. Logits are requested once per prompt; sliders redraw from them.
 *
 *   nextToken(view) -> {root, ask(), sampling()}
 */
import { post, postTensor } from "./api.js";
import { fill, h, inspect, number, percent, slider, visible } from "./dom.js";
import { distribution, ordered } from "./sampling.js";
import { store } from "./store.js";
import { panel } from "./view.js";
import { vocabulary } from "./vocabulary.js";

const SHOWN = 18;
const NO_NEXT = "This model is an encoder and predicts no next token: select a decoder, or look at its heads.";

/* The tokens up to the selected one, or the whole prompt. In an encoder-decoder the source stays whole and the decoder
 * input ends there. */
export function upToToken() {
  const { about } = store;
  const end = (store.get("token") ?? store.words.length - 1) + 1;
  return about.target ? { ...about, target: about.target.slice(0, end) } : { ...about, ids: about.ids.slice(0, end) };
}

export function nextToken(view) {
  const at = { logits: null, order: null, words: [], body: null, read: [] };
  const where = panel({
    title: "Next token",
    name: "next",
    figure: () => (at.logits ? figure : null),
    python: () => ({ view: "next", ...at.body, ...sampling() }),
  });
  const temperature = slider({
    label: "Temperature", min: 0, max: 2, step: 0.05, value: 1, format: (v) => (v === 0 ? "0, greedy" : v.toFixed(2)),
    input: redraw,
  });
  const topK = slider({
    label: "Top-k", min: 0, max: 50, step: 1, value: 0, format: (v) => (v === 0 ? "all" : String(v)), input: redraw,
  });
  const topP = slider({
    label: "Top-p", min: 0.05, max: 1, step: 0.01, value: 1, format: (v) => (v === 1 ? "1, all" : v.toFixed(2)),
    input: redraw,
  });
  const minP = slider({
    label: "Min-p", min: 0, max: 1, step: 0.01, value: 0, format: (v) => (v === 0 ? "0, all" : v.toFixed(2)),
    input: redraw,
  });
  const summary = h("p", { class: "soft small", "aria-live": "polite" });
  const list = h("ol", { class: "bars" });
  const figure = h("div", {}, summary, list);
  const rows = [];
  where.body.append(h("div", { class: "sliders" }, temperature.root, topK.root, topP.root, minP.root), figure);

  function sampling() {
    return { temperature: temperature.value, top_k: topK.value || null, top_p: topP.value, min_p: minP.value };
  }

  function row(i) {
    const parts = {
      piece: h("span", { class: "piece" }),
      was: h("span", { class: "was" }),
      is: h("span", { class: "is" }),
      p: h("span", { class: "p" }),
    };
    const track = h("span", { class: "track" }, parts.was, parts.is);
    parts.button = h(
      "button",
      {
        class: "bar-row",
        on: { click: () => append(at.order[i]), pointerenter: () => inspectToken(i), focus: () => inspectToken(i) },
      },
      parts.piece, track, parts.p,
    );
    return { ...parts, root: h("li", {}, parts.button) };
  }

  function inspectToken(i) {
    const id = at.order[i];
    const { p } = distribution(at.logits, at.order, sampling());
    const fact = (name, value) => [h("dt", { text: name }), h("dd", { text: value })];
    inspect(`Token “${visible(at.words[id] ?? "")}”`, h("dl", { class: "facts" }, fact("id", id), fact("rank", i +
      1), fact("logit", number(at.logits[id], 5)),
      fact("p of the model", percent(at.own.p[id], 3)), fact("p after sampling", percent(p[id], 3))), h(
        "p", { class: "soft", text: "Click the bar to append the token to the prompt." },
      ));
  }

  function redraw() {
    if (!at.logits) return;
    const started = performance.now();
    const { p, kept, entropy } = distribution(at.logits, at.order, sampling());
    const own = at.own;
    const many = Math.min(SHOWN, at.order.length);
    while (rows.length < many) rows.push(row(rows.length)), list.append(rows.at(-1).root);
    while (rows.length > many) rows.pop().root.remove();
    const most = Math.max(p[at.order[0]], own.p[at.order[0]]);
    rows.forEach((one, i) => {
      const id = at.order[i];
      const piece = visible(at.words[id] ?? `#${id}`);
      one.piece.textContent = piece;
      one.was.style.width = `${(100 * own.p[id]) / most}%`;
      one.is.style.width = `${(100 * p[id]) / most}%`;
      one.p.textContent = p[id] ? percent(p[id], 2) : `(${percent(own.p[id], 2)})`;
      one.button.classList.toggle("cut", p[id] === 0);
      one.button.setAttribute("aria-label", `${piece}, ${percent(p[id], 2)}: append it to the prompt`);
    });
    const after = visible(store.words[at.read.length - 1] ?? "");
    summary.textContent =
      `After “${after}”: ${kept} of ${at.order.length} tokens can be sampled, entropy ${number(entropy)} nats ` +
      `(before sampling parameters: ${number(own.entropy)}). Grey: probability of the model; blue: after sampling.`;
    where.root.dataset.redraw = (performance.now() - started).toFixed(2);
  }

  async function append(id) {
    const ids = [...at.read, id];
    const key = at.body.target ? "answered" : "prompt";
    if (store.model?.tokenizer === false) return store.set({ [key]: ids.join(" "), token: null });
    const body = at.body.target ? { ...at.body, target: ids } : { ...at.body, ids };
    const tokens = await view.work(where, "append", (signal) => post("tokens", body, { signal }));
    if (tokens) store.set({ [key]: (tokens.target ?? tokens).text, token: null });
  }

  async function ask() {
    const body = upToToken();
    const read = body.target ?? body.ids;
    if (!read.length || store.model?.kind === "encoder") {
      view.stop("next");
      at.logits = null;
      fill(summary, read.length ? NO_NEXT : "Type a prompt to see the next-token distribution.");
      rows.splice(0).forEach((one) => one.root.remove());
      return;
    }
    const got = await view.work(where, "next", async (signal) => ({
      ...(await postTensor("next", body, { signal })),
      words: await vocabulary(body.model),
    }));
    if (!got) return;
    at.words = got.words;
    Object.assign(at, { body, read });
    at.logits = got.tensors.logits.data;
    at.order = ordered(at.logits);
    at.own = distribution(at.logits, at.order);
    topK.control.max = Math.min(200, at.logits.length - 1);
    redraw();
    where.root.dataset.ready = String(read.length);
  }

  return { root: where.root, ask, sampling };
}
