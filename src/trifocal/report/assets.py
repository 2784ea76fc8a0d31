"""The report page's style and script, which are inlined."""

STYLE = """
:root {
  color-scheme: light;
  --page: #f6f7f9; --surface: #ffffff; --ink: #16191d; --soft: #5b6470; --line: #e3e6ea; --hover: #f0f2f5;
  --accent: #2563eb; --good: #0f7b4f; --watch: #a15c00; --bad: #c02626; --unknown: #5b6470;
  --good-back: #e4f5ec; --watch-back: #fdf1dc; --bad-back: #fde8e8; --unknown-back: #eceff3;
  --cmp: #1f6fb2; --slc: #e07b00; --win: #0b8f6a;
}
:root[data-theme="dark"] {
  color-scheme: dark;
  --page: #0e1116; --surface: #171b22; --ink: #e8ebef; --soft: #9aa4b1; --line: #2a303a; --hover: #1f252e;
  --accent: #6ea8ff; --good: #4cc38a; --watch: #e9a83b; --bad: #ff7b7b; --unknown: #9aa4b1;
  --good-back: #12291f; --watch-back: #2e2410; --bad-back: #331a1c; --unknown-back: #232932;
  --cmp: #6db3ee; --slc: #f5a742; --win: #45c89c;
}
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 28px 20px 64px; }
header { display: flex; gap: 16px; align-items: flex-start; justify-content: space-between; margin-bottom: 22px; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.02em; overflow-wrap: anywhere; }
h1 .mark { display: inline-block; vertical-align: middle; letter-spacing: 0; line-height: 1.6; }
h2 { font-size: 1.15rem; margin: 40px 0 14px; letter-spacing: -0.01em; }
h3 { font-size: 1rem; margin: 0; }
p { margin: 0; }
.soft { color: var(--soft); font-size: 0.9rem; }
button { font: inherit; font-size: 0.85rem; color: var(--soft); background: var(--surface); cursor: pointer;
  border: 1px solid var(--line); border-radius: 8px; padding: 6px 12px; white-space: nowrap; }
button:hover { background: var(--hover); color: var(--ink); }
.card { background: var(--surface); border: 1px solid var(--line); border-radius: 14px; padding: 18px; min-width: 0; }
.findings { display: grid; gap: 14px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
.finding { border-left: 5px solid var(--mark); }
.finding h3 { display: flex; gap: 10px; align-items: center; margin-bottom: 6px; }
.mark { font-size: 0.75rem; font-weight: 600; color: var(--mark); background: var(--back); border-radius: 99px;
  padding: 1px 10px; white-space: nowrap; }
.good { --mark: var(--good); --back: var(--good-back); }
.watch { --mark: var(--watch); --back: var(--watch-back); }
.bad { --mark: var(--bad); --back: var(--bad-back); }
.unknown { --mark: var(--unknown); --back: var(--unknown-back); }
.tiles { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(104px, 1fr)); margin-top: 14px; }
.tile { padding: 12px; }
.tile .soft { font-size: 0.82rem; }
.tile b { display: block; font-size: 1.1rem; white-space: nowrap; font-weight: 650; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.charts { display: flex; flex-wrap: wrap; gap: 14px; }
.chart { flex: 1 1 min(100%, 480px); padding: 16px 14px 8px; }
.wide { flex-basis: 100%; }
@media not (pointer: coarse) {
  .chart .modebar-container { top: -46px !important; }
  .chart .modebar { opacity: 0; transition: opacity 0.15s; background: var(--surface); border-radius: 8px; }
  .chart:hover .modebar, .chart:focus-within .modebar { opacity: 1; }
}
.chart .soft { margin: 2px 0 6px; }
.scroll { overflow-x: auto; }
.scroll > p { margin-bottom: 8px; }
.second, .charts + details.card { margin-top: 14px; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { text-align: left; padding: 7px 14px 7px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
th { color: var(--soft); font-weight: 500; white-space: nowrap; }
.tight td:not(:last-child), .tight th:not(:last-child) { width: 1%; white-space: nowrap; padding-right: 22px; }
nav { display: flex; flex-wrap: wrap; gap: 6px 18px; margin: -8px 0 18px; font-size: 0.9rem; }
a { color: var(--accent); text-decoration: none; }
a:hover { text-decoration: underline; }
section { scroll-margin-top: 12px; }
td.number { font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { overflow-wrap: break-word; }
td.text:last-child { min-width: 150px; }
details { margin-top: 10px; }
details:first-child { margin-top: 0; }
summary { cursor: pointer; font-weight: 550; padding: 4px 0; }
pre { margin: 8px 0 0; padding: 14px; background: var(--page); border: 1px solid var(--line); border-radius: 10px;
  overflow-x: auto; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo,
  Consolas, "DejaVu Sans Mono", monospace; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin-right: 8px; }
.samples { display: flex; gap: 14px; align-items: center; }
input[type=range] { flex: 1; min-width: 0; accent-color: var(--accent); }
#js-missing { padding: 10px 14px; }
@media (max-width: 760px) {
  .tight td:not(:last-child), .tight th:not(:last-child) { padding-right: 12px; }
  main { padding: 18px 12px 48px; }
  .charts { gap: 10px; }
  .chart { padding: 14px 8px 4px; }
  .chart h3, .chart .soft { padding: 0 6px; }
  .tiles { grid-template-columns: repeat(2, minmax(0, 1fr)); }
}
@media print { button { display: none; } .card { break-inside: avoid; } }
"""

SCRIPT = """
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
"""
