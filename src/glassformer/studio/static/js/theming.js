/* Who draws by hand draws again when the theme changes.
 *
 *   onTheme(f)   f() after the theme changed, by the button or by the system; gives a function that ends it
 */
const listeners = new Set();
const tell = () => listeners.forEach((f) => f());

new MutationObserver(tell).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", tell);

export function onTheme(f) {
  listeners.add(f);
  return () => listeners.delete(f);
}
