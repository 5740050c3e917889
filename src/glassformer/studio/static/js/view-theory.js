/* Theory view: all claims by chapter with badge and verdict; one in full, which can be run with other knobs and with
 * its negative control.
 *
 * The selected claim is in the URL (`claim`). The list needs no torch; running a claim does.
 */
import { events, get, text } from "./api.js";
import { fill, h, inspect, later, number, slider } from "./dom.js";
import { findingTable, relation, verdictMark } from "./findings.js";
import { latest } from "./latest.js";
import { prose } from "./prose.js";
import { store } from "./store.js";
import { View, panel } from "./view.js";

const LETTER = { proved: "P", "verified on stated ranges": "V", illustrated: "I" };

function badge(name) {
  return h("span", { class: "claim-badge", dataset: { badge: LETTER[name] ?? "" }, text: name });
}

const words = (claim) =>
  [claim.id, claim.title, claim.chapter, claim.chapter_title, claim.badge, ...claim.sources, ...claim.errata]
    .join(" ").toLowerCase();

export class Theory extends View {
  claims = [];
  verdicts = new Map();

  build() {
    this.buildList();
    this.buildClaim();
    this.append(this.list.root, this.claim.root);
  }

  buildList() {
    this.list = panel({ title: "Claims", name: "claims" });
    const label = "Search the claims";
    this.search = h("input", { type: "search", placeholder: "Bishop 12.3, E32, …", "aria-label": label });
    this.search.addEventListener("input", later(() => this.showList(), 80));
    this.found = h("p", { class: "soft small", role: "status" });
    this.nav = h("nav", { class: "claim-list", "aria-label": "Claims by chapter" });
    this.list.body.append(this.search, this.found, this.nav);
  }

  buildClaim() {
    this.claim = panel({
      title: "Claim", name: "claim", figure: () => this.figure.querySelector("svg"),
      python: () => ({ view: "theory", claim: this.shown?.id, ...this.request() }),
    });
    this.words = h("div", { class: "claim-words" });
    this.figure = h("figure", { class: "claim-figure" });
    this.rest = h("div", { class: "claim-rest" });
    this.buildBench();
    this.claim.body.append(this.words, this.figure, this.bench, this.rest);
  }

  buildBench() {
    this.seed = h("input", { type: "number", min: 0, max: 1000000, step: 1, value: 0, class: "narrow" });
    this.broken = h("input", { type: "checkbox", on: { change: () => this.run() } });
    this.slow = h("input", { type: "checkbox" });
    this.slowLabel = h("label", { class: "check small" }, this.slow, "also train (takes minutes)");
    const click = () => (this.busy("run") ? this.stop("run") : this.run());
    this.start = h("button", { class: "primary", text: "Run", on: { click } });
    this.knobs = h("div", { class: "sliders" });
    this.verdict = h("p", { class: "verdict-line", role: "status" });
    this.table = findingTable("Evidence", { kinds: true });
    this.control = h("p", { class: "small soft control-words" });
    this.bench = h("section", { class: "bench", "aria-label": "Run it", hidden: true },
      h("div", { class: "row" }, this.start, h("label", { class: "check small" }, "seed", this.seed), this.slowLabel,
        h("label", { class: "check small break" }, this.broken, "negative control")),
      this.control, this.knobs, this.verdict, this.table.root);
  }

  async update(changed) {
    if (this.busy("list")) return; // it calls update when it ends
    if (!this.claims.length) {
      const answer = await this.work(this.list, "list", (signal) => get("claims", { signal }));
      if (!answer) return;
      this.claims = answer;
      this.showList();
    }
    const id = store.get("claim") ?? this.claims[0]?.id;
    if (id !== this.shown?.id) await this.open(id);
    else if (changed.has("view")) inspect("Sources", sources(this.shown));
  }

  /* The list */

