"use strict";
// Draw a uPlot chart in each element with data-chart, in place of its text, and make tables with data-sort sortable.
// A chart shows the values under the pointer, zooms by dragging (a double click resets it), and supports smoothing and a
// logarithmic axis. On the keyboard, the arrow keys show values, + and - zoom, and Escape resets the zoom.
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const HEIGHT = 230;
  const state = { smoothing: 0.9, isLog: false };
  const plots = [];

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const number = (value) => value == null ? "–" : Math.abs(value) >= 1e6 ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  const last = (values) => values.findLast((value) => value != null);

  // Bias-corrected exponential moving average. A point that represents n points is weighted like n points.
  function smooth(line, weight) {
    let total = 0, norm = 0;
    return line.mean.map((y, i) => {
      const decay = Math.pow(weight, line.count[i]);
      total = decay * total + (1 - decay) * y;
      norm = decay * norm + (1 - decay);
      return total / norm;
    });
  }

  function range(fromZero) {
    return (plot, low, high) => {
      if (low == null) return [0, 1];
      if (state.isLog) return uPlot.rangeLog(low, high, 10, false);
      const pad = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [fromZero && low >= 0 ? 0 : low - pad, high + pad];
    };
  }

  function draw(element) {
    const chart = charts[Number(element.dataset.chart)];
    const isSmooth = chart.is_noisy && state.smoothing > 0;
    const positive = (values) => state.isLog ? values.map((y) => (y > 0 ? y : null)) : values;
    const tables = [], series = [{ label: "step", value: (plot, x) => (x ?? last(plot.data[0])).toLocaleString("en") }];
    chart.lines.forEach((line, i) => {
      const colour = css(`--line${i % 4}`), dash = i >= 4 ? [6, 3] : undefined;
      const label = line.label || (isSmooth ? "smoothed" : "value"), prefix = line.label ? `${line.label}, ` : "";
      // Without a pointer, the legend shows the last values.
      const value = (plot, y, seriesIndex, index) => number(index == null ? last(plot.data[seriesIndex]) : y);
      const common = { stroke: colour, dash, spanGaps: true, value };
      const markers = { show: line.x.length <= 60, size: 5, fill: colour };
      tables.push([line.x, positive(line.y)]);
      if (isSmooth) {
        series.push({ ...common, label: `${prefix}each step`, class: "raw", width: 1, alpha: 0.35, points: { show: false } });
        tables.push([line.x, positive(smooth(line, state.smoothing))]);
        series.push({ ...common, label, width: 2, points: { show: line.x.length === 1 } });
      } else {
        series.push({ ...common, label, width: 2, points: markers });
      }
    });
    const axis = { stroke: css("--soft"), grid: { stroke: css("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const options = {
      width: element.clientWidth, height: HEIGHT, series,
      scales: { x: { time: false }, y: { distr: state.isLog ? 3 : 1, range: range(chart.from_zero) } },
      axes: [
        { ...axis, size: 28, values: (plot, ticks) => ticks.map((x) => (x % 1 ? "" : x.toLocaleString("en"))) },
        { ...axis, size: 58, values: (plot, ticks) => ticks.map((y) => (y == null ? "" : number(y))) },
      ],
      cursor: { drag: { x: true, y: false }, sync: { key: "step" }, points: { size: 6 } },
      legend: { live: true },
      // An unsmoothed line has no legend entry; it is shown and hidden together with the smoothed line that follows it.
      hooks: { setSeries: [(plot, index, { show }) => {
        if (index > 1 && show != null && plot.series[index - 1].class === "raw") plot.setSeries(index - 1, { show });
      }] },
    };
    element.replaceChildren();
    const plot = new uPlot(options, uPlot.join(tables), element);
    plots.push({ plot, element });
    describe(plot, chart, element);
    takeKeys(plot, chart);
  }

  // For screen readers, a chart is a group: an image with a description, and a button for each line.
  function describe(plot, chart, element) {
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", chart.title);
    const canvas = element.querySelector("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.title} by step. ${chart.text}`);
    element.querySelectorAll(".u-legend .u-series").forEach((row, index) => {
      const head = row.querySelector("th");
      if (index === 0 || row.classList.contains("raw")) return;
      const showState = () => head.setAttribute("aria-pressed", String(plot.series[index].show));
      head.tabIndex = 0;
      head.setAttribute("role", "button");
      head.addEventListener("click", () => setTimeout(showState));
      head.addEventListener("keydown", (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        head.click();
      });
      showState();
    });
  }

  // Keys move the cursor and zoom around it; the legend shows the values at the cursor.
  function takeKeys(plot, chart) {
    const steps = plot.data[0], last = steps.length - 1, area = plot.root.querySelector(".u-wrap");
    const legend = plot.root.querySelector(".u-legend");
    area.tabIndex = 0;
    area.setAttribute("role", "group");
    area.setAttribute("aria-label", `${chart.title}: arrow keys show values, + and - zoom, Escape resets`);
    area.addEventListener("focus", () => legend.setAttribute("aria-live", "polite"));
    area.addEventListener("blur", () => legend.removeAttribute("aria-live"));
    area.addEventListener("keydown", (event) => {
      const index = plot.cursor.idx ?? last, { min, max } = plot.scales.x;
      const targets = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: last };
      const factor = { "+": 0.5, "=": 0.5, "-": 2 }[event.key];
      if (event.key in targets) {
        const x = steps[Math.min(Math.max(targets[event.key], 0), last)];
        plot.setCursor({ left: plot.valToPos(x, "x"), top: plot.over.clientHeight / 2 });
      } else if (factor) {
        const middle = steps[index], half = (max - min) * factor / 2;
        plot.setScale("x", { min: Math.max(middle - half, steps[0]), max: Math.min(middle + half, steps[last]) });
      } else if (event.key === "Escape") {
        plot.setScale("x", { min: steps[0], max: steps[last] });
      } else return;
      event.preventDefault();
    });
  }

  function drawAll() {
    plots.splice(0).forEach(({ plot }) => plot.destroy());
    document.querySelectorAll("[data-chart]").forEach(draw);
  }

  function readControls(changed) {
    document.querySelectorAll("[data-control]").forEach((control) => {
      const name = control.dataset.control;
      if (name === "smoothing") {
        if (control === changed) state.smoothing = Number(control.value);
        control.value = state.smoothing;
        control.nextElementSibling.textContent = state.smoothing.toFixed(2);
      } else if (name === "log") {
        if (control === changed) state.isLog = control.checked;
        control.checked = state.isLog;
      }
    });
  }

  document.querySelectorAll("[data-control]").forEach((control) => {
    control.addEventListener(control.type === "button" ? "click" : "input", () => { readControls(control); drawAll(); });
  });
  document.querySelectorAll("[data-controls]").forEach((element) => { element.hidden = false; });

  // A click on a column header sorts the rows of the table, the largest numbers first; a second click reverses the order.
  document.querySelectorAll("[data-sort] th").forEach((head) => {
    const button = document.createElement("button");
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const rows = [...head.closest("table").querySelectorAll("tr")].filter((row) => row.querySelector("td"));
      const isDown = head.getAttribute("aria-sort") !== "descending";
      const value = (row) => {
        const cell = row.children[head.cellIndex];
        return cell.dataset.value === undefined || cell.dataset.value === "" ? cell.textContent.trim() : Number(cell.dataset.value);
      };
      const order = (a, b) => typeof a === "number" && typeof b === "number" ? b - a
        : typeof a === "number" ? -1 : typeof b === "number" ? 1 : a.localeCompare(b);
      rows.sort((a, b) => (isDown ? 1 : -1) * order(value(a), value(b)));
      head.closest("tr").querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
      rows[0].parentElement.append(...rows);
    });
  });

  // Make tables that are too wide for the page scrollable by keyboard as well.
  function reachWide() {
    document.querySelectorAll(".wide").forEach((element) => {
      const scrolls = element.scrollWidth > element.clientWidth || element.scrollHeight > element.clientHeight;
      element.toggleAttribute("tabindex", scrolls);
      if (!scrolls) return element.removeAttribute("role");
      const title = element.querySelector("caption") ?? element.closest("section").querySelector("h2");
      for (const [name, value] of [["tabindex", "0"], ["role", "region"], ["aria-label", title.textContent]]) {
        element.setAttribute(name, value);
      }
    });
  }

  readControls(null);
  drawAll();
  reachWide();
  document.querySelectorAll("details").forEach((element) => element.addEventListener("toggle", reachWide));
  new ResizeObserver(() => {
    for (const { plot, element } of plots) {
      const width = element.clientWidth;
      if (width && width !== plot.width) plot.setSize({ width, height: HEIGHT });
    }
    reachWide();
  }).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
})();
