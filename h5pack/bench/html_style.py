"""The style sheet of a bench's HTML report."""

STYLE = """
:root { color-scheme: light dark; --ink: #202124; --quiet: #5f6368; --paper: #fff; --card: #f6f7f9; --line: #dde0e4;
  --bar: #cfe3f5; --chosen: #fff3c4; --warn: #fde7e4; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8eaed; --quiet: #9aa0a6; --paper: #17181a; --card: #222427;
  --line: #3a3d41; --bar: #1f4a6e; --chosen: #4a4016; --warn: #5c2a24; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 84rem; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.45rem; line-height: 1.3; margin: 0 0 .3rem; }
h2 { font-size: 1.05rem; margin: 2.2rem 0 .4rem; }
p { margin: .4rem 0; max-width: 60rem; }
.quiet, figcaption, footer { color: var(--quiet); font-size: .87rem; }
.banner { background: var(--warn); padding: .5rem .8rem; border-radius: .4rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1.1rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: .6rem 0; }
dt { color: var(--quiet); }
dd { margin: 0; overflow-wrap: anywhere; }
ul { margin: .4rem 0; padding-left: 1.2rem; max-width: 60rem; }
li { overflow-wrap: anywhere; }
pre { background: var(--paper); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem;
  overflow-x: auto; font: 13px/1.5 ui-monospace, monospace; }
figure { margin: 1.2rem 0; }
figure div { background: #fff; border: 1px solid var(--line); border-radius: .5rem; padding: .5rem; }
figure svg { display: block; width: 100%; height: auto; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; font-size: .8rem; }
th { font-weight: 600; text-align: right; color: var(--quiet); padding: .2rem .4rem; }
th.group { text-align: center; border-bottom: 1px solid var(--line); color: var(--ink); }
th.lead, td.lead { text-align: left; }
thead tr:last-child th { vertical-align: bottom; }
td { text-align: right; padding: .2rem .4rem; border-top: 1px solid var(--line); }
thead td { border: 0; }
td.first, th.first { border-left: 1px solid var(--line); }
td.speed { background: linear-gradient(90deg, var(--bar) calc(100% * var(--part)), transparent 0); }
td small { color: var(--quiet); display: inline-block; min-width: 2.4em; text-align: left; }
tr.chosen td:first-child { background: var(--chosen); font-weight: 600; }
footer { margin-top: 2.5rem; border-top: 1px solid var(--line); padding-top: .6rem; }
"""
