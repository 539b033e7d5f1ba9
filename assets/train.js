// The Train tab's places: the machine, the verdict beside Start, and the preview of the data.

import {el, field} from './dom.js';

const PATIENCE = 600, TYPING_PAUSE = 150;

const text = (name) => ({element}, value) => { field(element, name).textContent = value[name] ?? ''; };
const draw = {header: text('machine'), about: text('about'), why_not: text('why_not'), verdict: drawVerdict,
  preview: drawPreview};

export function mountTrain(place) {
  const show = () => draw[place.name]?.(place, place.props.value ?? {});
  place.watch('value', show);
  show();
  if (place.name === 'verdict') watchTyping(() => place.trigger('input'));
}

function watchTyping(check) {
  // Sources are checked when they are left: a hub is not asked for every beginning of a name.
  let pause;
  document.addEventListener('input', ({target}) => {
    if (!target.closest('.rs-train') || target.closest('#field-model-source, #field-data-source, #preset')) return;
    clearTimeout(pause);
    pause = setTimeout(check, TYPING_PAUSE);
  });
}

function drawVerdict({element}, verdict) {
  if (!verdict.headline) return;
  element.querySelector('.rs-verdict').dataset.tone = verdict.tone;
  field(element, 'headline').textContent = verdict.headline;
  field(element, 'size').textContent = verdict.size;
  field(element, 'reasons').replaceChildren(...verdict.reasons.map((reason) => el('li', {}, reason)));
  field(element, 'bars').replaceChildren(...verdict.bars.map(drawBar));
  for (const node of document.querySelectorAll('.rs-wrong')) node.classList.remove('rs-wrong');
  if (verdict.field) document.getElementById(verdict.field)?.classList.add('rs-wrong');
}

function drawBar(bar) {
  const pieces = bar.items.map((item, index) => {
    const piece = el('i', {class: `rs-piece-${index % 6}`, title: `${item.name}: ${item.text}`});
    piece.style.width = `${100 * item.share}%`;
    return piece;
  });
  const limit = el('b', {class: 'rs-limit'});
  limit.style.left = `${100 * bar.limit_share}%`;
  const rows = bar.items.map((item, index) => el('tr', {},
    el('th', {scope: 'row'}, el('i', {class: `rs-piece-${index % 6}`}), item.name,
      item.note ? el('small', {}, item.note) : null), el('td', {}, item.text)));
  const label = `${bar.label}: ${bar.text}`;
  return el('details', {class: 'rs-fit', 'data-tone': bar.tone},
    el('summary', {}, el('span', {}, bar.label), el('span', {}, bar.text),
      el('div', {class: 'rs-fit-bar', role: 'img', 'aria-label': label}, ...pieces, limit)),
    el('table', {}, el('tbody', {}, ...rows)));
}

function drawPreview(place, preview) {
  // What is shown stays until the answer is there; only one that takes long says so.
  clearTimeout(place.late);
  const {element} = place;
  element.querySelector('.rs-preview').setAttribute('aria-busy', Boolean(preview.pending));
  if (preview.pending) {
    place.late = setTimeout(() => { field(element, 'understood').textContent = 'Reading the first rows …'; }, PATIENCE);
    return;
  }
  const understood = field(element, 'understood'), rows = field(element, 'rows');
  const key = element.querySelector('.rs-preview-key');
  const failed = Boolean(preview.error);
  understood.classList.toggle('rs-error', failed);
  key.hidden = failed || !preview.rows;
  if (!preview.rows) {
    understood.textContent = preview.error ?? '';
    rows.replaceChildren();
    field(element, 'warnings').replaceChildren();
    return;
  }
  const columns = preview.columns.map(([name, meaning]) => `${name} → ${meaning}`).join(', ');
  understood.textContent = `${preview.format_detected ? 'Recognised as' : 'Read as'} ${preview.format}` +
    (columns ? `: ${columns}.` : '.');
  const notes = [`${preview.percent_trained} % of the tokens of the first ${preview.rows_measured} rows`];
  if (preview.rows_cut) notes.push(`${preview.rows_cut} rows are cut`);
  if (preview.rows_skipped) notes.push(`${preview.rows_skipped} are skipped`);
  field(element, 'counted').textContent = `· ${notes.join(' · ')}`;
  rows.replaceChildren(...preview.rows.map((row) => el('li', {},
    el('p', {class: 'rs-tokens'}, ...(row.skipped ? [el('em', {}, `Skipped: ${row.skipped}`)]
      : row.pieces.map((piece) => el(piece.trained ? 'mark' : 'span', {}, piece.text)))),
    el('small', {}, `${row.where} · ${row.tokens} tokens, ${row.trained_tokens} trained${row.cut ? ' · cut' : ''}`))));
  field(element, 'warnings').replaceChildren(...preview.warnings.map((warning) => el('li', {}, warning)));
}
