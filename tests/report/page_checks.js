// Evaluated in the page: what is wrong with how it looks. An empty list is good.
() => {
  const isSeen = (e) => e.getClientRects().length > 0 && getComputedStyle(e).visibility !== "hidden";
  const name = (e) => `${e.tagName}#${e.id}.${e.className.baseVal ?? e.className} ${e.textContent.slice(0, 40)}`;
  const wrong = [];
  // Every picture is there and not empty.
  for (const e of document.querySelectorAll("svg")) {
    if (isSeen(e) && !e.querySelector("path, circle, rect")) wrong.push(`empty ${name(e)}`);
  }
  for (const e of document.querySelectorAll("canvas")) {
    if (!isSeen(e)) continue;
    const data = e.getContext("2d").getImageData(0, 0, e.width, e.height).data;
    const colours = new Set();
    for (let i = 0; i < data.length; i += 4 * 97) colours.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
    if (colours.size < 4) wrong.push(`empty ${name(e)}`);
  }
  // Nothing is wider than the window, but in boxes that scroll.
  for (const e of document.querySelectorAll("main *")) {
    if (!isSeen(e) || e.closest(".wraps, pre, nav")) continue;
    if (e.getBoundingClientRect().right > innerWidth + 1) wrong.push(`too wide ${name(e)}`);
  }
  // No text is cut, but where an ellipsis says so and a title has the whole.
  for (const e of document.querySelectorAll("main *")) {
    if (!isSeen(e) || !e.firstChild || e.tagName === "CANVAS" || e.closest("pre, .wraps, nav, svg")) continue;
    const style = getComputedStyle(e);
    if (style.overflowX === "visible" || style.textOverflow === "ellipsis") continue;
    if (e.scrollWidth > e.clientWidth + 1 && e.matches("span, button, dd, dt, p, td, h1, h2, h3, li")) wrong.push(`cut ${name(e)}`);
  }
  // Texts of one picture do not overlap, and lie inside it.
  for (const svg of document.querySelectorAll("svg")) {
    if (!isSeen(svg)) continue;
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map((e) => [e, e.getBoundingClientRect()]);
    texts.forEach(([e, a], k) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 || a.top < frame.top - 1 || a.bottom > frame.bottom + 1) {
        wrong.push(`outside ${name(e)}`);
      }
      for (const [other, b] of texts.slice(k + 1)) {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
        const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 1 && tall > 3) wrong.push(`over each other: ${name(e)} and ${name(other)}`);
      }
    });
  }
  // Texts of the page do not lie over each other.
  const blocks = [...document.querySelectorAll("main h1, main h2, main h3, main p, main li, main dt, main dd, main button, main label, main figcaption, .rowbar > span")]
    .filter((e) => isSeen(e) && !e.closest("canvas, .wraps"));
  const boxes = blocks.map((e) => [e, e.getBoundingClientRect()]);
  boxes.forEach(([e, a], k) => {
    for (const [other, b] of boxes.slice(k + 1)) {
      if (e.contains(other) || other.contains(e)) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const tall = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && tall > 2) wrong.push(`over each other: ${name(e)} and ${name(other)}`);
    }
  });
  return wrong;
}
