"""The look of the contact sheet, in light and dark."""

STYLE = """
:root { color-scheme: light dark; --paper: #f6f6f4; --card: #fff; --ink: #1d1d1b; --soft: #6b6b66; --line: #e2e2dc;
  --alarm: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #141413; --card: #1e1e1c; --ink: #ececE6; --soft: #9c9c95; --line: #32322e; --alarm: #f2b8b5; } }
* { box-sizing: border-box; margin: 0; }
body { background: var(--paper); color: var(--ink); font: 14px/1.45 system-ui, sans-serif; padding: 24px; }
header { margin-bottom: 24px; }
h1 { font-size: 20px; font-weight: 600; overflow-wrap: anywhere; }
header p { color: var(--soft); margin-top: 4px; overflow-wrap: anywhere; }
h2 { font-size: 14px; font-weight: 600; margin: 20px 0 8px; padding-top: 12px; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
h2 span { color: var(--soft); font-weight: 400; margin-left: 8px; }
code { font: 12px/1.4 ui-monospace, monospace; color: var(--soft); overflow-wrap: anywhere; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(440px, 100%), 1fr)); gap: 12px; }
article { background: var(--card); border: 1px solid var(--line); border-radius: 8px; overflow: hidden;
  padding-bottom: 8px; }
.strip { display: flex; gap: 1px; background: #000; align-items: center; }
.strip img { flex: 1 1 0; min-width: 0; max-width: 25%; height: auto; max-height: 140px; object-fit: contain;
  display: block; }
article p { padding: 4px 10px 0; }
.place { display: flex; justify-content: space-between; gap: 10px; flex-wrap: wrap; }
time { font-variant-numeric: tabular-nums; font-weight: 600; }
.caption { overflow-wrap: anywhere; }
.more { color: var(--soft); }
.problem { color: var(--alarm); min-height: 72px; padding-top: 10px; overflow-wrap: anywhere; }
"""
