"use strict";
/* Opens what is folded, but not the solutions of exercises; fits the page of buckets into the front page. */

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

/** The page of buckets says how high it is, and is told which colours this page has. */
document.addEventListener("DOMContentLoaded", () => {
  const frame = document.querySelector("iframe.buckets");
  if (!frame) return;
  const root = document.documentElement;
  const tell = () => frame.contentWindow.postMessage({ theme: root.dataset.theme }, "*");
  window.addEventListener("message", (event) => {
    if (event.source !== frame.contentWindow || !event.data.height) return;
    frame.style.height = `${Math.ceil(event.data.height) + 2}px`;
    tell();
  });
  new MutationObserver(tell).observe(root, { attributeFilter: ["data-theme"] });
});
