/* Notification of theme changes, for code that draws on a canvas.
 *
 *   onTheme(f)   call f after the theme changed, by the button or by the system; returns a function that unsubscribes
 */
const listeners = new Set();
const notify = () => listeners.forEach((f) => f());

new MutationObserver(notify).observe(document.documentElement, { attributeFilter: ["data-theme"] });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", notify);

export function onTheme(f) {
  listeners.add(f);
  return () => listeners.delete(f);
}
