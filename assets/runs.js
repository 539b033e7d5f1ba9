// The Runs tab: every run, and what can be done with one.

import {el, field, send} from './dom.js';

const JOB_WAIT = 400, LIST_WAIT = 2000;

export class RunList {
  constructor(element, openRun, closeRun) {
    this.root = element;
    this.openRun = openRun;
    this.closeRun = closeRun;
    this.shown = '';
    this.readAt = 0;
    this.run = null;
    for (const name of ['ask', 'export']) {
      const card = this.part(name);
      card.querySelector('[data-part="close"]').addEventListener('click', () => { card.hidden = true; });
      card.querySelector('form').addEventListener('submit', (event) => {
        event.preventDefault();
        this[name](new FormData(event.target));
      });
    }
  }

  part(name) { return this.root.querySelector(`[data-part="${name}"]`); }

  async refresh(force = false) {
    if (!force && Date.now() - this.readAt < LIST_WAIT) return;
    this.readAt = Date.now();
    const {runs} = await send('/api/runs');
    const text = JSON.stringify(runs);
    if (text === this.shown) return;
    this.shown = text;
    this.part('empty').hidden = runs.length > 0;
    this.part('list').hidden = runs.length === 0;
    this.root.querySelector('tbody').replaceChildren(...runs.map((run) => this.row(run)));
  }

  row(run) {
    const button = (label, act) => el('button', {type: 'button', class: 'rs-small', click: act,
      'aria-label': `${label} ${run.name}`}, label);
    const can = (action) => run.actions.includes(action);
    return el('tr', {'data-run': run.id},
      el('td', {}, el('span', {class: 'rs-state', 'data-tone': run.tone, title: run.reason}, run.word)),
      el('td', {}, el('strong', {}, run.name), el('small', {}, run.id),
        run.reason && run.tone === 'bad' ? el('small', {class: 'rs-error'}, run.reason) : null),
      el('td', {class: 'rs-number'}, run.steps), el('td', {class: 'rs-number'}, run.loss),
      el('td', {}, run.model, el('small', {}, run.data)),
      el('td', {}, started(run.created), el('small', {}, `at work for ${run.at_work}`)),
      el('td', {class: 'rs-row-actions'},
        can('open') ? button('Open', () => this.openRun(run.id, 'live')) : null,
        can('resume') ? button('Resume', (event) => this.resume(run, event.target)) : null,
        can('ask') ? button('Ask', () => this.open('ask', run)) : null,
        can('export') ? button('Export', () => this.open('export', run)) : null,
        can('delete') ? button('Delete', (event) => this.delete(run, event.target)) : null));
  }

  delete(run, button) {
    const dialog = this.root.querySelector('dialog');
    field(this.root, 'delete-name').textContent = run.name;
    dialog.returnValue = 'keep';
    dialog.addEventListener('close', async () => {
      if (dialog.returnValue !== 'delete') return;
      await this.act(button, async () => {
        await send(`/api/runs/${encodeURIComponent(run.id)}/delete`, {});
        for (const name of ['ask', 'export']) if (this.run?.id === run.id) this.part(name).hidden = true;
        this.closeRun(run.id);
        await this.refresh(true);
      });
    }, {once: true});
    dialog.showModal();
  }

  async resume(run, button) {
    await this.act(button, async () => {
      await send(`/api/runs/${encodeURIComponent(run.id)}/control`, {command: 'resume'});
      this.openRun(run.id, 'live');
    });
  }

  async act(button, work) {
    button.disabled = true;
    try {
      await work();
    } catch (error) {
      button.disabled = false;
      button.closest('td').append(el('small', {class: 'rs-error', role: 'alert'}, error.message));
    }
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
      let job = await send(`/api/runs/${encodeURIComponent(this.run.id)}/${name}`, body);
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
