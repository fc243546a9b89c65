"use strict";
// Behaviour of a report page: everything is readable without it. Texts from results enter by textContent only.
(() => {
  const $ = (id) => document.getElementById(id);
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  const make = (tag, text, className) => {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const digits = (value) => String(Number(value.toPrecision(3)));

  // Theme: as the system, light, dark. Storage may be forbidden in a frame.
  const themes = [["", "as the system"], ["light", "light"], ["dark", "dark"]];
  let theme = "";
  try { theme = localStorage.getItem("d5suite-theme") || ""; } catch { /* nothing is kept */ }
  const showTheme = () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    $("theme").textContent = "Theme: " + (themes.find(([name]) => name === theme) || themes[0])[1];
  };
  $("theme").hidden = false;
  $("theme").addEventListener("click", () => {
    theme = themes[(themes.findIndex(([name]) => name === theme) + 1) % themes.length][0];
    try { localStorage.setItem("d5suite-theme", theme); } catch { /* nothing is kept */ }
    showTheme();
  });
  showTheme();

  // Filter.
  const filter = () => {
    const words = $("q").value.toLowerCase().split(/\s+/).filter(Boolean);
    const off = new Set(all(".pick[aria-pressed=false]").map((each) => each.dataset.backend));
    const marked = $("marked").checked;
    let shown = 0, rows = 0;
    for (const row of all("[data-f]")) {
      let fits = words.every((word) => row.dataset.f.includes(word));
      if (row.classList.contains("row")) {
        fits = fits && !off.has(row.dataset.b) && (!marked || "m" in row.dataset);
        rows += 1;
        shown += fits ? 1 : 0;
      }
      row.hidden = !fits;
    }
    for (const body of all("table.rows tbody")) {
      body.hidden = !body.querySelector("tr.row:not([hidden])");
    }
    for (const part of all(".case .part")) part.hidden = !part.querySelector("tbody:not([hidden])");
    for (const each of all(".case")) each.hidden = !each.querySelector(".part:not([hidden])");
    const hidden = all(".pick").flatMap((each, place) => off.has(each.dataset.backend) ? [place + 2] : []);
    $("columns").textContent = hidden.map((n) => `.grid :is(td, th, col):nth-child(${n}) { display: none; }`).join("");
    $("count").textContent = shown === rows ? `${rows} results` : `${shown} of ${rows} results`;
  };
  const clear = () => {
    $("q").value = "";
    $("marked").checked = false;
    for (const each of all(".pick")) each.setAttribute("aria-pressed", "true");
    filter();
  };
  let waiting = 0;
  $("q").addEventListener("input", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(filter); });
  $("marked").addEventListener("change", filter);
  $("count").textContent = `${all("tr.row").length} results`;

  // Sort the rows of each measurement, in all parts of a table.
  const sort = (button) => {
    const column = Number(button.dataset.column), header = button.closest("th");
    const region = button.closest(".scroll");
    const down = header.getAttribute("aria-sort") === "ascending";
    for (const each of all("th[aria-sort]", region)) each.setAttribute("aria-sort", "none");
    for (const each of all(`.sort[data-column="${column}"]`, region)) {
      each.closest("th").setAttribute("aria-sort", down ? "descending" : "ascending");
    }
    const value = (row) => {
      const cell = row.cells[column + 2];
      return row.classList.contains("wrong") || !("v" in cell.dataset) ? NaN : Number(cell.dataset.v);
    };
    for (const body of all("tbody", region)) {
      const rows = all("tr.row", body).map((row) => [value(row), row]);
      rows.sort(([a], [b]) => Number.isNaN(a) - Number.isNaN(b) || (down ? b - a : a - b) || 0);
      body.append(...rows.map(([, row]) => row));
    }
  };

  // Details of a row.
  let data;
  const known = () => (data ??= JSON.parse($("data").textContent));
  const copy = async (text, button) => {
    let copied = true;
    try { await navigator.clipboard.writeText(text); } catch {
      const around = button.closest("dialog") || document.body; // all else is inert while a dialog is open
      const area = around.appendChild(make("textarea", text));
      area.select();
      try { copied = document.execCommand("copy"); } catch { copied = false; }
      area.remove();
      button.focus();
    }
    button.textContent = copied ? "copied" : "not copied";
  };
  const list = (facts) => {
    const made = make("dl");
    for (const [name, value] of facts) made.append(make("dt", name), make("dd", value));
    return made;
  };
  const details = (row) => {
    const found = known().rows[row.id], body = $("details-b");
    $("details-h").textContent = found.title;
    body.replaceChildren();
    for (const reason of found.marks) body.append(make("p", reason, "apart"));
    const link = body.appendChild(make("p")).appendChild(make("a", "Link to this row"));
    link.href = `#${row.id}`;
    link.addEventListener("click", () => $("details").close());
    body.append(make("h3", "Command"));
    for (const command of found.commands) {
      const line = make("p"), button = make("button", "copy", "copy");
      button.addEventListener("click", () => copy(command, button));
      line.append(make("code", command), " ", button);
      body.append(line);
    }
    body.append(make("h3", "Numbers"), list(found.facts), make("h3", "Proof"));
    const table = make("table"), head = table.createTHead().insertRow();
    for (const name of ["check", "error", "tolerance"]) { const th = make("th", name); th.scope = "col"; head.append(th); }
    const rows = table.createTBody();
    for (const [name, error, tolerance] of found.checks) {
      const line = rows.insertRow();
      line.append(make("td", name), make("td", digits(error)), make("td", digits(tolerance)));
      line.firstChild.style.whiteSpace = "normal";
    }
    body.append(table);
    if (found.left_out) body.append(make("p", found.left_out));
    body.append(make("h3", "Conditions"), list(known().conditions[found.conditions]), make("h3", "Versions"), list(known().versions[found.versions]));
    $("details").showModal();
  };
  $("close").addEventListener("click", () => $("details").close());

  // Pin two rows to compare them.
  let pinned = [];
  const showPinned = () => {
    for (const each of all(".pin[aria-pressed=true]")) each.setAttribute("aria-pressed", "false");
    for (const row of pinned) row.querySelector(".pin").setAttribute("aria-pressed", "true");
    const aside = $("pinned");
    aside.hidden = !pinned.length;
    aside.replaceChildren();
    if (!pinned.length) return;
    const found = pinned.map((row) => known().rows[row.id]);
    const table = aside.appendChild(make("table")), head = table.createTHead().insertRow();
    head.append(make("td", pinned.length < 2 ? "Pin another row to compare." : ""));
    for (const each of found) { const th = make("th", each.title); th.scope = "col"; head.append(th); }
    const alike = new Set(found.map((each) => each.group)).size === 1;
    if (found.length > 1) { const th = make("th", alike ? "second over first, of these figures" : "different workloads, no ratio"); th.scope = "col"; th.className = "n"; head.append(th); }
    const body = table.createTBody();
    const values = found.map((each) => new Map(each.figures.map(([name, text, value]) => [name, [text, value]])));
    for (const name of new Set(values.flatMap((each) => [...each.keys()]))) {
      const line = body.insertRow(), th = make("th", name);
      th.scope = "row";
      line.append(th);
      for (const each of values) line.append(make("td", (each.get(name) || ["–"])[0]));
      if (values.length > 1) {
        const [first, second] = values.map((each) => (each.get(name) || [])[1]);
        line.append(make("td", alike && name !== "× fastest" && first > 0 && second > 0 ? `${(second / first).toPrecision(4)}×` : "–", "n"));
      }
    }
    const button = aside.appendChild(make("button", "Unpin"));
    button.type = "button";
    button.addEventListener("click", () => { pinned = []; showPinned(); });
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if (button.classList.contains("sort")) sort(button);
    else if (button.classList.contains("name")) details(button.closest("tr"));
    else if (button.classList.contains("copy") && button.dataset.copy) copy(button.dataset.copy, button);
    else if (button.classList.contains("pick")) {
      button.setAttribute("aria-pressed", String(button.getAttribute("aria-pressed") !== "true"));
      filter();
    } else if (button.classList.contains("pin")) {
      const row = button.closest("tr");
      pinned = pinned.includes(row) ? pinned.filter((each) => each !== row) : [...pinned, row].slice(-2);
      showPinned();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && !/INPUT|TEXTAREA/.test(document.activeElement.tagName)) {
      event.preventDefault();
      $("q").focus();
    } else if (event.key === "Escape") $("tip").hidden = true;
  });

  // Numbers on hover and focus.
  const tip = (event) => {
    const source = event.target.closest?.("[data-tip], .strip");
    const box = $("tip");
    box.hidden = !source;
    if (!source) return;
    box.textContent = source.dataset.tip || source.getAttribute("aria-label");
    const at = source.getBoundingClientRect(), size = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 8))}px`;
    box.style.top = `${at.bottom + 6 + size.height > innerHeight ? at.top - size.height - 6 : at.bottom + 6}px`;
  };
  document.addEventListener("pointerover", tip);
  document.addEventListener("focusin", tip);
  document.addEventListener("scroll", () => { $("tip").hidden = true; }, { passive: true, capture: true });

  // Say where a table is wider than the window. Only in sight: measuring lays a table out.
  const measure = (region) => {
    const beyond = region.scrollWidth - region.clientWidth;
    region.toggleAttribute("data-wide", beyond > 8);
    region.toggleAttribute("data-more", beyond - region.scrollLeft > 8);
  };
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) measure(entry.target);
  });
  for (const region of all(".scroll")) {
    seen.observe(region);
    region.addEventListener("scroll", () => measure(region), { passive: true });
  }
  addEventListener("resize", () => { for (const region of all(".scroll[data-wide]")) measure(region); });

  // Deep links: what a filter hides is shown again.
  const arrive = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.closest("[hidden]")) { clear(); target.scrollIntoView(); }
  };
  addEventListener("hashchange", arrive);
})();
