"use strict";
/* A button that opens everything that is folded but the solutions of exercises. */

document.addEventListener("DOMContentLoaded", () => {
  const folds = [...document.querySelectorAll("article details:not(.solution)")];
  const title = document.querySelector("article h1");
  if (!folds.length || !title) return;
  const button = document.createElement("button");
  button.type = "button";
  button.className = "open-all";
  button.textContent = "Open all";
  button.onclick = () => {
    const opening = folds.some((fold) => !fold.open);
    for (const fold of folds) fold.open = opening;
    button.textContent = opening ? "Close all" : "Open all";
  };
  title.after(button);
});
