// Charts of the last 15 minutes, drawn by uPlot.

import uPlot from "./vendor/uPlot.esm.js";
import { h, setText } from "./dom.js";

const WINDOW_SECONDS = 900;
const MIN_SECONDS = 10;
const HEIGHT = 150;
/** Resolve light-dark() of a custom property, which canvas does not understand. */
function resolved(name) {
  const probe = h("span");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

export const tokens = value => value >= 100 ? value.toFixed(0) : value.toFixed(1);
export const duration = seconds => seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;

/** One chart. series: list of { label, key } of samples; at most two. */
export class Chart {
  constructor(title, series, format, signal) {
    this.series = series;
    this.format = format;
    this.latest = h("span");
    this.plot = h("div", { class: "plot", "aria-hidden": "true" });
    this.element = h("figure", {}, h("figcaption", {}, title, this.latest), this.plot);
    this.samples = [];
    this.uplot = null;
    const sizes = new ResizeObserver(() => {
      if (this.plot.clientWidth) this.uplot?.setSize({ width: this.plot.clientWidth, height: HEIGHT });
    });
    sizes.observe(this.plot);
    const redraw = () => this.draw(true);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", redraw);
    signal.addEventListener("abort", () => { sizes.disconnect(); dark.removeEventListener("change", redraw); this.uplot?.destroy(); });
  }

  update(samples) {
    this.samples = samples;
    const last = samples.at(-1);
    const values = this.series.map(({ label, key }, index) => ({ label, value: last?.[key], colour: index ? "second" : "first" }));
    const texts = values.filter(({ value }) => value !== null && value !== undefined).map(({ label, value, colour }) =>
      h("span", { class: label && colour }, `${label ? `${label} ` : ""}${this.format(value)}`));
    if (texts.length) this.latest.replaceChildren(...texts);
    else setText(this.latest, "no requests");
    this.draw(false);
  }

  data() {
    return [this.samples.map(each => each.at), ...this.series.map(({ key }) => this.samples.map(each => each[key]))];
  }

  draw(again) {
    if (again) { this.uplot?.destroy(); this.uplot = null; }
    if (this.uplot) this.uplot.setData(this.data());
    else if (this.plot.clientWidth) this.uplot = new uPlot(this.options(), this.data(), this.plot);
  }

  options() {
    const axis = { stroke: resolved("--soft"), grid: { stroke: resolved("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const end = () => this.samples.at(-1)?.at ?? Date.now() / 1000;
    const begin = () => Math.min(Math.max(this.samples.at(0)?.at ?? 0, end() - WINDOW_SECONDS), end() - MIN_SECONDS);
    const clock = at => new Date(1000 * at).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: end() - begin() < 300 ? "2-digit" : undefined, hour12: false });
    return {
      width: this.plot.clientWidth,
      height: HEIGHT,
      legend: { show: false },
      cursor: { show: false },
      scales: {
        x: { range: () => [begin(), end()] },
        y: { range: (_, low, high) => [0, high > 0 ? high * 1.15 : 1] },
      },
      axes: [
        { ...axis, space: 70, size: 26, values: (_, times) => times.map(clock) },
        { ...axis, size: 62, values: (_, values) => values.map(value => value ? this.format(value) : "0") },
      ],
      series: [{}, ...this.series.map(({ label }, index) => ({
        label, stroke: resolved(index ? "--second" : "--first"), width: 1.5, spanGaps: true, points: { size: 3 },
      }))],
    };
  }
}

/** Keep samples of the window. */
export function within(samples) {
  const end = samples.at(-1)?.at ?? 0;
  return samples.filter(each => each.at > end - WINDOW_SECONDS);
}
