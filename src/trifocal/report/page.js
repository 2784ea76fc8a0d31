(() => {
  const root = document.documentElement;
  const names = {
    light: {
      runs: ["#2563eb", "#d97706", "#0d9467", "#c026d3", "#dc2626", "#0e7490"],
      surface: "#ffffff", ink: "#16191d", soft: "#5b6470", line: "#e9ebef", edge: "#cfd5dc",
      cmp: "#1f6fb2", slc: "#e07b00", win: "#0b8f6a", dense: "#6b7280", forced: "#f6cd97", unread: "#f1f3f6",
      sequential: [[0, "#f1f5fb"], [0.25, "#bcd3f7"], [0.5, "#7aa7ee"], [0.75, "#3b74d6"], [1, "#123a86"]],
      data: "#d97706", forward: "#60a5fa", backward: "#2563eb", optimizer: "#1e3a8a", checkpoint: "#c026d3",
      evaluate: "#0d9467", telemetry: "#84cc16", sample: "#0891b2", wait: "#dc2626", compile: "#9ca3af",
      start: "#d1d5db", other: "#6b7280",
    },
    dark: {
      runs: ["#6ea8ff", "#f0b04a", "#4cc9a0", "#e58bf2", "#ff8a8a", "#5cc8df"],
      surface: "#171b22", ink: "#e8ebef", soft: "#9aa4b1", line: "#252b34", edge: "#39414d",
      cmp: "#6db3ee", slc: "#f5a742", win: "#45c89c", dense: "#9aa4b1", forced: "#7a5423", unread: "#222933",
      sequential: [[0, "#1a212c"], [0.25, "#1f3f73"], [0.5, "#2f68bd"], [0.75, "#6ea8ff"], [1, "#dcebff"]],
      data: "#f0b04a", forward: "#93c5fd", backward: "#4f8df0", optimizer: "#2b57ab", checkpoint: "#e58bf2",
      evaluate: "#4cc9a0", telemetry: "#a3e635", sample: "#5cc8df", wait: "#ff7b7b", compile: "#6b7280",
      start: "#4b5563", other: "#9ca3af",
    },
  };
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const pictures = [...document.querySelectorAll(".picture")].map(makePicture);
  const touch = matchMedia("(pointer: coarse)").matches, phone = matchMedia("(max-width: 760px)").matches;
  for (const chart of charts) {
    if (phone) chart.height = Math.min(chart.height, 280);
    document.getElementById("chart-" + chart.key).style.height = chart.height + "px";
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const zoom = ["zoomIn2d", "zoomOut2d", "resetScale2d"];
  const buttons = touch ? [zoom] : [["zoom2d", "pan2d"], zoom, ["toImage"]];
  let chosen = null;

  const colour = (name, theme) => {
    const palette = names[theme];
    if (name.startsWith("run")) return palette.runs[Number(name.slice(3)) % palette.runs.length];
    return palette[name];
  };
  const painted = (value, theme) => {
    if (typeof value === "string") return (value[0] === "@" && colour(value.slice(1), theme)) || value;
    if (Array.isArray(value)) return typeof value[0] === "number" ? value : value.map((v) => painted(v, theme));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, v]) => [key, painted(v, theme)]));
    return value;
  };
  const layoutOf = (chart, theme) => {
    const palette = names[theme];
    const axis = { gridcolor: palette.line, zerolinecolor: palette.edge, linecolor: palette.edge, ticks: "",
      tickcolor: palette.edge, automargin: true, title: { font: { size: 12, color: palette.soft }, standoff: 8 } };
    const layout = painted(chart.layout, theme);
    const merged = { ...layout };
    for (const key of new Set(["xaxis", "yaxis", ...Object.keys(layout)]))
      if (/^[xy]axis/.test(key)) {
        const own = layout[key] || {};
        merged[key] = { ...axis, ...own, title: { ...axis.title, ...(own.title || {}) } };
      }
    return {
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: palette.soft },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "x unified",
      hoverlabel: { bgcolor: palette.surface, bordercolor: palette.edge, font: { color: palette.ink, size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: palette.soft, activecolor: palette.ink },
      legend: { orientation: "h", x: 0, yref: "container", y: 0, yanchor: "bottom", traceorder: "normal",
        font: { color: palette.ink } },
      height: chart.height, dragmode: touch ? false : "zoom",
      ...merged, margin: { l: 8, r: 10, t: touch ? 30 : 10, b: 8, ...(layout.margin || {}) },
    };
  };
  const draw = () => {
    const theme = chosen || (system.matches ? "dark" : "light");
    root.dataset.theme = theme;
    document.getElementById("theme").textContent = theme === "dark" ? "Light" : "Dark";
    for (const key of document.querySelectorAll("[data-colour]"))
      key.style.background = colour(key.dataset.colour, theme);
    const config = { responsive: true, displaylogo: false, displayModeBar: "hover", modeBarButtons: buttons };
    return Promise.all([
      ...charts.map((chart) => Plotly.react(
        document.getElementById("chart-" + chart.key), painted(chart.traces, theme), layoutOf(chart, theme), config)),
      ...pictures.map((picture) => picture.draw(names[theme], (chart) => layoutOf(chart, theme), config)),
    ]);
  };
  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    draw();
  });
  system.addEventListener("change", draw);
  for (const box of document.querySelectorAll(".sample-box")) {
    const slider = box.querySelector("input"), texts = box.querySelectorAll("pre"), label = box.querySelector("output");
    const show = () => {
      texts.forEach((text, index) => { text.hidden = index !== Number(slider.value); });
      label.textContent = "step " + texts[Number(slider.value)].dataset.step;
    };
    slider.addEventListener("input", show);
    show();
  }
  document.getElementById("js-missing").remove();
  draw().then(() => { root.dataset.drawn = String(charts.length); });
})();
