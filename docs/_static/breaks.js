// Lets words in tables break after punctuation (not in 0.01, 1,040 or 1/4), so that
// tables fit a phone.
document.addEventListener("DOMContentLoaded", () => {
  for (const cell of document.querySelectorAll("article table :is(td, th)")) {
    const words = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    const found = [];
    while (words.nextNode()) found.push(words.currentNode);
    for (const word of found) {
      const parts = word.textContent.split(/(?<=[_(=:]|[.,/](?!\d))/);
      if (parts.length === 1) continue;
      word.replaceWith(...parts.flatMap((part) => [part, document.createElement("wbr")]));
    }
  }
});
