/* "Save figure": save any part of the page as an SVG or PNG file.
 *
 *   saveFigure(node, name, kind)   kind "svg" or "png"; node is a plotly chart, an <svg>, a <canvas>, or any element
 *                                  (saved as it looks, inside a foreignObject; canvases in it become images)
 *   download(blob, filename)       offer a file for download
 *   figureSvg(node)                the SVG text alone
 */
import { plotly } from "./charts.js";

const KEPT = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "stroke-linejoin",
  "opacity", "color", "font-family", "font-size", "font-weight", "font-style", "font-variant-numeric", "text-anchor",
  "dominant-baseline", "text-align", "white-space", "line-height", "letter-spacing", "display", "flex-direction",
  "flex-wrap", "flex-grow", "flex-shrink", "flex-basis", "align-items", "justify-content", "gap",
  "grid-template-columns", "grid-template-rows", "grid-column", "grid-row", "width", "height", "min-width",
  "max-width", "margin", "padding", "border-top", "border-right", "border-bottom", "border-left", "border-radius",
  "border-collapse", "background-color", "vertical-align", "position", "left", "top", "right", "bottom", "overflow",
  "box-sizing", "transform", "transform-origin", "visibility",
];

export function download(blob, filename) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = filename;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/* A copy with inline styles: the file does not contain the stylesheet. */
function dressed(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.cloneNode();
  if (node.nodeType !== Node.ELEMENT_NODE) return null;
  const style = getComputedStyle(node);
  if (style.display === "none" || node.hasAttribute("data-unsaved")) return null;
  let copy = node.cloneNode(false);
  if (node instanceof HTMLCanvasElement) {
    copy = document.createElement("img");
    copy.setAttribute("src", node.toDataURL());
  } else if (node instanceof HTMLInputElement || node instanceof HTMLSelectElement) {
    copy = document.createElement("span");
    copy.textContent = node instanceof HTMLSelectElement ? (node.selectedOptions[0]?.textContent ?? "") : node.value;
  }
  copy.removeAttribute("class");
  copy.style.cssText = KEPT.map((name) => `${name}:${style.getPropertyValue(name)}`).join(";");
  if (copy.tagName !== "IMG" && !copy.textContent)
    for (const child of node.childNodes) copy.append(...[dressed(child)].filter(Boolean));
  return copy;
}

const SVG = "http://www.w3.org/2000/svg";

function give(node, attributes) {
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
}

export function figureSvg(node) {
  const box = node.getBoundingClientRect();
  const [width, height] = [
    Math.ceil(Math.max(box.width, node.scrollWidth)), Math.ceil(Math.max(box.height, node.scrollHeight)),
  ];
  const paper = getComputedStyle(document.documentElement).getPropertyValue("--paper").trim();
  const outer = document.createElementNS(SVG, "svg");
  give(outer, { width, height, viewBox: `0 0 ${width} ${height}` });
  const ground = document.createElementNS(SVG, "rect");
  give(ground, { width, height, fill: paper });
  outer.append(ground);
  const copy = dressed(node);
  if (node instanceof SVGElement) {
    give(copy, { width, height });
    outer.append(copy);
  } else if (node instanceof HTMLCanvasElement) {
    const picture = document.createElementNS(SVG, "image");
    give(picture, { width, height, href: node.toDataURL() });
    outer.append(picture);
  } else {
    const foreign = document.createElementNS(SVG, "foreignObject");
    give(foreign, { width, height });
    foreign.append(copy);
    outer.append(foreign);
  }
  return { text: new XMLSerializer().serializeToString(outer), width, height };
}

async function raster({ text, width, height }) {
  const picture = new Image();
  picture.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await picture.decode();
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(picture, 0, 0, 2 * width, 2 * height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function fromDataUrl(address) {
  const comma = address.indexOf(",");
  const type = address.slice(5, comma).split(";")[0];
  const payload = address.slice(comma + 1);
  if (!address.slice(0, comma).endsWith(";base64")) return new Blob([decodeURIComponent(payload)], { type });
  return new Blob([Uint8Array.from(atob(payload), (char) => char.charCodeAt(0))], { type });
}

async function figureBlob(node, kind) {
  if (node.classList.contains("js-plotly-plot")) {
    const { clientWidth: width, clientHeight: height } = node;
    return fromDataUrl(await (await plotly()).toImage(
      node, { format: kind, width, height, scale: kind === "png" ? 2 : 1 },
    ));
  }
  const figure = figureSvg(node);
  return kind === "svg" ? new Blob([figure.text], { type: "image/svg+xml" }) : raster(figure);
}

export async function saveFigure(node, name, kind) {
  download(await figureBlob(node, kind), `${name}.${kind}`);
}
