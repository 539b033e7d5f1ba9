// The Live tab: figures that the server has built, drawn with Plotly in place and linked by their x axis.

import {Diagnosis} from './diagnosis.js';
import {el, isShown} from './dom.js';
import {SamplePrompts} from './prompts.js';

export const CONFIG = {responsive: false, displaylogo: false, showSendToCloud: false, displayModeBar: false,
  doubleClick: 'reset'};
const LINKED = ['loss', 'throughput', 'optimizer', 'memory', 'step_time', 'power', 'norms'];
const NARROW = 480;  // px of a chart below which its legend is set smaller
const MAPS = ['norms'];  // have no curve that a line through x could be read at

let plotly;
export function loadPlotly() {
  plotly ??= new Promise((resolve, reject) => {
    const address = document.querySelector('meta[name="ramstream-plotly"]').content;
    document.head.append(el('script', {src: address, load: () => resolve(window.Plotly), error: reject}));
  });
  return plotly;
}

export class Live {
  constructor(element, setAxis, timeline) {
    this.root = element;
    this.setAxis = setAxis;
    this.timeline = timeline;
    this.prompts = new SamplePrompts(this.part('prompts'));
    this.plots = new Map();
    this.range = null;
    this.rangeVersion = 0;
    this.linking = false;
    this.log = false;
    this.diagnosis = new Diagnosis((name) => this.part(name));
    const sizes = new ResizeObserver((entries) => {
      for (const {target} of entries) this.plots.get(target.dataset.figure).dirty = true;
      this.schedule();
    });
    for (const node of element.querySelectorAll('[data-figure]:not([data-figure="timeline"])')) {
      this.plots.set(node.dataset.figure, {node, figure: null, dirty: false, drawn: false});
      sizes.observe(node);
    }
    new MutationObserver(() => this.redrawAll()).observe(document.body, {attributeFilter: ['class']});
    window.addEventListener('scroll', () => this.schedule(), {passive: true});
    for (const button of element.querySelectorAll('button[data-axis]')) {
      button.addEventListener('click', () => this.chooseAxis(button.dataset.axis));
    }
    this.part('reset').addEventListener('click', () => this.zoom(null));
    this.part('log-scale').addEventListener('click', () => this.toggleLog());
  }

  part(name) { return this.root.querySelector(`[data-part="${name}"]`); }

  isShown() { return isShown(this.root); }

  clear() {
    this.part('empty').hidden = false;
    this.part('run').hidden = true;
    this.zoom(null);
    for (const plot of this.plots.values()) plot.figure = null;
    this.timeline.clear();
  }

  chooseAxis(axis) {
    for (const button of this.root.querySelectorAll('button[data-axis]')) {
      button.setAttribute('aria-pressed', String(button.dataset.axis === axis));
    }
    this.zoom(null);
    this.setAxis(axis);
  }

  toggleLog() {
    this.log = !this.log;
    this.part('log-scale').setAttribute('aria-pressed', String(this.log));
    this.redrawAll();
  }

  show(answer) {
    this.part('empty').hidden = true;
    this.part('run').hidden = false;
    this.showTiles(answer.tiles);
    this.diagnosis.show(answer.diagnosis, answer.run_id);
    for (const [name, part] of Object.entries(answer.parts)) {
      if (name === 'details') this.showDetails(part);
      else if (name === 'timeline') this.timeline.show(part, answer.run_id);
      else if (name === 'prompts') this.prompts.show(part);
      else {
        const plot = this.plots.get(name), said = this.root.querySelector(`[data-said="${name}"]`);
        Object.assign(plot, {figure: part, dirty: true});
        plot.node.closest('figure').hidden = Boolean(part.is_absent);
        said.textContent = part.said;
        said.dataset.tone = part.tone;
      }
    }
    this.schedule();
  }

  // -------------------------------------------------------------- drawing

  redrawAll() {
    for (const plot of this.plots.values()) plot.dirty = true;
    this.schedule();
  }

  schedule() {
    if (this.scheduled) return;
    this.scheduled = true;
    requestAnimationFrame(() => { this.scheduled = false; this.drawNext(); });
  }

  async drawNext() {
    // One chart a frame, and only those that can be seen: no long task, and no work for what nobody looks at.
    const next = [...this.plots.values()].find((plot) => plot.dirty && plot.figure && onScreen(plot.node));
    if (!next) return;
    next.dirty = false;
    const Plotly = await loadPlotly();
    const {node, figure} = next;
    if (!figure || !onScreen(node)) { next.dirty = true; return; }
    const linked = LINKED.includes(node.dataset.figure);
    await Plotly.react(node, figure.data, this.layout(figure, node, linked), CONFIG);
    if (!next.drawn && linked) this.link(node, Plotly);
    next.drawn = true;
    this.schedule();
  }

  layout(figure, node, linked) {
    const drawn = themed(figure.layout, node);
    if (drawn.width < NARROW) drawn.legend = {...drawn.legend, font: {size: 10}};
    for (const name of figure.log_axes ?? []) {
      // A zoom of the linear axis means nothing on the other one.
      Object.assign(drawn[name], {uirevision: `log ${this.log}`}, this.log ? {type: 'log', rangemode: 'normal'} : {});
    }
    if (linked) {
      Object.assign(drawn.xaxis, this.range ? {range: this.range, autorange: false} : {autorange: true},
        {uirevision: `range ${this.rangeVersion}`});
    }
    return drawn;
  }