  showList() {
    const wanted = this.search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.claims.filter((claim) => wanted.every((word) => words(claim).includes(word)));
    const chapter = (claims) =>
      h("section", {}, h("h3", { text: claims[0].chapter_title }),
        h("ul", {}, claims.map((claim) => this.entry(claim))));
    fill(this.nav, [...groupBy(found).values()].map(chapter));
    const numbers = found.flatMap((claim) => claim.errata.map((word) => /^E\d+/.exec(word)?.[0]).filter(Boolean));
    const errata = new Set(numbers).size;  // as docs/errata.md counts them: E35a and E35b are one erratum
    this.found.textContent = `${found.length} of ${this.claims.length} claims, ${errata} errata in their sources`;
  }

  entry(claim) {
    const verdict = this.verdicts.get(claim.id) ?? claim.verdict;
    const count = claim.errata_count;
    const link = h("a", { href: store.link({ view: "theory", claim: claim.id }), dataset: { claim: claim.id } },
      h("span", { class: "claim-title", text: claim.title }),
      h("span", { class: "claim-meta" }, badge(claim.badge),
        verdict ? verdictMark(verdict) : claim.slow && h("span", { class: "soft", text: "trains" }),
        count > 0 && h("span", { class: "errata-count", text: `${count} errat${count === 1 ? "um" : "a"}` })));
    link.addEventListener("click", (event) => this.choose(event, claim.id));
    if (claim.id === this.shown?.id) link.setAttribute("aria-current", "true");
    return h("li", {}, link);
  }

