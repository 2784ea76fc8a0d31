const makePicture = (box) => {
  const data = JSON.parse(box.querySelector("script").textContent);
  const { groups, blocks, slots, geometry, texts, positions, documents, queries } = data;
  const size = geometry.selection_block_size, total = texts.length, rows = queries.length;
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const frames = data.frames.map((frame) => ({ step: frame.step, importance: bytes(frame.importance),
    dense: bytes(frame.dense), gates: bytes(frame.gates), selected: new Int16Array(bytes(frame.selected).buffer) }));
  const find = (name) => box.querySelector(name);
  const state = { frame: frames.length - 1, layer: Number(find(".layer").value), group: 0,
    row: Math.round(0.85 * (rows - 1)) };
  const bin = Math.ceil(total / 256), columns = Math.ceil(total / bin), rowTokens = (total - 1) / Math.max(rows - 1, 1);
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  box.append(tip);
  let palette = null, busy = false;

  // Layers of the model: where their arrays lie, or -1 and their window, 0 where they read everything.
  const index = () => data.shown[state.layer][0], isRecorded = () => index() >= 0;
  const window = () => isRecorded() ? geometry.window_size : data.shown[state.layer][1] || total;
  const cell = (row) => (index() * rows + row) * groups + state.group;
  const share = (map, row, block) =>
    isRecorded() ? (frames[state.frame][map][cell(row) * blocks + block] / 255) ** 2 : 0;
  const ownBlock = (row) => Math.floor(positions[queries[row]] / size);
  const isForced = (row, block) =>
    block < geometry.num_initial_blocks || block > ownBlock(row) - geometry.num_local_blocks;
  const choiceOf = (row) => {
    const chosen = new Uint8Array(blocks), first = cell(row) * slots;
    if (!isRecorded()) return chosen;
    for (const block of frames[state.frame].selected.subarray(first, first + slots))
      if (block >= 0) chosen[block] = isForced(row, block) ? 1 : 2;
    return chosen;
  };
  // Relative to an even spread over the blocks so far: half strength at the even share, full at four times it.
  const strength = (value, row) => Math.min(1, Math.sqrt(value * (ownBlock(row) + 1)) / 2);
  // A branch whose gate is zero for all queries and heads is none.
  const hasBranch = (branch) => {
    const cells = rows * groups, first = index() * cells, gates = frames[state.frame].gates;
    return gates.subarray(3 * first, 3 * (first + cells)).some((gate, place) => place % 3 === branch && gate > 0);
  };
  const hasWindow = () => !isRecorded() || hasBranch(2);
  const windowStart = (row, windowed = hasWindow()) => windowed
    ? queries[row] - Math.min(positions[queries[row]], window() - 1) : total + bin;
  const mapsOf = () => {
    const maps = { cmp: [], slc: [], win: [], dense: [] }, windowed = hasWindow();
    for (let row = 0; row < rows; row++) {
      const query = queries[row], chosen = choiceOf(row), start = windowStart(row, windowed);
      const line = { cmp: [], slc: [], win: [], dense: [] };
      for (let column = 0; column < columns; column++) {
        const key = column * bin, seen = key <= query && documents[key] === documents[query];
        const block = Math.floor(positions[key] / size);
        line.cmp.push(seen ? strength(share("importance", row, block), row) : null);
        line.slc.push(seen ? chosen[block] : null);
        line.win.push(seen ? Number(key + bin > start) : null);
        line.dense.push(seen ? strength(share("dense", row, block), row) : null);
      }
      for (const name of Object.keys(maps)) maps[name].push(line[name]);
    }
    return maps;
  };
  const scales = () => ({
    cmp: [[0, palette.unread], [1, palette.cmp]], slc: [[0, palette.unread], [0.5, palette.forced], [1, palette.slc]],
    win: [[0, palette.unread], [1, palette.win]], dense: [[0, palette.unread], [1, palette.dense]],
  });
  const rowMark = () => [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: state.row * rowTokens,
    y1: state.row * rowTokens, line: { color: palette.ink, width: 1 } }];
  const percent = (value) => (100 * value).toFixed(value < 0.0995 ? 1 : 0) + " %";
  const visible = (text) => text.replaceAll("\n", "\u23ce").replaceAll("\t", " ");
  const marked = (text) => text.trim() ? text : visible(text).replaceAll(" ", "\u00b7") + (text === "\n" ? text : "");
  const textOf = (from, to) => visible(texts.slice(from, to).join(""));

  const visibleMaps = () => [...box.querySelectorAll("figure:not([hidden]) .map")];
  const draw = (colours, layoutOf, config) => {
    palette = colours;
    const maps = mapsOf(), scale = scales(), axis = { nticks: 4, showgrid: false, zeroline: false };
    const drawn = (name) => name === "win" ? hasWindow() : isRecorded();
    for (const div of box.querySelectorAll(".map")) div.closest("figure").hidden = !drawn(div.dataset.map);
    for (const words of box.querySelectorAll("[data-of]")) words.hidden = !drawn(words.dataset.of);
    find("[data-map=win]").closest("figure").querySelector("b").textContent = window() < total ? "Window" : "All tokens";
    return Promise.all(visibleMaps().map(async (div) => {
      const name = div.dataset.map, top = name === "slc" ? 2 : 1;
      const trace = { type: "heatmap", z: maps[name], x0: (bin - 1) / 2, dx: bin, y0: 0, dy: rowTokens, zmin: 0,
        zmax: top, colorscale: scale[name], showscale: false, hoverinfo: "none" };
      const layout = layoutOf({ height: undefined, layout: { hovermode: "closest", shapes: rowMark(), autosize: true,
        margin: { l: 4, r: 4, t: 6, b: 4 }, font: { size: 11, color: palette.soft },
        xaxis: { ...axis, range: [-0.5, total - 0.5] }, yaxis: { ...axis, range: [total - 0.5, -0.5] } } });
      await Plotly.react(div, [trace], layout, { ...config, displayModeBar: false, doubleClick: "reset" });
      if (!div.dataset.wired) {
        div.dataset.wired = "1";
        div.on("plotly_hover", pointed);
        div.on("plotly_click", pointed);
        div.on("plotly_unhover", () => { tip.hidden = true; });
      }
    })).then(read);
  };
  const pointed = (event) => {
    const [row, column] = event.points[0].pointIndex, key = Math.min(column * bin, total - 1);
    show(row);
    const query = queries[row], block = Math.floor(positions[key] / size);
    if (key > query || documents[key] !== documents[query]) { tip.hidden = true; return; }
    const from = key - positions[key] + block * size, to = Math.min(from + size, query + 1);
    const status = ["not selected", "always selected", "selected"][choiceOf(row)[block]];
    const lines = [
      ["b", `Tokens ${from}\u2013${to - 1} for query ${query}, \u201c${visible(texts[query])}\u201d`],
      ["code", textOf(from, to)],
      ["div", [
        ...(isRecorded() ? [`score ${percent(share("importance", row, block))}`, status,
          `full attention ${percent(share("dense", row, block))}`] : []),
        ...(hasWindow() ? [to > windowStart(row) ? "in the window" : "not in the window"] : []),
      ].join(" \u00b7 ")],
    ];
    tip.replaceChildren(...lines.map(([tag, text]) => {
      const element = document.createElement(tag);
      element.textContent = text;
      return element;
    }).flatMap((element, index) => index === 1 ? [document.createElement("br"), element] : [element]));
    tip.hidden = false;
    const { clientX = 0, clientY = 0 } = event.event.touches?.[0] ?? event.event;
    const left = Math.min(clientX + 16, innerWidth - tip.offsetWidth - 8);
    const above = clientY + tip.offsetHeight + 24 > innerHeight;
    tip.style.left = Math.max(8, left) + "px";
    tip.style.top = (above ? clientY - tip.offsetHeight - 16 : clientY + 16) + "px";
  };
  const show = (row) => {
    if (row === state.row) return;
    state.row = row;
    find(".row").value = row;
    if (busy) return;
    busy = true;
    requestAnimationFrame(() => {
      busy = false;
      for (const div of visibleMaps()) Plotly.relayout(div, { shapes: rowMark() });
      read();
    });
  };
  const read = () => {
    const row = state.row, query = queries[row], first = query - positions[query], chosen = choiceOf(row);
    const start = windowStart(row), edges = new Set([0, first, start, query, query + 1, total]);
    for (let edge = first; edge <= query; edge += size) edges.add(edge);
    const cuts = [...edges].sort((a, b) => a - b), parts = [];
    // A block with three times its even share is shaded in full.
    const full = 3 / (ownBlock(row) + 1);
    for (let index = 0; index + 1 < cuts.length; index++) {
      const from = cuts[index], to = cuts[index + 1];
      const part = document.createElement(from === query ? "mark" : "span");
      part.textContent = texts.slice(from, to).join("");
      if (from === query) part.textContent = marked(texts[query]);
      if (from > query || from < first) part.className = "unread";
      else if (from !== query) {
        const block = Math.floor((from - first) / size), weight = share("importance", row, block);
        part.className = (chosen[block] ? "slc " : "") + (from >= start ? "win" : "");
        if (weight > 0) part.style.background =
          `color-mix(in srgb, var(--cmp) ${Math.round(50 * Math.min(1, weight / full))}%, transparent)`;
      }
      parts.push(part);
    }
    const pane = find(".text");
    pane.replaceChildren(...parts);
    const mark = pane.querySelector("mark");
    pane.scrollTop = Math.max(0, mark.offsetTop - 0.75 * pane.clientHeight);
    let held = 0;
    for (let block = 0; block < blocks; block++) held += chosen[block] ? share("dense", row, block) : 0;
    find(".reader-head").textContent = `token ${query} of ${total}, \u201c${visible(texts[query])}\u201d: `
      + (isRecorded() ? `the selected blocks hold ${percent(Math.min(1, held))} of what full attention weighs`
        : window() < total ? `the layer reads the last ${window()} tokens` : "the layer reads all tokens");
    find(".frame-label").textContent = frames[state.frame].step.toLocaleString("en");
    const isGated = isRecorded() && (hasBranch(0) || hasBranch(2));
    const branches = isGated ? [["compressed", "cmp"], ["selected", "slc"], ["window", "win"]] : [];
    find(".gates").replaceChildren(...branches.map(([label, name], branch) => {
      const gate = frames[state.frame].gates[cell(row) * 3 + branch] / 255, line = document.createElement("span");
      line.innerHTML = `<span>${label} gate ${gate.toFixed(2)}</span><i><b></b></i>`;
      const bar = line.querySelector("b");
      bar.style.width = 100 * gate + "%";
      bar.style.background = `var(--${name})`;
      return line;
    }));
  };
  find(".row").value = state.row;
  let redraw = () => {};
  for (const [name, key] of [[".layer", "layer"], [".group", "group"], [".frame", "frame"]])
    find(name).addEventListener("input", (event) => { state[key] = Number(event.target.value); redraw(); });
  find(".row").addEventListener("input", (event) => show(Number(event.target.value)));
  return { draw: (...settings) => { redraw = () => draw(...settings); return draw(...settings); } };
};
