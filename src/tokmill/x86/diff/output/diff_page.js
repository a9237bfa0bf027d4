"use strict";
(() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  // Fields of a row, as diff_page.py writes them.
  const [KIND, NAME_A, ADDRESS_A, NAME_B, ADDRESS_B, SIMILARITY, CONFIDENCE, REASON, SIZE_A, SIZE_B,
    REFERENCES_OF, CODE] = Array(12).keys();
  // Fields of a block.
  const [ADDRESS, TEXT, MARKS, PARTNER, EDGES, STRINGS] = Array(6).keys();
  const KINDS = ["changed", "references", "same", "deleted", "inserted"];
  const [, REFERENCES, SAME, DELETED] = KINDS.keys();
  const EDGE_NAMES = ["fall", "jump", "branch", "call", "indirect", "return"];
  const DOUBTFUL = 0.5;    // Matches with a lower confidence get a question mark.
  const PAGE = 300;        // Rows of the list that are added at once.
  const MANY_BLOCKS = 100; // Of two functions; their changed blocks are shown first.
  const MOST_LINES = 3000; // Lines of instructions that are shown at once.
  const NODE_LINES = 7, NODE_CHARACTERS = 40;
  const rows = DATA.rows, code = DATA.code;
  const byId = (id) => document.getElementById(id);
  const list = byId("list"), detail = byId("detail"), search = byId("search");
  let listed = [], drawn = 0, chosen = -1, view = "instructions", zoom = 1;
  // Whether blocks that did not change are left out; null: where there are many.
  let changedOnly = null;
  let allLines = false, here = -1;

  /** Make an element with text; nothing of a program becomes markup. */
  function make(name, attributes = {}, ...children) {
    const svg = ["svg", "g", "rect", "text", "path", "defs", "marker", "title"].includes(name);
    const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name)
      : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  // ---- the list ----------------------------------------------------------------------------

  function label(row) {
    const [a, b] = [row[NAME_A], row[NAME_B]];
    return !a ? b : !b || a === b ? a : `${a} → ${b}`;
  }

  function about(row) {
    const places = [row[ADDRESS_A], row[ADDRESS_B]].filter(Boolean).map((one) => `0x${one}`);
    const sizes = [row[SIZE_A], row[SIZE_B]].filter(Boolean);
    const size = sizes.length === 2 && sizes[0] === sizes[1] ? [sizes[0]] : sizes;
    return `${places.join(" ↔ ")} · ${size.join(" → ")} instructions`;
  }

  const share = (value) => `${(100 * value).toFixed(1)} %`;

  const ORDERS = [
    null,
    (a, b) => rows[a][SIMILARITY] - rows[b][SIMILARITY],
    (a, b) => (label(rows[a]) < label(rows[b]) ? -1 : 1),
    (a, b) => Number("0x" + (rows[a][ADDRESS_A] || rows[a][ADDRESS_B]))
      - Number("0x" + (rows[b][ADDRESS_A] || rows[b][ADDRESS_B])),
  ];

  function find() {
    const word = search.value.trim().toLowerCase().replace(/^0x/, "");
    const kinds = new Set([...document.querySelectorAll("[data-kind]")]
      .filter((box) => box.checked).map((box) => Number(box.dataset.kind)));
    listed = [];
    rows.forEach((row, number) => {
      if (!kinds.has(row[KIND])) return;
      const has = !word || [NAME_A, NAME_B, ADDRESS_A, ADDRESS_B]
        .some((field) => row[field].toLowerCase().includes(word));
      if (has) listed.push(number);
    });
    const order = ORDERS[Number(byId("order").value)];
    if (order) listed.sort(order);
    drawn = 0;
    list.replaceChildren();
    grow();
    const count = listed.length.toLocaleString("en"), all = rows.length.toLocaleString("en");
    byId("found").textContent = `${count} of ${all} functions`;
  }

  function grow() {
    for (const number of listed.slice(drawn, drawn + PAGE)) {
      const row = rows[number];
      const button = make("button", { type: "button", "data-row": number },
        make("span", { class: `mark ${KINDS[row[KIND]]}`, title: DATA.kinds[row[KIND]] }),
        make("span", { class: "name" }, label(row)),
        make("span", { class: "share soft" }, row[KIND] <= SAME ? share(row[SIMILARITY])
          + (row[CONFIDENCE] < DOUBTFUL ? " ?" : "") : ""),
        make("span", { class: "about soft" }, about(row)));
      if (number === chosen) button.setAttribute("aria-current", "true");
      list.append(make("li", {}, button));
    }
    drawn = Math.min(listed.length, drawn + PAGE);
    byId("more").hidden = drawn >= listed.length;
    byId("more").textContent = `Show more (${(listed.length - drawn).toLocaleString("en")} left)`;
  }

  function mark(number) {
    for (const one of list.querySelectorAll("[aria-current]")) one.removeAttribute("aria-current");
    const place = listed.indexOf(number);
    while (place >= drawn) grow();
    const button = list.querySelector(`[data-row="${number}"]`);
    if (button) {
      button.setAttribute("aria-current", "true");
      reveal(button);
    }
  }

  /** Scroll the list, and not the page, to one of its rows. */
  function reveal(button) {
    const nav = list.parentElement, tools = nav.firstElementChild.offsetHeight;
    const top = button.offsetTop - tools, bottom = button.offsetTop + button.offsetHeight;
    if (top < nav.scrollTop) nav.scrollTop = top;
    else if (bottom > nav.scrollTop + nav.clientHeight) nav.scrollTop = bottom - nav.clientHeight;
  }

  function step(by) {
    if (!listed.length) return;
    const place = listed.indexOf(chosen);
    const next = place < 0 ? 0 : Math.min(listed.length - 1, Math.max(0, place + by));
    open(listed[next]);
  }

  function open(number) {
    if (!(number in rows)) return;
    chosen = number;
    allLines = false;
    here = -1;
    mark(number);
    document.body.classList.add("open");
    show();
    const hash = `#${number}${view === "graph" ? "-graph" : ""}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
  }

  function close() {
    document.body.classList.remove("open");
    const button = list.querySelector("[aria-current]");
    if (button) button.focus();
  }

  // ---- one function ------------------------------------------------------------------------

  function show() {
    const row = rows[chosen];
    const back = make("button", { type: "button", id: "back" }, "← Functions");
    back.onclick = close;
    const facts = [about(row)];
    if (row[KIND] <= SAME) {
      facts.unshift(`${share(row[SIMILARITY])} similarity, confidence ${share(row[CONFIDENCE])}, `
        + `matched by ${row[REASON]}`);
    } else facts.unshift(`in ${row[KIND] === DELETED ? "A" : "B"} alone: ${DATA.kinds[row[KIND]]}`);
    if (row[KIND] === REFERENCES) facts.push("the same except for references");
    detail.replaceChildren(back, make("h2", {}, label(row)),
      make("div", { class: "soft" }, facts.join(" · ")));
    for (const text of row[REFERENCES_OF]) detail.append(make("div", { class: "reference" }, text));
    if (row[CODE] < 0) {
      detail.append(make("p", {}, "The code of this function is not on this page: see the notes "
        + "at its top."));
      return;
    }
    const [a, b] = code[row[CODE]];
    const views = make("div", { class: "views" });
    for (const name of ["instructions", "graph"]) {
      const button = make("button", { type: "button", "aria-pressed": view === name },
        name === "graph" ? "Graph" : "Instructions");
      button.onclick = () => turn(name);
      views.append(button);
    }
    detail.append(views);
    if (view === "graph") graphs(a, b, row);
    else {
      const box = make("input", { type: "checkbox" });
      box.checked = leavesOut(a, b, row);
      box.onchange = () => { changedOnly = box.checked; show(); };
      views.append(make("label", {}, box, " changed blocks only"));
      instructions(a, b, row);
    }
  }

  function turn(name) {
    view = name;
    if (chosen >= 0) open(chosen);
  }

  /** Return pairs of blocks (null for none) in the order of A, those of B alone behind others. */
  function aligned(a, b) {
    if (!b.length || !a.length) return a.map((one) => [one, null]).concat(b.map((one) => [null, one]));
    const pairs = [], done = new Set();
    const alone = (from) => {
      for (let i = from; i < b.length && b[i][PARTNER] < 0 && !done.has(i); i++) {
        done.add(i);
        pairs.push([null, b[i]]);
      }
    };
    alone(0);
    for (const block of a) {
      const partner = block[PARTNER];
      pairs.push([block, partner < 0 ? null : b[partner]]);
      if (partner >= 0) alone(partner + 1);
    }
    b.forEach((block, i) => { if (block[PARTNER] < 0 && !done.has(i)) pairs.push([null, block]); });
    return pairs;
  }

  function changed(one, other) {
    return !one || !other || one[MARKS] !== "" || other[MARKS] !== "";
  }

  function leavesOut(a, b, row) {
    return changedOnly ?? (row[KIND] < SAME && a.length + b.length > MANY_BLOCKS);
  }

  function instructions(a, b, row) {
    const same = row[KIND] === SAME;
    const numbers = new Map([...a.entries(), ...b.entries()].map(([i, block]) => [block, i]));
    const body = make("tbody");
    const head = make("tr", {}, make("td", { class: "mark" }),
      make("th", {}, a.length ? `A: ${row[NAME_A]}` : ""),
      make("th", {}, b.length ? `B: ${row[NAME_B]}` : ""));
    body.append(head);
    if (same) detail.append(make("p", { class: "soft" }, "Both are the same; the addresses are those of A."));
    const only = leavesOut(a, b, row) && !same;
    let lines = 0, left = 0;
    for (const [one, other] of aligned(a, b)) {
      if (only && !changed(one, other)) continue;
      const more = Math.max(one ? one[TEXT].length : 0, other ? other[TEXT].length : 0);
      if (!allLines && lines + more > MOST_LINES && lines) { left += more; continue; }
      lines += more;
      body.append(make("tr", { class: "head" }, make("td", { class: "mark" }),
        title("A", one, numbers), title("B", other, numbers)));
      addLines(body, one, other, same || row[KIND] > SAME, row[KIND]);
    }
    detail.append(make("table", { class: "code" }, body));
    if (left) {
      const button = make("button", { type: "button" }, `Show ${left.toLocaleString("en")} more lines`);
      button.onclick = () => { allLines = true; show(); };
      detail.append(button);
    }
    if (lines === 0) detail.append(make("p", {}, "No block of it changed."));
  }

  function title(side, block, numbers) {
    if (!block) return make("td");
    const cell = make("th", {}, `${side} block ${numbers.get(block)} · 0x${block[ADDRESS]}`);
    for (const text of block[STRINGS]) {
      // Its control characters are escaped already.
      cell.append(make("span", { class: "literal" }, `"${text}"`));
    }
    return cell;
  }

  function addLines(body, one, other, whole, kind) {
    const [a, b] = [one ? one[TEXT] : [], other ? other[TEXT] : []];
    const [marksA, marksB] = [one ? one[MARKS] : "", other ? other[MARKS] : ""];
    const add = (name, left, right) => body.append(make("tr", { class: name },
      make("td", { class: `mark ${name}`, title: name }),
      make("td", { class: "a" }, left), make("td", { class: "b" }, right)));
    if (whole) {
      const name = KINDS[kind];
      a.forEach((text) => add(name, text, ""));
      b.forEach((text) => add(name, "", text));
      return;
    }
    for (let i = 0, j = 0; i < a.length || j < b.length;) {
      const left = i < a.length && (!other || marksA[i] === "!");
      if (left) add("deleted", a[i++], "");
      else if (j < b.length && (!one || marksB[j] === "!")) add("inserted", "", b[j++]);
      else {
        add(marksA[i] === "~" ? "changed" : "same", a[i] ?? "", b[j] ?? "");
        i++; j++;
      }
    }
  }

  function change(by) {
    if (view !== "instructions") return;
    const lines = [...detail.querySelectorAll("tr.changed, tr.deleted, tr.inserted")];
    // A run of changed lines is one change.
    const first = lines.filter((line) => !lines.includes(line.previousElementSibling));
    if (!first.length) return;
    here = Math.min(first.length - 1, Math.max(0, here + by));
    detail.querySelectorAll("tr.here").forEach((line) => line.classList.remove("here"));
    first[here].classList.add("here");
    first[here].scrollIntoView({ block: "center" });
  }

  // ---- graphs ------------------------------------------------------------------------------

  function graphs(a, b, row) {
    const both = row[KIND] === SAME ? [["A and B", a]] : [["A", a], ["B", b]];
    const place = make("div", { class: "graphs" });
    for (const [name, blocks] of both) {
      if (!blocks.length) continue;
      const own = name === "B" ? row[NAME_B] : row[NAME_A];
      const pane = make("div", { "data-side": name[0], tabindex: "0" }, make("h3", {}, `${name}: ${own}`));
      if (blocks.length > DATA.mostBlocks) {
        pane.append(make("p", {}, `${blocks.length.toLocaleString("en")} blocks: graphs of up to `
          + `${DATA.mostBlocks} are drawn. The instructions show all of them.`));
      } else pane.append(draw(blocks, name[0], row));
      place.append(pane);
    }
    if (place.children.length === 1) place.style.gridTemplateColumns = "minmax(0, 1fr)";
    detail.append(place);
    for (const pane of place.children) {
      // The beginning of a wide graph is in its middle.
      const first = pane.querySelector(".entry rect");
      if (first) pane.scrollLeft = zoom * (Number(first.getAttribute("x")) - 40);
    }
  }

  function state(block, side, row) {
    if (row[KIND] === SAME) return "same";
    if (block[PARTNER] < 0) return side === "B" ? "inserted" : "deleted";
    return block[MARKS] === "" ? "same" : "changed";
  }

  const SIGNS = { same: "=", changed: "~", deleted: "−", inserted: "+" };

  function nodeText(block, number, sign) {
    const short = (text) => (text.length > NODE_CHARACTERS ? text.slice(0, NODE_CHARACTERS - 1) + "…" : text);
    const lines = [`${sign} block ${number} · 0x${block[ADDRESS]}`];
    block[TEXT].slice(0, NODE_LINES).forEach((text) => lines.push(short(text)));
    const more = block[TEXT].length - NODE_LINES;
    if (more > 0) lines.push(`… ${more} more`);
    return lines;
  }

  function draw(blocks, side, row) {
    const nodes = blocks.map((block, i) => {
      const name = state(block, side, row), lines = nodeText(block, i, SIGNS[name]);
      const width = 14 + 6.7 * Math.max(...lines.map((line) => line.length));
      return { lines, name, width, height: 10 + 14 * lines.length };
    });
    // What was moved out of a function may lie before it.
    const address = row[side === "B" ? ADDRESS_B : ADDRESS_A];
    const entry = Math.max(0, blocks.findIndex((block) => block[ADDRESS] === address));
    const made = layout(nodes, blocks.map((block) => block[EDGES]), entry);
    const arrow = `arrow-${side}`;
    const svg = make("svg", { viewBox: `0 0 ${made.width} ${made.height}`, width: made.width * zoom,
      height: made.height * zoom, role: "img", "aria-label": `Graph of ${blocks.length} blocks` },
      make("defs", {}, make("marker", { id: arrow, viewBox: "0 0 8 8", refX: 7, refY: 4,
        markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
        make("path", { d: "M0 0L8 4L0 8z" }))));
    for (const edge of made.edges) {
      svg.append(make("path", { d: edge.path, "marker-end": `url(#${arrow})`,
        class: `${EDGE_NAMES[edge.kind]}${edge.back ? " back" : ""}` }));
    }
    nodes.forEach((node, i) => {
      const group = make("g", { class: `block ${node.name}${i === entry ? " entry" : ""}`, "data-block": i },
        make("title", {}, `block ${i}: ${node.name}`),
        make("rect", { x: node.x, y: node.y, width: node.width, height: node.height, rx: 3 }));
      node.lines.forEach((line, n) => group.append(make("text", { x: node.x + 7, y: node.y + 16 + 14 * n,
        class: n ? "" : "head" }, line)));
      group.onclick = () => pick(side, i, blocks[i][PARTNER]);
      svg.append(group);
    });
    return svg;
  }

  function pick(side, number, partner) {
    detail.querySelectorAll(".chosen").forEach((one) => one.classList.remove("chosen"));
    for (const [name, block] of [[side, number], [side === "A" ? "B" : "A", partner]]) {
      const found = detail.querySelector(`[data-side="${name}"] [data-block="${block}"]`);
      if (!found) continue;
      found.classList.add("chosen");
      if (name !== side) found.scrollIntoView({ block: "center", inline: "center" });
    }
  }

  /** Lay blocks out in layers (Sugiyama): layers by the longest way, orders by the middle of
   *  neighbours, long edges through points of their own in each layer. */
  function layout(nodes, edges, entry) {
    const back = backEdges(edges, entry);
    const depth = depths(edges, back);
    const items = nodes.map((node, i) => ({ node: i, width: node.width, layer: depth[i], up: [], down: [] }));
    const chains = [];
    edges.forEach((ways, from) => ways.forEach(([to, kind], w) => {
      if (from === to) { chains.push({ from, to, kind, points: [], loop: true }); return; }
      const turned = back.has(`${from} ${w}`);
      const [top, bottom] = turned ? [to, from] : [from, to];
      const points = [];
      let last = top;
      for (let layer = depth[top] + 1; layer < depth[bottom]; layer++) {
        items.push({ node: -1, width: 8, layer, up: [last], down: [] });
        items[last].down.push(items.length - 1);
        last = items.length - 1;
        points.push(last);
      }
      items[last].down.push(bottom);
      items[bottom].up.push(last);
      chains.push({ from, to, top, bottom, kind, points, back: turned });
    }));
    const layers = [];
    items.forEach((item, i) => { (layers[item.layer] ||= []).push(i); });
    arrange(items, layers);
    let y = 12, width = 0;
    for (const layer of layers) {
      const height = Math.max(4, ...layer.map((i) => (items[i].node < 0 ? 4 : nodes[items[i].node].height)));
      for (const i of layer) { items[i].y = y; items[i].height = height; }
      y += height + 34;
    }
    const left = Math.min(...items.map((item) => item.x));
    items.forEach((item) => {
      item.x += 16 - left;
      width = Math.max(width, item.x + item.width + 30);
      if (item.node >= 0) Object.assign(nodes[item.node], { x: item.x, y: item.y });
    });
    return { width: Math.ceil(width), height: Math.ceil(y), edges: chains.map((one) => route(one, items, nodes)) };
  }

  function backEdges(edges, entry) {
    // Without recursion, as functions may be deep.
    const found = new Set(), colour = new Uint8Array(edges.length);
    for (const root of [entry, ...edges.keys()]) {
      if (colour[root]) continue;
      const stack = [[root, 0]];
      colour[root] = 1;
      while (stack.length) {
        const top = stack[stack.length - 1];
        if (top[1] === edges[top[0]].length) { colour[top[0]] = 2; stack.pop(); continue; }
        const way = top[1]++, to = edges[top[0]][way][0];
        if (colour[to] === 1) found.add(`${top[0]} ${way}`);
        else if (!colour[to]) { colour[to] = 1; stack.push([to, 0]); }
      }
    }
    return found;
  }

  function depths(edges, back) {
    const waiting = new Int32Array(edges.length), depth = new Int32Array(edges.length);
    const forward = edges.map((ways, from) => ways.filter((way, w) => !back.has(`${from} ${w}`)).map((way) => way[0]));
    forward.forEach((ways) => ways.forEach((to) => waiting[to]++));
    const ready = [...edges.keys()].filter((i) => !waiting[i]);
    while (ready.length) {
      const from = ready.pop();
      for (const to of forward[from]) {
        depth[to] = Math.max(depth[to], depth[from] + 1);
        if (!--waiting[to]) ready.push(to);
      }
    }
    return depth;
  }

  function arrange(items, layers) {
    const GAP = 18;
    const middle = (item, way) => {
      const near = item[way];
      return near.length ? near.reduce((sum, i) => sum + items[i].x + items[i].width / 2, 0) / near.length : null;
    };
    const pack = (layer) => { let x = 0; for (const i of layer) { items[i].x = x; x += items[i].width + GAP; } };
    layers.forEach(pack);
    for (let round = 0; round < 8; round++) {
      const down = round % 2 === 0;
      for (const layer of down ? layers : [...layers].reverse()) {
        const want = new Map(layer.map((i) => [i, middle(items[i], down ? "up" : "down") ?? items[i].x + items[i].width / 2]));
        layer.sort((a, b) => want.get(a) - want.get(b));
        // From the left nothing overlaps; the mean of what is wanted and what is stays where it is.
        let x = -Infinity, shift = 0;
        for (const i of layer) {
          items[i].x = Math.max(want.get(i) - items[i].width / 2, x);
          x = items[i].x + items[i].width + GAP;
          shift += items[i].x + items[i].width / 2 - want.get(i);
        }
        for (const i of layer) items[i].x -= shift / layer.length;
      }
    }
  }

  function route(edge, items, nodes) {
    if (edge.loop) {
      const node = nodes[edge.from], x = node.x + node.width, y = node.y;
      return { kind: edge.kind, back: true, path: `M${x} ${y + 14}C${x + 24} ${y + 14} ${x + 24} ${y + 4} ${x} ${y + 6}` };
    }
    const top = nodes[edge.top], bottom = nodes[edge.bottom];
    const ways = [[top.x + top.width / 2, top.y + top.height]];
    for (const i of edge.points) {
      ways.push([items[i].x + 4, items[i].y], [items[i].x + 4, items[i].y + items[i].height]);
    }
    ways.push([bottom.x + bottom.width / 2, bottom.y]);
    if (edge.back) ways.reverse();
    let path = `M${ways[0].map((n) => n.toFixed(1)).join(" ")}`;
    for (let i = 1; i < ways.length; i++) {
      const [x0, y0] = ways[i - 1], [x1, y1] = ways[i], half = (y1 - y0) / 2;
      path += `C${[x0, y0 + half, x1, y1 - half, x1, y1].map((n) => n.toFixed(1)).join(" ")}`;
    }
    return { kind: edge.kind, back: edge.back, path };
  }

  function scale(to) {
    if (view !== "graph") return;
    zoom = Math.min(3, Math.max(0.1, to));
    for (const svg of detail.querySelectorAll("svg")) {
      const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
      svg.setAttribute("width", width * zoom);
      svg.setAttribute("height", height * zoom);
    }
  }

  // ---- keys --------------------------------------------------------------------------------

  const KEYS = {
    "/": () => { close(); search.focus(); search.select(); },
    j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1),
    n: () => change(1), p: () => change(-1), i: () => turn("instructions"), g: () => turn("graph"),
    c: () => {
      const box = detail.querySelector(".views input");
      if (box) { changedOnly = !box.checked; show(); }
    },
    "+": () => scale(zoom * 1.25), "-": () => scale(zoom / 1.25), "0": () => scale(1),
    Escape: close,
    "?": () => { byId("keys").open = !byId("keys").open; byId("keys").scrollIntoView({ block: "nearest" }); },
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target === search || event.target.tagName === "SELECT";
    if (typing && event.key === "Escape") { event.target.blur(); return; }
    if (event.target === search && (event.key === "Enter" || event.key === "ArrowDown")) {
      event.preventDefault();
      search.blur();
      if (listed.length) open(listed[0]);
      return;
    }
    if (typing || !(event.key in KEYS)) return;
    // In a graph that has the focus, arrows scroll.
    if (event.key.startsWith("Arrow") && event.target.closest && event.target.closest(".graphs")) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  list.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) { open(Number(button.dataset.row)); detail.focus({ preventScroll: true }); }
  });
  search.addEventListener("input", find);
  byId("order").addEventListener("change", find);
  document.querySelectorAll("[data-kind]").forEach((box) => box.addEventListener("change", find));
  byId("more").addEventListener("click", grow);
  window.addEventListener("hashchange", fromHash);

  function fromHash() {
    const found = /^#(\d+)(-graph)?$/.exec(location.hash);
    if (!found) return false;
    view = found[2] ? "graph" : "instructions";
    open(Number(found[1]));
    return chosen >= 0;
  }

  find();
  // Narrow windows show the list or one function, so there the reader chooses.
  if (!fromHash() && matchMedia("(min-width: 50.01rem)").matches) step(1);
})();
