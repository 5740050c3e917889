/* Set the stored theme before the first paint, so that a dark page does not flash white. Not a module, to run first. */
(() => {
  const chosen = localStorage.getItem("glass-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
