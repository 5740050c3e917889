/* Course view: problems with drawn numbers and coding exercises, by topic or by source, with the progress.
 *
 * The selected item is in the URL (`item`). Answers are read while they are typed and judged when they are submitted.
 * Programs run in a separate process of the server.
 */
import { get, post, text } from "./api.js";
import { codeEditor } from "./code-editor.js";
import { fill, h, inspect, later } from "./dom.js";
import { prose } from "./prose.js";
import { store } from "./store.js";
import { View, panel } from "./view.js";

const path = (id) => `course/${encodeURIComponent(id)}`;

export class Course extends View {
  outline = null;
  shown = null;
  drafts = new Map();

  build() {
    this.buildList();
    this.buildItem();
    this.append(this.list.root, this.item.root);
  }

  buildList() {
    this.list = panel({ title: "Course", name: "course" });
    this.order = h("select", { "aria-label": "Order", on: { change: () => this.showList() } },
      h("option", { value: "topic", text: "by topic" }), h("option", { value: "source", text: "by source" }));
    this.bar = h("progress", { max: 1, value: 0, "aria-label": "Solved problems and exercises" });
    this.done = h("p", { class: "soft small", role: "status" });
    this.nav = h("nav", { class: "claim-list", "aria-label": "Problems and exercises" });
    this.list.body.append(this.order, this.bar, this.done, this.nav);
  }