  choose(event, id) {
    if (event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    store.set({ claim: id });
  }

  /* One claim */

  async open(id) {
    this.stop("run");
    const claim = await this.work(this.claim, "claim", (signal) => get(`claims/${encodeURIComponent(id)}`, { signal }));
    if (!claim) return;
    this.shown = claim;
    for (const link of this.nav.querySelectorAll("a")) {
      if (link.dataset.claim === id) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
    this.nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
    this.showClaim(claim);
    fill(this.figure);
    this.drawFigure();
  }

  showClaim(claim) {
    fill(this.words, h("h3", { class: "claim-name" }, prose(claim.title)),
      h("p", { class: "claim-meta" }, this.badge = badge(claim.badge),
        h("span", { class: "soft", text: claim.kinds.join(", ") }), h("code", { text: claim.id })),
      h("div", { class: "statement" }, prose(claim.statement)));
    this.bench.hidden = false;
    this.slowLabel.hidden = !claim.slow && !claim.kinds.includes("empirical");
    this.slow.checked = false;
    this.broken.checked = false;
    fill(this.control, h("b", { text: "Negative control: " }), prose(claim.control));
    this.sliders = new Map(claim.knobs.map((knob) => [knob, this.knob(knob)]));
    fill(this.knobs, [...this.sliders.values()].map((one) => one.root));
    this.table.clear();
    this.table.root.hidden = true;
    fill(this.verdict);
    fill(this.rest, derivation(claim), claim.errata.map(erratum));
    inspect("Sources", sources(claim));
  }

  /* A changed knob redraws the figure, and repeats the check if it has run before. */
  knob({ name, label, low, high, step, default: value }) {
    const again = () => (this.drawFigure(), this.verdict.hasChildNodes() && this.run());
    const format = (v) => number(v, 4);
    return slider({ label: label || name, min: low, max: high, step, value, format, input: later(again, 200) });
  }

  /* Knobs that were changed; the others keep the default of the claim. */
  knobValues() {
    const values = [...(this.sliders ?? [])].map(([knob, one]) => [knob, Number(one.value.toPrecision(12))]);
    return Object.fromEntries(values.filter(([knob, v]) => v !== knob.default).map(([knob, v]) => [knob.name, v]));
  }

  request() {
    const seed = Number(this.seed.value) || 0;
    return { seed, broken: this.broken.checked, slow: this.slow.checked, knobs: this.knobValues() };
  }

  drawFigure = latest(async () => {
    const claim = this.shown;
    if (this.hidden) return;
    if (!claim.has_figure) return void fill(this.figure);
    const path = `claims/${encodeURIComponent(claim.id)}/figure.svg?${new URLSearchParams(this.knobValues())}`;
    const drawn = await this.work(this.claim, "figure", (signal) => text(path, { signal }));
    if (!drawn || this.shown !== claim) return;
    const parsed = new DOMParser().parseFromString(drawn, "image/svg+xml").documentElement;
    if (parsed.localName !== "svg") return;
    parsed.setAttribute("role", "img");
    parsed.setAttribute("aria-label", `Figure of ${claim.id}`);
    fill(this.figure, document.adoptNode(parsed));
    this.figure.dataset.ready = path;
  });

  async run() {
    const claim = this.shown;
    const body = this.request();
    const report = (text) => fill(this.verdict, h("span", { class: "soft", text }));
    this.table.clear();
    this.table.root.hidden = false;
    this.start.textContent = "Stop";
    delete this.claim.root.dataset.ready;
    report(body.broken ? "Running the negative control …" : "Running …");
    const verdict = await this.work(this.claim, "run", async (signal) => {
      for await (const { event, data } of events(`claims/${encodeURIComponent(claim.id)}/run`, { body, signal })) {
        if (event === "part") this.table.add(data);
        else if (event === "verdict") return data;
      }
      throw new Error("the check ended before its verdict: run it again.");
    });
    if (this.busy("run")) return; // superseded by a newer run
    this.start.textContent = "Run";
    if (this.shown !== claim) return;
    if (!verdict) return void report("Stopped.");
    this.conclude(claim, verdict, body);
  }

  conclude(claim, verdict, { broken, knobs }) {
    const rejected = broken && verdict.verdict === "fail" && !verdict.crashed;
    let mark = verdictMark(verdict.verdict);
    if (rejected) mark = verdictMark("rejected", "The negative control fails, as it must.");
    else if (broken) mark = verdictMark("fail", `The negative control was not detected: ${verdict.verdict}.`);
    fill(this.verdict, mark, h("span", { class: "soft", text: ` ${relation(verdict)} ` }),
      h("span", { class: "small", text: verdict.why }));
    const reached = verdict.evidence?.badge; // lower than the recorded one where evidence could not be examined
    if (!broken && reached) this.badge.replaceWith(this.badge = badge(reached));
    this.claim.root.dataset.ready = `${claim.id} ${broken ? "broken" : "whole"}`;
    if (broken || Object.keys(knobs).length) return;
    this.verdicts.set(claim.id, verdict.verdict);
    this.showList();
  }

  leave() {
    if (this.start) this.start.textContent = "Run";
  }
}

function groupBy(claims) {
  const chapters = new Map();
  for (const claim of claims) chapters.set(claim.chapter, [...(chapters.get(claim.chapter) ?? []), claim]);
  return chapters;
}

function derivation(claim) {
  return h("details", { class: "fold", open: true }, h("summary", { text: "Derivation" }),
    h("ol", {}, claim.derivation.map((step) => h("li", {}, prose(step)))));
}

function sources(claim) {
  return claim.sources.map((source) => {
    const errata = source.errata.length ? ` (${source.errata.join(", ")})` : "";
    return h("article", { class: "source" }, h("h3", { text: source.cite }), h("p", { text: source.says }),
      h("p", { class: "soft small", text: `${source.note || source.verdict}${errata}` }));
  });
}

function erratum(one) {
  const rows = [["statement", one.states], ["fails because", one.fails], ["correct", one.correct]];
  return h("article", { class: "erratum" }, h("h3", { text: `Erratum ${one.id}: ${one.flaw}` }),
    h("p", { class: "soft small", text: one.sources.join(", ") }),
    h("dl", { class: "facts" }, rows.map(([name, value]) => [h("dt", { text: name }), h("dd", {}, prose(value))])),
    h("details", {}, h("summary", { text: "Smallest counterexample, as Python" }),
      h("pre", { class: "code", tabindex: 0, text: one.example })));
}

customElements.define("glass-theory", Theory);
