/* Before the first paint: the theme chosen last time, so that a dark page never flashes white. No module on purpose. */
(() => {
  const chosen = localStorage.getItem("glass-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
