// The Runs tab: the queue, every run, and what can be done with one.

import {Comparison, MOST, LEAST} from './compare.js';
import {el, field, send} from './dom.js';
import {RunDetails} from './run_details.js';

const JOB_WAIT = 400, LIST_WAIT = 2000;
const path = (id, what) => `/api/runs/${encodeURIComponent(id)}/${what}`;

export class RunList {
  constructor(element, openRun, closeRun) {
    this.root = element;
    this.openRun = openRun;
    this.closeRun = closeRun;
    this.rows = new Map();
    this.ticked = new Set();
    this.readAt = 0;
    this.run = null;
    this.details = new RunDetails(this.part('details'), () => this.refresh(true));
    this.comparison = new Comparison(element, this.part('compare'), (ids) => this.compared(ids));
    this.part('compare-open').addEventListener('click', () => this.comparison.open([...this.ticked], true));
    this.part('queue-continue').addEventListener('click', ({target}) => this.changeQueue(target, 'continue'));
    for (const name of ['ask', 'export']) {
      const card = this.part(name);
      card.querySelector('[data-part="close"]').addEventListener('click', () => { card.hidden = true; });
      card.querySelector('form').addEventListener('submit', (event) => {
        event.preventDefault();
        this[name](new FormData(event.target));
      });
    }
    this.comparison.openAddress();
  }

  part(name) { return this.root.querySelector(`[data-part="${name}"]`); }

  async refresh(force = false) {
    if (!force && Date.now() - this.readAt < LIST_WAIT) return;
    this.readAt = Date.now();
    const {runs, queue} = await send('/api/runs');
    this.part('empty').hidden = runs.length > 0;
    this.part('list').hidden = this.part('bar').hidden = runs.length === 0;
    this.showQueue(queue);
    this.showRuns(runs);
    this.comparison.refresh();
  }

  // A row stays as it is while what it says does: the focus and an open menu are not lost to the next step of another run.
  showRuns(runs) {
    const known = new Map();
    for (const run of runs) {
      const text = JSON.stringify(run), before = this.rows.get(run.id);
      if (before?.text === text) { known.set(run.id, before); continue; }
      const focused = before?.node.contains(document.activeElement) ? document.activeElement.dataset.act : null;
      const node = this.row(run);
      before?.node.replaceWith(node);
      if (focused) node.querySelector(`[data-act="${focused}"]`)?.focus();
      known.set(run.id, {text, node});
    }
    this.rows = known;
    const body = this.part('rows'), nodes = [...known.values()].map(({node}) => node);
    if (nodes.length !== body.children.length || nodes.some((node, index) => node !== body.children[index])) {
      body.replaceChildren(...nodes);
    }
    for (const id of this.ticked) if (!known.has(id)) this.ticked.delete(id);
    this.showTicked();
  }

  row(run) {
    const button = (act, label, work) => run.actions.includes(act) ? el('button', {type: 'button', class: 'rs-small',
      'data-act': act, 'aria-label': `${label}: ${run.name}`, click: work}, label) : null;
    return el('tr', {'data-run': run.id},
      el('td', {class: 'rs-pick'}, run.actions.includes('compare') ? this.tick(run) : null,
        el('span', {class: 'rs-state', 'data-tone': run.tone, title: run.reason}, run.word)),
      el('td', {}, el('strong', {}, run.name), run.note ? el('p', {class: 'rs-note'}, run.note) : null,
        el('small', {}, run.id), run.reason && run.tone === 'bad' ? el('small', {class: 'rs-error'}, run.reason) : null),
      el('td', {class: 'rs-number'}, run.steps), el('td', {class: 'rs-number'}, run.loss),
      el('td', {}, run.model, el('small', {}, run.data)),
      el('td', {}, started(run.created), el('small', {}, `at work for ${run.at_work}`)),
      el('td', {class: 'rs-row-actions'}, el('div', {},
        button('open', 'Open', () => this.openRun(run.id, 'live')),
        button('resume', 'Resume', (event) => this.resume(run, event.target)),
        button('details', 'Details', () => this.details.open(run)),
        button('ask', 'Ask', () => this.open('ask', run)),
        button('draft', 'New run from this one', (event) => this.draft(run, event.target)),
        button('export', 'Export', () => this.open('export', run)),
        button('delete', 'Delete', (event) => this.delete(run, event.target)))));
  }

  // -------------------------------------------------------------- comparing

  tick(run) {
    const box = el('input', {type: 'checkbox', 'data-act': 'compare', 'aria-label': `Compare: ${run.name}`, change: () => {
      if (box.checked) this.ticked.add(run.id);
      else this.ticked.delete(run.id);
      this.showTicked();
    }});
    box.checked = this.ticked.has(run.id);
    return box;
  }

  showTicked() {
    const count = this.ticked.size, fits = count >= LEAST && count <= MOST;
    const button = this.part('compare-open');
    button.disabled = !fits;
    button.classList.toggle('rs-primary', fits);
    button.textContent = count ? `Compare ${count}` : 'Compare';
    field(this.root, 'ticked').textContent = count > MOST ? `At most ${MOST} runs are compared: untick ${count - MOST}.`
      : count === 1 ? 'Tick one run more.' : count ? '' : 'Tick two to six runs to see them side by side.';
  }

