// Lets code in tables break after punctuation (not in 0.01), so that it fits a phone.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("article table code")) {
    const words = document.createTreeWalker(code, NodeFilter.SHOW_TEXT);
    const found = [];
    while (words.nextNode()) found.push(words.currentNode);
    for (const word of found) {
      const parts = word.textContent.split(/(?<=[_(,=/]|\.(?!\d))/);
      word.replaceWith(...parts.flatMap((part) => [part, document.createElement("wbr")]));
    }
  }
});