  buildItem() {
    this.item = panel({ title: "Problem", name: "problem" });
    this.words = h("div", { class: "claim-words" });
    this.form = h("form", { class: "bench", "aria-label": "Your answer", hidden: true });
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.submit();
    });
    this.field = h("div");
    this.live = h("p", { class: "small soft live", role: "status" });
    this.send = h("button", { class: "primary", type: "submit", text: "Check" });
    const button = (label, click) => h("button", { type: "button", text: label, on: { click } });
    this.hint = button("Hint", () => this.showHint());
    this.renew = button("New numbers", () => this.newNumbers());
    this.next = button("Next", () => this.goNext());
    this.verdict = h("div", { class: "course-verdict", role: "alert" });
    this.hints = h("ol", { class: "course-hints", "aria-label": "Hints", "aria-live": "polite" });
    this.form.append(this.field, this.live,
      h("div", { class: "row" }, this.send, this.hint, this.renew, this.next), this.verdict, this.hints);
    this.solution = this.folded("Solution", () => this.showSolution());
    this.derivation = this.folded("Derivation and figure", () => this.showDerivation());
    this.item.body.append(this.words, this.form, this.solution.root, this.derivation.root);
  }

  folded(title, load) {
    const body = h("div");
    const root = h("details", { class: "folded", hidden: true }, h("summary", { text: title }), body);
    root.addEventListener("toggle", () => root.open && !body.hasChildNodes() && load());
    return { root, body };
  }

  async update() {
    if (this.busy("outline")) return;
    if (!this.outline) {
      const outline = await this.work(this.list, "outline", (signal) => get("course", { signal }));
      if (!outline) return;
      this.outline = outline;
      this.showList();
    }
    const id = store.get("item") ?? this.following() ?? this.ids()[0];
    if (id !== this.shown?.id) await this.open(id);
  }

  /* The list */

  ids() {
    return this.outline[this.order.value].flatMap((group) => group.ids);
  }

  following() {
    const ids = this.ids();
    const from = ids.indexOf(this.shown?.id) + 1;
    return [...ids.slice(from), ...ids.slice(0, from)].find((id) => !this.outline.items[id].solved);
  }

  showList() {
    const entry = (id) => {
      const { title, code, solved } = this.outline.items[id];
      const link = h("a", { href: store.link({ view: "course", item: id }), dataset: { item: id } },
        h("span", { class: "claim-title", text: title }),
        h("span", { class: "claim-meta" }, solved && h("span", { class: "solved", text: "✓ solved" }),
          code && h("span", { class: "soft", text: "program" })));
      if (id === this.shown?.id) link.setAttribute("aria-current", "true");
      link.addEventListener("click", (event) => {
        if (event.ctrlKey || event.metaKey || event.shiftKey) return;
        event.preventDefault();
        store.set({ item: id });
      });
      return h("li", {}, link);
    };
    fill(this.nav, this.outline[this.order.value].map((group) =>
      h("section", {}, h("h3", { text: group.name }), h("ul", {}, group.ids.map(entry)))));
    const all = Object.values(this.outline.items);
    const solved = all.filter((one) => one.solved).length;
    this.bar.max = all.length;
    this.bar.value = solved;
    this.done.textContent = `${solved} of ${all.length} solved`;
    this.nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
  }

  /* One item */

  async open(id) {
    const item = await this.work(this.item, "item", (signal) => get(path(id), { signal }));
    if (!item) return;
    this.keepDraft();
    this.shown = item;
    this.showItem(item);
    this.showList();
  }

  keepDraft() {
    if (this.shown?.kind === "code") this.drafts.set(this.shown.id, this.editor.value);
  }

  showItem(item) {
    const code = item.kind === "code";
    fill(this.words, h("h3", { class: "claim-name", text: item.title }),
      h("p", { class: "claim-meta" }, h("code", { text: item.id }),
        item.rows?.length && h("span", { class: "soft", text: item.rows.join("; ") })),
      code ? h("pre", { class: "problem-text", text: item.problem })
        : h("div", { class: "statement" }, prose(item.statement)));
    this.form.hidden = false;
    fill(this.field, code ? this.program(item) : item.options ? this.choices(item) : this.box(item));
    fill(this.live);
    fill(this.verdict);
    this.showHints(item.hints ?? []);
    this.renew.hidden = code;
    this.send.textContent = code ? "Grade" : "Check";
    for (const one of [this.solution, this.derivation]) {
      one.root.open = false;
      fill(one.body);
    }
    this.solution.root.hidden = false;
    this.derivation.root.hidden = !item.claims.length;
    this.item.root.dataset.ready = item.id;
    inspect("Claims", item.claims.map((claim) =>
      h("p", {}, h("a", { href: store.link({ view: "theory", claim }), text: claim }))));
  }

  box(item) {
    this.input = h("input", { class: "mono", id: "course-answer", autocomplete: "off", spellcheck: "false",
      "aria-describedby": "course-prompt", on: { input: later(() => this.read(), 150) } });
    return h("div", { class: "field" }, h("label", { for: "course-answer", text: "Answer" }), this.input,
      h("small", { class: "hint", id: "course-prompt", text: item.prompt }));
  }

  choices(item) {
    const group = (legend, name, rows) => rows.length && h("fieldset", {}, h("legend", { text: legend }),
      rows.map(([key, words]) => h("label", { class: "choice" },
        h("input", { type: "radio", name, value: key }), h("span", {}, prose(words)))));
    return [group("Answer", "option", item.options), group("Because", "reason", item.reasons)];
  }

  program(item) {
    this.editor = codeEditor({ label: `Program: ${item.title}` });
    this.editor.value = this.drafts.get(item.id) ?? item.stub;
    return this.editor.root;
  }

  answer() {
    if (!this.shown.options) return this.input.value;
    const picked = (name) => this.form.querySelector(`input[name=${name}]:checked`)?.value ?? "";
    return `${picked("option")} ${picked("reason")}`.trim();
  }

  async read() {
    const answer = this.answer();
    const found = await this.work(this.item, "read", (signal) =>
      post(path(this.shown.id), { action: "read", answer }, { signal }));
    if (!found) return;
    this.input.setAttribute("aria-invalid", String(Boolean(found.message)));
    if (found.formula?.length) fill(this.live, "Read as ", prose(found.formula));
    else fill(this.live, found.message || (found.readable ? "This can be read." : ""));
  }

  async submit() {
    const { id, kind } = this.shown;
    const body = kind === "code" ? { action: "grade", source: this.editor.value }
      : { action: "check", answer: this.answer() };
    fill(this.verdict, h("p", { class: "soft", text: "Checking …" }));
    const mark = await this.work(this.item, "check", (signal) => post(path(id), body, { signal }));
    if (!mark || this.shown.id !== id) return void fill(this.verdict);
    const words = { right: "Right", wrong: "Wrong" }[mark.result] ?? "Not graded";
    const alone = mark.message.length === 1 && mark.message[0].text === "Right.";
    fill(this.verdict, h("p", { dataset: { result: mark.result } }, h("strong", { text: `${words}. ` }),
      kind === "code" ? null : alone ? "" : prose(mark.message)),
      kind === "code" ? h("pre", { text: mark.message[0].text }) : null);
    this.outline.items[id].solved = mark.solved;
    this.showList();
  }

  showHints(hints) {
    fill(this.hints, hints.map((hint) => h("li", {}, prose(hint))));
    this.hint.disabled = hints.length >= (this.shown?.hint_count ?? 3);
  }

  async showHint() {
    const found = await this.work(this.item, "hint", (signal) =>
      post(path(this.shown.id), { action: "hint" }, { signal }));
    if (found) this.showHints(found.hints);
  }

  async newNumbers() {
    const { id } = this.shown;
    const drawn = await this.work(this.item, "new", (signal) => post(path(id), { action: "new" }, { signal }));
    if (drawn) await this.open(id);
  }

  goNext() {
    const id = this.following();
    if (id) store.set({ item: id });
    else fill(this.verdict, h("p", { text: "Everything is solved." }));
  }

  /* Folded below */

  async showSolution() {
    const found = await this.work(this.item, "solution", (signal) =>
      post(path(this.shown.id), { action: "solution" }, { signal }));
    if (!found) return;
    const program = found.program && h("pre", { class: "code", tabindex: 0, text: found.program });
    fill(this.solution.body, program ? [program] : [h("p", {}, prose(found.solution)),
      h("p", {}, "Answer: ", h("code", { text: found.answer }))],
      found.errata.map((one) => h("div", { class: "erratum" }, h("b", { text: `${one.id}: an error in a source` }),
        h("p", {}, "It states: ", prose(one.states)), h("p", {}, "Why it fails: ", prose(one.fails)),
        h("details", {}, h("summary", { text: "Smallest counterexample, as Python" }),
          h("pre", { class: "code", tabindex: 0, text: one.example })))));
  }

  async showDerivation() {
    const [claim] = this.shown.claims;
    const found = await this.work(this.item, "derivation", (signal) => get(`claims/${claim}`, { signal }));
    if (!found) return;
    const figure = h("figure", { class: "claim-figure" });
    fill(this.derivation.body, h("p", {}, prose(found.statement)),
      h("ol", { class: "claim-rest" }, found.derivation.map((step) => h("li", {}, prose(step)))), figure);
    if (!found.has_figure) return;
    const drawn = await this.work(this.item, "figure", (signal) => text(`claims/${claim}/figure.svg`, { signal }));
    const parsed = drawn && new DOMParser().parseFromString(drawn, "image/svg+xml").documentElement;
    if (parsed?.localName !== "svg") return;
    parsed.setAttribute("role", "img");
    parsed.setAttribute("aria-label", `Figure of ${claim}`);
    fill(figure, document.adoptNode(parsed));
  }

  leave() {
    this.keepDraft();
  }
}

customElements.define("glass-course", Course);
