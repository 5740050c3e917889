/* A text area for Python: highlighted, Tab indents, Enter keeps the indentation, Escape and then Tab leaves it.
 *
 *   codeEditor({label}) -> {root, area, get value, set value}
 *
 * The highlighted copy lies behind the transparent text of the area and is hidden from screen readers.
 */
import { fill, h } from "./dom.js";

const WORDS = new Set(("and as assert break class continue def del elif else except False finally for from global if "
  + "import in is lambda None nonlocal not or pass raise return True try while with yield").split(" "));
const TOKEN = /("""[\s\S]*?"""|'''[\s\S]*?'''|"[^"\n]*"|'[^'\n]*')|(#[^\n]*)|\b(\d[\w.]*)|\b([A-Za-z_]\w*)/g;

function highlighted(text) {
  const nodes = [];
  let end = 0;
  for (const found of text.matchAll(TOKEN)) {
    const [whole, string, comment, number, word] = found;
    const kind = string ? "string" : comment ? "comment" : number ? "number" : WORDS.has(word) ? "keyword" : "";
    if (!kind) continue;
    nodes.push(text.slice(end, found.index), h("span", { class: `py-${kind}`, text: whole }));
    end = found.index + whole.length;
  }
  return [...nodes, `${text.slice(end)}\n`];
}

export function codeEditor({ label }) {
  const area = h("textarea", { rows: 16, spellcheck: "false", autocomplete: "off", autocapitalize: "off", wrap: "off",
    "aria-label": label, "aria-description": "Tab indents. Press Escape, then Tab, to leave the editor." });
  const back = h("pre", { "aria-hidden": "true" });
  const show = () => fill(back, highlighted(area.value));
  let leaving = false;
  const insert = (text) => {
    area.setRangeText(text, area.selectionStart, area.selectionEnd, "end");
    area.dispatchEvent(new Event("input"));
  };
  area.addEventListener("input", show);
  area.addEventListener("scroll", () => {
    back.scrollTop = area.scrollTop;
    back.scrollLeft = area.scrollLeft;
  });
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") leaving = true;
    else if (event.key === "Tab" && !event.shiftKey && !leaving) {
      event.preventDefault();
      insert("    ");
    } else if (event.key === "Enter" && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      const line = area.value.slice(0, area.selectionStart).split("\n").at(-1);
      insert(`\n${/^\s*/.exec(line)[0]}${line.trimEnd().endsWith(":") ? "    " : ""}`);
    } else if (event.key !== "Tab" && event.key !== "Shift") leaving = false;
  });
  area.addEventListener("blur", () => (leaving = false));
  return {
    root: h("div", { class: "code-editor" }, back, area),
    area,
    get value() {
      return area.value;
    },
    set value(text) {
      area.value = text;
      show();
    },
  };
}
