"""The HTML frame of the report: style and the places to fill."""

from string import Template

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title - drumroll</title>
<style>
:root { color-scheme: light dark; --bg: #f8fafc; --card: #ffffff; --text: #0f172a; --dim: #64748b; --line: #e2e8f0;
  --good: #15803d; --bad: #b91c1c; --soft: #f1f5f9; }
@media (prefers-color-scheme: dark) { :root { --bg: #0b1120; --card: #131c2e; --text: #e2e8f0; --dim: #94a3b8; --line: #263348;
  --good: #4ade80; --bad: #f87171; --soft: #0f1828; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--text); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; margin: 0; display: flex; gap: 14px; align-items: center; flex-wrap: wrap; }
h2 { font-size: 19px; margin: 36px 0 10px; }
h3 { font-size: 15px; margin: 0; }
p { margin: 6px 0 12px; max-width: 90ch; }
.story { color: var(--dim); font-size: 16px; }
.badge { font-size: 13px; font-weight: 600; padding: 2px 10px; border-radius: 99px; border: 1px solid; }
.badge.good, .tile.good b { color: var(--good); } .badge.bad, .tile.bad b { color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 12px; margin: 20px 0; }
.tile, figure, .pair, .alarm, table, details { background: var(--card); border: 1px solid var(--line);
  border-radius: 10px; }
.tile { padding: 14px 16px; } .tile b { display: block; font-size: 21px; white-space: nowrap; }
.tile span { color: var(--dim); font-size: 13px; }
figure { margin: 0; padding: 16px 18px 12px; } figure p { color: var(--dim); font-size: 13px; margin: 2px 0 8px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font: 11px system-ui, sans-serif; } .main svg text { font-size: 12px; } svg .grid { stroke: var(--line); }
svg rect:hover { fill: var(--dim); fill-opacity: .12; }
figcaption { display: flex; flex-wrap: wrap; gap: 4px 16px; color: var(--dim); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.alarm { border-left: 4px solid var(--bad); padding: 10px 16px; margin: 8px 0; } .alarm p { margin: 2px 0; }
.calm { color: var(--good); }
.pair { margin: 10px 0; padding: 10px; border-left-width: 4px; }
.pair.better { border-left-color: var(--good); } .pair.worse { border-left-color: var(--bad); }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 10px; } .sides > div { min-width: 0; }
.head { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 12px; color: var(--dim); font-size: 13px; padding: 2px 4px; }
pre { font: 13px/1.45 ui-monospace, "SFMono-Regular", Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere;
  background: var(--soft); border-radius: 6px; padding: 8px 10px; margin: 4px 0; max-height: 320px; overflow: auto; }
pre:empty::after { content: "(empty)"; color: var(--dim); }
pre.prompt { background: none; border-left: 3px solid var(--line); border-radius: 0; max-height: 160px; }
table { border-collapse: collapse; } th, td { text-align: left; padding: 5px 16px; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; } th { color: var(--dim); font-weight: 500; } td { font-variant-numeric: tabular-nums; }
details { padding: 10px 16px; } summary { cursor: pointer; }
@media (max-width: 640px) { .sides { grid-template-columns: 1fr; } }
</style></head>
<body><main>
<h1>$title $status</h1>
<p class="story">$story</p>
$body
</main></body></html>
""")
