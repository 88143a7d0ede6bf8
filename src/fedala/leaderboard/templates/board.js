"use strict";
// Sort the tables by a click on a heading, and show one setting at a time. Without this script, all
// settings are there, the best method first. All text is set as text, never as markup.
(() => {
  const live = document.getElementById("live");
  const sections = [...document.querySelectorAll("main section[data-setting]")];
  const links = [...document.querySelectorAll("#settings a")];

  /** Compare two keys; an empty one is last in both directions. */
  const compare = (a, b, direction) => {
    if (a === "" || b === "") return (a === "") - (b === "");
    const difference = isNaN(a) || isNaN(b) ? a.localeCompare(b, "en") : Number(a) - Number(b);
    return direction * difference;
  };
  const sort = (table, place, direction) => {
    const rows = [...table.tBodies[0].rows];
    const key = (row) => row.cells[place].dataset.key ?? "";
    rows.sort((a, b) => compare(key(a), key(b), direction) || Number(a.dataset.rank) - Number(b.dataset.rank));
    table.tBodies[0].append(...rows);
  };
  for (const table of document.querySelectorAll("table.board")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, place) => {
      if (!head.dataset.sort) return;
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = head.textContent;
      button.title = head.title;
      head.replaceChildren(button);
      if (!head.hasAttribute("aria-sort")) head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const first = head.dataset.sort === "text" ? "ascending" : "descending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        for (const one of heads) if (one.dataset.sort) one.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", order);
        sort(table, place, order === "ascending" ? 1 : -1);
        live.textContent = `Sorted by ${button.textContent}, ${order}`;
      });
    });
  }

  const show = () => {
    const asked = decodeURIComponent(location.hash.slice(1));
    const name = (sections.find((one) => one.id === asked) ?? sections.find((one) => one.dataset.first) ?? sections[0])?.id;
    for (const one of sections) one.hidden = one.id !== name;
    for (const link of links) link.setAttribute("aria-current", String(link.hash.slice(1) === name));
    for (const chip of document.querySelectorAll("#methods button")) chip.hidden = chip.dataset.group !== name;
    document.dispatchEvent(new Event("redraw"));
  };
  addEventListener("hashchange", show);
  show();
})();
