"""The stylesheet of the report: one column, light and dark, readable from 320 pixels on.

Colours are Okabe and Ito's, which the colour-blind can tell apart; no verdict is told by colour alone.
"""

STYLE = """
:root { --ink: #1b1f24; --soft: #59626d; --paper: #fff; --panel: #f4f6f8; --edge: #d5dbe1; --blue: #0072b2;
  --orange: #c25a00; --good: #00704f; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #a3adb8; --paper: #14171b; --panel: #1e2329; --edge: #3a424b; --blue: #56b4e9;
    --orange: #e69f00; --good: #3fcf9f; --bad: #ff8a80; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 54rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: clamp(1.5rem, 5vw, 2.3rem); line-height: 1.15; margin: 0 0 .6rem; letter-spacing: -.01em; }
h2 { font-size: 1.4rem; margin: 3rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--edge); }
h3 { font-size: 1.05rem; margin: 1.6rem 0 .4rem; }
.lead { font-size: 1.15rem; }
a { color: var(--blue); }
a:focus-visible, .wide:focus-visible, summary:focus-visible { outline: 2px solid var(--blue); outline-offset: 2px; }
nav ol { columns: 2; padding-left: 1.4rem; margin: 1.2rem 0; }
nav li { break-inside: avoid; }
.soft, figcaption, caption, footer { color: var(--soft); }
.badge { display: inline-block; padding: .15rem .7rem; border: 1px solid; border-radius: 1rem; font-weight: 600; }
.pass { color: var(--good); } .fail { color: var(--bad); } .skip { color: var(--soft); }
.verdict { font-weight: 600; white-space: nowrap; }
.note { padding: .6rem .9rem; border-left: 4px solid var(--orange); background: var(--panel); }
pre, code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .85rem; }
pre { margin: .5rem 0; padding: .7rem .9rem; background: var(--panel); border-radius: .4rem; overflow-x: auto;
  white-space: pre-wrap; line-height: 1.45; }
details pre { white-space: pre; }
figure { margin: 1.2rem 0; }
figcaption { font-size: .9rem; margin-top: .3rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .95rem; min-width: 60%; }
caption { text-align: left; font-size: .9rem; padding: .3rem 0; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--edge); }
th { font-weight: 600; } thead th { color: var(--soft); font-size: .85rem; }
.why { color: var(--soft); font-size: .85rem; }
#size td, #cache td, #checks td { white-space: nowrap; } .why { display: block; font-weight: 400; }
details { margin-top: 1rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .token { font: 11px ui-monospace, "DejaVu Sans Mono", monospace; }
.chart { width: 44rem; } .large-map { width: 36rem; }
.grid { stroke: var(--edge); stroke-width: 1; } .frame { fill: none; stroke: var(--edge); stroke-width: 1;
  vector-effect: non-scaling-stroke; }
.baseline { stroke: var(--soft); stroke-width: 1.2; stroke-dasharray: 5 4; }
.train { fill: none; stroke: var(--orange); stroke-width: 1.2; opacity: .8; }
.validation { fill: none; stroke: var(--blue); stroke-width: 2.4; } .dot { fill: var(--blue); }
.cells { fill: var(--blue); } .hover { fill: transparent; }
.hover:hover { stroke: var(--orange); stroke-width: 2; }
.bar, .fast { fill: var(--blue); background: var(--blue); } .slow { fill: var(--orange); background: var(--orange); }
.none { fill: var(--soft); }
.bars { width: 112px; margin: .3rem 0; }
.key { display: inline-block; width: .8em; height: .8em; margin-left: .6em; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); gap: .4rem 1.2rem; }
.cards figure { margin: .4rem 0; min-width: 0; }
.maps { display: grid; grid-template-columns: repeat(4, 1fr); gap: .8rem; }
.maps figure { margin: 0; } .maps svg { width: 100%; } .maps figcaption { font-size: .8rem; }
dt { margin-top: .7rem; } dd { margin: 0; } dd code { display: block; white-space: pre; overflow-x: auto;
  background: var(--panel); padding: .3rem .6rem; border-radius: .3rem; }
@media (max-width: 34rem) { nav ol { columns: 1; } th, td { padding-right: .5rem; } table { font-size: .88rem; }
  .chart text { font-size: 16px; } svg .token { font-size: 14px; }
  .maps { gap: .5rem; } .maps figcaption { font-size: .7rem; } }
@media print { body { max-width: none; } .hover { display: none; } }
"""