  compared(ids) {
    if (ids.length) this.ticked = new Set(ids);
    for (const box of this.root.querySelectorAll('[data-act="compare"]')) {
      box.checked = this.ticked.has(box.closest('tr').dataset.run);
    }
    this.showTicked();
  }

  // -------------------------------------------------------------- the queue

  showQueue(queue) {
    const text = JSON.stringify(queue);
    if (text === this.queueShown) return;
    const focused = this.part('queue-rows').contains(document.activeElement) ? document.activeElement.dataset.queued : null;
    this.queueShown = text;
    this.part('queue').hidden = !queue.rows.length && !queue.problem;
    this.part('queue-held').hidden = !queue.held;
    field(this.root, 'queue-problem').textContent = queue.problem;
    this.part('queue-rows').replaceChildren(...queue.rows.map((row, index) => this.queueRow(row, index)));
    if (focused) this.root.querySelector(`[data-queued="${CSS.escape(focused)}"]`)?.focus();
  }

  queueRow(row, index) {
    const button = (label, what) => el('button', {type: 'button', class: 'rs-small', 'data-queued': `${row.id} ${what}`,
      'aria-label': `${label}: ${row.name}`, click: ({target}) => this.changeQueue(target, `${row.id}/${what}`)}, label);
    return el('li', {}, el('div', {}, el('strong', {}, row.name), el('small', {}, `${row.model} · ${row.data}`),
      row.problem ? el('small', {class: 'rs-error'}, `It was not started: ${row.problem}`) : null),
      el('span', {class: 'rs-queue-actions'}, index ? button('Move up', 'up') : null, button('Remove', 'remove')));
  }

  async changeQueue(button, what) {
    button.disabled = true;
    try {
      const {queue} = await send(`/api/queue/${what}`, {});
      this.showQueue(queue);
      field(this.root, 'queue-problem').textContent = queue.problem;
    } catch (error) {
      field(this.root, 'queue-problem').textContent = error.message;
    }
    button.disabled = false;
  }

  // -------------------------------------------------------------- one run

  delete(run, button) {
    const dialog = this.part('delete');
    field(this.root, 'delete-name').textContent = run.name;
    dialog.returnValue = 'keep';
    dialog.addEventListener('close', async () => {
      if (dialog.returnValue !== 'delete') return;
      await this.act(button, async () => {
        await send(path(run.id, 'delete'), {});
        for (const name of ['ask', 'export']) if (this.run?.id === run.id) this.part(name).hidden = true;
        this.comparison.without(run.id);
        this.closeRun(run.id);
        await this.refresh(true);
      });
    }, {once: true});
    dialog.showModal();
  }

  async resume(run, button) {
    await this.act(button, async () => {
      await send(path(run.id, 'control'), {command: 'resume'});
      this.openRun(run.id, 'live');
    });
  }

  async draft(run, button) {
    await this.act(button, async () => {
      await send(path(run.id, 'draft'), {changes: {}});
      location.assign('?tab=train');  // a page that is opened shows the form as the server keeps it
    });
  }

  async act(button, work) {
    const cell = button.closest('td');
    cell.querySelector('.rs-error')?.remove();
    button.disabled = true;
    try {
      await work();
    } catch (error) {
      cell.append(el('small', {class: 'rs-error', role: 'alert'}, error.message));
    }
    button.disabled = false;
  }

  open(name, run) {
    this.run = run;
    for (const other of ['ask', 'export']) this.part(other).hidden = other !== name;
    field(this.root, `${name}-name`).textContent = run.name;
    field(this.root, name === 'ask' ? 'answer' : 'export-said').replaceChildren();
    const first = this.part(name).querySelector('textarea, input');
    if (name === 'export') first.value = run.export_folder;
    this.part(name).scrollIntoView({block: 'nearest'});
    first.focus();
  }

  async ask(form) {
    const said = field(this.root, 'answer');
    const numbers = ['max_new_tokens', 'temperature', 'top_p'].map((name) => [name, Number(form.get(name))]);
    const body = {prompt: form.get('prompt'), ...Object.fromEntries(numbers)};
    await this.follow('ask', body, said, (job) => {
      said.textContent = job.text || (job.state === 'working' ? 'Loading the weights …' : '(nothing)');
    });
  }

  async export(form) {
    const said = field(this.root, 'export-said');
    await this.follow('export', {folder: form.get('folder')}, said, (job) => {
      const share = job.total ? ` ${Math.round(100 * job.done / job.total)} %` : '';
      said.textContent = job.result || `Writing${share} …`;
    });
  }

  async follow(name, body, said, show) {
    const button = this.part(name).querySelector('.rs-primary');
    button.disabled = true;
    said.className = name === 'ask' ? 'rs-answer' : '';
    try {
      let job = await send(path(this.run.id, name), body);
      while (job.state === 'working') {
        show(job);
        await new Promise((resolve) => setTimeout(resolve, JOB_WAIT));
        job = await send(`/api/jobs/${job.id}`);
      }
      if (job.state === 'failed') throw new Error(job.error);
      show(job);
    } catch (error) {
      said.className = 'rs-error';
      said.textContent = error.message;
    }
    said.dataset.done = 'true';
    button.disabled = false;
  }
}

function started(seconds) {
  return new Date(1000 * seconds).toLocaleString([], {dateStyle: 'medium', timeStyle: 'short'});
}
