// Several runs side by side: their curves on shared axes, key figures, and the settings in which they differ.

import {CONFIG, loadPlotly, themed} from './charts.js';
import {el, field, isShown, send} from './dom.js';

export const LEAST = 2, MOST = 6;
const AGAIN = 4000;

export class Comparison {
  constructor(root, card, changed) {
    this.root = root;
    this.card = card;
    this.changed = changed;
    this.ids = [];
    this.axis = 'step';
    this.turn = 0;
    this.readAt = 0;
    this.plots = new Map();
    const sizes = new ResizeObserver(() => this.draw());
    for (const node of card.querySelectorAll('[data-compare]')) {
      this.plots.set(node.dataset.compare, {node, figure: null, drawn: ''});
      sizes.observe(node);
    }
    new MutationObserver(() => this.draw()).observe(document.body, {attributeFilter: ['class']});
    for (const button of card.querySelectorAll('button[data-axis]')) {
      button.addEventListener('click', () => this.chooseAxis(button.dataset.axis));
    }
    this.part('compare-close').addEventListener('click', () => this.close());
  }

  part(name) { return this.card.querySelector(`[data-part="${name}"]`); }

  // -------------------------------------------------------------- which runs

  openAddress() {
    const asked = (new URLSearchParams(location.search).get('compare') ?? '').split(',').filter(Boolean);
    if (asked.length) this.open([...new Set(asked)], false);
  }

  open(ids, scrolls) {
    this.ids = ids;
    this.card.hidden = false;
    this.part('compare-body').hidden = true;
    this.part('compare-runs').replaceChildren();
    this.writeAddress();
    this.changed(ids);
    if (scrolls) {
      this.card.scrollIntoView({block: 'start'});
      this.card.querySelector('h3').focus({preventScroll: true});
    }
    this.read();
  }

  close() {
    this.ids = [];
    this.turn += 1;
    this.card.hidden = true;
    this.writeAddress();
    this.changed([]);
  }

  without(id) {
    if (!this.ids.includes(id)) return;
    const left = this.ids.filter((other) => other !== id);
    if (left.length >= LEAST) this.open(left, false);
    else this.close();
  }

  writeAddress() {
    const query = new URLSearchParams(location.search);
    query.delete('compare');
    const rest = query.toString(), own = this.ids.length ? `compare=${this.ids.map(encodeURIComponent).join(',')}` : '';
    history.replaceState(null, '', `${location.pathname}?${[rest, own].filter(Boolean).join('&')}`);
  }

  chooseAxis(axis) {
    this.axis = axis;
    for (const button of this.card.querySelectorAll('button[data-axis]')) {
      button.setAttribute('aria-pressed', String(button.dataset.axis === axis));
    }
    this.read();
  }

  // -------------------------------------------------------------- reading and showing

  refresh() {
    if (this.ids.length && this.goingOn && Date.now() - this.readAt >= AGAIN) this.read();
  }

  async read() {
    const turn = ++this.turn;
    this.readAt = Date.now();
    let answer;
    try {
      answer = await send(`/api/compare?runs=${this.ids.map(encodeURIComponent).join(',')}&axis=${this.axis}`);
    } catch (error) {
      if (turn !== this.turn) return;
      field(this.card, 'compare-problem').textContent = error.message;
      this.goingOn = Boolean(error.unreachable);
      return;
    }
    if (turn !== this.turn) return;
    this.goingOn = answer.going_on;
    field(this.card, 'compare-problem').textContent = answer.unread.length
      ? `The settings of ${answer.unread.join(', ')} cannot be read, so they are left out of the difference.` : '';
    this.part('compare-body').hidden = false;
    this.showRuns(answer.runs);
    this.showTable('compare-figures', answer.runs, answer.rows);
    this.showTable('compare-settings', answer.runs, answer.settings);
    this.part('compare-settings').hidden = !answer.settings.length;
    field(this.card, 'compare-same').textContent = answer.settings.length ? 'All other settings are the same.'
      : 'None: all settings of these runs are the same.';
    for (const [name, plot] of this.plots) plot.figure = answer.figures[name];
    this.draw();
  }

  showRuns(runs) {
    this.part('compare-runs').replaceChildren(...runs.map((run) => el('li', {}, swatch(run.colour),
      el('span', {}, run.name), el('span', {class: 'rs-state', 'data-tone': run.tone}, run.word))));
  }

  showTable(name, runs, rows) {
    const table = this.part(name);
    table.querySelector('thead').replaceChildren(el('tr', {}, el('td'),
      ...runs.map((run) => el('th', {scope: 'col'}, swatch(run.colour), run.name))));
    table.querySelector('tbody').replaceChildren(...rows.map((row) => el('tr', {}, el('th', {scope: 'row'}, row.name),
      ...row.texts.map((text, index) => el('td', {class: row.best?.includes(index) ? 'rs-best' : null}, text,
        row.best?.includes(index) ? el('span', {class: 'rs-hidden'}, ' (best)') : null)))));
  }

  async draw() {
    if (!this.ids.length) return;
    const Plotly = await loadPlotly();
    for (const plot of this.plots.values()) {
      if (!plot.figure || !isShown(plot.node) || !plot.node.clientWidth) continue;
      const layout = themed(plot.figure.layout, plot.node);
      layout.uirevision = `${this.axis} ${this.ids.join()}`;  // another zoom for other runs or another axis
      layout.hoverlabel = {...layout.hoverlabel, namelength: -1};
      const drawn = JSON.stringify([plot.figure.data, layout]);
      if (drawn === plot.drawn) continue;
      plot.drawn = drawn;
      await Plotly.react(plot.node, plot.figure.data, layout, CONFIG);
    }
  }
}

function swatch(colour) {
  const node = el('i', {class: 'rs-swatch', 'aria-hidden': 'true'});
  node.style.background = colour;
  return node;
}