  link(node, Plotly) {
    node.on('plotly_relayout', (change) => {
      if (this.linking) return;
      if (change['xaxis.range[0]'] !== undefined) {
        this.zoom([change['xaxis.range[0]'], change['xaxis.range[1]']]);
      } else if (change['xaxis.autorange'] || change['xaxis.range']) this.zoom(change['xaxis.range'] ?? null);
    });
    const isMap = MAPS.includes(node.dataset.figure);
    node.on('plotly_hover', ({xvals, points}) => this.hover(node, Plotly, isMap ? place(points[0]) : xvals?.[0]));
    node.on('plotly_unhover', () => this.hover(node, Plotly, null));
    // A point of a curve opens the step that it stands for.
    node.on('plotly_click', ({points}) => {
      if (points?.length && this.root.querySelector('[data-axis="step"]').ariaPressed === 'true') {
        this.timeline.openNear(points[0].x);
      }
    });
  }

  zoom(range) {
    if (!range && !this.range) return;
    this.range = range;
    this.rangeVersion += 1;
    this.part('reset').hidden = !range;
    this.redrawAll();
  }

  hover(from, Plotly, x) {
    if (this.linking) return;
    this.linking = true;
    for (const name of LINKED) {
      const {node, drawn} = this.plots.get(name);
      if (node === from || !drawn || MAPS.includes(name) || !onScreen(node)) continue;
      if (x === null || x === undefined) Plotly.Fx.unhover(node);
      else Plotly.Fx.hover(node, {xval: x}, Object.keys(node._fullLayout._plots));
    }
    this.linking = false;
  }

  // -------------------------------------------------------------- words

  showTiles(tiles) {
    const list = this.part('tiles');
    if (list.children.length !== tiles.length) {
      list.replaceChildren(...tiles.map(() => el('div', {}, el('dt'), el('dd'), el('small'))));
    }
    tiles.forEach((tile, index) => {
      const [label, value, note] = list.children[index].children;
      label.textContent = tile.label;
      if (value.textContent !== tile.value) value.textContent = tile.value;
      note.textContent = tile.note;
    });
  }

  showDetails(details) {
    const pairs = (facts) => facts.flatMap(([name, value]) => [el('dt', {}, name), el('dd', {}, value)]);
    this.part('facts').replaceChildren(...pairs(details.facts));
    for (const name of ['data', 'plan']) {
      this.part(name).hidden = !details[name].length;
      this.part(name).querySelector('dl').replaceChildren(...pairs(details[name]));
    }
    this.part('files').replaceChildren(...details.files.map((file) => el('li', {}, file)));
    this.part('grid').hidden = !details.grid;
    this.part('grid').querySelector('pre').textContent = details.grid;
    this.part('formula').textContent = details.formula ? `TFLOPS: ${details.formula}` : '';
    this.showLog(details.log);
    this.showAnswers(details.answers);
    this.showForecast(details.forecast);
  }

  showLog(lines) {
    const log = this.part('log'), atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 30;
    log.replaceChildren(...lines.map((line) => el('li', {'data-level': line.level},
      el('time', {}, new Date(1000 * line.time).toLocaleTimeString()), line.text)));
    if (!lines.length) log.replaceChildren(el('li', {}, 'Nothing to tell so far.'));
    if (atEnd) log.scrollTop = log.scrollHeight;
  }

  showForecast(forecast) {
    const card = this.part('forecast');
    card.hidden = !forecast;
    if (!forecast) return;
    card.querySelector('tbody').replaceChildren(...forecast.rows.map((row) => el('tr', {'data-tone': row.tone},
      el('th', {scope: 'row'}, row.name), ...['predicted', 'measured', 'error'].map((name) => el('td', {}, row[name])))));
    this.part('forecast-said').textContent = forecast.said;
  }

  showAnswers(answers) {
    const card = this.part('answers');
    card.hidden = !answers;
    if (!answers) return;
    const scores = Object.entries(answers.scores).map(([moment, score]) => `${moment} training ${score}`);
    this.part('scores').textContent = `Answered exactly as expected: ${scores.join(', ')}.`;
    card.querySelector('tbody').replaceChildren(...answers.rows.map((row) => el('tr', {},
      ...['prompt', 'expected', 'before', 'after'].map((name) => el('td', {class: tone(row, name)}, row[name] ?? '–')))));
  }
}

function tone(row, name) {
  if (!['before', 'after'].includes(name) || row[name] === undefined) return undefined;
  return row[name] === row.expected ? 'rs-right' : 'rs-off';
}

// The colours of the page for a figure as the server made it, in the size of its place.
export function themed(layout, node) {
  const style = getComputedStyle(document.body), colour = (name) => style.getPropertyValue(`--rs-${name}`).trim();
  const drawn = {...layout, width: node.clientWidth, height: node.clientHeight, paper_bgcolor: 'rgba(0,0,0,0)',
    plot_bgcolor: 'rgba(0,0,0,0)', font: {family: getComputedStyle(node).fontFamily, size: 12, color: colour('text')},
    hoverlabel: {bgcolor: colour('card'), bordercolor: colour('field-line'), font: {color: colour('text')}}};
  for (const name of Object.keys(layout).filter((key) => /^[xy]axis/.test(key))) {
    const muted = colour('muted'), axis = layout[name];
    drawn[name] = {gridcolor: colour('line'), linecolor: colour('line'), spikecolor: muted, ...axis,
      tickfont: {color: muted, size: 11}, title: {...axis.title, font: {color: muted, size: 11}}};
  }
  return drawn;
}

// Of a point on its x axis, as a number: on a time axis its x is text.
function place({x, xaxis}) { return xaxis.type === 'date' ? xaxis.d2c(x) : x; }

export function onScreen(node) {
  if (!isShown(node) || !node.clientWidth) return false;
  const box = node.getBoundingClientRect();
  return box.bottom > -200 && box.top < window.innerHeight + 200;
}
